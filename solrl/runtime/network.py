"""Several machines: which one this process is on, under which address others reach it, and what they ask each other.

A blob lies in the shared memory of the machine that sent it (blobs.py), parameters in that of the machine where they
are written (replication.py). A process of another machine asks there, and a server answers over TCP. Requests carry the
run's token. Nothing is encrypted: machines that train together trust the network between them, as torch's own store
does.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from solrl.errors import SolrlError

TIMEOUT_S = 60.0
"""Of a transfer without progress."""
MAX_REQUEST = 16 * 1024
"""Bytes of a request, which is one line."""
MAX_ANSWER = 64 * 1024 * 1024
"""Bytes of an answer whose size is not known beforehand."""


def machine(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process's machine, as torchrun and accelerate launch count them."""
    return int(environment.get("GROUP_RANK", "0"))


def is_one_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all processes of the run are here."""
    size = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", size) == size


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Under which other machines of the run reach this one: the first by its name (MASTER_ADDR), any other by its IPv4
    address on the way there."""
    first = environment.get("MASTER_ADDR", "127.0.0.1")
    if machine(environment) == 0:
        return first  # by itself it might know itself as 127.0.1.1
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
            probe.connect((first, int(environment.get("MASTER_PORT", "1"))))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SolrlError(f"the first machine, {first} (MASTER_ADDR), cannot be reached from here: {error}") from error


class Server:
    """Answers other machines, which know this one as ``host``: ``answer(request)`` gives bytes, or raises SolrlError.

    It listens on all interfaces. ``address``: "host:port".
    """

    def __init__(self, host: str, token: str, answer: Callable[[dict[str, Any]], memoryview | bytes]) -> None:
        self._token, self._answer = token, answer
        self._listener = socket.create_server(("", 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="server", daemon=True).start()

    def close(self) -> None:
        """Nobody is answered any more. Twice is harmless."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in [*self._open]:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(line,), name="server", daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        self._open.add(line)
        try:
            with line, line.makefile("rb") as requests, suppress(OSError):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while text := requests.readline(MAX_REQUEST):
                    head, body = self._reply(text)
                    line.sendall(json.dumps(head).encode() + b"\n")
                    line.sendall(body)
                    if "error" in head:
                        return
        finally:
            self._open.discard(line)

    def _reply(self, text: bytes) -> tuple[dict[str, Any], memoryview | bytes]:
        try:
            request = json.loads(text)
            if not secrets.compare_digest(str(request.pop("token")).encode(), self._token.encode()):
                return {"error": "a request of another run"}, b""
            body = self._answer(request)
        except SolrlError as error:
            return {"error": str(error)}, b""
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return {"error": f"no request: {type(error).__name__}"}, b""
        return {"nbytes": len(body)}, body


class Lines:
    """Connections to the servers of other machines, one each. For any number of threads.

    ``goods``: what is asked for, in errors. A server that says nothing for ``timeout_s`` (TIMEOUT_S) is one.
    """

    def __init__(self, token: str, goods: str = "a blob", timeout_s: float | None = None) -> None:
        self._token, self._goods, self._timeout_s = token, goods, timeout_s
        self._lock = threading.Lock()
        self._lines: dict[str, socket.socket] = {}

    def ask(self, rank: int, address: str, request: dict[str, Any], into: memoryview | None = None) -> memoryview:
        """What the server of process ``rank`` says to ``request``: in ``into``, which it fills, or in new memory."""
        with self._lock:
            try:
                return self._ask(address, request, into)
            except (OSError, ValueError) as error:
                line = self._lines.pop(address, None)
                if line is not None:
                    line.close()
                raise SolrlError(
                    f"process {rank} on another machine does not hand over {self._goods}: {error}"
                ) from error

    def close(self) -> None:
        """No connection is left."""
        with self._lock:
            for line in self._lines.values():
                line.close()
            self._lines.clear()

    def _ask(self, address: str, request: dict[str, Any], into: memoryview | None) -> memoryview:
        line = self._lines.get(address)
        if line is None:
            host, _, port = address.rpartition(":")
            timeout_s = TIMEOUT_S if self._timeout_s is None else self._timeout_s
            line = self._lines[address] = socket.create_connection((host, int(port)), timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(json.dumps({"token": self._token} | request).encode() + b"\n")
        head = bytearray()
        while not head.endswith(b"\n"):
            head += _some(line.recv(1))
        found = json.loads(head)
        if "error" in found:
            raise ValueError(found["error"])
        size = found["nbytes"]
        if into is None:
            if not 0 <= size <= MAX_ANSWER:
                raise ValueError(f"an answer of {size} bytes")
            into = memoryview(bytearray(size))
        if size != len(into):
            raise ValueError(f"{size} bytes instead of {len(into)}")
        left = into
        while len(left):
            received = line.recv_into(left)
            _some(received)
            left = left[received:]
        return into


def _some(received: Any) -> Any:
    if not received:
        raise OSError("it closed the connection")
    return received
