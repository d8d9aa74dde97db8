"""Remote rewards: the scores of the served reward and no others, whatever the server does. Servers are real ones."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_rewards import load_reward
from solrl_rewards.png import encode_png
from solrl_rewards.server import RewardServer
from torch import Tensor

from solrl.cli import main
from solrl.config import Config
from solrl.rollout import call_reward
from solrl.train import train
from solrl.types import RewardFailed
from tests.children import in_child
from tests.parts import Redness, tiny_config
from tests.test_resume import assert_same_run

FAST: dict[str, Any] = {"timeout_s": 2.0, "patience_s": 0.0}
FACTS = {"name": "false", "range": [0, 1], "description": "a server of a test"}


def images(count: int = 5) -> Tensor:
    """[count, 3, 8, 6] on 8-bit levels, so that PNGs change nothing."""
    levels = torch.randint(0, 256, (count, 3, 8, 6), generator=torch.Generator().manual_seed(0))
    return levels.float() / 255


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(reward: Any = None, **settings: Any) -> Iterator[str]:
    with running(RewardServer(reward or Redness(), port=0, **settings)) as url:
        yield url


@contextmanager
def answering(*answers: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that introduces itself well, then answers POSTs as told, the last way again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            send(json.dumps(FACTS))(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            (left.pop(0) if len(left) > 1 else left[0])(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def send(body: str, status: int = 200, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


def silence(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.0)


class Picky:
    """Misses dark images and fails on the prompt `fail`."""

    name = "picky"
    range = (0.0, 1.0)
    description = "for tests"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        if "fail" in prompts:
            raise RuntimeError("the scorer broke")
        values = images.mean((1, 2, 3))
        if "nan" in prompts:
            values = values * torch.nan
        return values, ~(values <= 0.5)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_remote_reward_scores_as_the_reward_itself(batch_size: int) -> None:
    pictures, prompts = images(), [str(row) for row in range(5)]
    with serving() as url:
        reward = load_reward("remote", url=url, batch_size=batch_size, **FAST)
        values, present = call_reward(reward, pictures, prompts)
        empty, _ = call_reward(reward, pictures[:0], [])
    assert torch.equal(values, Redness()(pictures, prompts).double()) and present.all() and len(empty) == 0
    assert reward.range == Redness.range and "redness" in reward.description and url in reward.description


def test_missing_scores_stay_missing() -> None:
    pictures = torch.tensor([0.2, 0.8])[:, None, None, None].expand(2, 3, 4, 4)
    with serving(Picky()) as url:
        values, present = call_reward(load_reward("remote", url=url, **FAST), pictures, ["a", "b"])
    assert present.tolist() == [False, True] and values[1] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("fail", "picky.*RuntimeError: the scorer broke"), ("nan", r"status 500.*picky.*returned")],
)
def test_a_reward_that_fails_on_the_server_fails_here_with_its_reason(prompt: str, message: str) -> None:
    with serving(Picky()) as url:
        reward = load_reward("remote", url=url, timeout_s=2, patience_s=60)  # not worth another try
        with pytest.raises(RewardFailed, match=message):
            call_reward(reward, torch.ones(1, 3, 4, 4), [prompt])


LIES: dict[str, tuple[Callable[[BaseHTTPRequestHandler], None], str]] = {
    "NaN": (send('{"scores": [0.5, NaN]}'), "no JSON"),
    "infinity": (send('{"scores": [0.5, 1e999]}'), "no finite number"),
    "text for a number": (send('{"scores": [0.5, "0.5"]}'), "no finite number"),
    "truth for a number": (send('{"scores": [0.5, true]}'), "no finite number"),
    "HTML": (send("<html><body>Welcome</body></html>"), "no JSON but '<html>"),
    "nothing": (send(""), "no JSON but ''"),
    "a short list": (send('{"scores": [0.5]}'), "1 scores for 2 images"),
    "a long list": (send('{"scores": [0.5, 0.5, 0.5]}'), "3 scores for 2 images"),
    "no list": (send('{"score": 0.5}'), "no scores for 2 images"),
    "another JSON": (send("[]"), "no scores for 2 images"),
    "refusal": (send('{"error": "not you"}', 403), "status 403.*not you"),
    "redirect": (send("", 302), "status 302"),
    "half a body": (send('{"scores": [0.5, 0.5', length=100), "no answer from"),
    "silence": (silence, "silent for 0.3 s"),
    "busy": (send("", 503), "status 503"),
    "a hang-up": (lambda handler: handler.connection.close(), "no answer from"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_answers_no_scores_ends_the_call_with_its_address_and_the_reason(lie: str) -> None:
    answer, message = LIES[lie]
    with answering(answer) as url:
        reward = load_reward("remote", url=url, timeout_s=0.3, patience_s=0.0)
        with pytest.raises(RewardFailed, match=message) as caught:
            call_reward(reward, images(2), ["a", "b"])
        assert url in str(caught.value) and "\n" not in str(caught.value)


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_rewards.http_json.MAX_ANSWER_BYTES", 1000)
    with answering(send(" " * 2000)) as url, pytest.raises(RewardFailed, match="more than 1000 bytes"):
        call_reward(load_reward("remote", url=url, **FAST), images(1), ["a"])


def test_an_answer_that_trickles_is_given_up() -> None:
    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(20):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)

    with answering(trickle) as url, pytest.raises(RewardFailed, match=r"silent for 0\.3 s"):
        call_reward(load_reward("remote", url=url, timeout_s=0.3, patience_s=0.0), images(1), ["a"])


def test_what_passes_is_waited_for() -> None:
    """Silent, busy, gone, and then right."""
    right = send('{"scores": [0.25]}')
    with answering(silence, send("", 503), lambda handler: handler.connection.close(), right) as url:
        reward = load_reward("remote", url=url, timeout_s=0.3, patience_s=20)
        values, _ = call_reward(reward, images(1), ["a"])
    assert values.tolist() == [0.25]


def test_a_server_that_is_not_there_is_a_usage_error(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", "tiny_flux", "--reward.name", "remote", "--output.dir", str(tmp_path / "run")]
    words += ["--reward.options.url", "http://127.0.0.1:9", "--reward.options.patience_s", "0"]
    assert main(words) == 2
    assert "reward.name: no answer from http://127.0.0.1:9" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8300"}, "url must look like"),
        ({"url": "file:///etc/passwd"}, "url must look like"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"timeout_s": 0}, "must be positive"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward("remote", **options)


def test_a_server_of_something_else_is_refused_at_once() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            send('{"hello": "world"}')(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    other = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(other) as url, pytest.raises(ValueError, match="is no reward server"):
        load_reward("remote", url=url, **FAST)


def test_requests_under_way_are_bounded() -> None:
    now, most = 0, 0
    lock = threading.Lock()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        send('{"scores": [0.5]}')(handler)

    with answering(slow) as url:
        load_reward("remote", url=url, batch_size=1, connections=3, **FAST)(images(9), ["a"] * 9)
    assert most == 3


# --- what the server lets in


def ask(url: str, body: bytes | str, path: str = "/score", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else {}


def request(*texts: str) -> str:
    return json.dumps({"prompts": ["a"] * len(texts), "images": list(texts)})


def png(width: int, height: int, mode: str = "RGB") -> str:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def jpeg() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, format="JPEG")
    return base64.b64encode(buffer.getvalue()).decode()


REFUSALS: dict[str, tuple[str, int, str]] = {
    "no JSON": ("{", 400, "JSON object"),
    "a deep JSON": ("[" * 100_000, 400, "JSON object"),
    "another object": ("{}", 400, "JSON object"),
    "no object": ("3", 400, "JSON object"),
    "unequal lists": ('{"prompts": ["a"], "images": []}', 400, "same length"),
    "numbers": ('{"prompts": [1], "images": [2]}', 400, "lists of strings"),
    "no base64": (request("!!"), 400, "no PNG"),
    "no image": (request(base64.b64encode(b"hello").decode()), 400, "no PNG"),
    "a JPEG": (request(jpeg()), 400, "no PNG"),
    "half a PNG": (request(png(30, 30)[:40]), 400, "no PNG"),
    "too many pixels": (request(png(33, 32)), 400, "33 x 32 pixels; at most 1024"),
    "a palette": (request(png(4, 4, "P")), 400, "mode P"),
    "two sizes": (request(png(4, 4), png(5, 4)), 400, "one size"),
    "too many images": (request(*[png(1, 1)] * 5), 413, "5 images; at most 4"),
    "a large body": (" " * 200_001, 413, "200001 bytes; at most 200000"),
}


@pytest.fixture(scope="module")
def strict_server() -> Iterator[str]:
    with serving(max_pixels=1024, max_images=4, max_body_bytes=200_000) as url:
        yield url


@pytest.mark.parametrize("case", REFUSALS)
def test_a_bad_request_is_refused_with_a_reason(strict_server: str, case: str) -> None:
    body, status, reason = REFUSALS[case]
    answer = ask(strict_server, body)
    assert answer[0] == status and reason in answer[1]["error"]
    assert ask(strict_server, request(png(4, 4))) == (200, {"scores": [0.0]})  # and the server goes on


def test_pixels_are_counted_before_they_are_decoded(strict_server: str) -> None:
    """A PNG of 60000 x 60000 pixels and no pixel data: refused by its size, not by what is missing."""
    header = base64.b64decode(png(4, 4))
    huge = header[:16] + (60_000).to_bytes(4, "big") * 2 + header[24:29]
    huge += zlib.crc32(huge[12:29]).to_bytes(4, "big") + header[33:]
    status, answer = ask(strict_server, request(base64.b64encode(huge).decode()))
    assert status == 400 and ("60000 x 60000" in answer["error"] or "decompression bomb" in answer["error"])


def test_other_content_and_paths_are_refused(strict_server: str) -> None:
    body = request(png(4, 4))
    assert ask(strict_server, body, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(strict_server, body, path="/elsewhere")[0] == 404


def test_with_a_token_nothing_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(token="secret") as url:
        assert ask(url, request(png(4, 4)))[0] == 401
        assert ask(url, request(png(4, 4)), Authorization="Bearer wrong")[0] == 401
        assert ask(url, request(png(4, 4)), Authorization="Bearer secret")[0] == 200
        monkeypatch.delenv("SOLRL_REWARD_TOKEN", raising=False)
        with pytest.raises(ValueError, match=r"status 401.*SOLRL_REWARD_TOKEN"):
            load_reward("remote", url=url, **FAST)
        monkeypatch.setenv("SOLRL_REWARD_TOKEN", "secret")
        load_reward("remote", url=url, **FAST)


def test_other_machines_are_served_only_with_a_token() -> None:
    with pytest.raises(ValueError, match=r"a server on 0.0.0.0 needs a token"):
        RewardServer(Redness(), "0.0.0.0", 0)
    RewardServer(Redness(), "0.0.0.0", 0, token="secret").server_close()


def test_beyond_the_bound_connections_are_told_to_come_back() -> None:
    with serving(max_connections=1) as url:
        idle = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        idle.connect()
        time.sleep(0.1)
        turned_away = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        turned_away.request("GET", "/reward")
        assert turned_away.getresponse().status == 503
        idle.close()
        reward = load_reward("remote", url=url, timeout_s=2, patience_s=10)
        assert reward(images(8), ["a"] * 8)[1].all()


def test_an_image_arrives_as_it_left() -> None:
    from solrl_rewards.png import decode_png

    for image in images(3):
        assert torch.equal(decode_png(encode_png(image), 100), image)
    assert decode_png(encode_png(torch.full((3, 2, 2), 1.7)), 4).max() == 1


# --- the command, and runs


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "solrl", "reward-server", "tiny_flux", "--port", "0", *words],
        stdout=subprocess.PIPE, env=env, text=True, cwd=Path(__file__).parent.parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    try:
        assert process.stdout
        line = process.stdout.readline()
        yield process, line.split()[-1] if line else ""
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.mark.slow
def test_the_command_serves_the_configs_reward_until_it_is_interrupted() -> None:
    with command("--reward.name", "tests.parts:Redness") as (process, url):
        reward = load_reward("remote", url=url, **FAST)
        assert torch.equal(reward(images(), ["a"] * 5)[0], Redness()(images(), []))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_the_command_refuses_what_it_cannot_serve(capfd: pytest.CaptureFixture[str]) -> None:
    redness = ["--reward.name", "tests.parts:Redness"]
    assert main(["reward-server", "tiny_flux", "--host", "0.0.0.0", *redness]) == 2
    assert "needs a token" in capfd.readouterr().err
    assert main(["reward-server", "tiny_flux", "--reward.name", "rednes"]) == 2
    assert "unknown reward 'rednes'" in capfd.readouterr().err


class Fragile(Redness):
    """Redness that ends its whole process at the call whose number a file names."""

    def __init__(self, file: str) -> None:
        self.file, self.calls = Path(file), 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.calls += 1
        if self.file.exists() and self.calls == int(self.file.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(images, prompts)


@contextmanager
def forked_server(file: Path, port: int = 0) -> Iterator[tuple[int, str]]:
    """A server of Fragile in a process of its own: its id and address."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with RewardServer(Fragile(str(file)), port=port) as server:
            os.write(writer, str(server.server_port).encode())
            os.close(writer)
            server.serve_forever()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        url = f"http://127.0.0.1:{pipe.read()}"
    try:
        yield child, url
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def remote_config(folder: Path, url: str) -> Config:
    options = {"url": url, "patience_s": 1.0, "timeout_s": 5.0, "batch_size": 4}
    return tiny_config(
        folder, reward={"name": "remote", "options": options}, prompts={"per_step": 2},
        output={"checkpoint_every_steps": 100, "audit_every_steps": 0},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("call", [9, 11], ids=["exploring step 2", "regenerating step 2"])
def test_a_run_whose_server_is_killed_mid_step_stops_with_everything_saved_and_resumes_bit_for_bit(
    tmp_path: Path, call: int
) -> None:
    file = tmp_path / "call"
    with forked_server(file) as (_, url):
        assert in_child(lambda: train(remote_config(tmp_path / "whole", url))) == (0, "")
    port = int(url.rpartition(":")[2])
    file.write_text(str(call))  # 2 evaluations, 3 explored and 2 regenerated micro-batches a step
    with forked_server(file, port) as (server, url):
        code, message = in_child(lambda: train(remote_config(tmp_path / "cut", url)))
        status = os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    assert status is not None and status.si_status == signal.SIGKILL
    assert code == 1 and f"no answer from {url}" in message and "start again" in message
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step_000001"]
    file.unlink()
    with forked_server(file, port) as (_, url):
        assert in_child(lambda: train(remote_config(tmp_path / "cut", url), resume=True)) == (0, "")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_000001")  # of the stop; the whole run had no need for it
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
