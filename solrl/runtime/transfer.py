"""Who sends which piece of a parameter to whom (PivotRL Appendix B.2). Pure: layouts in, transfers out.

A stored layout and a wanted layout cut a parameter at different places. Their common refinement gives atomic slices,
which are moved whole. Every (slice, receiver) pair is a demand that any holder of the slice can serve. Roles come back
to the same places again and again, so a plan is made once for each signature and remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, TypeVar

from solrl.errors import SolrlError

Piece = TypeVar("Piece")
Box = tuple[tuple[int, int], ...]
"""(begin, end) in every dimension."""


def refine(shape: Sequence[int], *layouts: Iterable[Box]) -> list[Box]:
    """The atomic slices of a parameter: boxes that no cut of any layout divides, in order, covering it once."""
    edges = []
    for dimension, size in enumerate(shape):
        cuts = {0, size} | {edge for layout in layouts for box in layout for edge in box[dimension]}
        if not all(0 <= cut <= size for cut in cuts):
            raise SolrlError(f"a layout cuts outside of dimension {dimension} of {tuple(shape)}")
        edges.append([*pairwise(sorted(cuts))])
    return list(product(*edges))


@dataclass(frozen=True)
class Transfer:
    """One piece from a sender to a receiver."""

    piece: object
    sender: int
    receiver: int


def plan_senders(
    demands: Sequence[tuple[Piece, int]],
    holders: Mapping[Piece, Sequence[int]],
    cost_s: Callable[[Piece, int, int], float],
    *,
    policy: Literal["local_first", "paper"] = "local_first",
    is_local: Callable[[int, int], bool] = lambda sender, receiver: False,
) -> tuple[list[Transfer], dict[int, float]]:
    """(a transfer for each (piece, receiver), seconds of every sender).

    Each demand in turn goes to the holder with the least seconds so far, the lowest of equals (paper); local_first
    asks holders on the receiver's node before any other.
    """
    busy: dict[int, float] = {}
    transfers = []
    for piece, receiver in demands:
        candidates = holders[piece]
        if not candidates:
            raise SolrlError(f"nobody holds {piece}, which {receiver} needs")
        if policy == "local_first":
            candidates = [sender for sender in candidates if is_local(sender, receiver)] or candidates
        sender = min(candidates, key=lambda candidate: (busy.get(candidate, 0.0), candidate))
        busy[sender] = busy.get(sender, 0.0) + cost_s(piece, sender, receiver)
        transfers.append(Transfer(piece, sender, receiver))
    return transfers, busy


@dataclass(frozen=True)
class Signature:
    """All that a plan depends on: (M, G, P) of the paper, what the links were measured at, and who takes part."""

    model: str
    receivers: tuple[int, ...]
    parallelism: str
    links: str = ""
    """A digest of the measured bandwidths."""
    epoch: int = 0
    """Goes up when a node joins or leaves."""


class PlanCache:
    """The plans used last, ``max_plans`` of them."""

    def __init__(self, max_plans: int = 256) -> None:
        self._max_plans = max_plans
        self._plans: OrderedDict[Signature, tuple[Transfer, ...]] = OrderedDict()

    def plan(self, signature: Signature, make: Callable[[], Iterable[Transfer]]) -> tuple[Transfer, ...]:
        """The transfers of ``signature``; ``make`` is called where it was not asked for before."""
        if signature not in self._plans:
            self._plans[signature] = tuple(make())
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(signature)
        return self._plans[signature]
