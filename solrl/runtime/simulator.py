"""Whole runs, event by event: what a deployment would do with a workload, under stated assumptions.

The schedulers and the planner are the real ones; replicas, training and shifts are their durations. Between two
events a replica's jobs advance together, and a round gets longer as they grow, so k rounds with n jobs take k L + A n
k^2 / 2 seconds. Nothing here is measured: every number that comes out is simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from solrl.errors import SolrlError
from solrl.runtime.migration import Move
from solrl.runtime.planner import ShiftPlan, State
from solrl.runtime.progress import Progress, Task
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Cluster, Working
from solrl.runtime.scheduler import Replica, Scheduler
from solrl.runtime.throughput import Coefficients
from solrl.runtime.workload import Sample, Setting

ROLES: tuple[Working, Working] = (EXPLORE, SCORE)
ROUNDING = 1e-6
MOST_SHIFTS = 5000
"""In a batch; a strategy that wants more is stuck."""


class Strategy(Protocol):
    """When GPUs move; see strategies.py."""

    period_s: float
    """Seconds between two looks, besides events; infinite: events only."""

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Slots of each role at the beginning."""

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """The next shift, or None. Called when a batch is ready, training or a shift is done, a role has run dry, and
        every ``period_s``; never while a shift is under way."""


@dataclass(frozen=True)
class Deployment:
    """How a run is laid out."""

    name: str
    strategy: Strategy
    num_train_gpus: int
    trains_apart: bool
    """Whether training keeps its GPUs always."""
    staleness: int
    one_batch_at_a_time: bool = False
    """Whether a batch is released only when the one before has been scored."""
    model: Coefficients | None = None
    """Predicts throughput in place of the roles' own coefficients."""
    migrate: bool = True
    split: tuple[int, ...] = ()
    """GPUs of the parts, for tables."""


@dataclass(frozen=True)
class Moment:
    """The run at one time."""

    t: float
    gpus: dict[str, int]
    """Role -> GPUs it has."""
    jobs: dict[str, int]
    """Role -> running and waiting."""
    throughput: dict[str, float]
    """Role -> job-rounds a second, of all its replicas."""


@dataclass
class Result:
    """Everything that came out of a run. Simulated."""

    deployment: str
    seconds: float = 0.0
    rounds: float = 0.0
    """Explored and scored, of jobs that ended."""
    num_shifts: int = 0
    num_moved: int = 0
    """Running jobs that went to another replica."""
    batch_times: list[float] = field(default_factory=list)
    """When each batch had been trained."""
    timeline: list[Moment] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    split: tuple[int, ...] = ()

    @property
    def throughput(self) -> float:
        """Rounds (tokens) a second over the whole run."""
        return self.rounds / self.seconds

    @property
    def seconds_per_batch(self) -> float:
        """Mean time of a training step."""
        return self.seconds / len(self.batch_times)


class _Replica:
    """The part of a replica that takes time."""

    def __init__(self, role: Working, slot: int, t: float) -> None:
        self.role, self.slot, self.t = role, slot, t
        self.stall = 0.0
        self.version = 0  # of its timer
        self.ends: list[tuple[float, int]] = []  # (replica's round at which the job ends, job); aborted ones stay in


