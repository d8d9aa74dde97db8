"""Staleness: the step decides which version draws, so any number of processes in any mode gives the same bits."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from solrl import ledger
from solrl.checkpoint import newest_checkpoint
from solrl.config import Config
from solrl.jobs import StepDraw, StepJobs
from solrl.learner import Learner
from solrl.models import load_policy
from solrl.overlap import Overlap
from solrl.pipeline import Drawing
from solrl.runtime.mailbox import ProcessLost
from solrl.train import train
from solrl.types import Conditioning
from tests.children import in_child, in_children
from tests.parts import ALONE, CPU, Redness, never, tiny_config
from tests.test_learner import training_set
from tests.test_pipeline import run_config, signal_in
from tests.test_processes import final_state, same_bits

STEPS = 4


def lagging(dir: Path, mode: str, staleness: int, **sections: Any) -> Config:
    runtime = {"mode": mode, "lost_after_s": 8.0, "staleness": staleness}
    return run_config(dir, mode, **({"num_steps": STEPS, "runtime": runtime} | sections))


def lines(dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (dir / "metrics.jsonl").read_text().splitlines()][1:]


MORE: dict[str, Any] = {"train": {"num_steps": STEPS, "timestep_fraction": 0.4, "old_from_rollout": True}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Staleness -> folder of a colocated run of one process."""

    @cache
    def run(staleness: int) -> Path:
        dir = tmp_path_factory.mktemp("alone")
        assert in_child(lambda: train(lagging(dir, "colocated", staleness, **MORE))) == (0, "")
        return dir

    return run


# Versions


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_old_policy_is_the_version_that_drew_and_a_step_without_update_counts(staleness: int) -> None:
    config = tiny_config(runtime={"staleness": staleness})
    some = Learner(load_policy(config, CPU), config)
    newest = (some.newer_old or [some.old_parameters])[-1]
    history, data = [([p.detach().clone() for p in newest], 0)], training_set(some.policy)
    for step in range(1, 6):
        if step == 3:
            some.age_old_()
        else:
            some.update(data, ALONE, never)
        history.append(([p.detach().clone() for p in newest], some.step))
        for ahead in range(staleness + 1):  # what draws step + 1 + ahead
            expected, version = history[max(step + ahead - staleness, 0)]
            pairs = some.old_weights(ahead).values()
            found = [matrix for pair in pairs for matrix in (pair.a, pair.b)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert some.old_versions[ahead] == version
    other = Learner(load_policy(config, CPU), config)
    other.load_state_dict({name: tensor.clone() for name, tensor in some.state_dict().items()})
    assert other.old_versions == some.old_versions and other.step == 4
    both = [some.state_dict(), other.state_dict()]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0]) and both[0].keys() == both[1].keys()


def test_staleness_needs_a_forward_of_the_version_that_drew_whatever_old_policy_is() -> None:
    on_policy = {"old_decay_rate": 0.0}
    assert tiny_config(train=on_policy).is_on_policy
    assert not tiny_config(train=on_policy, runtime={"staleness": 1}).is_on_policy


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"recalibrate_every_steps and runtime.staleness exclude each other"):
        tiny_config(explore={"recalibrate_every_steps": 1}, runtime={"staleness": 1})


def test_a_step_that_was_put_aside_goes_on_where_it_was_and_a_complete_one_is_not_drawn_again() -> None:
    config = tiny_config(explore={"group_size": 2}, regenerate={"group_size": 2}, prompts={"per_step": 1})
    draw = StepDraw(config, Redness(), 3, ["a red circle"], Conditioning(torch.zeros(1, 1, 1)), [[1, 2]])
    jobs = StepJobs(config, draw)
    (explore,) = jobs.pending()
    assert jobs.pending() == [explore]
    while pending := jobs.pending():
        (job,) = pending
        scores = {"values": [(0.5).hex(), (1.0).hex()], "present": [True, True]}
        assert jobs.finished(job, scores if job.role == "score" else {"images": {}}, 1) == jobs.pending()
    assert jobs.pending() == [] and jobs.outcome() == {"explore": [1], "regenerate": [1]}
    assert jobs.boards["regenerate"].scores().values.tolist() == [[0.5, 1.0]]


