"""Who does which job in which role: the live counterpart of the simulator, a thread of process 0 while jobs run.

Jobs wait in one queue a role (scheduler.py); the planner says when a process should change roles (planner.py). A shift
is carried out in three steps: the process gives its job back, takes the other role, and says so; only then is the job
placed again. What is decided, and what became of it, goes to a log.

A job's first result counts, any other is ignored. A job whose worker raised is tried again; a worker that raises
repeatedly gets no jobs any more; a job that nobody can do ends the run with its own error. A process whose new role did
not come up goes on in its old one; after the second time in a row it gets no jobs any more.

A score replica may be several processes (shifts.py): its jobs go to their leader, they shift together, and where one
of them gets no jobs any more, none of them does.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from solrl.errors import SolrlError
from solrl.runtime.mailbox import (
    CONTROLLER,
    Ending,
    Failed,
    Finish,
    Post,
    Raised,
    Result,
    Role,
    Run,
    Shifted,
    Stop,
    Yielded,
)
from solrl.runtime.migration import Load
from solrl.runtime.planner import Decision, PlannerSettings, State
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Cluster, RoleSpec, Working
from solrl.runtime.scheduler import RoleLoad, Scheduler
from solrl.runtime.shifts import MOST_FAILURES, Member, Move, Shifts
from solrl.runtime.throughput import Coefficients
from solrl.runtime.worker import ended

ROLES: tuple[Working, Working] = (EXPLORE, SCORE)
TICK_S = 0.25
"""Between two looks at the plan, besides messages."""
CHECK_S = 1.0
"""Between two looks at who lives."""
MOST_TRIES = 3
"""Of a job."""
AHEAD = 2
"""Jobs between being explored and scored, for each process, and 2 more: their images take memory."""
PAUSE = 2.0
"""Shifts that would fit between two shifts."""
GUESS = Coefficients(0.0, 0.0, 1.0, 1e-6)
"""Before the first round has been measured: a second."""


@dataclass
class Job:
    """Something to do: ``payload`` is what its role's ``Begin`` takes, ``rounds`` about how many it needs."""

    number: int
    role: Working
    payload: dict[str, Any]
    rounds: int
    kind: str = ""
    """What the log calls it; its role, where nothing else is said."""
    state: dict[str, Any] | None = None
    tries: int = 0


class Jobs(Protocol):
    """What there is to do."""

    def first(self) -> list[Job]:
        """Jobs that need no other."""
        ...

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        """``job`` is done by ``rank``; what follows from it."""
        ...

    def outcome(self) -> dict[str, Any]:
        """What every process is told when nothing is left."""
        ...


Plan = Callable[["Controller"], Decision | None]
"""Looks at the controller and decides; None: nothing to say."""


