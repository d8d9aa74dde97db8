"""Score replicas of several processes: they shift whole or not at all, and no job is lost or done twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from solrl.errors import SolrlError
from solrl.runtime import controller as controller_module
from solrl.runtime.context import Context, Residency
from solrl.runtime.controller import Controller, Job, Plan
from solrl.runtime.mailbox import CONTROLLER, Role, Shifted
from solrl.runtime.planner import Decision, ShiftPlan
from solrl.runtime.plans import fixed, planned, scoring
from solrl.runtime.roles import EXPLORE, SCORE
from tests.runtime.test_controller import NUM_JOBS, Crew, HashJobs, raising

SIZE = 2


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "TICK_S", 0.01)
    monkeypatch.setattr(controller_module, "CHECK_S", 0.1)


class Gpus:
    """One GPU a process: a process has released it or not, a judge has it or not. Roles fail where ``fails`` says."""

    def __init__(self, crew: Crew, fails: dict[tuple[int, Role], int] | None = None) -> None:
        self.crew, self.left = crew, dict(fails or {})
        self.holds = [True] * len(crew.gangs)
        self.judges: dict[int, tuple[int, ...]] = {}
        self.most, self.starts = 0, 0
        for rank, gang in enumerate(crew.gangs):
            roles: tuple[Role, ...] = ("explore", "score", "train")
            gang.worker.residency = Residency([self.context(rank, role) for role in roles], "train")

    def context(self, rank: int, role: Role) -> Context:
        def fail() -> None:
            if self.left.get((rank, role), 0) > 0:
                self.left[rank, role] -= 1
                raise RuntimeError(f"no room for {role}")

        def start() -> None:
            if role != "score":
                assert not any(rank in gpus for gpus in self.judges.values()), "a judge still has this GPU"
                fail()
                self.holds[rank] = True
                return
            self.holds[rank] = False
            fail()
            if rank % SIZE == 0:
                gpus = tuple(range(rank, rank + SIZE))
                assert not any(self.holds[gpu] for gpu in gpus), "a judge came up on a GPU that is not free"
                self.judges[rank], self.starts = gpus, self.starts + 1
                self.most = max(self.most, len(self.judges))

        def stop() -> None:
            if role == "score":
                self.judges.pop(rank, None)

        return Context(role, dict, (), start=start, stop=stop)

    def trouble(self, rank: int, role: str, n: int) -> None:
        if role == "score":
            assert rank in self.judges, "scored without a judge"
        else:
            assert self.holds[rank], "explored on a GPU that was given up"


def crew_of(size: int, fails: dict[tuple[int, Role], int] | None = None, **options: Any) -> tuple[Crew, Gpus]:
    crew = Crew(size, replica_size=SIZE, **options)
    gpus = Gpus(crew, fails)
    crew.trouble = gpus.trouble
    return crew, gpus


def restless(seed: int) -> Plan:
    """Moves a random replica to a random role, as long as there are two."""
    generator = random.Random(seed)

    def plan(controller: Controller) -> Decision | None:
        if len(controller.healthy) == SIZE:
            return planned(controller)
        if generator.random() < 0.5:
            return Decision(ShiftPlan(EXPLORE, (generator.randrange(len(controller.healthy)),), ()), "restless")
        return Decision(ShiftPlan(SCORE, (generator.randrange(len(controller.healthy) // SIZE),), ()), "restless")

    return plan


@pytest.mark.parametrize(
    ("size", "plan"), [(2, planned), (2, fixed(2)), (4, planned), (4, fixed(2)), (4, restless(1)), (6, restless(2))]
)
def test_a_judge_has_all_gpus_of_its_replica_alone_and_no_job_is_lost_or_done_twice(size: int, plan: Plan) -> None:
    crew, gpus = crew_of(size)
    for _ in range(2):
        jobs = HashJobs()
        assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * size
        jobs.check()
        assert not gpus.judges and gpus.holds == [True] * size
    assert gpus.starts >= 2 and not crew.events("raised")
    ups = [line for line in crew.events("shift") if line["role"] == "score"]
    assert {line["rank"] % SIZE for line in ups} == {0, 1}
    assert {line["rank"] % SIZE for line in crew.events("job") if line["role"] == "score"} == {0}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("before", ["explore", "train"])
def test_a_judge_that_does_not_come_up_leaves_every_process_of_its_replica_in_the_role_that_it_had(
    who: int, before: str
) -> None:
    """``who`` fails: the leader's judge does not start, or the other one does not release what it has."""
    crew, _ = crew_of(2, {(who, "score"): 1})
    seen: list[tuple[str, str]] = []

    def plan(controller: Controller) -> Decision | None:
        seen.append((controller.members[0].role, controller.members[1].role))
        if before == "train" and len(seen) == 1:  # straight from role train
            return Decision(ShiftPlan(SCORE, (0,), ()), "too early")
        return planned(controller)

    jobs = HashJobs(4)
    assert crew.run(jobs, plan) == [{"num": 4}] * 2
    jobs.check()
    shifts = crew.events("shift")
    (failed,) = [place for place, line in enumerate(shifts) if line["error"]]
    assert shifts[failed]["rank"] == who and f"score did not come up, {before} is back" in shifts[failed]["error"]
    if who == 0:  # the other one had given way, and went back
        assert (shifts[failed - 1]["rank"], shifts[failed - 1]["role"]) == (1, "score")
    assert (shifts[failed + 1]["rank"], shifts[failed + 1]["role"]) == (1 - who, before)
    assert set(seen) <= {(role, role) for role in ("explore", "score", "train")}
    assert not crew.events("quarantine")


