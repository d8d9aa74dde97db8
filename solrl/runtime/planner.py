"""When to shift GPUs between roles, and which (PivotRL section 7 and Appendix D).

Five steps: the role to shift up, the shift pairs that free GPUs for it, one cheapest candidate for every number of new
replicas, the benefit of each by simulated migration, the best. Added to the paper: dominated candidates are dropped; a
start where every candidate is worth nothing because one role has no replica; one shift at a time, a pause after each,
and a least relative gain, without which marginal plans follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from solrl.runtime.migration import Estimate, shift_down, shift_up
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Cluster, Working, other
from solrl.runtime.scheduler import RoleLoad

INFINITY = float("inf")


@dataclass(frozen=True)
class PlannerSettings:
    """The planner's constants."""

    horizon_s: float = 60.0
    """H: how long a gain in throughput is expected to last."""
    shift_s: float = 1.25
    """How long a replica that shifts produces nothing; Figure 8 implies 1.23."""
    minimum_gain: float = 0.02
    """Plans that raise overall throughput by a smaller share are not carried out."""
    pause_s: float = 1.0
    """After a shift, before the next."""
    num_replayed: int = 2
    """Up to so many candidates are all replayed; of more, the estimated best and its neighbours uphill."""
    doubt: float = 0.005
    """Where the estimated best loses more than this share of overall throughput, nothing is replayed."""


@dataclass(frozen=True)
class State:
    """What the monitor knows."""

    cluster: Cluster
    explore: RoleLoad
    score: RoleLoad
    training: Literal["off", "held", "active"] = "off"
    """Whether training has its GPUs, and whether it uses them."""
    batch_ready: bool = False
    in_flight: bool = False
    """A shift is being carried out."""
    since_shift_s: float = INFINITY
    """Since the last one was done."""

    def role(self, role: Working) -> RoleLoad:
        """The load of a working role."""
        return self.explore if role == EXPLORE else self.score


@dataclass(frozen=True)
class ShiftPair:
    """GPUs that can go to the growing role together, and what that stops."""

    up: tuple[int, ...]
    """Slots of the growing role, in the order in which they are used."""
    down: tuple[int, ...] = ()
    """Slots of the opposite role; all go down whichever of ``up`` are used."""
    penalty: float = 0.0
    """Work not done meanwhile."""


@dataclass(frozen=True)
class Candidate:
    """One way to gain ``num_up`` replicas, at the least penalty."""

    num_up: int
    penalty: float
    up: tuple[int, ...]
    down: tuple[int, ...]
    estimated: float | None = None
    """Overall throughput by the quick estimate."""
    throughput: float | None = None
    """Overall throughput by replayed migration."""
    benefit: float | None = None


@dataclass(frozen=True)
class ShiftPlan:
    """What the executor carries out: ``down`` first, then ``up``."""

    role: Literal["explore", "score", "train"]
    up: tuple[int, ...]
    """Slots of ``role``; for train its home GPUs."""
    down: tuple[tuple[Working, int], ...]
    """(role, slot) of the replicas that end."""
    other_up: tuple[tuple[Working, int], ...] = ()
    """(role, slot) of replicas that come up with them; the planner grows one role at a time, a fixed split both."""
    releases_training: bool = False
    """Idle training gives up its GPUs."""
    penalty: float = 0.0
    benefit: float = 0.0


