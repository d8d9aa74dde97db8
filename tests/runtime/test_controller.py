"""Whatever happens to workers and roles, every job is done exactly once, or the run ends and says why."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from solrl.errors import Interrupted, RewardFailed, SolrlError
from solrl.runtime import controller as controller_module
from solrl.runtime.context import Context, Residency
from solrl.runtime.controller import Controller, Job, Plan
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import CONTROLLER, Post, Result, Role, Stop, Yielded
from solrl.runtime.planner import Decision, ShiftPlan
from solrl.runtime.plans import fixed, planned
from solrl.runtime.roles import EXPLORE, SCORE
from solrl.runtime.worker import Begin, Work, Worker

NUM_JOBS = 24


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "TICK_S", 0.01)
    monkeypatch.setattr(controller_module, "CHECK_S", 0.1)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def explored(job: int) -> str:
    """What a job is after all of its rounds, wherever they were done."""
    text = f"job {job}"
    for _ in range(1 + job % 4):
        text = digest(text)
    return text


class HashJobs:
    """Each job hashes for some rounds, then its hash is scored."""

    def __init__(self, num: int = NUM_JOBS) -> None:
        self.num, self.scores, self.done = num, dict[int, str](), Counter[tuple[str, int]]()

    def first(self) -> list[Job]:
        return [Job(n, EXPLORE, {"n": n}, 1 + n % 4) for n in range(self.num)]

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        n = job.payload["n"]
        self.done[job.role, n] += 1
        if job.role == EXPLORE:
            return [Job(self.num + n, SCORE, {"n": n, "text": value["text"]}, 1)]
        self.scores[n] = value["text"]
        return []

    def outcome(self) -> dict[str, Any]:
        return {"num": len(self.scores)}

    def check(self) -> None:
        assert self.scores == {n: digest("score" + explored(n)) for n in range(self.num)}
        assert set(self.done.values()) == {1} and len(self.done) == 2 * self.num


class Hashing:
    """A job in progress; ``trouble`` may raise before a round."""

    def __init__(self, payload: dict[str, Any], state: dict[str, Any] | None, trouble: Callable[[int], None]) -> None:
        self.n, self.trouble = payload["n"], trouble
        self.text, self.rounds = (state["text"], state["rounds"]) if state else (f"job {self.n}", 0)

    def advance(self) -> dict[str, Any] | None:
        self.trouble(self.n)
        time.sleep(0.002)
        self.text, self.rounds = digest(self.text), self.rounds + 1
        return {"text": self.text} if self.rounds == 1 + self.n % 4 else None

    def give_back(self) -> dict[str, Any] | None:
        return {"text": self.text, "rounds": self.rounds} if self.rounds else None


class Judging:
    def __init__(self, payload: dict[str, Any], trouble: Callable[[int], None]) -> None:
        self.payload, self.trouble = payload, trouble

    def advance(self) -> dict[str, Any] | None:
        self.trouble(self.payload["n"])
        return {"text": digest("score" + self.payload["text"])}

    def give_back(self) -> None:
        return None


def fine(rank: int, role: str, n: int) -> None:
    """No trouble."""


class Crew:
    """Workers in threads of this process, over one in-memory store; ``run`` is what a step of a run is."""

    def __init__(self, size: int, trouble: Callable[[int, str, int], None] = fine, **options: Any) -> None:
        self.log: list[dict[str, Any]] = []
        store = dist.HashStore()
        posts = [Post(store.clone(), "token", size, rank, 60.0) for rank in range(size)]
        for post in posts:
            post.beat(0)
        settings = {"stop": lambda: None, "job_timeout_s": 30.0} | options
        contexts = [Context(role, dict, ()) for role in ("explore", "score", "train")]
        self.gangs = [Gang(post, Residency(contexts, "train"), self.log.append, **settings) for post in posts]
        self.trouble = trouble

    @property
    def controller(self) -> Controller:
        assert self.gangs[0].controller is not None
        return self.gangs[0].controller

    def run(self, jobs: HashJobs, plan: Plan) -> list[Any]:
        """What ``work`` returned or raised, by rank."""
        outcomes: list[Any] = [None] * len(self.gangs)

        def work(rank: int) -> None:
            def begin(role: str, kind: Callable[..., Work]) -> Begin:
                return lambda payload, state: kind(payload, state, lambda n: self.trouble(rank, role, n))

            roles = {
                "explore": begin("explore", Hashing),
                "score": begin("score", lambda payload, state, trouble: Judging(payload, trouble)),
            }
            try:
                outcomes[rank] = self.gangs[rank].work(roles, jobs if rank == 0 else None, plan)
            except SolrlError as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(self.gangs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return outcomes

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == kind]


def restless(seed: int) -> Plan:
    """Moves a random process to a random role at every look; none of them is left without a process for long."""
    generator = random.Random(seed)

    def plan(controller: Controller) -> Decision | None:
        place = generator.randrange(len(controller.healthy))
        now = controller.members[controller.healthy[place]].role
        role = generator.choice((EXPLORE, SCORE))
        return None if role == now else Decision(ShiftPlan(role, (place,), ()), "restless")

    return plan


@pytest.mark.parametrize("size", [1, 2, 3])
def test_under_random_shifts_no_job_is_lost_or_done_twice(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "TICK_S", 0.004)  # about two rounds
    crew, jobs, moved = Crew(size), HashJobs(), []
    send = Worker._say
    monkeypatch.setattr(Worker, "_say", lambda self, message: (moved.append(message), send(self, message))[1])
    assert crew.run(jobs, restless(size)) == [{"num": NUM_JOBS}] * size
    jobs.check()
    assert any(isinstance(message, Yielded) and message.state for message in moved)  # in the middle of a job
    rounds = sum(message.rounds for message in moved if isinstance(message, Result | Yielded))
    assert rounds == sum(1 + n % 4 for n in range(NUM_JOBS)) + NUM_JOBS  # none is done again after a move
    assert {gang.worker.residency.current for gang in crew.gangs} == {"train"}


@pytest.mark.parametrize(("size", "plan"), [(1, planned), (3, planned), (2, fixed(1)), (4, fixed(2))])
def test_planned_and_fixed_roles_finish_step_after_step(size: int, plan: Plan) -> None:
    crew = Crew(size)
    for _ in range(2):
        jobs = HashJobs()
        assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * size
        jobs.check()
    decided = [line for line in crew.events("decision") if line["plan"]]
    assert len(crew.events("shift")) >= 2 * size and decided
    if plan is planned and size > 1:
        weighed = [line for line in decided if line.get("candidates")]
        assert weighed and {"num_up", "penalty", "throughput", "benefit"} <= weighed[0]["candidates"][0].keys()


def test_explored_jobs_do_not_pile_up_before_scoring() -> None:
    most, crew = [0], Crew(1)

    class Watched(HashJobs):
        def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
            found = super().finished(job, value, rank)
            most[0] = max(most[0], self.done.total() - 2 * len(self.scores))
            return found

    crew.run(Watched(), planned)
    assert 1 < most[0] <= controller_module.AHEAD + 2


def test_a_result_that_comes_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Worker._say

    def twice(self: Worker, message: Any) -> None:
        send(self, message)
        if isinstance(message, Result):
            send(self, message)

    monkeypatch.setattr(Worker, "_say", twice)
    jobs = HashJobs()
    assert Crew(2).run(jobs, planned) == [{"num": NUM_JOBS}] * 2
    jobs.check()


def raising(*moments: tuple[int, str], error: Exception, often: int = 1000) -> Callable[[int, str, int], None]:
    """``error`` in these (rank, role), up to so often each."""
    left = Counter(dict.fromkeys(moments, often))

    def trouble(rank: int, role: str, n: int) -> None:
        if left[rank, role] > 0:
            left[rank, role] -= 1
            raise error

    return trouble


def test_a_role_that_fails_now_and_then_costs_tries_and_no_job() -> None:
    trouble = raising((0, "score"), (1, "explore"), error=RuntimeError("out of memory"), often=1)
    crew, jobs = Crew(2, trouble), HashJobs()
    assert crew.run(jobs, restless(5)) == [{"num": NUM_JOBS}] * 2
    jobs.check()
    assert {(line["rank"], line["role"]) for line in crew.events("raised")} == {(0, "score"), (1, "explore")}
    assert crew.events("raised")[0]["error"] == "RuntimeError: out of memory" and not crew.events("quarantine")


@pytest.mark.parametrize("plan", [planned, fixed(1), restless(3)])
def test_a_worker_that_fails_again_and_again_gets_no_more_jobs(plan: Plan) -> None:
    trouble = raising((2, "score"), (2, "explore"), error=RewardFailed("reward 'judge' failed"))
    crew, jobs = Crew(3, trouble), HashJobs()
    assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * 3
    jobs.check()
    if crew.events("raised"):  # of score and explore the plan may have given it none
        assert [line["rank"] for line in crew.events("quarantine")] == [2] and crew.controller.healthy == [0, 1]
    again = HashJobs()
    assert crew.run(again, plan) == [{"num": NUM_JOBS}] * 3
    again.check()
    assert len(crew.events("raised")) <= controller_module.MOST_FAILURES


def test_a_job_that_nobody_can_do_ends_the_run_everywhere_with_its_own_error() -> None:
    def trouble(rank: int, role: str, n: int) -> None:
        if role == "score" and n == 5:
            raise RewardFailed("reward 'judge' failed: no answer")

    crew = Crew(2, trouble)
    outcomes = crew.run(HashJobs(), planned)
    assert [type(error) for error in outcomes] == [RewardFailed] * 2
    assert {str(error) for error in outcomes} == {"reward 'judge' failed: no answer"}
    assert 2 <= len(crew.events("raised")) <= controller_module.MOST_TRIES


@pytest.mark.parametrize(
    ("rank", "error", "others"),
    [(0, Interrupted("stopped by SIGTERM"), "stopped by SIGTERM"), (1, SolrlError("NaN"), "process 1: NaN")],
)
def test_what_ends_one_process_ends_all(rank: int, error: SolrlError, others: str) -> None:
    def trouble(here: int, role: str, n: int) -> None:
        if here == rank and n > 6:
            raise error

    outcomes = Crew(3, trouble).run(HashJobs(), fixed(1))
    assert outcomes[rank] is error
    assert {(type(outcome), str(outcome)) for i, outcome in enumerate(outcomes) if i != rank} == {(type(error), others)}


def test_a_mistake_of_the_controller_ends_all_and_is_the_cause() -> None:
    def broken(controller: Controller) -> Decision | None:
        raise KeyError("slot")

    outcomes = Crew(2).run(HashJobs(), broken)
    assert [str(error) for error in outcomes] == ["KeyError: 'slot'"] * 2
    assert isinstance(outcomes[0].__cause__, KeyError)


def test_a_worker_that_hangs_is_named() -> None:
    def trouble(rank: int, role: str, n: int) -> None:
        if rank == 1 and role == "explore":
            time.sleep(1.5)

    outcomes = Crew(2, trouble, job_timeout_s=0.4).run(HashJobs(), planned)
    assert "process 1 has been at" in str(outcomes[0]) and "runtime.job_timeout_s" in str(outcomes[0])
    assert str(outcomes[1]) == str(outcomes[0])


class Moody:
    """A role's parameters in real memory; reading them fails on ranks and for as often as ``fails`` says."""

    def __init__(self, fails: dict[tuple[int, str], int]) -> None:
        self.left, self.tried = Counter(fails), Counter[tuple[int, str]]()

    def residency(self, rank: int) -> Residency:
        contexts = [self.context(rank, role) for role in ROLE_NAMES]
        residency = Residency(contexts, "train", budget_bytes=0)
        for role in ("explore", "score"):  # train is up
            residency.shift_down(role, "train")
        return residency

    def context(self, rank: int, role: Role) -> Context:
        weight = torch.full((64,), float(ROLE_NAMES.index(role)))

        def read(name: str, out: torch.Tensor) -> None:
            self.tried[rank, role] += 1
            if self.left[rank, role] > 0:
                self.left[rank, role] -= 1
                raise torch.OutOfMemoryError("no room for the weights")
            out.fill_(float(ROLE_NAMES.index(role)))

        return Context(role, lambda: {"weight": weight}, [("*", "parameters")], read)


