"""Whole runs: conservation, order, traces, and agreement with what can be worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from solrl.errors import SolrlError, UsageError
from solrl.runtime.planner import ShiftPlan
from solrl.runtime.progress import Progress, Task
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Cluster, Working
from solrl.runtime.simulator import Deployment, Simulation, simulate
from solrl.runtime.strategies import (
    Fixed,
    async_score,
    colocated,
    disaggregated,
    rollout_reward_colocated,
    rule_based,
    shiftable,
    static_strategy,
)
from solrl.runtime.workload import Sample, Setting, draw, load_sample, load_setting, save_sample
from tests.runtime.parts import tiny_setting

WORKLOADS = Path(__file__).parents[2] / "benchmarks" / "workloads"


def everyone(setting: Setting) -> list[Deployment]:
    split = setting.deployments.disaggregated
    assert split is not None
    return [
        colocated(setting), disaggregated(setting, split), rollout_reward_colocated(setting, 4),
        static_strategy(setting, split), rule_based(setting), async_score(setting, 4),
        shiftable(setting), shiftable(setting, migrate=False), shiftable(setting, use_model=False, migrate=False),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(9))
def test_every_deployment_ends_with_every_job_done_once_and_no_gpu_in_two_roles(number: int) -> None:
    setting = tiny_setting()
    sample = draw(setting, 3)
    deployment = everyone(setting)[number]
    run = Simulation(setting, sample, deployment, watch_s=1.0)
    result = run.run()
    assert result.rounds == pytest.approx(sum(sample.explore) + sum(sample.score))
    assert len(result.batch_times) == 3
    assert result.batch_times == sorted(result.batch_times)
    for moment in result.timeline:
        assert sum(moment.gpus.values()) <= 8
        assert moment.gpus[TRAIN] in (0, deployment.num_train_gpus)
    assert run.outstanding == {EXPLORE: 0, SCORE: 0}


@pytest.mark.parametrize("seed", range(3))
def test_a_job_ends_after_exactly_its_rounds_however_often_it_moved(seed: int) -> None:
    setting = tiny_setting(**{"batch.num_groups": 40, "planner.period_s": 1.0, "planner.minimum_gain": 0.0,
                              "planner.pause_s": 0.0, "planner.shift_s": 0.0, "explore.up_s": 0.1})  # fmt: skip
    sample = draw(setting, seed)
    run = Simulation(setting, sample, shiftable(setting, 2))
    plain, ends = run.progress.finished, dict[int, float]()

    def finished(role: Working, job: int, length: float) -> list[Task]:
        if role == EXPLORE:
            ends[job] = length
        else:
            assert length == pytest.approx(ends[job] + sample.score[job], abs=1e-3)
        return plain(role, job, length)

    run.progress.finished = finished  # type: ignore[method-assign]
    result = run.run()
    assert result.num_moved > 50
    for job, length in ends.items():
        assert length == pytest.approx(50.0 + sample.explore[job], abs=1e-3)


class ThereAndBack:
    """A second replica comes, and goes again."""

    period_s = 0.5

    def start(self, run: Simulation) -> dict[Working, list[int]]:
        return {EXPLORE: [0], SCORE: [3]}

    def decide(self, run: Simulation) -> ShiftPlan | None:
        there = 1 in run.schedulers[EXPLORE].replicas
        if run.t == 0.5 and not there:
            return ShiftPlan(EXPLORE, (1,), ())
        return ShiftPlan(EXPLORE, (), ((EXPLORE, 1),)) if run.t == 1.0 and there else None


def test_a_job_that_comes_back_to_its_replica_still_has_what_it_had_to_go() -> None:
    setting = by_hand(**{"batch.num_batches": 1, "explore.prefill_tokens_per_s": 100, "passes.0.prompt_tokens": 1,
                         "explore.a_s": 1e-6, "planner.pause_s": 100})  # fmt: skip
    rounds = [150.0 - job for job in range(24)]  # the low ids, which move first, have the longest way to go
    run = Simulation(setting, Sample(rounds, [1.0] * 24), Deployment("there and back", ThereAndBack(), 2, True, 0))
    ends, plain = dict[int, float](), run.progress.finished

    def finished(role: Working, job: int, length: float) -> list[Task]:
        if role == EXPLORE:
            ends[job] = length
        return plain(role, job, length)

    run.progress.finished = finished  # type: ignore[method-assign]
    assert run.run().num_moved > 12
    assert ends == pytest.approx({job: 1 + rounds[job] for job in range(24)}, abs=1e-3)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    setting = tiny_setting()
    first, second, other = (simulate(setting, draw(setting, seed), shiftable(setting)) for seed in (1, 1, 2))
    assert first == second
    assert first.seconds != other.seconds


def by_hand(**values: object) -> Setting:
    """Equal lengths, no growth, no cost of shifts: everything can be worked out."""
    law = {"median": 100, "sigma": 0}
    return tiny_setting(**{
        "explore.a_s": 0, "explore.b_s": 0, "explore.c_s": 1e-3, "explore.d_s": 1e-2,
        "explore.prefill_tokens_per_s": 1e12,
        "score.a_s": 0, "score.b_s": 0, "score.c_s": 1e-3, "score.d_s": 3e-2, "score.prefill_tokens_per_s": 1e12,
        "explore.up_s": 0, "explore.down_s": 0, "score.up_s": 0, "score.down_s": 0, "train.up_s": 0, "train.down_s": 0,
        "train.sync_s": 0, "train.gpu_s_per_token": 0, "train.gpu_s_per_job": 1.0, "train.fixed_s": 2.0,
        "batch.difficulty_sigma": 0, "passes.0.explore": law, "passes.0.score": law, **values,
    })  # fmt: skip


def test_a_colocated_step_takes_what_its_stages_take() -> None:
    setting = by_hand()
    result = simulate(setting, draw(setting, 0), colocated(setting))
    explore = 100 * (3 * 1e-3 + 1e-2)  # 24 jobs on 8 replicas
    score = 100 * (6 * 1e-3 + 3e-2)  # on 4
    train = 24 * 1.0 / 8 + 2.0
    assert result.seconds_per_batch == pytest.approx(explore + score + train)


def test_a_stage_that_grows_takes_the_closed_form() -> None:
    a = 1e-6
    setting = by_hand(**{"explore.a_s": a, "batch.num_batches": 1, "passes.0.score": None})
    result = simulate(setting, draw(setting, 0), colocated(setting))
    tokens = 3 * 50.0  # three prompts of 50 on each replica
    expected = 100 * (a * tokens + 3e-3 + 1e-2) + a * 3 * 100**2 / 2
    assert result.seconds == pytest.approx(expected + 24 / 8 + 2)


def test_staleness_lets_exploration_run_ahead_and_no_further() -> None:
    seconds = {}
    for staleness in (0, 1, 2):
        setting = by_hand(**{"batch.staleness": staleness, "batch.num_batches": 6})
        result = simulate(setting, draw(setting, 0), disaggregated(setting, (2, 2, 4)))
        seconds[staleness] = result.seconds
    assert seconds[0] > max(seconds[1], seconds[2])
    for staleness in (0, 1):
        run = Progress(setting, draw(setting, 0))
        for trained in (0, 1, 4):
            run.release(trained, staleness, one_at_a_time=False)
            assert run.num_released == trained + staleness + 1


def test_first_finished_batches_are_never_later_than_batches_by_id() -> None:
    times = {}
    for membership in ("id", "first"):
        setting = tiny_setting(**{"batch.membership": membership, "batch.staleness": 2})
        times[membership] = simulate(setting, draw(setting, 5), disaggregated(setting, (2, 2, 4))).seconds
    assert times["first"] <= times["id"]


def test_passes_wait_for_each_other_within_a_group() -> None:
    """Two passes: a group's kept jobs start when all its candidates are scored."""
    one = tiny_setting().passes[0].model_dump()
    setting = by_hand(**{"batch.num_batches": 1})
    law = {"median": 100}
    setting = setting.with_values({"passes": [
        {**one, "num_jobs": 8, "explore": law, "score": law},
        {**one, "num_jobs": 2, "explore": law, "score": law}]})  # fmt: skip
    result = simulate(setting, draw(setting, 0), colocated(setting))
    wide = 100 * (6e-3 + 1e-2) + 100 * (12e-3 + 3e-2)  # 48 jobs on 8 and on 4 replicas
    narrow = 100 * (2e-3 + 1e-2) + 100 * (3e-3 + 3e-2)  # 12 jobs: up to 2 and 3 a replica
    assert result.seconds == pytest.approx(wide + narrow + 12 / 8 + 2)
    assert result.num_shifts == 4


