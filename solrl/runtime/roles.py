"""Roles, the GPUs they take, and where their replicas can stand.

A run has three roles (PivotRL section 2): ``explore`` makes candidates (an LLM's policy rollout is this role),
``score`` judges them, ``train`` updates the policy. A replica of a role is a fixed set of GPUs, called a slot; slots
of one role never overlap, and none lies across two nodes unless it fills them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

from solrl.errors import UsageError
from solrl.runtime.throughput import Coefficients

EXPLORE: Literal["explore"] = "explore"
SCORE: Literal["score"] = "score"
TRAIN: Literal["train"] = "train"
Working = Literal["explore", "score"]
"""A role whose replicas shift one by one; ``train`` shifts as a whole."""


def other(role: Working) -> Working:
    """The opposite working role."""
    return SCORE if role == EXPLORE else EXPLORE


@dataclass(frozen=True)
class RoleSpec:
    """A working role: its replica's size, speed and room."""

    role: Working
    coefficients: Coefficients
    gpus: int = 1
    """GPUs of one replica."""
    capacity_tokens: float = float("inf")
    """Tokens (of KV cache) that a replica has room for."""
    capacity_jobs: int = 256
    """Jobs that run on a replica at once."""
    prefill_tokens_per_s: float = float("inf")
    """How fast a replica recomputes what a job that is sent to it has already produced."""


@dataclass(frozen=True)
class Cluster:
    """GPUs 0 .. num_gpus - 1, in nodes of equal size; the first ``num_train_gpus`` are the home of training."""

    num_gpus: int
    gpus_per_node: int = 8
    num_train_gpus: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.gpus_per_node < 1:
            raise UsageError(f"a cluster of {self.num_gpus} GPUs in nodes of {self.gpus_per_node} is none")
        if not 0 <= self.num_train_gpus <= self.num_gpus:
            raise UsageError(f"training on {self.num_train_gpus} of {self.num_gpus} GPUs: choose 0 to {self.num_gpus}")

    @cached_property
    def home(self) -> frozenset[int]:
        """The GPUs that training takes, all or none."""
        return frozenset(range(self.num_train_gpus))

    def slots(self, gpus: int) -> list[range]:
        """The GPUs of every slot of a role whose replicas take ``gpus``; a replica's number is its place here."""
        if gpus <= self.gpus_per_node:
            starts = [
                node + inner
                for node in range(0, self.num_gpus, self.gpus_per_node)
                for inner in range(0, self.gpus_per_node - gpus + 1, gpus)
            ]
        elif gpus % self.gpus_per_node:
            raise UsageError(f"a replica of {gpus} GPUs is no whole number of nodes of {self.gpus_per_node}")
        else:
            starts = list(range(0, self.num_gpus, gpus))
        return [range(start, start + gpus) for start in starts if start + gpus <= self.num_gpus]

    def aligned_home(self, *replica_gpus: int) -> int:
        """The smallest home of at least ``num_train_gpus`` that cuts no slot of the given sizes in two."""
        step = lcm(*replica_gpus)
        return min(-(-self.num_train_gpus // step) * step, self.num_gpus)
