"""Where jobs go: dispatch by largest gain, and the moves that follow a shift. Pure: loads in, moves out.

The live scheduler carries out what these functions decide, the planner only looks at the throughput they end with, so a
simulated shift and a real one are the same code. PivotRL section 6 and Appendix C, with these corrections: a job is
taken from the queue only when a replica has room; a move is decided before anything is aborted, so the last one is
never undone; both ends of a move get fresh heap keys; a job moves at most once a shift; running jobs move only if all
waiting ones fitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solrl.runtime.throughput import Coefficients

NUM_ARRAYS_PAY = 64
"""From so many replicas on, numpy beats a loop."""
LEAST_GAIN = 1e-9
"""Of a replica's throughput: a smaller gain is rounding."""


class Item(NamedTuple):
    """A job in the queue's order: by priority, then by id."""

    priority: float
    job: int
    length: float
    """Tokens of prompt and answer so far."""


class Move(NamedTuple):
    """A job goes to ``target``; ``source`` is None when it was waiting."""

    job: int
    source: int | None
    target: int


class Load:
    """The jobs of one replica at one moment: id -> (priority, length - rounds). Nothing is computed before it is
    asked."""

    def __init__(self, slot: int, jobs: Mapping[int, tuple[float, float]], rounds: float = 0.0) -> None:
        self.slot, self._jobs, self._rounds = slot, jobs, rounds

    @classmethod
    def of(cls, slot: int, items: Iterable[Item]) -> Load:
        """A replica that runs ``items``."""
        return cls(slot, {item.job: (item.priority, item.length) for item in items})

    def __len__(self) -> int:
        return len(self._jobs)

    @cached_property
    def jobs(self) -> list[Item]:
        """In the order of admission."""
        rounds = self._rounds
        return [Item(priority, job, offset + rounds) for job, (priority, offset) in self._jobs.items()]

    @cached_property
    def tokens(self) -> float:
        """Of all its jobs."""
        return sum([offset for _, offset in self._jobs.values()]) + len(self._jobs) * self._rounds

    @cached_property
    def longest_first(self) -> list[tuple[float, int]]:
        """(length, id) of its jobs."""
        rounds = self._rounds
        return sorted([(offset + rounds, job) for job, (_, offset) in self._jobs.items()], reverse=True)


@dataclass(frozen=True)
class Outcome:
    """What a shift leads to."""

    throughput: float
    """Sum over the role's replicas."""
    moves: list[Move]
    waiting: list[Item]
    """What found no room, in the queue's order."""
    moved_tokens: float = 0.0
    """Held by the running jobs that move: their state is computed again."""


class Fleet:
    """Counts and tokens of a role's replicas by place, arranged so that the best place for a job is found fast."""

    def __init__(
        self,
        model: Coefficients,
        capacity_tokens: float,
        capacity_jobs: int,
        loads: Iterable[tuple[int, float]] = (),
    ) -> None:
        self.model, self.capacity_tokens, self.capacity_jobs = model, capacity_tokens, capacity_jobs
        loads = list(loads)
        self.num = [0] * len(loads)
        self.tokens = [0.0] * len(loads)
        self.throughput = [0.0] * len(loads)
        self._columns: tuple[list[float], list[float], list[float], list[float]] | None = None
        self._arrays: NDArray[np.float64] | None = None
        if len(loads) < NUM_ARRAYS_PAY:
            self._columns = tuple([0.0] * len(loads) for _ in range(4))  # type: ignore[assignment]
        else:
            self._arrays = np.empty((4, len(loads)))
        for place, (num, tokens) in enumerate(loads):
            self.set(place, num, tokens)

    def __len__(self) -> int:
        return len(self.num)

    @property
    def total(self) -> float:
        """Throughput of all replicas."""
        return sum(self.throughput)

    def set(self, place: int, num: int, tokens: float) -> None:
        """The replica at ``place`` holds ``num`` jobs of together ``tokens``."""
        model = self.model
        self.num[place], self.tokens[place] = num, tokens
        now = self.throughput[place] = model.throughput(num, tokens)
        more = num + 1
        latency = model.a * tokens + max(model.b, model.c * more) + model.d
        room = self.capacity_tokens - tokens if more <= self.capacity_jobs else -1.0
        if self._columns is not None:
            for column, value in zip(self._columns, (more, latency, now, room), strict=True):
                column[place] = value
        else:
            assert self._arrays is not None
            self._arrays[:, place] = (more, latency, now, room)

    def add(self, place: int, length: float) -> None:
        """One more job of ``length`` tokens at ``place``."""
        self.set(place, self.num[place] + 1, self.tokens[place] + length)

    def remove(self, place: int, length: float) -> None:
        """One job of ``length`` tokens less at ``place``."""
        num = self.num[place] - 1
        self.set(place, num, self.tokens[place] - length if num else 0.0)

    def best(self, length: float, skip: int = -1) -> tuple[int, float]:
        """(place with room where one more job adds the most throughput, what it adds); the lowest of equals, -1 if
        none."""
        extra = self.model.a * length
        if self._columns is not None:
            top, where = -float("inf"), -1
            for place, (more, latency, now, room) in enumerate(zip(*self._columns, strict=True)):
                if length <= room:
                    gain = more / (latency + extra) - now
                    if gain > top and place != skip:
                        top, where = gain, place
            return where, top
        assert self._arrays is not None
        more_, latency_, now_, room_ = self._arrays
        gains = more_ / (latency_ + extra) - now_
        if skip >= 0:
            gains[skip] = -np.inf
        where = int(gains.argmax())
        if room_[where] < length:
            gains[room_ < length] = -np.inf
            where = int(gains.argmax())
        top = float(gains[where])
        return (where, top) if top > -np.inf else (-1, top)

    def loss(self, place: int, length: float) -> float:
        """The throughput that ``place`` would lose with a job of ``length``."""
        num = self.num[place] - 1
        return self.throughput[place] - self.model.throughput(num, self.tokens[place] - length)


