"""Deployments to compare: who has which GPUs, and what moves them (PivotRL sections 2.2, 8.1 and 8.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from solrl.runtime.planner import PlannerSettings, ShiftPlan, make_plan, training_plan
from solrl.runtime.roles import EXPLORE, SCORE, Working, other
from solrl.runtime.simulator import ROLES, Deployment, Simulation
from solrl.runtime.throughput import BUSY_OR_NOT
from solrl.runtime.workload import Setting

HIGH_USE, LOW_USE = 0.8, 0.1


def slots_within(run: Simulation, role: Working, gpus: Iterable[int]) -> list[int]:
    """Slots of ``role`` that lie wholly in ``gpus``."""
    wanted = set(gpus)
    slots = run.cluster.slots(run.costs[role].gpus)
    return [slot for slot, part in enumerate(slots) if wanted.issuperset(part)]


class Fixed:
    """Every role keeps its GPUs; training has the first, then score, then explore."""

    period_s = math.inf

    def __init__(self, split: tuple[int, int, int]) -> None:
        self.split = split

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Scoring next to training, because its replicas are the larger ones and must be aligned."""
        _, score, train = self.split
        return {
            SCORE: slots_within(run, SCORE, range(train, train + score)),
            EXPLORE: slots_within(run, EXPLORE, range(train + score, run.cluster.num_gpus)),
        }

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """Never."""
        return None


class TakingTurns:
    """All GPUs of the pool explore, then all score; colocated training takes them too."""

    period_s = math.inf

    def __init__(self, pool: range) -> None:
        self.pool = pool

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Everything explores."""
        return {EXPLORE: slots_within(run, EXPLORE, self.pool)}

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """The role that has run dry makes room for the one with work."""
        if run.training == "off" and run.batch_ready:
            return training_plan(run.state())
        if run.training == "active" and not run.deployment.trains_apart:
            return None
        current = [role for role in ROLES if run.gpus_of(role)]
        wanted = next((role for role in (SCORE, EXPLORE) if run.outstanding[role]), None)
        if wanted is None or wanted in current or (current and run.outstanding[current[0]]):
            return None
        down = tuple((other(wanted), slot) for slot in run.schedulers[other(wanted)].replicas)
        releases = run.training == "held" and not run.deployment.trains_apart
        return ShiftPlan(wanted, tuple(slots_within(run, wanted, self.pool)), down, releases_training=releases)


class Sharing:
    """Fixed parts for both roles, of whose GPUs training takes its home whenever a batch is ready, and gives it
    back."""

    period_s = math.inf

    def __init__(self, explore: Iterable[int], score: Iterable[int]) -> None:
        self.parts: dict[Working, list[int]] = {EXPLORE: list(explore), SCORE: list(score)}

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Every role on its part."""
        return {role: slots_within(run, role, self.parts[role]) for role in ROLES}

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """Training as soon as it can; afterwards the parts are as they were."""
        if run.training == "off" and run.batch_ready:
            return training_plan(run.state())
        if run.training == "active" or run.batch_ready:
            return None
        missing: list[tuple[Working, int]] = [
            (role, slot) for role, slots in self.start(run).items() for slot in slots
            if slot not in run.schedulers[role].replicas
        ]  # fmt: skip
        if not missing:
            return None
        first = missing[0][0]
        up = tuple(slot for role, slot in missing if role == first)
        others = tuple(pair for pair in missing if pair[0] != first)
        return ShiftPlan(first, up, (), others, releases_training=run.training == "held")


