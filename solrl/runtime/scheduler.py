"""The jobs of one role: a shared queue, and the replicas they run on (PivotRL section 6).

State is explicit and there is no clock: whoever runs the replicas says how many rounds each has done and which jobs
ended, and gets back the moves to carry out. A job keeps its id through queue, replica and migration; what it has
produced goes along as its length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from solrl.errors import SolrlError
from solrl.runtime import migration
from solrl.runtime.migration import Item, Limits, Load, Move, Outcome
from solrl.runtime.roles import RoleSpec
from solrl.runtime.throughput import Coefficients


class Replica:
    """Jobs that advance together, one token or denoising step a round."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.rounds = 0.0
        """Done since it came up."""
        self.tokens = 0.0
        """Of all its jobs."""
        self._jobs: dict[int, tuple[float, float]] = {}  # id -> (priority, length - rounds)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    @property
    def jobs(self) -> list[int]:
        """Ids, in the order of admission."""
        return list(self._jobs)

    def length(self, job: int) -> float:
        """Tokens of ``job`` so far."""
        return self._jobs[job][1] + self.rounds

    def advance(self, rounds: float) -> None:
        """Every job is longer by ``rounds``."""
        self.rounds += rounds
        self.tokens += rounds * len(self._jobs)

    def admit(self, item: Item) -> None:
        """``item`` runs here."""
        self._jobs[item.job] = (item.priority, item.length - self.rounds)
        self.tokens += item.length

    def release(self, job: int) -> Item:
        """``job`` no longer runs here; as it is now."""
        priority, offset = self._jobs.pop(job)
        length = offset + self.rounds
        self.tokens = self.tokens - length if self._jobs else 0.0
        return Item(priority, job, length)

    def load(self) -> Load:
        """What it holds, for planning."""
        return Load(self.slot, dict(self._jobs), self.rounds)


@dataclass(frozen=True)
class RoleLoad:
    """A role at one moment: what the planner needs to know."""

    spec: RoleSpec
    limits: Limits
    replicas: Sequence[Load]
    """Ascending slots."""
    waiting: Sequence[Item] = ()
    """In the queue's order."""
    rounds_per_job: float = 1.0
    """Rounds that a job of this role takes on average, where roles are compared in jobs a second and not in rounds."""

    @cached_property
    def num_jobs(self) -> int:
        """Running and waiting."""
        return len(self.waiting) + sum(len(load) for load in self.replicas)


