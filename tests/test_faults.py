"""Whatever happens to a run's processes, it ends with the ledger and the weights of the run that was left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import Verdict, compare, launch, report
from benchmarks.faulty_train import DEADLY, KINDS, Faults, damage, install, suffered, write_faults
from solrl import ledger
from solrl.errors import UsageError
from solrl.restart import goes_on, mark
from solrl.timeline import read_steps
from solrl.trace import write_trace
from solrl.train import train
from tests.children import in_child, in_gang
from tests.families import save_random_pipeline
from tests.test_pipeline import run_config
from tests.test_processes import same_bits
from tests.test_timeline import check_steps, check_trace

NUM_STEPS, JOBS_A_STEP = 13, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A FLUX of a few thousand parameters: what is tested is the runtime."""
    path = save_random_pipeline("flux", tmp_path_factory.mktemp("model") / "flux")
    return {"family": "flux", "path": str(path), "height": 16, "width": 16, "guidance": 1.5}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_under_random_faults_no_candidate_is_lost_or_counted_twice(
    tmp_path: Path, model: dict[str, Any], seed: int
) -> None:
    """Three processes, 208 jobs, each kind of fault, some of them twice."""
    alone, disturbed, faults = tmp_path / "alone", tmp_path / "disturbed", tmp_path / "faults"
    assert in_child(lambda: train(run_config(alone, "colocated", num_steps=NUM_STEPS, model=model))) == (0, "")
    kinds = [*KINDS, "raise_explore", "raise_score", "slow", "no_room"]
    write_faults(faults, kinds, NUM_STEPS, seed)

    def run(rank: int) -> None:
        install(faults, seed, disturbed)
        train(run_config(disturbed, "shiftable", num_steps=NUM_STEPS, model=model, runtime={"lost_after_s": 30.0}))

    restarts = in_gang(3, run, max_restarts=2 * len(DEADLY))
    found = compare(alone, disturbed, NUM_STEPS, faults)
    assert found.is_equal, found
    same_bits(alone, disturbed)
    assert found.candidates == NUM_STEPS * 9 and found.jobs == NUM_STEPS * JOBS_A_STEP >= 200
    assert set(found.struck) == set(KINDS) and len(suffered(faults)) == len(kinds)
    steps = read_steps(disturbed)
    check_steps(steps)
    check_trace(write_trace(disturbed, tmp_path / "trace.json"))
    assert [step.num_done("explore", "regenerate") for step in steps] == [JOBS_A_STEP // 2] * NUM_STEPS
    assert restarts >= found.restarts >= 3 and found.damaged == 1 and found.rolled_back >= 1

    path = ledger.ledger_path(disturbed, 3)  # and it would have been seen
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert compare(alone, disturbed, NUM_STEPS, faults).different_candidates == 1
    path.write_text("".join([*lines, lines[0]]))
    assert not compare(alone, disturbed, NUM_STEPS, faults).is_equal


@pytest.mark.slow
def test_under_accelerate_a_killed_gang_starts_again_and_goes_on_by_itself(tmp_path: Path) -> None:
    """The embedded model on two processes: kill -9 of process 0, whose newest checkpoint is damaged."""
    alone, disturbed, faults = tmp_path / "alone", tmp_path / "disturbed", tmp_path / "faults"
    assert in_child(lambda: train(run_config(alone, "colocated", num_steps=4))) == (0, "")
    write_faults(faults, ["corrupt"], 4, 0)
    launch(run_config(disturbed, "shiftable", num_steps=4, runtime={"lost_after_s": 30.0}), disturbed, 2, faults, 0)
    found = compare(alone, disturbed, 4, faults)
    assert found.is_equal and found.struck == {"corrupt": 1} and found.damaged == 1, found
    same_bits(alone, disturbed)


# Going on after a restart


def restarted(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
    monkeypatch.setenv("RANK", "0")


def test_only_what_this_launcher_began_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(monkeypatch, 1)
    assert not goes_on(tmp_path, False)  # it died before anything was recorded
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "step_000001.jsonl").write_text("")
    with pytest.raises(UsageError, match="already holds a run; pass --resume"):
        goes_on(tmp_path, False)
    (tmp_path / ".launcher").write_text("elsewhere 1 0.0")
    with pytest.raises(UsageError, match="already holds a run; pass --resume"):
        goes_on(tmp_path, False)
    mark(tmp_path)
    assert goes_on(tmp_path, False) and goes_on(tmp_path, True)
    restarted(monkeypatch, 0)
    assert not goes_on(tmp_path, False) and goes_on(tmp_path, True)  # the first start has to be asked


# The faults themselves


def test_the_report_says_whether_the_runs_are_equal_and_how_often_each_fault_struck() -> None:
    equal = Verdict(
        candidates=300, different_candidates=0, tensors=40, different_tensors=0, jobs=320, struck={"slow": 3},
        restarts=2, damaged=1, rolled_back=4, quarantined=0,
    )  # fmt: skip
    text = report(equal, 320, 10, 3, 7, {"undisturbed": 10.0, "disturbed": 60.0})
    assert "320 jobs in 10 steps on 3 processes, seed 7" in text and "verdict: EQUAL" in text
    assert "300 of 300 candidates, 40 of 40 tensors" in text and "restarts of all processes 2" in text
    for change in ({"different_candidates": 1}, {"different_tensors": 1}, {"candidates": 0}):
        assert "verdict: DIFFERENT" in report(replace(equal, **change), 1, 1, 1, 1, {"undisturbed": 1, "disturbed": 1})


def test_a_fault_strikes_once_and_not_before_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(monkeypatch, 0)
    write_faults(tmp_path / "faults", ["slow", "frozen", "slow"], 9, 0)
    assert sorted(path.name.split(".")[1] for path in (tmp_path / "faults").iterdir()) == ["0001", "0005", "0009"]
    everyone = [Faults(tmp_path / "faults", 0, rank, tmp_path) for rank in range(3)]
    taken = [kind for _ in range(50) for each in everyone if (kind := each.take(5, ["slow", "frozen"]))]
    assert len(taken) == 2 and len(suffered(tmp_path / "faults")) == 2
    assert not any(each.take(9, ["raise_score"]) for _ in range(50) for each in everyone)


def test_damage_changes_a_checkpoint(tmp_path: Path) -> None:
    import random

    for seed in range(4):
        (tmp_path / "state.safetensors").write_bytes(bytes(1000))
        damage(tmp_path, random.Random(seed))
        assert (tmp_path / "state.safetensors").read_bytes() != bytes(1000)