@dataclass(frozen=True)
class Limits:
    """What bounds a role's replicas, and whether running jobs may move."""

    model: Coefficients
    capacity_tokens: float = float("inf")
    capacity_jobs: int = 256
    migrate: bool = True
    max_moves: int | None = None

    def fleet(self, loads: Iterable[tuple[int, float]]) -> Fleet:
        """Replicas with (jobs, tokens) each."""
        return Fleet(self.model, self.capacity_tokens, self.capacity_jobs, loads)


def dispatch(fleet: Fleet, waiting: Sequence[Item], slots: Sequence[int], first: int = 0) -> tuple[list[Move], int]:
    """(moves, how many of ``waiting`` were taken); ``fleet`` holds them afterwards.

    The head of the queue goes where it adds most throughput, a loss included, until it finds no room anywhere.
    ``first`` leaves out the places before it.
    """
    moves: list[Move] = []
    if first >= len(fleet):
        return moves, 0
    part = fleet if first == 0 else Fleet(
        fleet.model, fleet.capacity_tokens, fleet.capacity_jobs,
        zip(fleet.num[first:], fleet.tokens[first:], strict=True),
    )  # fmt: skip
    for item in waiting:
        place, _ = part.best(item.length)
        if place < 0:
            break
        part.add(place, item.length)
        moves.append(Move(item.job, None, slots[first + place]))
    if part is not fleet:
        for place in range(len(part)):
            fleet.set(first + place, part.num[place], part.tokens[place])
    return moves, len(moves)


def shift_down(limits: Limits, loads: Sequence[Load], waiting: Sequence[Item], down: Iterable[int]) -> Outcome:
    """All jobs of the slots in ``down`` return to the queue, which is dispatched over the rest (Algorithm 3)."""
    slots_down = set(down)
    staying = [load for load in loads if load.slot not in slots_down]
    going = [load for load in loads if load.slot in slots_down]
    source = {item.job: load.slot for load in going for item in load.jobs}
    queue = sorted([*waiting, *(item for load in going for item in load.jobs)])
    slots = [load.slot for load in staying]
    fleet = limits.fleet(_totals(staying))
    moves, taken = dispatch(fleet, queue, slots)
    moves = [Move(move.job, source.get(move.job), move.target) for move in moves]
    return Outcome(fleet.total, moves, queue[taken:], sum(load.tokens for load in going))


def shift_up(limits: Limits, loads: Sequence[Load], waiting: Sequence[Item], up: Sequence[int]) -> Outcome:
    """Empty replicas ``up`` join: they take what waits; if all of it fits, jobs move for as long as that adds
    throughput.

    Algorithm 4: always the shortest job of the replica with the highest throughput, to where it adds most.
    """
    slots = [*(load.slot for load in loads), *up]
    fleet = limits.fleet([*_totals(loads), *((0, 0.0) for _ in up)])
    moves, taken = dispatch(fleet, waiting, slots, first=len(loads))
    moved_tokens = 0.0
    left = list(waiting[taken:])
    if left:
        more, taken = dispatch(fleet, left, slots)
        moves, left = moves + more, left[taken:]
    elif limits.migrate:
        movable = [*(list(load.longest_first) for load in loads), *([] for _ in up)]
        levelling, moved_tokens = _level(fleet, movable, slots, limits.max_moves)
        moves += levelling
    return Outcome(fleet.total, moves, left, moved_tokens)


def _level(
    fleet: Fleet, movable: list[list[tuple[float, int]]], slots: Sequence[int], max_moves: int | None
) -> tuple[list[Move], float]:
    """(moves from the replica of the highest throughput, its shortest job first; tokens of the jobs that move).

    ``movable`` is by place, longest first.
    """
    moves, moved_tokens = list[Move](), 0.0
    heap = [(-throughput, place) for place, throughput in enumerate(fleet.throughput) if throughput > 0]
    heapq.heapify(heap)
    while heap and (max_moves is None or len(moves) < max_moves):
        key, place = heapq.heappop(heap)
        if -key != fleet.throughput[place] or not movable[place]:  # stale, or nothing left there that may move
            continue
        length, job = movable[place][-1]
        target, gain = fleet.best(length, skip=place)
        if target < 0 or gain - fleet.loss(place, length) <= LEAST_GAIN * fleet.throughput[place]:
            break
        movable[place].pop()
        fleet.remove(place, length)
        fleet.add(target, length)
        moved_tokens += length
        moves.append(Move(job, slots[place], slots[target]))
        for end in (place, target):
            heapq.heappush(heap, (-fleet.throughput[end], end))
    return moves, moved_tokens