def test_moved_jobs_pay_for_what_they_hold() -> None:
    free, paid = (
        simulate(s, draw(s, 0), shiftable(s))
        for s in (by_hand(), by_hand(**{"explore.prefill_tokens_per_s": 50, "score.prefill_tokens_per_s": 50}))
    )
    assert paid.seconds > free.seconds


def test_a_trace_of_lengths_comes_back_as_it_was(tmp_path: Path) -> None:
    setting = tiny_setting()
    sample = draw(setting, 7)
    save_sample(tmp_path / "trace.jsonl", sample)
    again = load_sample(tmp_path / "trace.jsonl", setting)
    assert again == sample
    assert simulate(setting, again, shiftable(setting)) == simulate(setting, sample, shiftable(setting))
    longer = load_sample(tmp_path / "trace.jsonl", setting.with_values({"batch.num_batches": 6}))
    assert longer.explore == sample.explore * 2


def test_events_of_a_shiftable_run_hold_every_shift_with_its_decision() -> None:
    setting = tiny_setting()
    result = simulate(setting, draw(setting, 3), shiftable(setting))
    shifts = [event for event in result.events if event["event"] == "shift"]
    decisions = [event for event in result.events if event["event"] == "decision"]
    assert len(shifts) == len(decisions) == result.num_shifts > 1
    assert all(event["candidates"] for event in decisions if event["plan"]["role"] != TRAIN)
    assert [event["version"] for event in result.events if event["event"] == "trained"] == [1, 2, 3]


