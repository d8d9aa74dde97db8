"""Pushing a LoRA, to a server on this machine that answers as the hub does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from solrl.errors import SolrlError, UsageError
from solrl.hub import FILES, check_push, push
from solrl.train import train
from tests.parts import tiny_config

ROOT = Path(__file__).parent.parent
PUSH = "from pathlib import Path; from solrl.hub import push; print(push(Path({!r}), {!r}))"
RUN = """
import os, shlex
from pathlib import Path
from solrl import cli
from solrl.errors import SolrlError
from solrl.train import train
from tests.parts import tiny_config

output = {"dir": FOLDER, "push_to": "me/lora", "audit_every_steps": 0}
config = tiny_config(FOLDER, output=output, train={"num_steps": 1}, reward={"name": "tests.parts:Redness"})
try:
    train(config)
except SolrlError as error:
    print(f"refused: {error}")
    command = str(error).partition("Try again with: ")[2]
print("complete:", sorted(path.name for path in Path(FOLDER).iterdir()))
os.environ["HF_TOKEN"] = "let-me-in"
print("again:", cli.main(shlex.split(command)[1:]))
print("resumed:", train(config, resume=True))
"""


class Hub(ThreadingHTTPServer):
    """What was asked, and the files of the last commit."""

    created: list[dict[str, Any]]
    files: dict[str, bytes]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.server
        assert isinstance(hub, Hub)
        if "Bearer let-me-in" not in self.headers.get("Authorization", ""):
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self._answer(200, {"url": f"{os.environ['HUB']}/me/lora"})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {})
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self._answer(200, {"commitUrl": f"{os.environ['HUB']}/me/lora/commit/abc", "commitOid": "abc"})

    def do_GET(self) -> None:
        self._answer(404, {"error": "Repository not found"})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.created, server.files = [], {}
    monkeypatch.setenv("HUB", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pushed(folder: Path, repository: str, token: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a push."""
    return run(PUSH.format(str(folder), repository), folder, token)


def run(code: str, folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for which the hub is the one on this machine."""
    environment = os.environ | {"HF_ENDPOINT": os.environ["HUB"], "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'rewards'}", "HF_HOME": str(folder.parent / "home")}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)


def lora(folder: Path) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: diffusers\n---\n# A LoRA\n")
    (folder / FILES[1]).write_bytes(bytes(range(256)))
    (folder / "notes.txt").write_text("mine")
    return folder


def test_weights_and_card_arrive_in_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    folder = lora(tmp_path / "lora")
    done = pushed(folder, "me/lora", "let-me-in")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("/me/lora/commit/abc")
    assert hub.files == {name: (folder / name).read_bytes() for name in FILES}
    assert (hub.created[0]["name"], hub.created[0]["visibility"]) == ("lora", "private")


@pytest.mark.slow
def test_a_refusal_is_one_line_that_names_the_folder(hub: Hub, tmp_path: Path) -> None:
    done = pushed(lora(tmp_path / "lora"), "me/lora", "wrong")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("solrl.errors.SolrlError: cannot push ")
    assert last.endswith("the folder itself is complete") and hub.files == {}


def test_what_is_no_lora_is_not_pushed(tmp_path: Path) -> None:
    with pytest.raises(SolrlError, match=r"no exported LoRA or transformer: README\.md is missing"):
        push(tmp_path, "me/lora")
    with pytest.raises(SolrlError, match=r"cannot push .* to me/lora: .*offline"):
        push(lora(tmp_path / "lora"), "me/lora")


@pytest.mark.slow
def test_a_run_pushes_its_lora_and_a_refusal_loses_nothing_and_names_the_command_that_repeats_it(
    hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "my run"
    done = run(RUN.replace("FOLDER", repr(str(folder))), folder, "wrong")
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("refused", "complete", "again", "resumed"))]
    assert said[0].startswith("refused: the run is complete and saved; cannot push ")
    assert said[0].endswith(f"Try again with: solrl export '{folder}' '{folder}/lora' --push me/lora")
    assert all(name in said[1] for name in ("checkpoints", "lora", "metrics.jsonl", "report.html"))
    assert said[2:] == ["again: 0", f"resumed: {folder}"]
    assert f"pushed: {os.environ['HUB']}/me/lora/commit/abc" in done.stdout.splitlines()
    assert hub.files == {name: (folder / "lora" / name).read_bytes() for name in FILES}
    assert len(hub.created) == 2, "once by the command, once by the resumed run"


def test_a_push_that_cannot_work_is_found_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    check_push(None)
    for name, says in (("me/a/b", "must be in the form"), ("me/lo ra", "alphanumeric"), ("lora", "write OWNER/lora")):
        with pytest.raises(UsageError, match=rf"output\.push_to.*{says}"):
            check_push(name)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        check_push("me/lora")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match=r"no token.*hf auth login"):
        check_push("me/lora")
    monkeypatch.setenv("HF_TOKEN", "anything")
    check_push("me/lora")
    monkeypatch.setenv("RANK", "1")
    check_push("not/a/name")  # another machine's process needs no token: the main one pushes
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"output\.push_to = lora names no owner"):
        train(tiny_config(tmp_path / "run", output={"dir": str(tmp_path / "run"), "push_to": "lora"}))
    assert not (tmp_path / "run").exists()