def _totals(loads: Iterable[Load]) -> list[tuple[int, float]]:
    return [(len(load), load.tokens) for load in loads]


class Estimate:
    """The throughput that ``shift_down`` and ``shift_up`` end with, without replaying single jobs.

    Jobs count as a liquid: dispatch fills the emptiest replicas to one level, migration takes the shortest jobs above
    it.
    """

    def __init__(self, limits: Limits, loads: Sequence[Load], waiting: Sequence[Item]) -> None:
        self.limits = limits
        self.num = np.array([len(load) for load in loads], dtype=np.float64)
        self.tokens = np.array([load.tokens for load in loads], dtype=np.float64)
        self.place = {load.slot: place for place, load in enumerate(loads)}
        self.num_waiting, self.tokens_waiting = len(waiting), sum(item.length for item in waiting)
        longest = max((len(load) for load in loads), default=0)
        self._shortest = np.zeros((len(loads), longest + 2))  # [replicas, m]: tokens of the m shortest jobs
        for row, load in zip(self._shortest, loads, strict=True):
            sums = np.cumsum([length for length, _ in reversed(load.longest_first)] or [0.0])
            row[1 : len(sums) + 1] = sums
            row[len(sums) + 1 :] = sums[-1]

    def down(self, slots: Iterable[int]) -> float:
        """The slots shift down."""
        going = np.zeros(len(self.num), dtype=bool)
        going[[self.place[slot] for slot in slots]] = True
        if going.all():
            return 0.0
        num_more = self.num_waiting + self.num[going].sum()
        tokens_more = self.tokens_waiting + self.tokens[going].sum()
        return self._filled(self.num[~going], self.tokens[~going], num_more, tokens_more)

    def up(self, count: int) -> float:
        """``count`` empty replicas join."""
        mean = self.tokens_waiting / max(self.num_waiting, 1)
        most = min(self.limits.capacity_jobs, self.limits.capacity_tokens / max(mean, 1e-9))
        fresh = min(self.num_waiting / count, most)
        num = np.concatenate([self.num, np.full(count, fresh)])
        if fresh * count < self.num_waiting - 0.5:
            tokens = np.concatenate([self.tokens, np.full(count, fresh * self.tokens_waiting / self.num_waiting)])
            share = 1 - fresh * count / self.num_waiting
            return self._filled(num, tokens, self.num_waiting * share, self.tokens_waiting * share)
        tokens = np.concatenate([self.tokens, np.full(count, self.tokens_waiting / count)])
        level = _level_from_above(self.num, count, self.num_waiting) if self.limits.migrate else fresh
        if level > fresh:
            excess = np.maximum(self.num - level, 0.0)
            whole = excess.astype(np.int64)
            rows = np.arange(len(self.num))
            low, high = self._shortest[rows, whole], self._shortest[rows, whole + 1]
            moved = low + (excess - whole) * (high - low)
            num = np.concatenate([self.num - excess, np.full(count, fresh + excess.sum() / count)])
            tokens += np.concatenate([-moved, np.full(count, moved.sum() / count)])
        return self._total(num, tokens)

    def _filled(
        self, num: NDArray[np.float64], tokens: NDArray[np.float64], num_more: float, tokens_more: float
    ) -> float:
        if num_more <= 0:
            return self._total(num, tokens)
        level = _level_from_below(num, num_more)
        added = np.maximum(level - num, 0.0)
        mean = tokens_more / num_more
        room = np.minimum(self.limits.capacity_jobs - num, (self.limits.capacity_tokens - tokens) / max(mean, 1e-9))
        added = np.clip(added, 0.0, np.maximum(room, 0.0))
        return self._total(num + added, tokens + added * mean)

    def _total(self, num: NDArray[np.float64], tokens: NDArray[np.float64]) -> float:
        model = self.limits.model
        return float((num / (model.a * tokens + np.maximum(model.b, model.c * num) + model.d)).sum())


def _level_from_below(num: NDArray[np.float64], more: float) -> float:
    """The level to which ``more`` jobs fill the lowest."""
    ordered = np.sort(num)
    counts = np.arange(1, len(ordered) + 1)
    levels = (np.cumsum(ordered) + more) / counts
    enough = np.append(ordered[1:], np.inf) >= levels
    return float(levels[int(enough.argmax())])


def _level_from_above(num: NDArray[np.float64], count: int, waiting: float) -> float:
    """The level to which replicas sink when ``count`` empty ones take what waits and what is above it."""
    ordered = np.sort(num)[::-1]
    counts = count + np.arange(0, len(ordered) + 1)
    levels = (np.concatenate([[0.0], np.cumsum(ordered)]) + waiting) / counts
    enough = np.append(ordered, -np.inf) <= levels
    return float(levels[int(enough.argmax())])
