"""A reward on another process or machine, behind `solrl reward-server` or anything that speaks the same JSON.

    GET  /reward   ->  {"name": ..., "range": [low, high], "description": ...}
    POST /score    {"prompts": [...], "images": [base64 PNG, ...]}  ->  {"scores": [number or null, ...]}

null is a missing score. A server that is down or busy is waited for; one that answers anything else than one finite
number or null an image ends the call with an error, and a score is never made up. Images travel as 8-bit PNGs.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from solrl_rewards.http_json import Endpoint
from solrl_rewards.inputs import check_inputs
from solrl_rewards.png import encode_png
from solrl_rewards.scoring import parts

TOKEN_VARIABLE = "SOLRL_REWARD_TOKEN"
START_PATIENCE_S = 30.0


class Remote:
    """What the server's reward says; name, range and description beside `remote` are the server's."""

    name = "remote"

    def __init__(
        self,
        url: str = "http://127.0.0.1:8300",
        *,
        batch_size: int = 8,
        connections: int = 4,
        timeout_s: float = 120.0,
        patience_s: float = 600.0,
    ) -> None:
        """Sends `batch_size` images a request, at most `connections` requests at once, and waits `patience_s`.

        The token, if the server wants one, comes from the environment variable SOLRL_REWARD_TOKEN.
        """
        for option, value in (("batch_size", batch_size), ("connections", connections)):
            if value < 1:
                raise ValueError(f"remote: {option} must be at least 1, got {value}")
        self.batch_size, self.connections = batch_size, connections
        token = os.environ.get(TOKEN_VARIABLE)
        self.server = Endpoint(url, token, timeout_s, patience_s)
        # a wrong address should not take ten minutes to show
        facts = Endpoint(url, token, timeout_s, min(patience_s, START_PATIENCE_S)).get("/reward")
        self.range, self.description = self._facts(facts)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] scores, [B] whether each is present; on the CPU."""
        check_inputs(self.name, images, prompts)
        pieces = list(parts(len(prompts), self.batch_size))
        # images are encoded by the thread that sends them, so no more than `connections` requests are held
        with ThreadPoolExecutor(self.connections, thread_name_prefix="remote-reward") as pool:
            jobs = [pool.submit(self._score, images[piece], list(prompts[piece])) for piece in pieces]
            try:
                scores = [score for job in jobs for score in job.result()]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        values = torch.tensor([0.0 if score is None else score for score in scores])
        return values, torch.tensor([score is not None for score in scores], dtype=torch.bool)

    def _score(self, images: Tensor, prompts: list[str]) -> list[float | None]:
        answer = self.server.post("/score", {"prompts": prompts, "images": [encode_png(image) for image in images]})
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(prompts):
            got = f"{len(scores)}" if isinstance(scores, list) else "no"
            raise ValueError(f"{self.server.url} answers {got} scores for {len(prompts)} images")
        return [None if score is None else self._number(score) for score in scores]

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.server.url} answers the score {value!r}, which is no finite number")
        return float(value)

    def _facts(self, facts: Any) -> tuple[tuple[float, float], str]:
        """Range and description."""
        try:
            low, high = (self._number(end) for end in facts["range"])
            return (low, high), f"{facts['name']} at {self.server.url}: {facts['description']}"
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.server.url} is no reward server: GET /reward answers {facts!r:.120}") from error
