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

from solrl.errors import SolrlError
from solrl.hub import FILES, push

ROOT = Path(__file__).parent.parent
PUSH = "from pathlib import Path; from solrl.hub import push; print(push(Path({!r}), {!r}))"


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
    """In a process of its own, for which the hub is the one on this machine."""
    environment = os.environ | {"HF_ENDPOINT": os.environ["HUB"], "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder.parent / "home")}
    command = [sys.executable, "-c", PUSH.format(str(folder), repository)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


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
    with pytest.raises(SolrlError, match=r"no exported LoRA: README\.md is missing"):
        push(tmp_path, "me/lora")
    with pytest.raises(SolrlError, match=r"cannot push .* to me/lora: .*offline"):
        push(lora(tmp_path / "lora"), "me/lora")
