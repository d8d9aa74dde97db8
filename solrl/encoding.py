"""The prompts of the next step, encoded by a thread while a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal

import torch

from solrl.clock import Stopwatch
from solrl.types import Conditioning, Policy

Place = Literal["draw", "requantize"]


class EncodeAhead:
    """Encodes prompts, at best before they are needed; what it gives has the same bits as ``policy.encode``.

    ``place`` is the part of a step beside which the next one's prompts are encoded: "draw", which is long, or
    "requantize", where neither samples nor activations take memory, for encoders that come in from host memory; None:
    nowhere. With ``compiles`` the first step takes "requantize" in any case: while torch.compile works in one thread,
    no other one should run a model.
    """

    def __init__(self, policy: Policy, place: Place | None, *, compiles: bool = False) -> None:
        self.policy, self.place = policy, place
        self._is_cold = compiles and place == "draw"
        self._ahead: tuple[list[str], Future[Conditioning]] | None = None

    def conditioning(self, prompts: list[str]) -> Conditioning:
        """Of ``prompts``: what was encoded ahead, if it was for these; an error then is that of the thread."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == prompts:
            return ahead[1].result()
        return self.policy.encode(prompts)

    @contextmanager
    def beside(self, place: Place, prompts: list[str], clock: Stopwatch) -> Iterator[None]:
        """Inside, if ``place`` is ours, a thread encodes ``prompts``; at the end it is over, whatever happened.

        Waiting for it counts as "encode". An error of the thread is kept for the step that needs the prompts.
        """
        if not prompts or place != ("requantize" if self._is_cold else self.place):
            yield
            return
        self._is_cold = False
        with ThreadPoolExecutor(1, "encode", _prepare, (self.policy.device, torch.get_num_threads())) as pool:
            future = pool.submit(self.policy.encode, prompts)
            yield
            with clock.phase("encode"):
                wait([future])
        self._ahead = prompts, future


def _prepare(device: torch.device, num_threads: int) -> None:
    """A new thread knows neither the device of this rank nor how many threads may compute."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(num_threads)