class Simulation:
    """One run. ``simulate`` is the way in; strategies read its public attributes."""

    def __init__(self, setting: Setting, sample: Sample, deployment: Deployment, *, watch_s: float = math.inf) -> None:
        self.setting, self.sample, self.deployment, self.watch_s = setting, sample, deployment, watch_s
        self.cluster: Cluster = setting.of_cluster(deployment.num_train_gpus)
        self.costs = {EXPLORE: setting.explore, SCORE: setting.score}
        self.schedulers = {
            role: Scheduler(self.costs[role].spec(role), model=deployment.model, migrate=deployment.migrate)
            for role in ROLES
        }
        self.t = 0.0
        self.training: Literal["off", "held", "active"] = "held" if deployment.trains_apart else "off"
        self.in_flight = False
        self.shift_ended = -math.inf
        self.trained = 0
        """Batches trained; the policy's version."""
        self.progress = Progress(setting, sample)
        self.result = Result(deployment.name, split=deployment.split)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._replicas: dict[Working, dict[int, _Replica]] = {EXPLORE: {}, SCORE: {}}
        self._touched: set[_Replica] = set()
        self._left: dict[Working, dict[int, float]] = {EXPLORE: {}, SCORE: {}}  # job -> rounds to go, of waiting ones
        self._end: dict[Working, dict[int, float]] = {EXPLORE: {}, SCORE: {}}  # job -> replica's round at which it ends
        self._look = False
        for role in ROLES:
            self.schedulers[role].settle = partial(self._settle_slot, role)

    # What strategies ask

    @property
    def batch_ready(self) -> bool:
        """The next batch can be trained."""
        return self.progress.ready(self.trained)

    @property
    def outstanding(self) -> dict[Working, int]:
        """Role -> jobs running and waiting."""
        return self.progress.outstanding

    def gpus_of(self, role: Working) -> int:
        """GPUs that replicas of ``role`` have."""
        return len(self._replicas[role]) * self.costs[role].gpus

    def state(self) -> State:
        """For the planner, every replica as of now."""
        for role in ROLES:
            for replica in self._replicas[role].values():
                self._settle(replica)
        explore, score = (self.schedulers[role].load(self.setting.rounds_per_job(role)) for role in ROLES)
        since = self.t - self.shift_ended
        return State(self.cluster, explore, score, self.training, self.batch_ready, self.in_flight, since)

    def note(self, kind: str, **values: Any) -> None:
        """A line of the trace."""
        self.result.events.append({"t": self.t, "event": kind, **values})

    # Time

    def _at(self, t: float, action: Callable[..., None], *values: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (t, self._num_events, action, values))

    def run(self) -> Result:
        """To the end of the last batch."""
        strategy, num_batches = self.deployment.strategy, self.setting.batch.num_batches
        for role, slots in strategy.start(self).items():
            self._up(role, slots)
        self._watch()
        if math.isfinite(strategy.period_s):
            self._at(strategy.period_s, self._tick)
        self._after()
        while self.trained < num_batches:
            if not self._events:
                raise SolrlError(
                    f"{self.deployment.name}: nothing can go on at {self.t:.0f} s with {self.outstanding} jobs left; "
                    "a role has work and no GPUs that could come to it"
                )
            self.t, _, action, values = heapq.heappop(self._events)
            action(*values)
        self.result.seconds, self.result.rounds = self.t, self.progress.rounds
        return self.result

    def _tick(self) -> None:
        self._at(self.t + self.deployment.strategy.period_s, self._tick)
        self._glance()

    def _watch(self) -> None:
        if not math.isfinite(self.watch_s):
            return
        training = self.deployment.num_train_gpus if self.training == "active" or self.deployment.trains_apart else 0
        gpus: dict[str, int] = {EXPLORE: self.gpus_of(EXPLORE), SCORE: self.gpus_of(SCORE), TRAIN: training}
        jobs: dict[str, int] = {role: self.outstanding[role] for role in ROLES}
        jobs[TRAIN] = int(self.training == "active")
        rates: dict[str, float] = {role: self.schedulers[role].throughput for role in ROLES}
        self.result.timeline.append(Moment(self.t, gpus, jobs, rates))
        self._at(self.t + self.watch_s, self._watch)

    # Replicas

    def _settle_slot(self, role: Working, slot: int) -> None:
        self._settle(self._replicas[role][slot])

    def _settle(self, replica: _Replica) -> None:
        """The scheduler knows what ``replica`` has done until now."""
        spent = self.t - replica.t
        replica.t = self.t
        if replica.stall > 0:
            standing = min(spent, replica.stall)
            replica.stall -= standing
            spent -= standing
        if spent <= 0:
            return
        held = self.schedulers[replica.role].replicas[replica.slot]
        num = len(held)
        if not num:
            return
        coefficients = self.schedulers[replica.role].spec.coefficients
        latency, growth = coefficients.latency(num, held.tokens), coefficients.a * num
        if growth * spent < 1e-9 * latency * latency:
            rounds = spent / latency
        else:
            rounds = (math.sqrt(latency * latency + 2 * growth * spent) - latency) / growth
        self.schedulers[replica.role].advance(replica.slot, rounds)

    def _arm(self) -> None:
        """Every replica that changed has a timer for its next job to end."""
        for replica in self._touched:
            replica.version += 1
            held = self.schedulers[replica.role].replicas.get(replica.slot)
            if held is None or self._replicas[replica.role].get(replica.slot) is not replica:
                continue
            while replica.ends and not self._runs(replica.role, *replica.ends[0], held):
                heapq.heappop(replica.ends)
            if replica.ends:
                coefficients, num = self.schedulers[replica.role].spec.coefficients, len(held)
                rounds = max(0.0, replica.ends[0][0] - held.rounds)
                wait = rounds * coefficients.latency(num, held.tokens) + coefficients.a * num * rounds * rounds / 2
                self._at(self.t + replica.stall + wait, self._ended, replica, replica.version)
        self._touched.clear()

    def _ended(self, replica: _Replica, version: int) -> None:
        if version != replica.version:
            return
        self._settle(replica)
        scheduler = self.schedulers[replica.role]
        held = scheduler.replicas[replica.slot]
        self._touched.add(replica)
        could_train = self.batch_ready
        while replica.ends and replica.ends[0][0] <= held.rounds + ROUNDING:
            end, job = heapq.heappop(replica.ends)
            if self._runs(replica.role, end, job, held):
                item = scheduler.finish(replica.slot, job)
                assert item is not None
                del self._end[replica.role][job]
                self._submit(self.progress.finished(replica.role, job, item.length))
        if not self.outstanding[replica.role] or self.batch_ready != could_train:
            self._look = True
        self._after()

    def _runs(self, role: Working, end: float, job: int, held: Replica) -> bool:
        """Whether this entry of a replica's list of ends still says something."""
        return job in held and self._end[role][job] == end

    def _keep_left(self, role: Working, slot: int, jobs: Iterable[int]) -> None:
        """The jobs, about to leave their replica, know what they have to go."""
        rounds = self.schedulers[role].replicas[slot].rounds
        for job in jobs:
            self._left[role][job] = max(self._end[role].pop(job) - rounds, 0.0)
        self._touched.add(self._replicas[role][slot])

    def _place(self, role: Working, moves: Iterable[Move]) -> None:
        """Jobs that the scheduler has admitted end some rounds from now; what they hold is computed first."""
        scheduler = self.schedulers[role]
        for move in moves:
            replica, held = self._replicas[role][move.target], scheduler.replicas[move.target]
            end = self._end[role][move.job] = held.rounds + self._left[role].pop(move.job)
            heapq.heappush(replica.ends, (end, move.job))
            replica.stall += held.length(move.job) / scheduler.spec.prefill_tokens_per_s
            self._touched.add(replica)
            self.result.num_moved += move.source is not None

    def _up(self, role: Working, slots: Sequence[int]) -> None:
        scheduler = self.schedulers[role]
        for replica in self._replicas[role].values():
            self._settle(replica)
        for slot in slots:
            self._replicas[role][slot] = _Replica(role, slot, self.t)
        moves = scheduler.shift_up(slots)
        for move in moves:
            if move.source is not None:
                self._keep_left(role, move.source, [move.job])
        self._place(role, moves)

    def _down(self, role: Working, slots: Sequence[int]) -> None:
        scheduler = self.schedulers[role]
        for slot in slots:
            self._settle(self._replicas[role][slot])
            self._keep_left(role, slot, scheduler.replicas[slot].jobs)
        moves = scheduler.shift_down(slots)
        for slot in slots:
            del self._replicas[role][slot]
        self._place(role, moves)

    # Work

    def _submit(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._left[task.role][task.job] = task.rounds
            self.schedulers[task.role].submit(task.job, task.length)

    def _after(self) -> None:
        """What follows from an event: new batches, placed jobs, training, a look by the strategy, timers."""
        deployment = self.deployment
        self._submit(
            self.progress.release(self.trained, deployment.staleness, one_at_a_time=deployment.one_batch_at_a_time)
        )
        for role in ROLES:
            scheduler = self.schedulers[role]
            if scheduler.num_waiting and scheduler.replicas:
                self._place(role, scheduler.dispatch())
        if self.training == "held" and not self.in_flight and self.batch_ready:
            self._train()
        if self._look and not self.in_flight:
            self._look = False
            plan = self.deployment.strategy.decide(self)
            if plan is not None:
                self._shift(plan)
        self._arm()

    # Training and shifts

    def _train(self) -> None:
        self.training = "active"
        self.note("train", batch=self.trained)
        seconds = self.progress.train_gpu_seconds(self.trained) / self.deployment.num_train_gpus
        self._at(self.t + seconds + self.setting.train.fixed_s, self._end_training)

    def _end_training(self) -> None:
        self.training = "held"
        self.trained += 1
        self.result.batch_times.append(self.t)
        self.note("trained", version=self.trained)
        for replica in self._replicas[EXPLORE].values():
            self._settle(replica)
            replica.stall += self.setting.train.sync_s
            self._touched.add(replica)
        self._look = True
        self._after()

    def _shift(self, plan: ShiftPlan) -> None:
        """``plan.down`` ends now, ``plan.up`` begins when both have taken their time."""
        self.in_flight = True
        self.result.num_shifts += 1
        if self.result.num_shifts > MOST_SHIFTS * self.setting.batch.num_batches:
            raise SolrlError(
                f"{self.deployment.name} does little but shift: {self.result.num_shifts} by {self.t:.0f} s"
            )
        down: dict[Working, list[int]] = {EXPLORE: [], SCORE: []}
        for role, slot in plan.down:
            down[role].append(slot)
        took = [self.costs[role].down_s for role in ROLES if down[role]]
        if plan.releases_training:
            self.training = "off"
            took.append(self.setting.train.down_s)
        rising = {plan.role, *(role for role, _ in plan.other_up)}
        up_s = max(self.setting.train.up_s if role == TRAIN else self.costs[role].up_s for role in rising)
        self.note(
            "shift", role=plan.role, up=list(plan.up), down=[list(pair) for pair in plan.down], benefit=plan.benefit,
            penalty=plan.penalty, gpus={role: self.gpus_of(role) for role in ROLES},
        )  # fmt: skip
        for role in ROLES:
            if down[role]:
                self._down(role, down[role])
        self._at(self.t + max(took, default=0.0) + up_s, self._shifted, plan)

    def _shifted(self, plan: ShiftPlan) -> None:
        self.in_flight = False
        self.shift_ended = self.t
        if plan.role == TRAIN:
            self.training = "held"
        else:
            self._up(plan.role, plan.up)
        for role in ROLES:
            if others := [slot for name, slot in plan.other_up if name == role]:
                self._up(role, others)
        self._at(self.t + self.setting.planner.pause_s, self._glance)
        self._look = True
        self._after()

    def _glance(self) -> None:
        self._look = True
        self._after()


def simulate(setting: Setting, sample: Sample, deployment: Deployment, *, watch_s: float = math.inf) -> Result:
    """The run of ``setting`` with the lengths of ``sample``; with ``watch_s`` its timeline is kept at that grain."""
    return Simulation(setting, sample, deployment, watch_s=watch_s).run()