# Whole runs


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_without_any_score_teaches_nothing(tmp_path: Path, staleness: int) -> None:
    """Calls: the evaluation, two explored micro-batches, one regenerated, the evaluation."""
    reward = {"name": "tests.parts:Blind", "options": {"blind": [4]}, "max_missing_share": 1.0}
    config = lagging(tmp_path, "shiftable", staleness, reward=reward, train={"num_steps": 1}, prompts={"per_step": 1})
    assert in_child(lambda: train(config)) == (0, "")
    (line,) = lines(tmp_path)
    assert line["health/trained_groups"] == line["health/zero_std_groups"] == 0
    assert line["health/missing_share"] == pytest.approx(2 / 5) and "grad_norm" not in line


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_the_used_lag_is_as_set_and_old_policy_is_what_drew(alone: Callable[[int], Path], staleness: int) -> None:
    dir = alone(staleness)
    for step, line in enumerate(lines(dir), start=1):
        versions = {entry.policy_version for entry in ledger.read(dir, step)}
        assert versions == {max(0, step - 1 - staleness)}
        assert line["health/policy_lag"] == step - 1 - max(0, step - 1 - staleness)
        assert line["health/old_rollout_error"] < 1e-9  # of the trees that drew and the adapter that is v_old
        assert line["health/velocity_old_distance"] > 1e-7 or step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "mode", "size"),
    [(1, "shiftable", 2), (2, "shiftable", 1), (2, "async_score", 2), (2, "shiftable", 4)],
)
def test_every_mode_and_number_of_processes_gives_the_same_bits(
    tmp_path: Path, alone: Callable[[int], Path], staleness: int, mode: str, size: int
) -> None:
    config = lagging(tmp_path, mode, staleness, **MORE)
    assert in_children(size, lambda rank: train(config)) == [(0, "")] * size
    same_bits(tmp_path, alone(staleness))
    assert final_state(tmp_path)["old_versions"].tolist() == list(range(STEPS - staleness, STEPS + 1))
    lags = [[line["health/policy_lag"] for line in lines(dir)] for dir in (tmp_path, alone(staleness))]
    assert lags[0] == lags[1]


@pytest.mark.slow
def test_killed_in_the_middle_a_run_goes_on_with_the_same_bits(
    tmp_path: Path, alone: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lagging(tmp_path, "shiftable", 2, **MORE)

    def run(rank: int) -> None:
        if rank == 1:
            signal_in(monkeypatch, "updating step 2", signal.SIGKILL)
        train(config)

    outcomes = in_children(2, run)
    assert outcomes[1][0] == -signal.SIGKILL and outcomes[0][0] == ProcessLost.exit_code, outcomes
    saved = newest_checkpoint(tmp_path)
    assert saved is not None and saved.step == 1
    assert in_children(2, lambda rank: train(config, resume=True)) == [(0, "")] * 2
    same_bits(tmp_path, alone(2))


@pytest.mark.slow
def test_the_update_and_the_next_steps_are_worked_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staleness 2: what is begun of the step after the next is put aside and goes on in the next window."""
    log = tmp_path / "log"

    def run(rank: int) -> None:
        begin, add = Drawing.__init__, Overlap.add

        def drawing(work: Drawing, crew: Any, payload: dict[str, Any], state: dict[str, Any] | None) -> None:
            note(f"draw {payload['step']} {crew.overlap._step}")
            begin(work, crew, payload, state)

        def adding(overlap: Overlap, number: int) -> None:
            note(f"update {overlap._step} {overlap._step}")
            add(overlap, number)

        monkeypatch.setattr(Drawing, "__init__", drawing)
        monkeypatch.setattr(Overlap, "add", adding)
        train(lagging(tmp_path / "run", "shiftable", 2))

    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(text + "\n")

    assert in_child(lambda: run(0)) == (0, "")
    done = [(kind, int(step), int(window)) for kind, step, window in map(str.split, log.read_text().splitlines())]
    ahead = {(step - window, window) for kind, step, window in done if kind == "draw"}
    assert {distance for distance, _ in ahead} == {0, 1, 2}
    assert {window for distance, window in ahead if distance == 0} == {1}  # later windows never wait for their own
    for window in (1, 2):
        kinds = [(kind, step - window) for kind, step, at in done if at == window]
        assert ("update", 0) in kinds[: len(kinds) - kinds[::-1].index(("draw", 1))] or ("draw", 2) in kinds
