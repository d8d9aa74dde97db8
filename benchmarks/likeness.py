"""Whether two runs are the same: candidate by candidate of their ledgers, tensor by tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from solrl import ledger
from solrl.checkpoint import list_checkpoints, read_checkpoint


@dataclass(frozen=True)
class Likeness:
    """What two run folders have in common."""

    candidates: int
    different_candidates: int
    tensors: int
    different_tensors: int

    @property
    def is_equal(self) -> bool:
        """No candidate lost, counted twice or different; no bit of the weights."""
        return self.candidates > 0 and self.tensors > 0 and not self.different_candidates + self.different_tensors

    @property
    def line(self) -> str:
        """How much of it is equal."""
        candidates = f"{self.candidates - self.different_candidates:,} of {self.candidates:,} candidates"
        return f"{candidates}, {self.tensors - self.different_tensors:,} of {self.tensors:,} tensors"


def likeness(mine: Path, theirs: Path, steps: int) -> Likeness:
    """Of two runs that have done ``steps`` steps and kept the checkpoint of the last."""
    candidates = different = 0
    for step in range(1, steps + 1):
        there, here = ledger.read(theirs, step), ledger.read(mine, step)
        candidates += len(there)
        different += abs(len(there) - len(here)) + sum(a != b for a, b in zip(there, here, strict=False))
    one, other = (read_checkpoint(list_checkpoints(run)[steps]).tensors for run in (mine, theirs))
    names = one.keys() | other.keys()
    unequal = sum(not (n in one and n in other and torch.equal(one[n], other[n])) for n in names)
    return Likeness(candidates, different, len(names), unequal)
