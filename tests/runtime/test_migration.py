"""Dispatch and migration: what is decided, and that nothing is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl.runtime import migration
from solrl.runtime.migration import Estimate, Item, Limits, Load, shift_down, shift_up
from solrl.runtime.throughput import Coefficients
from tests.runtime.parts import FAST, SLOW, load

MODELS = st.builds(
    Coefficients,
    st.floats(0, 1e-7), st.floats(1e-4, 0.05), st.floats(1e-6, 1e-2), st.floats(0, 0.1),
)  # fmt: skip


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Limits, list[Load], list[Item]]:
    """(limits, replicas, queue), with room that may be short."""
    lengths = st.lists(st.integers(1, 9000), max_size=12)
    replicas = draw(st.lists(lengths, min_size=1, max_size=7))
    loads, job = [], 0
    for slot, row in enumerate(replicas):
        loads.append(load(slot, [float(length) for length in row], job))
        job += len(row)
    waiting = [Item(float(job + k), job + k, float(n)) for k, n in enumerate(draw(lengths))]
    return Limits(draw(MODELS), draw(st.sampled_from([4e4, 1e12])), draw(st.sampled_from([13, 256]))), loads, waiting


def after(loads: list[Load], waiting: list[Item], moves: list[migration.Move], up: list[int], down: set[int]) -> dict:  # type: ignore[type-arg]
    """Slot -> jobs once the moves are carried out; every move must start where its job is."""
    where = {item.job: each.slot for each in loads for item in each.jobs}
    lengths = {item.job: item.length for each in loads for item in each.jobs} | {i.job: i.length for i in waiting}
    for move in moves:
        assert where.get(move.job) == move.source
        assert move.target not in down
        where[move.job] = move.target
    held: dict[int, list[float]] = {slot: [] for slot in [*(each.slot for each in loads), *up] if slot not in down}
    for job, slot in where.items():
        if slot not in down:
            held[slot].append(lengths[job])
    return held


def total(limits: Limits, held: dict[int, list[float]]) -> float:
    return sum(limits.model.throughput(len(row), sum(row)) for row in held.values())


@settings(max_examples=25, deadline=None)
@given(fleets(), st.data())
def test_a_shift_down_loses_no_job_keeps_the_order_of_the_queue_and_fits(
    fleet: tuple[Limits, list[Load], list[Item]], data: st.DataObject
) -> None:
    limits, loads, waiting = fleet
    down = data.draw(st.sets(st.sampled_from([each.slot for each in loads])))
    found = shift_down(limits, loads, waiting, down)
    held = after(loads, waiting, found.moves, [], down)
    left = [item.job for item in found.waiting]
    assert left == sorted(left)
    everything = Counter(item.job for each in loads for item in each.jobs) + Counter(item.job for item in waiting)
    staying = Counter(item.job for each in loads if each.slot not in down for item in each.jobs)
    assert Counter(move.job for move in found.moves) + Counter(left) + staying == everything
    assert found.throughput == pytest.approx(total(limits, held))
    for each in loads:
        if each.slot not in down and len(held[each.slot]) > len(each):
            assert len(held[each.slot]) <= limits.capacity_jobs
            assert sum(held[each.slot]) <= limits.capacity_tokens + 1e-6


@settings(max_examples=25, deadline=None)
@given(fleets(), st.integers(1, 4))
def test_a_shift_up_moves_a_job_at_most_once_and_only_where_throughput_grows(
    fleet: tuple[Limits, list[Load], list[Item]], count: int
) -> None:
    limits, loads, waiting = fleet
    up = [100 + k for k in range(count)]
    found = shift_up(limits, loads, waiting, up)
    held = after(loads, waiting, found.moves, up, set())
    assert found.throughput == pytest.approx(total(limits, held))
    assert max(Counter(move.job for move in found.moves).values(), default=1) == 1
    placed = shift_up(
        Limits(limits.model, limits.capacity_tokens, limits.capacity_jobs, migrate=False), loads, waiting, up
    )
    assert found.throughput >= placed.throughput - 1e-9
    migrated = [move for move in found.moves if move.source is not None]
    if migrated:
        assert not found.waiting
        assert all(move.target in up for move in found.moves if move.source is None)
        assert found.throughput > placed.throughput
        lengths = {item.job: item.length for each in loads for item in each.jobs}
        assert found.moved_tokens == pytest.approx(sum(lengths[move.job] for move in migrated))


def test_the_shortest_job_of_the_fastest_replica_moves_first() -> None:
    loads = [load(0, [50.0, 900.0, 20.0, 700.0], 0), load(1, [10.0], 10)]
    moves = shift_up(Limits(FAST), loads, [], [7]).moves
    assert moves[0] == migration.Move(2, 0, 7)


def test_a_job_that_waits_goes_to_the_new_replica_even_if_an_old_one_is_better() -> None:
    found = shift_up(Limits(FAST), [load(0, [], 0)], [Item(5.0, 5, 10.0)], [3])
    assert found.moves == [migration.Move(5, None, 3)]


def test_the_head_of_the_queue_blocks_when_it_fits_nowhere() -> None:
    limits = Limits(FAST, capacity_tokens=100)
    found = shift_up(limits, [load(0, [60.0], 0)], [Item(1.0, 1, 90.0), Item(2.0, 2, 50.0), Item(3.0, 3, 10.0)], [1])
    assert found.moves == [migration.Move(1, None, 1)]
    assert [item.job for item in found.waiting] == [2, 3]


def test_what_the_new_replicas_cannot_take_goes_to_the_old_ones_and_nothing_that_runs_moves() -> None:
    limits = Limits(FAST, capacity_jobs=3)
    queue = [Item(float(k), k, 10.0) for k in range(10, 15)]
    found = shift_up(limits, [load(0, [500.0, 20.0], 0), load(1, [600.0], 5)], queue, [7])
    assert [(move.source, move.target) for move in found.moves] == [(None, 7)] * 3 + [(None, 0), (None, 1)]
    assert found.waiting == []


def test_equal_replicas_are_filled_from_the_lowest() -> None:
    queue = [Item(float(k), k, 10.0) for k in range(4)]
    found = shift_down(Limits(Coefficients(0, 0, 1e-3, 1e-3)), [load(s, [], 0) for s in (2, 5, 9)], queue, [])
    assert [move.target for move in found.moves] == [2, 5, 9, 2]


def test_numpy_and_plain_lists_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    loads = [load(s, [float(rng.randint(1, 5000)) for _ in range(rng.randint(0, 20))], 100 * s) for s in range(12)]
    queue = [Item(5e3 + k, 5000 + k, float(rng.randint(1, 5000))) for k in range(30)]
    for model in (FAST, SLOW, Coefficients(0, 1e-2, 1e-2, 2e-3)):
        limits = Limits(model, capacity_tokens=6e4)
        plain = shift_down(limits, loads, queue, [1, 4]), shift_up(limits, loads, [], [20, 21])
        monkeypatch.setattr(migration, "NUM_ARRAYS_PAY", 1)
        assert (shift_down(limits, loads, queue, [1, 4]), shift_up(limits, loads, [], [20, 21])) == plain
        monkeypatch.undo()


@pytest.mark.parametrize("model", [FAST, SLOW])
def test_the_estimate_is_within_one_percent_of_the_replay(model: Coefficients) -> None:
    rng = random.Random(1)
    loads = [load(s, [rng.lognormvariate(7, 0.8) for _ in range(rng.randint(15, 33))], 100 * s) for s in range(24)]
    limits = Limits(model, capacity_tokens=1e6)
    estimate = Estimate(limits, loads, [])
    for count in (1, 4, 12):
        assert estimate.up(count) == pytest.approx(
            shift_up(limits, loads, [], range(50, 50 + count)).throughput, rel=0.01
        )
        down = range(count)
        assert estimate.down(down) == pytest.approx(shift_down(limits, loads, [], down).throughput, rel=0.01)
    queue = [Item(9e3 + k, 9000 + k, 500.0) for k in range(200)]
    estimate = Estimate(limits, loads, queue)
    assert estimate.up(6) == pytest.approx(shift_up(limits, loads, queue, range(50, 56)).throughput, rel=0.01)
    assert estimate.down([0]) == pytest.approx(shift_down(limits, loads, queue, [0]).throughput, rel=0.01)
    assert estimate.down(range(24)) == 0
