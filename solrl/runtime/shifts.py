"""The roles that the processes of a run have, and shifts under way: of one process, or of a whole score replica.

A replica of several processes has a leader, its lowest rank, which does its jobs; the others have given up what they
hold and wait. They shift together or not at all. Up: the others release first, then the leader brings the judge up on
the GPUs of all; where one of them fails, every one goes back to the role that it had. Down: the leader ends the judge
first, then the others fill their memory again; one that cannot is told again, and the second failure ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from solrl.errors import SolrlError
from solrl.runtime.mailbox import Post, Role, Shift, Shifted
from solrl.runtime.roles import SCORE, TRAIN

if TYPE_CHECKING:
    from solrl.runtime.controller import Job

MOST_FAILURES = 2
"""Of a worker in a row: jobs that raised, or roles that did not come up."""


@dataclass
class Member:
    """A process as the controller sees it."""

    role: Role = TRAIN
    job: Job | None = None
    since: float = field(default_factory=time.monotonic)
    """Of the last message to or from it, while something is expected of it."""
    told: float = 0.0
    """When it was last told to shift."""
    failures: int = 0
    refusals: int = 0


@dataclass
class Move:
    """A shift under way."""

    ranks: tuple[int, ...]
    """The leader first."""
    wanted: Role
    before: dict[int, Role]
    ordered: float
    stages: list[dict[int, Role]]
    """(rank -> role) still to be told, each stage when all of the one before have answered."""
    awaited: dict[int, Role] = field(default_factory=dict)
    """Who has been told and has not answered."""
    failed: dict[int, str] = field(default_factory=dict)
    """Rank -> why it did not go along; one that only came back late is not in here."""


class Shifts:
    """The processes of a run by rank, replicas of ``replica_size`` of them, and their shifts."""

    def __init__(self, post: Post, log: Callable[[dict[str, Any]], None], replica_size: int) -> None:
        self.members = {rank: Member() for rank in range(post.size)}
        self.replica_size = replica_size
        self.under_way: dict[int, Move] = {}
        """By every rank that takes part."""
        self.num_ordered = 0
        """Processes that were told to change roles."""
        self._post, self._log = post, log

    def replica(self, rank: int) -> tuple[int, ...]:
        """The ranks of the score replica that ``rank`` belongs to, its leader first."""
        first = rank // self.replica_size * self.replica_size
        return tuple(range(first, first + self.replica_size))

    def together(self, rank: int, role: Role) -> tuple[int, ...]:
        """Who has to shift where ``rank`` takes ``role``."""
        return self.replica(rank) if SCORE in (role, self.members[rank].role) else (rank,)

    def awaited(self, rank: int) -> Role | None:
        """The role that ``rank`` has been told to take, while it has not answered."""
        return self.under_way[rank].awaited.get(rank) if rank in self.under_way else None

    def order(self, ranks: Sequence[int], role: Role) -> None:
        """``ranks``, as ``together`` gives them, are on their way to ``role``."""
        leader, *others = ranks
        before = {rank: self.members[rank].role for rank in ranks}
        stages = [[leader], others] if before[leader] == SCORE else [others, [leader]]
        told: list[dict[int, Role]] = [dict.fromkeys(stage, role) for stage in stages if stage]
        move = Move((*ranks,), role, before, time.monotonic(), told)
        self.under_way |= dict.fromkeys(ranks, move)
        self._tell(move)

    def answered(self, message: Shifted) -> Move | None:
        """A process says which role it has; the move, if it is over: nobody failed, or all have the role from before.

        Raises SolrlError for a process that has not come back from a replica for the second time.
        """
        rank, member, move = message.rank, self.members[message.rank], self.under_way.get(message.rank)
        if move is None or rank not in move.awaited:
            raise SolrlError(f"process {rank} says that it has shifted, and was not told to")
        told, member.role = move.awaited.pop(rank), message.role
        self._log(
            {"event": "shift", "rank": rank, "role": message.role, "wanted": told,
             "seconds": time.monotonic() - member.told, "of_which_shifting_s": message.seconds, "error": message.error}
        )  # fmt: skip
        member.refusals = 0 if message.error is None else member.refusals + 1
        if message.error is not None:
            self._refused(move, rank, told, message.error)
        if move.awaited:
            return None
        if move.stages:
            self._tell(move)
            return None
        for each in move.ranks:
            del self.under_way[each]
        return move

    def _refused(self, move: Move, rank: int, told: Role, error: str) -> None:
        """What is left to tell when ``rank`` has not taken the role that it was told to."""
        if told == SCORE:  # also to those not told yet, who may have a job: they give it back like the others
            move.failed[rank] = error
            back = {each: role for each, role in move.before.items() if each not in move.failed}
            move.stages = [back] if back else []
        elif rank == move.ranks[0]:  # a single process, or a replica that is as it was
            move.failed[rank] = error
            move.stages.clear()
        elif self.members[rank].refusals >= MOST_FAILURES:
            raise SolrlError(f"process {rank}: {error}")
        else:
            move.stages.append({rank: told})

    def _tell(self, move: Move) -> None:
        move.awaited = move.stages.pop(0)
        for rank, role in move.awaited.items():
            self.members[rank].since = self.members[rank].told = time.monotonic()
            self._post.send(str(rank), Shift(role=role, number=self.num_ordered))
            self.num_ordered += 1
