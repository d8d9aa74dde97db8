"""Prompt files of public suites: what is downloaded is the known file, and a sidecar says what was made of it."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from solrl import cli
from solrl.prompts import load_prompts
from solrl.suites import SUITES, Source, fetch_prompts, git_blob

LINES = "a cat\n\n  a dog \na cat\n\u2028a \u00e9t\u00e9\r\na fox\n".encode()
ROWS = b'{"tag": "counting", "prompt": "two cups"}\n{"prompt": "a bench"}\n{"tag": "x", "prompt": "two cups "}\n'


@pytest.fixture(autouse=True)
def small_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "pets", Source("some/body", "0" * 40, "data/pets.txt", git_blob(LINES), "pets"))
    monkeypatch.setitem(SUITES, "things", Source("some/body", "0" * 40, "data/x.jsonl", git_blob(ROWS), "things"))


@pytest.fixture
def host() -> Iterator[str]:
    """A web server of this machine that holds the sources, and one file that has changed."""
    held = {f"/some/body/{'0' * 40}/data/pets.txt": LINES, f"/some/body/{'0' * 40}/data/x.jsonl": ROWS}
    held[f"/changed/some/body/{'0' * 40}/data/pets.txt"] = LINES + b"more\n"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in held else 404)
            self.end_headers()
            self.wfile.write(held.get(self.path, b"not here"))

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_and_a_local_copy_make_the_same_file(host: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(LINES)
    one = fetch_prompts("pets", out=tmp_path / "one.txt", host=f"{host}/", report=lambda line: None)
    two = fetch_prompts("pets", out=tmp_path / "two.txt", local_copy=copy, report=lambda line: None)
    assert one.read_bytes() == two.read_bytes()
    assert load_prompts(one) == ["a cat", "a dog", "a \u00e9t\u00e9", "a fox"]
    facts = json.loads((tmp_path / "one.txt.source.json").read_text())
    assert facts["source"]["address"] == f"{host}/some/body/{'0' * 40}/data/pets.txt"
    assert facts["source"]["sha256"] == hashlib.sha256(LINES).hexdigest() and facts["source"]["is_that_revision"]
    assert facts["sha256"] == hashlib.sha256(one.read_bytes()).hexdigest()
    assert (facts["num_prompts"], facts["num_repeated"], facts["seed"]) == (4, 1, None)


def test_rows_keep_their_other_fields(host: str, tmp_path: Path) -> None:
    file = fetch_prompts("things", out=tmp_path / "x.jsonl", host=host, report=lambda line: None)
    assert file.read_bytes() == b"".join(ROWS.splitlines(keepends=True)[:2])
    assert load_prompts(file) == ["two cups", "a bench"]


def test_a_draw_is_named_by_its_seed_and_keeps_the_order(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_text("".join(f"prompt {number:03}\n" for number in range(50)))
    said: list[str] = []
    drawn = [
        load_prompts(
            fetch_prompts(
                "pets", out=tmp_path / f"{i}.txt", local_copy=copy, num_prompts=10, seed=seed, report=said.append
            )
        )
        for i, seed in enumerate((0, 0, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] == sorted(drawn[0]) and len(set(drawn[0])) == 10
    facts = json.loads((tmp_path / "2.txt.source.json").read_text())
    assert facts["seed"] == 1 and not facts["source"]["is_that_revision"]
    assert said[0] == f"{copy} is not data/pets.txt of some/body at 000000000000: taken as it is"


def test_what_is_not_the_known_file_is_not_saved(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    for address, expected in {
        f"{host}/changed": "is not what it was when solrl",
        f"{host}/elsewhere": "cannot be downloaded (HTTP Error 404: Not Found); give a local copy with --from FILE",
        closed: "refused); give a local copy with --from FILE",
        "file:///etc": "is no http address",
    }.items():
        words = ["prompts", "fetch", "pets", "--out", str(tmp_path / "out.txt"), "--host", address]
        assert cli.main(words) in (1, 2)
        error = capsys.readouterr().err
        assert expected in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "copy").write_bytes(LINES)
    words = ["prompts", "fetch", "pets", "--from", str(tmp_path / "copy"), "--out", str(tmp_path / "out.txt")]
    assert cli.main(words) == 0
    before = (tmp_path / "out.txt").read_bytes()
    assert cli.main([*words, "--num-prompts", "1"]) == 2
    assert "exists already" in capsys.readouterr().err and (tmp_path / "out.txt").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "content", "expected"),
    [
        (["nothing"], b"", "no prompt suite 'nothing'; there are pickscore_train, "),
        (["pets", "--out", "x.jsonl"], b"", "pets is written as text, not .jsonl"),
        (["things", "--out", "x.txt"], b"", "things is written as .jsonl"),
        (["pets", "--num-prompts", "9"], LINES, "--num-prompts 9: pets has 4 prompts"),
        (["pets"], b" \n", "holds no prompt"),
        (["pets"], b"caf\xe9\n", "is not UTF-8 text"),
        (["things"], b'{"prompt": "a"}\n{"text": "b"}\n', 'row 2 has no text under "prompt" (it has text)'),
        (["things"], b"a prompt\n", "row 1 is not JSON"),
        (["pets", "--from", "nowhere"], None, "cannot read nowhere"),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    content: bytes | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "copy").write_bytes(content)
        words = [*words, "--from", "copy"]
    assert cli.main(["prompts", "fetch", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == (["copy"] if content is not None else [])


def test_the_known_contents_are_named_by_git() -> None:
    assert git_blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert all(len(suite.blob) == len(suite.revision) == 40 for suite in SUITES.values())
