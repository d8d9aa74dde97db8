"""Serves a reward to `remote` rewards, over JSON and PNG; nothing is unpickled and nothing is decoded unmeasured.

It listens on the loopback interface unless told otherwise, and elsewhere only with a token, which is compared in
constant time. Scoring is one request at a time; connections beyond a bound are told to come back later.
"""

import hmac
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

import torch
from torch import Tensor

from solrl_rewards import Reward
from solrl_rewards.png import decode_png

LATER = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Refused(Exception):
    """A request that gets `status` and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """A reward behind HTTP; `serve_forever` runs it, port 0 takes a free one."""

    daemon_threads = True

    def __init__(
        self,
        reward: Reward,
        host: str = "127.0.0.1",
        port: int = 8300,
        *,
        token: str | None = None,
        device: torch.device | str = "cpu",
        max_body_bytes: int = 64 << 20,
        max_pixels: int = 2048 * 2048,
        max_images: int = 256,
        max_connections: int = 64,
    ) -> None:
        if not token and not is_loopback(host):
            raise ValueError(f"a server on {host} needs a token in the environment variable SOLRL_REWARD_TOKEN")
        self.reward, self.device, self.token = reward, torch.device(device), token
        self.max_body_bytes, self.max_pixels, self.max_images = max_body_bytes, max_pixels, max_images
        self._scoring = threading.Lock()
        self._free = threading.BoundedSemaphore(max_connections)
        super().__init__((host, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or 503 where there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            request.settimeout(1)
            try:
                request.sendall(LATER)
            finally:
                self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def score(self, images: Tensor, prompts: list[str]) -> list[float | None]:
        """Scores as they go out, None where missing; Refused where the reward fails."""
        try:
            with self._scoring:
                answer = self.reward(images.to(self.device), prompts)
            values, present = answer if isinstance(answer, tuple) else (answer, torch.ones(len(prompts)))
            if values.shape != (len(prompts),):
                raise ValueError(f"{len(prompts)} scores are wanted, not shape {list(values.shape)}")
            scores = [v if there else None for v, there in zip(values.tolist(), present.tolist(), strict=True)]
        except Exception as error:  # somebody else's code: the client gets to know
            raise Refused(500, f"reward {self.reward.name!r} failed: {type(error).__name__}: {error}") from error
        if any(score is not None and not math.isfinite(score) for score in scores):
            raise Refused(500, f"reward {self.reward.name!r} returned {scores} for {len(prompts)} images")
        return scores


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "solrl", ""
    timeout = 60.0  # of a read: who sends nothing gives the connection back

    def do_GET(self) -> None:
        """GET /reward."""
        self._answer(self._facts)

    def do_POST(self) -> None:
        """POST /score."""
        self._answer(self._scores)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged; what goes wrong is answered."""

    def _answer(self, action: Any) -> None:
        try:
            self._authorize()
            status, answer = 200, action()
        except Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
            self.close_connection = True  # a body may not have been read
        body = json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _authorize(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if self.server.token and not hmac.compare_digest(given, self.server.token.encode()):
            raise Refused(401, "a token is needed, in the environment variable SOLRL_REWARD_TOKEN on both sides")

    def _facts(self) -> dict[str, Any]:
        if self.path != "/reward":
            raise Refused(404, "there are GET /reward and POST /score")
        reward = self.server.reward
        return {"name": reward.name, "range": list(reward.range), "description": reward.description}

    def _scores(self) -> dict[str, Any]:
        if self.path != "/score":
            raise Refused(404, "there are GET /reward and POST /score")
        if self.headers.get_content_type() != "application/json":  # what a web page may not send elsewhere
            raise Refused(415, "the body must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused(411, "the body needs a Content-Length")
        if int(length) > self.server.max_body_bytes:
            raise Refused(413, f"a body of {length} bytes; at most {self.server.max_body_bytes} are allowed")
        try:
            request = json.loads(self.rfile.read(int(length)))
            prompts, texts = request["prompts"], request["images"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(400, "the body must be a JSON object with prompts and images") from error
        if not (_is_texts(prompts) and _is_texts(texts) and 0 < len(prompts) == len(texts)):
            raise Refused(400, "prompts and images must be lists of strings of the same length")
        if len(prompts) > self.server.max_images:
            raise Refused(413, f"{len(prompts)} images; at most {self.server.max_images} are allowed")
        try:
            images = [decode_png(text, self.server.max_pixels) for text in texts]
        except ValueError as error:
            raise Refused(400, str(error)) from error
        if any(image.shape != images[0].shape for image in images):
            raise Refused(400, "the images of a request must be of one size")
        return {"scores": self.server.score(torch.stack(images), prompts)}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