@dataclass(frozen=True)
class Decision:
    """A plan or the reason for none, with everything it was weighed against."""

    plan: ShiftPlan | None
    reason: str
    throughput: float = 0.0
    """Overall, before."""
    latencies: dict[str, float] = field(default_factory=dict)
    """Role -> jobs over throughput, seconds."""
    role: Working | None = None
    """The one that needs GPUs most."""
    pairs: tuple[ShiftPair, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For the log: plain values only; infinite ones become None."""
        plan = self.plan
        return {
            "reason": self.reason,
            "role": self.role,
            "throughput": self.throughput,
            "latencies": {role: value if value < INFINITY else None for role, value in self.latencies.items()},
            "candidates": [
                {"num_up": c.num_up, "penalty": c.penalty, "estimated": c.estimated, "throughput": c.throughput,
                 "benefit": c.benefit} for c in self.candidates
            ],
            "plan": None if plan is None else {
                "role": plan.role, "up": list(plan.up), "down": [list(pair) for pair in plan.down],
                "releases_training": plan.releases_training, "penalty": plan.penalty, "benefit": plan.benefit,
            },
        }  # fmt: skip


def overall_throughput(explore: tuple[int, float], score: tuple[int, float]) -> float:
    """Eq. 1: the harmonic mean of the roles' throughputs weighted by their jobs; (jobs, throughput) of each.

    A role without jobs does not count; one with jobs and no throughput makes it 0.
    """
    time = 0.0
    for num_jobs, throughput in (explore, score):
        if num_jobs and throughput <= 0:
            return 0.0
        time += num_jobs / throughput if num_jobs else 0.0
    return (explore[0] + score[0]) / time if time else 0.0


def make_plan(state: State, settings: PlannerSettings) -> Decision:
    """The decision in ``state``; it depends on nothing else."""
    if state.in_flight:
        return Decision(None, "a shift is under way")
    if state.batch_ready and state.training == "off":
        return Decision(training_plan(state), "the next batch is ready")
    if state.since_shift_s < settings.pause_s:
        return Decision(None, "pausing after a shift")
    role, latencies, throughputs = growing_role(state)
    if role is None:
        return Decision(None, "no role has work", latencies=latencies)
    sizes = {name: (state.role(name).num_jobs, throughputs[name]) for name in (EXPLORE, SCORE)}
    current = overall_throughput(sizes[EXPLORE], sizes[SCORE])
    pairs = shift_pairs(state, role, settings.shift_s)
    if not pairs:
        return Decision(None, f"no GPUs can go to {role}", current, latencies)
    candidates = build_candidates(pairs)
    weighed = _Weighing(state, role, current, throughputs, settings).weigh(candidates)
    return _choose(state, pairs, weighed, Decision(None, "", current, latencies, role=role), settings)


def growing_role(state: State) -> tuple[Working | None, dict[str, float], dict[Working, float]]:
    """(the role that needs GPUs most, seconds of work of each, throughput of each); None when there is no work."""
    throughputs: dict[Working, float] = {}
    latencies: dict[str, float] = {}
    for name in (EXPLORE, SCORE):
        load = state.role(name)
        total = load.limits.fleet((len(r), r.tokens) for r in load.replicas).total
        throughputs[name] = total / load.rounds_per_job
        jobs = load.num_jobs
        latencies[name] = 0.0 if not jobs else jobs / throughputs[name] if throughputs[name] else INFINITY
    if not state.explore.num_jobs and not state.score.num_jobs:
        return None, latencies, throughputs
    return (EXPLORE if latencies[EXPLORE] > latencies[SCORE] else SCORE), latencies, throughputs


def shift_pairs(state: State, role: Working, shift_s: float) -> tuple[ShiftPair, ...]:
    """Disjoint sets of GPUs that ``role`` could have, ascending penalty, then lowest GPU.

    Free slots of ``role`` and replicas of the opposite role that share a GPU hang together: a pair is a connected
    component. Idle training GPUs, and GPUs that nobody uses, are pairs without penalty; training GPUs in use are no
    donors.
    """
    cluster, growing, giving = state.cluster, state.role(role), state.role(other(role))
    up_slots, down_slots = cluster.slots(growing.spec.gpus), cluster.slots(giving.spec.gpus)
    active = {load.slot for load in growing.replicas}
    owner = {gpu: load.slot for load in giving.replicas for gpu in down_slots[load.slot]}
    blocked = {gpu for slot in active for gpu in up_slots[slot]}
    held = cluster.home if state.training != "off" else frozenset[int]()
    if state.training == "active":
        blocked |= held
    parts: list[tuple[set[int], set[int]]] = []  # (slots of role, slots of the opposite role)
    part_of: dict[int, int] = {}  # slot of the opposite role -> its part
    idle_training = -1
    for slot, gpus in enumerate(up_slots):
        if slot in active or not blocked.isdisjoint(gpus):
            continue
        donors = {owner[gpu] for gpu in gpus if gpu in owner}
        joined = sorted({part_of[donor] for donor in donors if donor in part_of})
        if not donors and not held.isdisjoint(gpus):
            joined = [idle_training] if idle_training >= 0 else []
        if joined:
            where = joined[0]
            for extra in joined[1:]:
                parts[where][0].update(parts[extra][0])
                parts[where][1].update(parts[extra][1])
                parts[extra] = (set(), set())
        else:
            where = len(parts)
            parts.append((set(), set()))
        if not donors and not held.isdisjoint(gpus):
            idle_training = where
        parts[where][0].add(slot)
        parts[where][1].update(donors)
        part_of.update(dict.fromkeys(parts[where][1], where))
    model, unit, speed = giving.limits.model, giving.rounds_per_job, giving.spec.prefill_tokens_per_s
    lost = {
        load.slot: (shift_s + load.tokens / speed) * model.throughput(len(load), load.tokens) / unit
        for load in giving.replicas
    }
    pairs = [
        ShiftPair(tuple(sorted(ups)), tuple(sorted(downs)), sum(lost[slot] for slot in sorted(downs)))
        for ups, downs in parts
        if ups
    ]
    return tuple(sorted(pairs, key=lambda pair: (pair.penalty, up_slots[pair.up[0]][0])))


def build_candidates(pairs: Sequence[ShiftPair]) -> list[Candidate]:
    """For every number of new replicas the cheapest plan, without those that a larger number matches or undercuts.

    Algorithm 1 with parent pointers: least[j] is the least penalty of exactly j replicas; a pair adds 1 .. all of its
    replicas for one penalty; of equals the later in the traversal stays.
    """
    total = sum(len(pair.up) for pair in pairs)
    least = np.full(total + 1, INFINITY)
    least[0] = 0.0
    parents = []
    for pair in pairs:
        after, used = least.copy(), np.zeros(total + 1, dtype=np.int64)
        for count in range(len(pair.up), 0, -1):
            through = least[:-count] + pair.penalty
            better = (through <= after[count:]) & (through < INFINITY)
            after[count:][better] = through[better]
            used[count:][better] = count
        least = after
        parents.append(used)
    kept: list[int] = []
    for num_up in range(total, 0, -1):
        if least[num_up] < INFINITY and (not kept or least[num_up] < least[kept[-1]]):
            kept.append(num_up)
    return [_traced(num_up, float(least[num_up]), pairs, parents) for num_up in reversed(kept)]


def _traced(num_up: int, penalty: float, pairs: Sequence[ShiftPair], parents: Sequence[Any]) -> Candidate:
    up: list[int] = []
    down: list[int] = []
    left = num_up
    for pair, used in zip(reversed(pairs), reversed(parents), strict=True):
        count = int(used[left])
        if count:
            up += pair.up[:count]
            down += pair.down
            left -= count
    return Candidate(num_up, penalty, tuple(sorted(up)), tuple(sorted(down)))


class _Weighing:
    """Throughput and benefit of candidates in one state."""

    def __init__(
        self, state: State, role: Working, current: float, throughputs: dict[Working, float], settings: PlannerSettings
    ) -> None:
        self.role, self.current, self.throughputs, self.settings = role, current, throughputs, settings
        self.growing, self.giving = state.role(role), state.role(other(role))

    def weigh(self, candidates: list[Candidate]) -> list[Candidate]:
        """The same candidates; few are all replayed, of many the best estimate and its neighbours while they
        improve."""
        if len(candidates) <= self.settings.num_replayed:
            return [self._replayed(candidate) for candidate in candidates]
        up = Estimate(self.growing.limits, self.growing.replicas, self.growing.waiting)
        down = Estimate(self.giving.limits, self.giving.replicas, self.giving.waiting)
        found = [
            replace(
                candidate,
                estimated=self._overall(
                    up.up(candidate.num_up) / self.growing.rounds_per_job,
                    down.down(candidate.down) / self.giving.rounds_per_job,
                ),
            )
            for candidate in candidates
        ]
        here = max(range(len(found)), key=lambda place: self._benefit(found[place].estimated or 0.0, found[place]))
        estimated = found[here].estimated or 0.0
        if self._benefit(estimated, found[here]) < -self.settings.doubt * self.settings.horizon_s * self.current:
            return found
        found[here] = self._replayed(found[here])
        for step in (1, -1):
            place = here
            while 0 <= place + step < len(found):
                nearby = found[place + step] = self._replayed(found[place + step])
                if (nearby.benefit or 0.0) <= (found[place].benefit or 0.0):
                    break
                place += step
        return found

    def _replayed(self, candidate: Candidate) -> Candidate:
        if candidate.throughput is not None:
            return candidate
        growing, giving = self.growing, self.giving
        up = shift_up(growing.limits, growing.replicas, growing.waiting, candidate.up)
        down = self.throughputs[other(self.role)]
        if candidate.down:
            outcome = shift_down(giving.limits, giving.replicas, giving.waiting, candidate.down)
            down = outcome.throughput / giving.rounds_per_job
        rate = up.throughput / growing.rounds_per_job
        again_s = up.moved_tokens / growing.spec.prefill_tokens_per_s / (len(growing.replicas) + len(candidate.up))
        charged = replace(candidate, penalty=candidate.penalty + again_s * rate)
        throughput = self._overall(rate, down)
        return replace(charged, throughput=throughput, benefit=self._benefit(throughput, charged))

    def _benefit(self, throughput: float, candidate: Candidate) -> float:
        return self.settings.horizon_s * (throughput - self.current) - candidate.penalty

    def _overall(self, growing: float, giving: float) -> float:
        return overall_throughput((self.growing.num_jobs, growing), (self.giving.num_jobs, giving))


def _choose(
    state: State, pairs: tuple[ShiftPair, ...], weighed: list[Candidate], decision: Decision, settings: PlannerSettings
) -> Decision:
    """``decision`` with the best plan, or the reason why there is none."""
    role = decision.role
    assert role is not None
    decision = replace(decision, pairs=pairs, candidates=tuple(weighed))
    replayed = [candidate for candidate in weighed if candidate.benefit is not None]
    best = max(replayed, key=lambda candidate: candidate.benefit or 0.0, default=weighed[0])
    if (best.benefit or 0.0) <= 0:
        if decision.throughput > 0:
            return replace(decision, reason="no candidate pays")
        total = sum(len(pair.up) for pair in pairs)
        best = min(weighed, key=lambda candidate: abs(candidate.num_up - total / 2))
        return replace(
            decision, plan=_plan(state, role, best), reason="a role with work has no replica: half of the GPUs"
        )
    if (best.throughput or 0.0) < decision.throughput * (1 + settings.minimum_gain):
        return replace(decision, reason="the best candidate gains too little")
    return replace(decision, plan=_plan(state, role, best), reason="the best candidate pays")


def _plan(state: State, role: Working, candidate: Candidate) -> ShiftPlan:
    slots = state.cluster.slots(state.role(role).spec.gpus)
    taken = {gpu for slot in candidate.up for gpu in slots[slot]}
    giving = other(role)
    return ShiftPlan(
        role,
        candidate.up,
        tuple((giving, slot) for slot in candidate.down),
        releases_training=state.training == "held" and not taken.isdisjoint(state.cluster.home),
        penalty=candidate.penalty,
        benefit=candidate.benefit or 0.0,
    )


def training_plan(state: State) -> ShiftPlan:
    """Training takes its home; every replica that touches it goes down (section 7.1: no candidates)."""
    home = state.cluster.home
    down: list[tuple[Working, int]] = []
    for name in (EXPLORE, SCORE):
        load = state.role(name)
        slots = state.cluster.slots(load.spec.gpus)
        down += [(name, replica.slot) for replica in load.replicas if not home.isdisjoint(slots[replica.slot])]
    return ShiftPlan(TRAIN, tuple(sorted(home)), tuple(down))