def test_a_run_that_cannot_go_on_says_so() -> None:
    setting = tiny_setting()
    stuck = Deployment("stuck", Fixed((4, 0, 4)), 4, trains_apart=True, staleness=0)
    with pytest.raises(SolrlError, match="stuck: nothing can go on"):
        simulate(setting, draw(setting, 0), stuck)


@pytest.mark.parametrize("file", sorted(WORKLOADS.glob("*.toml")), ids=lambda file: file.stem)
def test_committed_workloads_load(file: Path) -> None:
    if file.stem != "auto_grid":
        setting = load_setting(file)
        assert math.isfinite(setting.rounds_per_job(SCORE))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"score.gpuz": 1}, "score.gpuz"),
        ({"score.gpus": 16}, "score.gpus"),
        ({"passes.3.num_jobs": 1}, "passes.3"),
        ({"batch.num_groups": 0}, "num_groups"),
        ({"explore.c_s": 0, "explore.b_s": 0, "explore.d_s": 0}, "a round must take time"),
    ],
)
def test_assumptions_that_make_no_sense_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        tiny_setting(**values)


def test_a_broken_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for text in ("", "{}", '{"explore": 0, "score": 1}', "nonsense"):
        path.write_text(text)
        with pytest.raises(UsageError, match="trace"):
            load_sample(path, tiny_setting())


def test_slots_never_lie_across_nodes_unless_they_fill_them() -> None:
    assert [list(part) for part in Cluster(16, 8).slots(3)] == [[0, 1, 2], [3, 4, 5], [8, 9, 10], [11, 12, 13]]
    assert [len(part) for part in Cluster(32, 8).slots(16)] == [16, 16]
    with pytest.raises(UsageError, match="12 GPUs"):
        Cluster(32, 8).slots(12)
    assert Cluster(32, 8, 6).aligned_home(1, 4) == 8
    assert isinstance(draw(tiny_setting(), 0), Sample)
