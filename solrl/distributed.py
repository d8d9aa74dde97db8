"""The process group of a run: who am I, and sums that do not depend on how work was split.

Launchers (accelerate, torchrun) set the environment; accelerate's PartialState opens the group. Everything that has to
be bit-equal for any number of processes is summed either over disjoint supports (each element comes from one rank, the
rest add zero) or in 64-bit fixed point, where addition is associative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from solrl.types import Interrupted, SolrlError, UsageError

FIXED_POINT_BITS = 48
"""Fraction bits of OrderFreeSum: a resolution of 3.6e-15 and sums up to 32768."""


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device
    in_step: bool = False
    """Whether all processes make the same calls of the transformer, which is sharded over them (solrl/sharding.py)."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks, on whatever device it lives, and return it."""
        if self.size > 1:
            there = tensor if self.device.type == "cpu" else tensor.to(self.device)
            dist.all_reduce(there)
            if there is not tensor:
                tensor.copy_(there)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its elementwise maximum over all ranks, on whatever device it lives, and return it."""
        if self.size > 1:
            there = tensor if self.device.type == "cpu" else tensor.to(self.device)
            dist.all_reduce(there, dist.ReduceOp.MAX)
            if there is not tensor:
                tensor.copy_(there)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by rank 0's and return it."""
        if self.size > 1:
            there = tensor if self.device.type == "cpu" else tensor.to(self.device)
            dist.broadcast(there, 0)
            if there is not tensor:
                tensor.copy_(there)
        return tensor

    def texts(self, text: str) -> list[str]:
        """What each rank has to say, by rank; no NUL in it."""
        data = text.encode()
        table = torch.zeros(self.size, int(self.max_(torch.tensor(len(data)))), dtype=torch.uint8)
        table[self.rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in self.sum_(table)]

    def shares(self, number: int) -> Iterator[int]:
        """Of 0 .. number - 1 every ``size``-th is this process's.

        In step, processes that get one less than others get ``number`` as well: work to join in, for nobody.
        """
        mine = range(self.rank, number, self.size)
        yield from mine
        if self.in_step and len(mine) < -(-number // self.size):
            yield number

    def stopping(self, stop: Callable[[], None]) -> Callable[[], None]:
        """``stop``; in step, one that raises Interrupted on all ranks where it does on one, so that none waits."""
        return partial(self._stop_together, stop) if self.in_step else stop

    def _stop_together(self, stop: Callable[[], None]) -> None:
        asked: Interrupted | None = None
        try:
            stop()
        except Interrupted as error:
            asked = error
        if bool(self.max_(torch.tensor(asked is not None, dtype=torch.int64))):
            raise asked or Interrupted("stopped by another process; continue with --resume")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def start(cpu_threads: int, deterministic: bool) -> Iterator[World]:
    """Join the launcher's process group (or be alone), and leave it at the end."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, **_meeting_point())
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != asked:
        raise UsageError(f"the launcher started {asked} processes but they found {state.num_processes} of each other")
    if state.device.type == "cpu":
        torch.set_num_threads(cpu_threads)
    elif deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield World(state.process_index, state.num_processes, state.device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        PartialState._reset_state()


def _meeting_point() -> dict[str, Any]:
    """Where a process that the launcher has started again finds the others.

    With its default ("static") rendezvous the launcher's store lives on, and with it the addresses of the processes
    that are gone, which torch would hand out again: so the same store is used under names of this start. On several
    machines it is left to torch: launchers there count restarts each on its own.
    """
    restart, size = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("WORLD_SIZE", "1")
    is_here = os.environ.get("LOCAL_WORLD_SIZE") == size
    if restart == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_here:
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    ours = dist.PrefixStore(f"restart_{restart}", store)  # type: ignore[attr-defined]
    return {"store": ours, "rank": int(os.environ["RANK"]), "world_size": int(size)}


class OrderFreeSum:
    """Sums float tensors exactly enough and in any order with the same bits: 64-bit fixed point.

    Floating-point addition depends on its order, so gradients reduced over ranks would depend on the number of ranks.
    Rounding each addend once to 2^-48 and adding integers does not. ``num_addends`` bounds how often ``add`` will be
    called in all, over all ranks.
    """

    def __init__(self, numel: int, num_addends: int, device: torch.device) -> None:
        self.total = torch.zeros(numel, dtype=torch.int64, device=device)
        self.limit = 2.0 ** (62 - FIXED_POINT_BITS) / max(num_addends, 1)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors, flattened one after the other. Raises SolrlError where one is not finite or too large."""
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        largest = float(flat.abs().max())
        if not largest < self.limit:
            raise SolrlError(
                f"the largest gradient of a micro-batch is {largest:.3g}: training has diverged; "
                "resume from an earlier checkpoint with a lower train.learning_rate"
            )
        self.total += (flat.double() * 2.0**FIXED_POINT_BITS).round_().long()

    def result(self, world: World) -> Tensor:
        """The sum over all ranks, float64."""
        return world.sum_(self.total).double() * 2.0**-FIXED_POINT_BITS
