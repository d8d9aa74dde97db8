"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time spent inside ``with stopwatch.phase(name)``; on a GPU a phase ends when its kernels have.

    ``now`` is the clock that is read: wall time, or ``time.process_time`` on a CPU that others use as well.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.now = device, now
        self.started = now()
        self.seconds: dict[str, float] = defaultdict(float)
        self.laps: dict[str, list[float]] = defaultdict(list)
        """Phase -> what each of its blocks took, in order: of a phase in micro-batches, each of them."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        begin = self.now()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.laps[name].append(self.now() - begin)
        self.seconds[name] += self.laps[name][-1]

    def metrics(self) -> dict[str, float]:
        """``time/<phase>_s`` for every phase, and ``time/total_s`` since the stopwatch was made."""
        total = self.now() - self.started
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()} | {"time/total_s": total}
