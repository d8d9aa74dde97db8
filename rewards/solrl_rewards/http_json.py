"""JSON over HTTP with patience: what is down or busy is tried again for a while, what answers nonsense is an error."""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

BUSY = {408, 425, 429, 502, 503, 504}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0


class _Again(Exception):
    """A failure that may pass."""


@dataclass(frozen=True)
class Endpoint:
    """A server at `url`. Redirects are not followed and proxies not used, so a token goes nowhere else."""

    url: str
    token: str | None = None
    timeout_s: float = 120.0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must look like http://127.0.0.1:8300, got {self.url!r}")
        if self.timeout_s <= 0 or self.patience_s < 0:
            raise ValueError(f"timeout_s and patience_s must be positive, got {self.timeout_s} and {self.patience_s}")

    def get(self, path: str) -> Any:
        """What the server answers to GET, parsed."""
        return self._patiently("GET", path, None)

    def post(self, path: str, payload: Any) -> Any:
        """What the server answers to this JSON, parsed.

        Raises ConnectionError once it was unreachable, silent or busy for `patience_s`, and ValueError at once where it
        refuses the request or answers with anything but JSON.
        """
        return self._patiently("POST", path, json.dumps(payload, allow_nan=False).encode())

    def _patiently(self, method: str, path: str, body: bytes | None) -> Any:
        started, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return self._once(method, path, body)
            except _Again as failure:
                waited = time.monotonic() - started
                if waited + pause > self.patience_s:
                    raise ConnectionError(
                        f"no answer from {self.url} in {waited:.1f} s of trying (last: {failure}); see that the server "
                        "runs there, then start again"
                    ) from failure
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, body: bytes | None) -> Any:
        parts = urlsplit(self.url)
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = make(parts.hostname or "", parts.port, timeout=self.timeout_s)
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            text = _read(response, time.monotonic() + self.timeout_s)
        except TimeoutError as error:
            raise _Again(f"silent for {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Again(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if response.status in BUSY:
            raise _Again(f"status {response.status}")
        if response.status != 200:
            raise ValueError(f"{self.url} refuses with status {response.status}: {_gist(text)}")
        try:
            return json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.url} answers with no JSON but {_gist(text)}") from error


MAX_ANSWER_BYTES = 4 << 20


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body; TimeoutError when it trickles past the deadline, ValueError when it is too long."""
    chunks, size = [], 0
    while chunk := response.read1(1 << 16):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and size < int(length):
        raise http.client.IncompleteRead(b"", int(length) - size)
    return b"".join(chunks)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _gist(text: bytes) -> str:
    """The beginning of an answer on one line."""
    words = " ".join(text[:400].decode("utf-8", "replace").split())
    return repr(words[:120] + ("..." if len(words) > 120 else ""))