ROLE_NAMES: tuple[Role, ...] = ("explore", "score", "train")


def moody_crew(size: int, fails: dict[tuple[int, str], int]) -> tuple[Crew, Moody]:
    crew, moody = Crew(size), Moody(fails)
    for rank, gang in enumerate(crew.gangs):
        gang.worker.residency = moody.residency(rank)
    return crew, moody


@pytest.mark.parametrize("plan", [planned, fixed(1), restless(3)])
def test_a_role_that_does_not_come_up_once_leaves_the_process_in_its_old_one_and_costs_nothing(plan: Plan) -> None:
    crew, jobs = moody_crew(3, {(0, "score"): 1, (1, "explore"): 1, (2, "train"): 1})[0], HashJobs()
    assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * 3
    jobs.check()
    failed = [line for line in crew.events("shift") if line["error"]]
    assert failed and all(line["role"] != line["wanted"] and "is back: no room" in line["error"] for line in failed)
    assert not crew.events("quarantine") and crew.controller.healthy == [0, 1, 2]
    assert {gang.worker.residency.current for gang in crew.gangs} == {"train"}


@pytest.mark.parametrize("plan", [planned, fixed(1), restless(3)])
def test_a_process_whose_role_does_not_come_up_again_gets_no_more_jobs(plan: Plan) -> None:
    crew, moody = moody_crew(3, {(2, "score"): 99, (2, "explore"): 99})
    for _ in range(2):
        jobs = HashJobs()
        assert crew.run(jobs, plan) == [{"num": NUM_JOBS}] * 3
        jobs.check()
    assert [line["rank"] for line in crew.events("quarantine")] == [2] and crew.controller.healthy == [0, 1]
    assert moody.tried[2, "explore"] + moody.tried[2, "score"] == controller_module.MOST_FAILURES