class Scheduler:
    """A queue by priority (the id, unless given) and replicas by slot.

    ``model`` predicts throughput where it is not the role's own; without ``migrate`` only waiting jobs are placed.
    """

    def __init__(
        self,
        spec: RoleSpec,
        *,
        model: Coefficients | None = None,
        migrate: bool = True,
        max_moves: int | None = None,
    ) -> None:
        self.spec = spec
        self.limits = Limits(
            model or spec.coefficients, spec.capacity_tokens, spec.capacity_jobs, migrate=migrate, max_moves=max_moves
        )
        self.replicas: dict[int, Replica] = {}
        """By slot, ascending."""
        self._waiting: list[Item] = []
        self._place: dict[int, int] = {}
        self._slots: list[int] = []
        self._fleet = self.limits.fleet([])
        self.settle: Callable[[int], None] | None = None
        """Called with a slot before a job is admitted there, so that its rounds so far are reported first."""

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs on replicas."""
        return sum(self._fleet.num)

    @property
    def num_jobs(self) -> int:
        """In the queue and on replicas."""
        return len(self._waiting) + self.num_running

    @property
    def throughput(self) -> float:
        """Predicted, of all replicas, as of their last report."""
        return self._fleet.total

    def load(self, rounds_per_job: float = 1.0) -> RoleLoad:
        """Everything about now, for the planner."""
        replicas = [replica.load() for replica in self.replicas.values()]
        return RoleLoad(self.spec, self.limits, replicas, sorted(self._waiting), rounds_per_job)

    def submit(self, job: int, length: float = 0.0, priority: float | None = None) -> None:
        """``job`` waits; ``dispatch`` places it."""
        heapq.heappush(self._waiting, Item(float(job) if priority is None else priority, job, length))

    def advance(self, slot: int, rounds: float) -> None:
        """The replica at ``slot`` has done ``rounds`` more."""
        replica = self._replica(slot)
        replica.advance(rounds)
        self._refresh(replica)

    def finish(self, slot: int, job: int) -> Item | None:
        """``job`` has ended at ``slot`` and is gone; None if it does not run there, as when a result comes twice."""
        replica = self.replicas.get(slot)
        if replica is None or job not in replica:
            return None
        item = replica.release(job)
        self._refresh(replica)
        return item

    def dispatch(self) -> list[Move]:
        """Place waiting jobs for as long as the head of the queue finds room."""
        fleet, waiting, moves = self._fleet, self._waiting, list[Move]()
        if not self._slots:
            return moves
        while waiting:
            head = waiting[0]
            place, _ = fleet.best(head.length)
            if place < 0:
                break
            heapq.heappop(waiting)
            replica = self.replicas[self._slots[place]]
            if self.settle is not None:
                self.settle(replica.slot)
            replica.admit(head)
            fleet.set(place, len(replica), replica.tokens)
            moves.append(Move(head.job, None, replica.slot))
        return moves

    def abort(self, slot: int, job: int | None = None) -> list[int]:
        """``job``, or all jobs of ``slot``, return to the queue with what they have produced."""
        replica = self._replica(slot)
        jobs = replica.jobs if job is None else [job]
        for each in jobs:
            heapq.heappush(self._waiting, replica.release(each))
        self._refresh(replica)
        return jobs

    def shift_down(self, slots: Iterable[int]) -> list[Move]:
        """The replicas are gone; their jobs run elsewhere or wait."""
        going = sorted(set(slots))
        source = {job: slot for slot in going for job in self.abort(slot)}
        for slot in going:
            del self.replicas[slot]
        self._rebuild()
        return [Move(move.job, source.get(move.job), move.target) for move in self.dispatch()]

    def shift_up(self, slots: Iterable[int]) -> list[Move]:
        """Replicas are there; they got what waited and, if all of that fitted, what adds throughput by moving."""
        fresh = sorted(set(slots))
        taken = [slot for slot in fresh if slot in self.replicas]
        if taken:
            raise SolrlError(f"role {self.spec.role} has a replica at slot {taken[0]} already")
        before = self.load()
        outcome = migration.shift_up(self.limits, before.replicas, before.waiting, fresh)
        for slot in fresh:
            self.replicas[slot] = Replica(slot)
        self.replicas = dict(sorted(self.replicas.items()))
        self._carry_out(outcome, before.waiting)
        self._rebuild()
        return outcome.moves

    def _carry_out(self, outcome: Outcome, waiting: Sequence[Item]) -> None:
        queued = {item.job: item for item in waiting}
        for move in outcome.moves:
            item = queued[move.job] if move.source is None else self.replicas[move.source].release(move.job)
            self.replicas[move.target].admit(item)
        self._waiting = list(outcome.waiting)  # sorted, so a heap

    def _replica(self, slot: int) -> Replica:
        try:
            return self.replicas[slot]
        except KeyError:
            raise SolrlError(f"role {self.spec.role} has no replica at slot {slot}") from None

    def _refresh(self, replica: Replica) -> None:
        self._fleet.set(self._place[replica.slot], len(replica), replica.tokens)

    def _rebuild(self) -> None:
        self._slots = list(self.replicas)
        self._place = {slot: place for place, slot in enumerate(self._slots)}
        self._fleet = self.limits.fleet([(len(replica), replica.tokens) for replica in self.replicas.values()])