class Controller:
    """Roles, speeds and shifts over the whole run; ``run`` works off the jobs of one step."""

    def __init__(
        self,
        post: Post,
        log: Callable[[dict[str, Any]], None],
        *,
        job_timeout_s: float = 1800.0,
        replica_size: int = 1,
    ) -> None:
        """``replica_size``: processes of a score replica; it divides those of each machine."""
        self.post, self.log, self.job_timeout_s, self.replica_size = post, log, job_timeout_s, replica_size
        self.shifts = Shifts(post, log, replica_size)
        self.members = self.shifts.members
        self.healthy = list(self.members)
        """Ranks that get jobs, whole replicas of them; a planner's GPU is a place in this list."""
        self.schedulers: dict[Working, Scheduler] = {}
        """A replica's slot is the rank of its leader."""
        self._seconds: dict[Working, list[float]] = {EXPLORE: [], SCORE: []}  # of a round, newest last
        self._shift_s = 0.0  # mean of the last
        self._shift_ended = -float("inf")
        self._has_failed = False  # the last one
        self._checked = time.monotonic()
        self._said = ""

    # One step

    def run(self, jobs: Jobs, plan: Plan, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Have ``jobs`` done in roles by ``plan``, then put all processes into role train and tell them the outcome.

        Once ``is_enough``, jobs that are not done are left as they are. Raises what ended the run.
        """
        self._begin(jobs)
        while self._open and not is_enough():
            self._refill()
            self._decide(plan)
            self._dispatch()
            self._handle_next()
        self._land()
        self._to_training()
        self._land()
        for rank in self.members:
            self.post.send(str(rank), Finish(value=jobs.outcome()))

    def _land(self) -> None:
        """Wait for shifts under way."""
        while self.in_flight:
            self._handle_next()

    def stop(self, message: Stop) -> None:
        """Tell every process that can be told that the run ends."""
        for rank in self.members:
            with suppress(SolrlError):  # its box is full, or gone
                self.post.send(str(rank), message, patience_s=0.0)

    def _begin(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._open: dict[int, Job] = {}
        self._backlog: list[Job] = []  # to explore, not yet in the queue: what explores ahead takes memory
        for role in ROLES:
            spec = RoleSpec(role, self.coefficients(role), self._gpus(role), capacity_jobs=1)
            self.schedulers[role] = Scheduler(spec)
            self._join(self.healthy, role)
        self._add(jobs.first())

    def _add(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._open[job.number] = job
            if job.role == EXPLORE:
                insort(self._backlog, job, key=lambda job: job.number)
            else:
                self.schedulers[SCORE].submit(job.number)

    def _refill(self) -> None:
        """Let explore jobs into the queue while few enough wait to be scored; once stopped, until half of them are
        gone."""
        most = AHEAD * len(self.healthy) + 2
        scoring, exploring = (self.schedulers[role].num_jobs for role in (SCORE, EXPLORE))
        room = 0 if not exploring and scoring > most // 2 else most - scoring - exploring
        for job in self._backlog[: max(room, 0)]:
            self.schedulers[EXPLORE].submit(job.number)
        del self._backlog[: max(room, 0)]

    # What planners ask

    def coefficients(self, role: Working) -> Coefficients:
        """Of a replica that does one job at a time, as measured lately."""
        seconds = self._seconds[role]
        return Coefficients(0.0, 0.0, sum(seconds) / len(seconds), 1e-6) if seconds else GUESS

    @property
    def planner_settings(self) -> PlannerSettings:
        """Costs as measured."""
        return PlannerSettings(shift_s=self._shift_s, pause_s=PAUSE * self._shift_s)

    @property
    def in_flight(self) -> bool:
        """A shift is being carried out."""
        return bool(self.shifts.under_way)

    def state(self) -> State:
        """For the planner: places among the healthy stand for GPUs; training holds those that have no other role."""
        place = {rank: number for number, rank in enumerate(self.healthy)}
        loads = {role: _renumbered(self._load(role), place, self._gpus(role)) for role in ROLES}
        is_busy = any(scheduler.num_jobs and scheduler.replicas for scheduler in self.schedulers.values())
        pauses = is_busy or self._has_failed  # a pause protects work, and leaves time for what failed
        since = time.monotonic() - self._shift_ended if pauses else float("inf")
        held = all(self.members[rank].role == TRAIN for rank in self.healthy)
        cluster = Cluster(len(place), len(place), len(place) if held else 0)
        training: Literal["held", "off"] = "held" if held else "off"
        return State(cluster, loads[EXPLORE], loads[SCORE], training, in_flight=self.in_flight, since_shift_s=since)

    def _gpus(self, role: Working) -> int:
        return self.replica_size if role == SCORE else 1

    def _load(self, role: Working) -> RoleLoad:
        rounds = [job.rounds for job in self._open.values() if job.role == role]
        return self.schedulers[role].load(sum(rounds) / len(rounds) if rounds else 1.0)

    # Decisions

    def _decide(self, plan: Plan) -> None:
        if self.in_flight:
            return
        decision = plan(self)
        if decision is None:
            return
        if decision.plan is None:
            if decision.reason != self._said:
                self._said = decision.reason
                self.log({"event": "decision"} | decision.as_dict())
            return
        self._said = ""
        assert decision.plan.role != TRAIN
        ups = [*((decision.plan.role, place) for place in decision.plan.up), *decision.plan.other_up]
        ranks = [(self.healthy[place * self._gpus(_working(role))], role) for role, place in ups]
        orders = {self.shifts.together(rank, role): role for rank, role in ranks}
        told = [(rank, role) for together, role in orders.items() for rank in together]
        self.log({"event": "decision", "orders": told} | decision.as_dict())
        for together, role in orders.items():
            self._shift(together, role)

    def _shift(self, ranks: Sequence[int], role: Role) -> None:
        """Order a shift; jobs that are running there are on their way back from now on."""
        for rank in ranks:
            member = self.members[rank]
            scheduler = self.schedulers[_working(member.role)] if member.role != TRAIN else None
            if scheduler is not None and rank in scheduler.replicas:
                if member.job is not None:
                    scheduler.finish(rank, member.job.number)
                for move in scheduler.shift_down([rank]):
                    self._send(move.target, move.job)
        self.shifts.order(ranks, role)

    def _to_training(self) -> None:
        self.log({"event": "decision", "reason": "the batch is complete", "plan": {"role": TRAIN}})
        self._retire(self.members)

    def _retire(self, ranks: Iterable[int]) -> None:
        """``ranks`` take role train, where they have another one and are not on their way."""
        for rank in ranks:
            if self.members[rank].role != TRAIN and rank not in self.shifts.under_way:
                self._shift(self.shifts.together(rank, TRAIN), TRAIN)

    # Jobs

    def _dispatch(self) -> None:
        for role in ROLES:
            for move in self.schedulers[role].dispatch():
                self._send(move.target, move.job)

    def _send(self, rank: int, number: int) -> None:
        job, member = self._open[number], self.members[rank]
        member.job, member.since = job, time.monotonic()
        self.post.send(str(rank), Run(job=number, role=job.role, payload=job.payload, state=job.state))

    def _handle_next(self) -> None:
        now, rested = time.monotonic(), self._shift_ended + PAUSE * self._shift_s
        until = rested if now < rested < now + TICK_S else now + TICK_S
        message = self.post.wait(CONTROLLER, until, self._look)
        if message is None:
            return
        if not isinstance(message, Result | Yielded | Raised | Shifted | Failed):
            raise SolrlError(f"the controller got a message for a worker: {message.kind}")
        if message.rank not in self.members:
            raise SolrlError(f"a message came from process {message.rank}, and there are {len(self.members)}")
        self.members[message.rank].since = time.monotonic()
        if isinstance(message, Failed):
            raise ended(
                message.ending, message.error if message.rank == 0 else f"process {message.rank}: {message.error}"
            )
        if isinstance(message, Shifted):
            return self._shifted(message)
        self._done(message)

    def _done(self, message: Result | Yielded | Raised) -> None:
        member, job = self.members[message.rank], self._open.get(message.job)
        if job is None or member.job is not job:  # a result that came twice
            return
        member.job = None
        self.schedulers[job.role].finish(message.rank, job.number)
        self._log_job(job, message)
        if isinstance(message, Result):
            member.failures = 0
            self._measure(job.role, message.spent.seconds / max(message.rounds, 1))
            del self._open[job.number]
            self._add(self._jobs.finished(job, message.value, message.rank))
            return
        if isinstance(message, Yielded):
            job.state = message.state
        else:
            self._raised(message, member, job)
        self.schedulers[job.role].submit(job.number)

    def _raised(self, message: Raised, member: Member, job: Job) -> None:
        job.tries += 1
        job.state = None
        member.failures += 1
        self.log({"event": "raised", "rank": message.rank, "job": job.number, "role": job.role, "error": message.error})
        if job.tries >= MOST_TRIES:
            raise ended(message.ending, message.error)
        if member.failures >= MOST_FAILURES:
            self._quarantine(message.rank, message.error, message.ending)

    def _quarantine(self, rank: int, error: str, how: Ending) -> None:
        """``rank`` gets no jobs any more. Where nobody else does, that ends the run."""
        if rank not in self.healthy:
            return
        self.log({"event": "quarantine", "rank": rank, "error": error})
        replica = self.shifts.replica(rank)
        self.healthy = [each for each in self.healthy if each not in replica]
        if not self.healthy:
            raise ended(how, error)
        self._retire(replica)

    def _shifted(self, message: Shifted) -> None:
        move = self.shifts.answered(message)
        if move is None:
            return
        self._shift_ended, self._has_failed = time.monotonic(), bool(move.failed)
        seconds = self._shift_ended - move.ordered  # most of it for the round that had begun
        self._shift_s = 0.9 * self._shift_s + 0.1 * seconds if self._shift_s else seconds
        for rank, error in move.failed.items():
            self._rolled_back(rank, move, error)
        for role in ROLES:
            self._join(move.ranks, role)

    def _join(self, ranks: Iterable[int], role: Working) -> None:
        """Replicas of ``role`` among ``ranks`` get jobs from now on, each through its leader."""
        size, busy = self._gpus(role), self.shifts.under_way
        for rank in ranks:
            is_free = rank in self.healthy and rank not in busy and rank % size == 0
            if is_free and self.members[rank].role == role:
                for move in self.schedulers[role].shift_up([rank]):
                    self._send(move.target, move.job)

    def _rolled_back(self, rank: int, move: Move, error: str) -> None:
        """A role did not come up, the previous one is back. Training needs all: there it is tried again, or over."""
        refusals = self.members[rank].refusals
        if move.wanted == TRAIN:
            if refusals >= MOST_FAILURES:
                raise SolrlError(f"process {rank}: {error}")
            self._shift(move.ranks, TRAIN)
        elif refusals >= MOST_FAILURES:
            self._quarantine(rank, f"process {rank}: {error}", "failed")

    def _log_job(self, job: Job, message: Result | Yielded | Raised) -> None:
        """What the timeline of the report is drawn from."""
        waiting = {role: self.schedulers[role].num_waiting for role in ROLES}
        waiting[EXPLORE] += len(self._backlog)
        self.log(
            {"event": "job", "rank": message.rank, "job": job.number, "role": job.role, "kind": job.kind or job.role,
             "began": message.spent.began, "seconds": message.spent.seconds, "ended": message.kind, "waiting": waiting}
        )  # fmt: skip

    def _measure(self, role: Working, seconds: float) -> None:
        self._seconds[role] = [*self._seconds[role][-31:], seconds]

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_S:
            return
        self._checked = now
        self.post.check_alive([rank for rank in self.members if rank != self.post.rank])
        for rank, member in self.members.items():
            busy = f"{member.job.role} job {member.job.number}" if member.job else ""
            told = self.shifts.awaited(rank)
            busy = f"its shift to {told}" if told else busy
            if busy and now - member.since > self.job_timeout_s:
                raise SolrlError(
                    f"process {rank} has been at {busy} for {now - member.since:.0f} s; if that is how long it takes, "
                    "raise runtime.job_timeout_s; continue with --resume"
                )


def _renumbered(load: RoleLoad, place: dict[int, int], gpus: int) -> RoleLoad:
    replicas = [Load.of(place[each.slot] // gpus, each.jobs) for each in load.replicas]
    return RoleLoad(load.spec, load.limits, replicas, load.waiting, load.rounds_per_job)


def _working(role: Role) -> Working:
    assert role != TRAIN
    return role
