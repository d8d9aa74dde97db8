"""Comparisons of several runs: intervals, resumable grids of runs, the table of explorer formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.arms import Arm, Run, carry_out, runs
from benchmarks.explorer_formats import main, report
from solrl.errors import SolrlError, UsageError
from solrl.intervals import interval, student_quantile
from solrl.settings import save_config
from tests.parts import tiny_config


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.95, 5, 2.0150), (0.975, 1, 12.7062), (0.975, 7, 2.3646), (0.95, 30, 1.6973), (0.995, 4, 4.6041)],
)
def test_student_quantiles_are_those_of_the_printed_tables(probability: float, freedom: int, expected: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(expected, abs=2e-4)


def test_an_interval_is_the_mean_and_t_standard_errors() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0], 0.90)
    assert mean == 2.5
    assert half == pytest.approx(2.3534 * 1.2909944 / 2, abs=1e-3)


def recorded(run: Run, final: float) -> Run:
    run.folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/shapes/mean": 0.4}, {"step": run.config.train.num_steps, "eval/shapes/mean": final}]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.folder / "lora").mkdir()
    save_config(run.config, run.folder / "config.toml")
    return run


def grid(folder: Path, seeds: int, **overrides: object) -> list[Run]:
    save_config(tiny_config(folder / "unused"), folder / "base.toml")
    arms = [Arm("full", {"explore.precision": "full"}), Arm("emulated_nvfp4", {"explore.precision": "emulated_nvfp4"})]
    return runs(folder, folder / "base.toml", arms, range(seeds), overrides)


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    """The seeds differ far more than the arms: only pairing shows that one arm is 1 % lower."""
    done = [recorded(run, (0.5 + 0.1 * run.seed) - (0.006 if run.arm != "full" else 0)) for run in grid(tmp_path, 3)]
    line = report(done, ["full", "emulated_nvfp4"]).splitlines()[-1]
    assert "-1.0% [-1.0%, -1.0%]" in line and "yes" in line


def test_a_wide_interval_shows_no_equivalence(tmp_path: Path) -> None:
    done = [recorded(run, 0.5 + (0.05 * (-1) ** run.seed if run.arm != "full" else 0)) for run in grid(tmp_path, 4)]
    assert "not shown" in report(done, ["full", "emulated_nvfp4"]).splitlines()[-1]


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    done = [recorded(run, 0.5) for run in grid(tmp_path, 2)]
    said: list[str] = []
    carry_out(done, 1, said.append)
    assert said == ["4 of 4 runs are finished"]


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    for run in grid(tmp_path, 1):
        recorded(run, 0.5)
    with pytest.raises(UsageError, match="made with other settings"):
        carry_out(grid(tmp_path, 1, **{"train.num_steps": 7}), 1)


@pytest.mark.slow
def test_runs_are_trained_and_a_cut_off_one_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(tiny_config(tmp_path / "unused"), tmp_path / "base.toml")
    words = [str(tmp_path / "runs"), "--config", str(tmp_path / "base.toml"), "--formats", "full", "--seeds", "1"]
    assert main(words) == 0
    run = tmp_path / "runs" / "full" / "seed_0"
    whole = load_file(run / "lora" / "pytorch_lora_weights.safetensors")
    shutil.rmtree(run / "lora")
    shutil.rmtree(run / "checkpoints" / "step_000003")
    assert main(words) == 0
    again = load_file(run / "lora" / "pytorch_lora_weights.safetensors")
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)
    assert "full" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_a_failed_run_names_its_last_line(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "unused")
    save_config(config.model_copy(update={"model": config.model.model_copy(update={"path": "nowhere"})}),
                tmp_path / "base.toml")  # fmt: skip
    arms, said = [Arm("full", {}), Arm("other", {"train.learning_rate": 1e-4})], list[str]()
    broken = runs(tmp_path, tmp_path / "base.toml", arms, [0, 1], {})
    with pytest.raises(SolrlError, match=r"full seed 0 ended with exit code 1: solrl: error: .*nowhere"):
        carry_out(broken, 1, said.append)
    assert sum(line.startswith("error: ") for line in said) == 1  # nothing began after it
    with pytest.raises(SolrlError, match="full seed 0"):
        carry_out(broken, 1, said.append, keep_going=True)
    assert [line[7:19] for line in said if line.startswith("error: ")][1:] == ["full seed 0 ", "other seed 0"]
