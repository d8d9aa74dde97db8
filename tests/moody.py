"""Rewards for child processes, which import nothing but torch: a child is up soon."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Moody:
    """Mean of the red channel, or what a prompt asks for."""

    name = "moody"
    range = (0.0, 1.0)
    description = "mean of the red channel, on good days"

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Any:
        time.sleep(self.slow_s)
        if "raise" in prompts:
            raise ValueError("no such shape")
        if "die" in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "grand" in prompts:
            subprocess.Popen(["sleep", "1000"])
        return images[:, 0].mean((1, 2)), torch.tensor([prompt != "missing" for prompt in prompts])


class Frail(Moody):
    """Counts its starts and calls in ``folder``; at some it does not load, or is killed."""

    def __init__(self, folder: str = "", fails_at: Sequence[int] = (), dies_at: Sequence[int] = ()) -> None:
        super().__init__()
        self.folder, self.dies_at = folder, dies_at
        if folder and self._count("starts") in fails_at:
            raise MemoryError("no room for the weights")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Any:
        if self.folder and self._count("calls") in self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(images, prompts)

    def _count(self, what: str) -> int:
        with open(os.path.join(self.folder, what), "ab") as file:
            file.write(b".")
            return file.tell()


class Two(Moody):
    """Two parts."""

    part_weights = (0.25, 0.75)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images[:, :2].mean((2, 3))
