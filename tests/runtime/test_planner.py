"""The planner: Figure 8, candidates against brute force, pairs, and the rules that the paper does not have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl.runtime.planner import (
    PlannerSettings,
    ShiftPair,
    State,
    build_candidates,
    growing_role,
    make_plan,
    overall_throughput,
    shift_pairs,
)
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Cluster
from tests.runtime.parts import FAST, SLOW, figure_8, role_load

FIGURE_8 = PlannerSettings(shift_s=2549 / 2077, minimum_gain=0.0, num_replayed=99)


def test_figure_8_the_printed_numbers_give_the_printed_throughput_and_candidates() -> None:
    assert 385 / 4752 > 59 / 2077
    assert overall_throughput((59, 2077), (385, 4752)) == pytest.approx(4057.58, abs=0.01)
    pairs = [
        ShiftPair((0, 1), (), 0.0),
        ShiftPair((6,), (24, 25, 26, 27), 706.0),
        ShiftPair((7,), (28, 29, 30, 31), 1843.0),
    ]
    found = build_candidates(pairs)
    assert [(c.num_up, c.penalty, c.up) for c in found] == [
        (2, 0, (0, 1)),
        (3, 706, (0, 1, 6)),
        (4, 2549, (0, 1, 6, 7)),
    ]
    assert found[1].down == (24, 25, 26, 27)


def test_figure_8_a_workload_of_its_numbers_gives_its_benefits_and_its_choice() -> None:
    state = figure_8()
    role, latencies, throughputs = growing_role(state)
    assert role == SCORE
    assert (throughputs[SCORE], throughputs[EXPLORE]) == (pytest.approx(4752, abs=1), pytest.approx(2077, abs=1))
    assert (latencies[SCORE], latencies[EXPLORE]) == (pytest.approx(0.081, abs=1e-3), pytest.approx(0.0284, abs=1e-4))
    decision = make_plan(state, FIGURE_8)
    assert [pair.up for pair in decision.pairs] == [(0, 1), (6,), (7,)]
    assert sum(pair.penalty for pair in decision.pairs) == pytest.approx(2549, abs=3)
    two, three, four = decision.candidates
    assert (two.num_up, three.num_up, four.num_up) == (2, 3, 4)
    assert two.benefit == pytest.approx(3774, abs=5)
    assert three.benefit == pytest.approx(
        4183, abs=10
    )  # 59 jobs do not split as the figure's penalty of 706 would need
    assert four.benefit is not None and four.benefit < 0  # printed -3359; Eq. 1 gives 0 without a rollout replica
    assert decision.plan is not None
    assert (decision.plan.role, decision.plan.up) == (SCORE, (0, 1, 6))
    assert decision.plan.down == tuple((EXPLORE, slot) for slot in (24, 25, 26, 27))
    assert decision.plan.releases_training


def test_a_decision_in_the_log_holds_candidates_gains_and_penalties() -> None:
    logged = make_plan(figure_8(), FIGURE_8).as_dict()
    assert [candidate["num_up"] for candidate in logged["candidates"]] == [2, 3, 4]
    assert logged["plan"]["benefit"] == logged["candidates"][1]["benefit"]
    assert logged["reason"] == "the best candidate pays"


def brute_force(pairs: list[ShiftPair]) -> dict[int, float]:
    least: dict[int, float] = {}
    for counts in itertools.product(*(range(len(pair.up) + 1) for pair in pairs)):
        num = sum(counts)
        penalty = sum(pair.penalty for pair, count in zip(pairs, counts, strict=True) if count)
        least[num] = min(penalty, least.get(num, float("inf")))
    kept = {}
    for num in sorted(least, reverse=True):
        if num and all(least[num] < penalty for penalty in kept.values()):
            kept[num] = least[num]
    return kept


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 5, 8])), min_size=1, max_size=5))
def test_candidates_are_those_of_brute_force_without_the_dominated(rows: list[tuple[int, int]]) -> None:
    pairs, slot = [], itertools.count()
    for number, (count, penalty) in enumerate(sorted(rows, key=lambda row: row[1])):
        pairs.append(ShiftPair(tuple(next(slot) for _ in range(count)), (number,), float(penalty)))
    found = build_candidates(pairs)
    assert {c.num_up: c.penalty for c in found} == brute_force(pairs)
    for candidate in found:
        used = [pair for pair in pairs if set(pair.down) <= set(candidate.down)]
        assert len(candidate.up) == candidate.num_up
        assert candidate.penalty == sum(pair.penalty for pair in used)
        assert set(candidate.up) <= {each for pair in used for each in pair.up}
        for pair in used:  # the first replicas of a pair, and at least one
            count = len(set(pair.up) & set(candidate.up))
            assert count and set(pair.up[:count]) <= set(candidate.up)


def state(explore: dict[int, list[float]], score: dict[int, list[float]], **values: object) -> State:
    gpus = values.pop("gpus", (1, 4))
    cluster = values.pop("cluster", Cluster(16, 8, 0))
    assert isinstance(gpus, tuple) and isinstance(cluster, Cluster)
    made = State(
        cluster,
        role_load(EXPLORE, FAST, gpus[0], explore),
        role_load(SCORE, SLOW, gpus[1], score, first_job=10**4),
    )
    return replace(made, **values)  # type: ignore[arg-type]


def test_one_large_donor_makes_room_for_several_small_replicas_for_one_penalty() -> None:
    found = shift_pairs(state({0: [], 1: []}, {1: [100.0] * 3, 2: [50.0]}), EXPLORE, 2.0)
    assert [(pair.up, pair.down) for pair in found] == [
        ((2,), ()), ((3,), ()), ((12,), ()), ((13,), ()), ((14,), ()), ((15,), ()),
        ((8, 9, 10, 11), (2,)), ((4, 5, 6, 7), (1,)),
    ]  # fmt: skip
    assert found[-1].penalty == pytest.approx(2.0 * SLOW.throughput(3, 300.0))


def test_sizes_that_do_not_divide_hang_together_in_components() -> None:
    found = shift_pairs(
        state({0: [1.0], 1: [1.0], 2: [1.0]}, {}, gpus=(3, 4), cluster=Cluster(12, 12, 0)), SCORE, 1.0
    )  # fmt: skip
    assert [(pair.up, pair.down) for pair in found] == [((0, 1, 2), (0, 1, 2))]


def test_training_in_use_gives_nothing_and_idle_training_is_one_free_pair() -> None:
    both = {k: [10.0] for k in range(8, 16)}
    idle = state(both, {}, cluster=Cluster(16, 8, 8), training="held")
    assert shift_pairs(idle, SCORE, 1.0)[0] == ShiftPair((0, 1))
    active = replace(idle, training="active")
    assert [pair.up for pair in shift_pairs(active, SCORE, 1.0)] == [(2,), (3,)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (8, 1), (2, 8)]),
    st.sampled_from([0, 4, 8, 16]),
    st.sampled_from(["off", "held", "active"]),
    st.randoms(use_true_random=False),
    st.sampled_from([EXPLORE, SCORE]),
)
def test_pairs_are_disjoint_free_every_gpu_they_use_and_touch_nothing_else(
    gpus: tuple[int, int], home: int, training: str, rng: object, role: str
) -> None:
    cluster = Cluster(24, 8, home)
    slots = {EXPLORE: cluster.slots(gpus[0]), SCORE: cluster.slots(gpus[1])}
    used = set(cluster.home) if training != "off" else set()
    active: dict[str, dict[int, list[float]]] = {EXPLORE: {}, SCORE: {}}
    for name, slot in sorted(((n, s) for n in slots for s in range(len(slots[n]))), key=lambda _: rng.random()):  # type: ignore[attr-defined]
        if used.isdisjoint(slots[name][slot]) and rng.random() < 0.7:  # type: ignore[attr-defined]
            active[name][slot] = [100.0]
            used |= set(slots[name][slot])
    made = state(active[EXPLORE], active[SCORE], gpus=gpus, cluster=cluster, training=training)
    opposite = SCORE if role == EXPLORE else EXPLORE
    ups, downs = [], []
    for pair in shift_pairs(made, role, 1.0):  # type: ignore[arg-type]
        ups += pair.up
        downs += pair.down
        wanted = {gpu for slot in pair.up for gpu in slots[role][slot]}
        freed = {gpu for slot in pair.down for gpu in slots[opposite][slot]}
        busy = {gpu for name in (EXPLORE, SCORE) for slot in active[name] for gpu in slots[name][slot]}
        assert wanted.isdisjoint(busy - freed)
        assert all(not wanted.isdisjoint(slots[opposite][slot]) for slot in pair.down)
        assert training != "active" or wanted.isdisjoint(cluster.home)
    assert len(ups) == len(set(ups)) and len(downs) == len(set(downs))
    assert set(ups).isdisjoint(active[role])
    assert set(downs) <= set(active[opposite])


def test_a_ready_batch_takes_the_whole_home_and_every_replica_that_touches_it() -> None:
    made = state({0: [1.0], 9: [1.0]}, {1: [1.0]}, cluster=Cluster(16, 8, 6), batch_ready=True)
    plan = make_plan(made, PlannerSettings()).plan
    assert plan is not None
    assert (plan.role, plan.up, plan.down) == (TRAIN, (0, 1, 2, 3, 4, 5), ((EXPLORE, 0), (SCORE, 1)))


def test_when_both_roles_have_work_and_no_replica_about_half_of_the_gpus_move_once() -> None:
    """Every candidate is worth 0 then: without the rule nothing ever moves again."""
    made = state({}, {}, cluster=Cluster(16, 8, 16), training="held")
    waiting = (
        role_load(EXPLORE, FAST, 1, {}, waiting=[10.0] * 40),
        role_load(SCORE, SLOW, 4, {}, waiting=[9.0] * 40, first_job=99),
    )
    made = replace(made, explore=waiting[0], score=waiting[1])
    decision = make_plan(made, PlannerSettings())
    assert decision.plan is not None
    half = len(decision.plan.up) * (1 if decision.plan.role == EXPLORE else 4)
    assert half == 16  # all of one free pair; it is the only candidate
    occupied = {slot: [10.0] for slot in range(8)}
    other_half = replace(made, training="off", explore=role_load(EXPLORE, FAST, 1, occupied), score=waiting[1])
    following = make_plan(other_half, PlannerSettings()).plan
    assert following is not None and following.role == SCORE
    assert len({slot for _, slot in following.down}) < 8, "the role that works keeps a replica"


def test_a_role_with_work_and_no_replica_gets_one_and_does_not_take_everything() -> None:
    made = state({slot: [100.0] * 8 for slot in range(16)}, {})
    made = replace(made, score=role_load(SCORE, SLOW, 4, {}, waiting=[50.0] * 30, first_job=10**4))
    plan = make_plan(made, PlannerSettings()).plan
    assert plan is not None and plan.role == SCORE
    assert 0 < len(plan.down) < 16


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"in_flight": True, "batch_ready": True}, "a shift is under way"),
        ({"since_shift_s": 0.5}, "pausing after a shift"),
    ],
)
def test_one_shift_at_a_time_and_a_pause_after_it(values: dict[str, object], reason: str) -> None:
    decision = make_plan(replace(figure_8(), **values), FIGURE_8)  # type: ignore[arg-type]
    assert (decision.plan, decision.reason) == (None, reason)


def test_a_gain_below_the_least_share_is_not_worth_a_shift() -> None:
    decision = make_plan(figure_8(), replace(FIGURE_8, minimum_gain=0.05))
    assert decision.plan is None
    assert decision.reason == "the best candidate gains too little"


def test_without_work_there_is_no_plan() -> None:
    assert make_plan(state({0: []}, {}), PlannerSettings()).reason == "no role has work"


def test_recomputing_what_jobs_hold_is_part_of_the_penalty() -> None:
    made = figure_8()
    slow = replace(made.explore, spec=replace(made.explore.spec, prefill_tokens_per_s=3000.0))
    before, after = (shift_pairs(s, SCORE, 1.0) for s in (made, replace(made, explore=slow)))
    for free, charged in zip(before[1:], after[1:], strict=True):
        assert charged.penalty > 4 * free.penalty  # 4 to 11 jobs of 3,000 tokens at 3,000 a second


def test_few_replays_find_what_replaying_every_candidate_finds() -> None:
    made = state({slot: [100.0 * (slot % 7 + 1)] * (4 + slot % 5) for slot in range(8, 32)},
                 {slot: [900.0] * 30 for slot in (8, 9)}, cluster=Cluster(40, 8, 8), training="held")  # fmt: skip
    every = make_plan(made, PlannerSettings(num_replayed=99))
    few = make_plan(made, PlannerSettings(num_replayed=0))
    assert len(every.candidates) > 6
    assert sum(c.benefit is not None for c in few.candidates) < len(few.candidates)
    assert few.plan == every.plan