def test_a_judge_that_does_not_come_up_again_costs_its_replica_all_jobs_and_the_others_do_them() -> None:
    crew, gpus = crew_of(4, {(2, "score"): 99})
    for _ in range(2):
        jobs = HashJobs()
        assert crew.run(jobs, planned) == [{"num": NUM_JOBS}] * 4
        jobs.check()
    (line,) = crew.events("quarantine")
    assert line["rank"] == 2 and "role score did not come up" in line["error"]
    assert crew.controller.healthy == [0, 1] and gpus.most == 1


def test_a_judge_that_comes_up_nowhere_ends_the_run_everywhere_with_its_own_error() -> None:
    crew, _ = crew_of(4, {(0, "score"): 99, (2, "score"): 99})
    outcomes = crew.run(HashJobs(), planned)
    assert all(isinstance(error, SolrlError) and "no room for score" in str(error) for error in outcomes)


def test_a_process_that_does_not_come_back_from_a_replica_is_told_again_and_the_second_failure_ends_the_run() -> None:
    crew, gpus = crew_of(2, {(1, "train"): 1})
    jobs = HashJobs(4)
    assert crew.run(jobs, planned) == [{"num": 4}] * 2
    jobs.check()
    late = [line for line in crew.events("shift") if line["error"]]
    assert [(line["rank"], line["role"], line["wanted"]) for line in late] == [(1, "score", "train")]
    gpus.left[1, "train"] = 99
    outcomes = crew.run(HashJobs(4), planned)
    assert all("process 1: role train did not come up, score is back" in str(error) for error in outcomes)


@pytest.mark.parametrize("plan", [planned, fixed(2)])
def test_a_leader_that_fails_again_and_again_takes_its_replica_along(plan: Plan) -> None:
    crew, gpus = crew_of(4)
    broken: Callable[[int, str, int], None] = raising((2, "score"), error=RuntimeError("out of memory"))

    def trouble(rank: int, role: str, n: int) -> None:
        gpus.trouble(rank, role, n)
        broken(rank, role, n)

    crew.trouble = trouble
    jobs = HashJobs()
    assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * 4
    jobs.check()
    assert crew.events("raised") and crew.controller.healthy == [0, 1]


class ScoreJobs(HashJobs):
    """Only scores are missing."""

    def first(self) -> list[Job]:
        for n in range(self.num):
            self.done[EXPLORE, n] += 1
        return [Job(n, SCORE, {"n": n, "text": str(n)}, 1) for n in range(self.num)]

    def check(self) -> None:
        assert len(self.scores) == self.num and set(self.done.values()) == {1}


@pytest.mark.parametrize(("num", "replicas"), [(1, 1), (2, 2), (7, 3)])
def test_where_only_scores_are_missing_as_many_replicas_come_up_as_have_work(num: int, replicas: int) -> None:
    crew, gpus = crew_of(6)
    jobs = ScoreJobs(num)
    assert crew.run(jobs, scoring) == [{"num": num}] * 6
    jobs.check()
    assert gpus.most == gpus.starts == replicas
    assert {line["role"] for line in crew.events("job")} == {"score"}


def test_a_process_that_says_it_shifted_and_was_not_told_to_ends_the_run() -> None:
    crew, _ = crew_of(2)
    crew.gangs[1].post.send(CONTROLLER, Shifted(rank=1, role="score", number=0, seconds=0.0))
    outcomes = crew.run(HashJobs(2), planned)
    assert all("process 1 says that it has shifted, and was not told to" in str(error) for error in outcomes)
