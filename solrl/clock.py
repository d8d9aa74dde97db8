"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time spent inside ``with stopwatch.phase(name)``; on a GPU a phase ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """``time/<phase>_s`` for every phase, and ``time/total_s`` since the stopwatch was made."""
        total = time.perf_counter() - self.started
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()} | {"time/total_s": total}