class RuleBased:
    """A role whose replicas are more than 80 % full takes GPUs from where less than 10 % is used (section 8.4)."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Everything explores."""
        return {EXPLORE: slots_within(run, EXPLORE, range(run.cluster.num_gpus))}

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """Training first; otherwise the fuller role grows by every replica that has next to nothing to do.

        At least a period lies between two shifts: two roles with little work would trade their GPUs for ever.
        """
        if run.training == "off" and run.batch_ready:
            return training_plan(run.state())
        if run.t - run.shift_ended < self.period_s:
            return None
        state = run.state()
        for role in sorted(ROLES, key=lambda role: -self._use(run, role)):
            if self._use(run, role) <= HIGH_USE:
                continue
            giving = other(role)
            gpus = {gpu for slot, use in self._uses(run, giving) if use < LOW_USE
                    for gpu in state.cluster.slots(run.costs[giving].gpus)[slot]}  # fmt: skip
            gpus |= self._idle(run)
            mine = state.cluster.slots(run.costs[role].gpus)
            up = tuple(
                slot for slot, part in enumerate(mine)
                if slot not in run.schedulers[role].replicas and gpus.issuperset(part)
            )  # fmt: skip
            if not up:
                continue
            taken = {gpu for slot in up for gpu in mine[slot]}
            theirs = state.cluster.slots(run.costs[giving].gpus)
            down = tuple((giving, slot) for slot in run.schedulers[giving].replicas if taken & set(theirs[slot]))
            releases = run.training == "held" and not taken.isdisjoint(run.cluster.home)
            return ShiftPlan(role, up, down, releases_training=releases)
        return None

    def _idle(self, run: Simulation) -> set[int]:
        used = {gpu for role in ROLES for slot in run.schedulers[role].replicas
                for gpu in run.cluster.slots(run.costs[role].gpus)[slot]}  # fmt: skip
        return set(range(run.cluster.num_gpus)) - used - (run.cluster.home if run.training == "active" else set())

    def _use(self, run: Simulation, role: Working) -> float:
        """Mean use of a role's room; above all when jobs wait and it has no replica."""
        uses = [use for _, use in self._uses(run, role)]
        if not uses:
            return 2.0 if run.outstanding[role] else 0.0
        return 2.0 if run.schedulers[role].num_waiting else sum(uses) / len(uses)

    def _uses(self, run: Simulation, role: Working) -> Iterator[tuple[int, float]]:
        spec = run.schedulers[role].spec
        for slot, replica in run.schedulers[role].replicas.items():
            yield slot, max(replica.tokens / spec.capacity_tokens, len(replica) / spec.capacity_jobs)


class Planned:
    """The planner decides."""

    def __init__(self, settings: PlannerSettings, period_s: float) -> None:
        self.settings, self.period_s = settings, period_s

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        """Everything explores."""
        return {EXPLORE: slots_within(run, EXPLORE, range(run.cluster.num_gpus))}

    def decide(self, run: Simulation) -> ShiftPlan | None:
        """The planner's decision; a plan goes into the trace with all that it was weighed against."""
        decision = make_plan(run.state(), self.settings)
        if decision.plan is not None:
            run.note("decision", **decision.as_dict())
        return decision.plan


def colocated(setting: Setting) -> Deployment:
    """All GPUs explore, then score, then train; nothing overlaps."""
    gpus = setting.cluster.gpus
    return Deployment("colocated", TakingTurns(range(gpus)), gpus, False, 0, one_batch_at_a_time=True)


def disaggregated(setting: Setting, split: Sequence[int]) -> Deployment:
    """GPUs of (explore, score, train), each for itself, asynchronous up to the staleness."""
    explore, score, train = split
    strategy = Fixed((explore, score, train))
    return Deployment(
        "disaggregated", strategy, train, True, setting.batch.staleness, split=(explore, score, train)
    )  # fmt: skip


def rollout_reward_colocated(setting: Setting, num_train_gpus: int) -> Deployment:
    """Exploring and scoring take turns batch by batch; training has its own GPUs."""
    gpus = setting.cluster.gpus
    return Deployment(
        "rollout-reward colocated", TakingTurns(range(num_train_gpus, gpus)), num_train_gpus, True,
        setting.batch.staleness, one_batch_at_a_time=True, split=(gpus - num_train_gpus, num_train_gpus),
    )  # fmt: skip


def async_score(setting: Setting, num_score_gpus: int, num_train_gpus: int | None = None) -> Deployment:
    """Scoring has its own GPUs and overlaps with exploring; training takes its home from both and gives it back."""
    gpus, score = setting.cluster.gpus, num_score_gpus
    strategy = Sharing(range(score, gpus), range(score))
    train = gpus if num_train_gpus is None else num_train_gpus
    return Deployment("async_score", strategy, train, False, setting.batch.staleness, split=(gpus - score, score))


def shiftable(
    setting: Setting, num_train_gpus: int | None = None, *, use_model: bool = True, migrate: bool = True
) -> Deployment:
    """The planner moves GPUs; without ``use_model`` a replica counts as busy or not."""
    train = setting.train.gpus if num_train_gpus is None else num_train_gpus
    return Deployment(
        "shiftable", Planned(setting.planner.planner, setting.planner.period_s), train, False, setting.batch.staleness,
        model=None if use_model else BUSY_OR_NOT, migrate=migrate, split=(train,),
    )  # fmt: skip


def static_strategy(setting: Setting, split: Sequence[int]) -> Deployment:
    """As disaggregated, but training GPUs with nothing to train go half to each role (section 8.4)."""
    _, score, train = split
    half = train // 2
    strategy = Sharing(
        [*range(half, train), *range(train + score, setting.cluster.gpus)], [*range(half), *range(train, train + score)]
    )
    return Deployment("static strategy", strategy, train, False, setting.batch.staleness, split=tuple(split))


def rule_based(setting: Setting) -> Deployment:
    """GPUs move by the use of a role's room."""
    return Deployment(
        "rule-based", RuleBased(setting.planner.period_s), setting.train.gpus, False, setting.batch.staleness
    )  # fmt: skip
