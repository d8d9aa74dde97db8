"""The live scheduler against the pure migration it carries out; ids are never lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from solrl.errors import SolrlError
from solrl.runtime.migration import Move, shift_up
from solrl.runtime.roles import EXPLORE, RoleSpec
from solrl.runtime.scheduler import Scheduler
from tests.runtime.parts import FAST


def scheduler(slots: int = 2, **limits: float) -> Scheduler:
    made = Scheduler(RoleSpec(EXPLORE, FAST, **limits))  # type: ignore[arg-type]
    made.shift_up(range(slots))
    return made


def test_a_job_resumes_with_what_it_has_produced_and_before_younger_ones() -> None:
    made = scheduler(1, capacity_jobs=2)
    for job in (1, 2, 3):
        made.submit(job, 10.0)
    assert [move.job for move in made.dispatch()] == [1, 2]
    made.advance(0, 25.0)
    assert made.abort(0, 1) == [1]
    assert made.dispatch() == [Move(1, None, 0)]
    assert made.replicas[0].length(1) == 35.0
    assert made.replicas[0].tokens == 70.0


def test_a_result_that_comes_twice_or_from_elsewhere_changes_nothing() -> None:
    made = scheduler(1)
    made.submit(7, 5.0)
    made.dispatch()
    assert made.finish(3, 7) is None
    item = made.finish(0, 7)
    assert item is not None and item.length == 5.0
    assert made.finish(0, 7) is None
    assert (made.num_jobs, made.throughput) == (0, 0.0)


def test_a_shift_up_does_what_the_planner_simulated() -> None:
    made = scheduler(3)
    for job in range(60):
        made.submit(job, float(37 * job % 400))
    made.dispatch()
    made.advance(1, 120.0)
    before = made.load()
    expected = shift_up(before.limits, before.replicas, before.waiting, [4, 5])
    assert made.shift_up([5, 4]) == expected.moves
    assert len(expected.moves) > 10
    assert made.throughput == pytest.approx(expected.throughput)


def test_a_shift_down_says_where_each_job_came_from() -> None:
    made = scheduler(2)
    made.submit(1, 50.0)
    made.submit(2, 50.0)
    made.dispatch()
    assert made.shift_down([0]) == [Move(1, 0, 1)]
    assert made.shift_down([1]) == []
    assert made.num_waiting == 2
    assert made.shift_up([9]) == [Move(1, None, 9), Move(2, None, 9)]


def test_mistakes_are_named() -> None:
    made = scheduler(2)
    with pytest.raises(SolrlError, match="explore has a replica at slot 1 already"):
        made.shift_up([1])
    with pytest.raises(SolrlError, match="explore has no replica at slot 5"):
        made.advance(5, 1.0)


class Anything(RuleBasedStateMachine):
    """Any sequence of what a controller does."""

    @initialize()
    def start(self) -> None:
        self.made = scheduler(2, capacity_tokens=400, capacity_jobs=5)
        self.lengths: dict[int, float] = {}
        self.next = 0

    @rule(length=st.integers(1, 90), priority=st.none() | st.integers(0, 3))
    def submit(self, length: int, priority: int | None) -> None:
        self.made.submit(self.next, float(length), priority)
        self.lengths[self.next] = float(length)
        self.next += 1

    @rule()
    def dispatch(self) -> None:
        self.made.dispatch()

    @rule(slot=st.integers(0, 4), rounds=st.integers(0, 5))
    def advance(self, slot: int, rounds: int) -> None:
        if slot in self.made.replicas:
            for job in self.made.replicas[slot].jobs:
                self.lengths[job] += rounds
            self.made.advance(slot, rounds)

    @rule(slot=st.integers(0, 4))
    def finish_the_first(self, slot: int) -> None:
        if slot in self.made.replicas and len(self.made.replicas[slot]):
            job = self.made.replicas[slot].jobs[0]
            item = self.made.finish(slot, job)
            assert item is not None and item.length == pytest.approx(self.lengths.pop(job))

    @rule(slots=st.sets(st.integers(0, 4)))
    def down(self, slots: set[int]) -> None:
        self.made.shift_down(slots & set(self.made.replicas))

    @rule(slots=st.sets(st.integers(0, 4)))
    def up(self, slots: set[int]) -> None:
        self.made.shift_up(slots - set(self.made.replicas))

    @invariant()
    def every_job_is_somewhere_once_with_its_length(self) -> None:
        load = self.made.load()
        items = [*load.waiting, *(item for replica in load.replicas for item in replica.jobs)]
        assert sorted(item.job for item in items) == sorted(self.lengths)
        for item in items:
            assert item.length == pytest.approx(self.lengths[item.job])
        assert [replica.slot for replica in load.replicas] == sorted(self.made.replicas)
        expected = sum(FAST.throughput(len(r), r.tokens) for r in self.made.replicas.values())
        assert self.made.throughput == pytest.approx(expected)
        for replica in self.made.replicas.values():
            assert replica.tokens == pytest.approx(sum(replica.length(job) for job in replica.jobs))


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