def test_a_role_that_comes_up_nowhere_ends_the_run_everywhere_with_its_own_error() -> None:
    crew, _ = moody_crew(2, {(rank, "score"): 99 for rank in range(2)})
    outcomes = crew.run(HashJobs(), planned)
    assert all("role score did not come up" in str(error) and "no room for the weights" in str(error)
               for error in outcomes)  # fmt: skip
    assert {str(error) for error in outcomes} == {str(outcomes[0])}


def test_training_that_does_not_come_up_again_ends_the_run_and_names_the_process() -> None:
    crew, moody = moody_crew(2, {(1, "train"): 99})
    outcomes = crew.run(HashJobs(), planned)
    assert all(str(error).startswith("process 1: role train did not come up") for error in outcomes)
    assert moody.tried[1, "train"] == controller_module.MOST_FAILURES


def test_a_previous_role_that_does_not_come_back_ends_the_run() -> None:
    crew, _ = moody_crew(2, {(1, "score"): 99, (1, "explore"): 99, (1, "train"): 99})
    outcomes = crew.run(HashJobs(), planned)
    assert all("and train did not come back (no room for the weights)" in str(error) for error in outcomes)


def test_a_message_that_is_not_for_the_controller_ends_the_run() -> None:
    crew = Crew(1)
    crew.gangs[0].post.send(CONTROLLER, Stop(ending="failed", reason="x"))
    (outcome,) = crew.run(HashJobs(), planned)
    assert "message for a worker: stop" in str(outcome)
