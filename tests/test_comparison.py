"""`solrl evaluate`: the run's own numbers again, paired over weights, the same for any number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl import cli
from solrl.comparison import SCORES, Comparison, Result, compare
from solrl.errors import SolrlError, UsageError
from solrl.images import load_grid
from solrl.models.base import load_policy
from solrl.models.sd3 import SD3Policy
from solrl.prompts import load_prompts
from solrl.train import train
from solrl.types import Scores
from tests.children import in_children
from tests.families import family_config, save_random_pipeline
from tests.parts import CPU, tiny_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One step of a run with a reward of its own, evaluated before and after."""
    dir = tmp_path_factory.mktemp("run")
    train(
        tiny_config(
            dir,
            reward={"name": "tests.parts:Redness"},
            prompts={"per_step": 1},
            regenerate={"group_size": 2},
            train={"num_steps": 1, "learning_rate": 0.01},
        )
    )
    yield dir


def evaluated(run_dir: Path, out: Path, **wanted: Any) -> dict[str, Any]:
    folder = compare(run_dir, Comparison(out=out, **wanted), trust_code=True, report=lambda line: None)
    found: dict[str, Any] = json.loads((folder / SCORES).read_text())
    return found


def test_the_runs_own_numbers_come_out_again_bit_for_bit(run_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    compare(run_dir, Comparison(out=tmp_path), trust_code=True, report=said.append)
    found = json.loads((tmp_path / SCORES).read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    base, ema, raw = found["results"]["run"]["summary"]
    for row, line in ((base, lines[0]), (ema, lines[1])):
        assert row["mean"] == line["eval/tests.parts:Redness/mean"]
        assert row["stderr"] == line["eval/tests.parts:Redness/stderr"]
    assert ema["minus_base"] == lines[1]["eval/tests.parts:Redness/gain"] != 0
    assert ema["minus_base_stderr"] == lines[1]["eval/tests.parts:Redness/gain_stderr"] > 0
    assert base["mean"] != ema["mean"] != raw["mean"] and found["step"] == 1
    assert (tmp_path / "ema.png").is_file() and (tmp_path / "raw.png").is_file()
    shown, recorded = load_grid(tmp_path / "ema.png"), load_grid(run_dir / "samples" / "step_000001.png")
    assert shown.rewards == recorded.rewards and shown.prompts == recorded.prompts == found["prompts"]
    assert len(load_grid(tmp_path / "side_by_side.png").images[0]) == 3
    table = "\n".join(said)
    assert "Redness  base" in table and "2 steps, euler, guidance 1, CFG 1" in table
    assert [line for line in table.splitlines() if len(line) > 80 and str(tmp_path.parent) not in line] == []
    with pytest.raises(UsageError, match="holds an evaluation already; choose another folder with --out"):
        evaluated(run_dir, tmp_path)


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_file(run_dir: Path, tmp_path: Path) -> None:
    """3 prompts x 3 seeds are 3 micro-batches of 4, the last one padded."""
    suite = tmp_path / "suite.txt"
    suite.write_text("a red circle\na blue square\na green cross\n")
    changes = {"evaluate.images_per_prompt": 3, "evaluate.num_steps": 1}
    one = evaluated(run_dir, tmp_path / "one", suite=str(suite), overrides=changes)

    def on_two(rank: int) -> None:
        evaluated(run_dir, tmp_path / "two", suite=str(suite), overrides=changes)

    assert in_children(2, on_two) == [(0, ""), (0, "")]
    assert (tmp_path / "two" / SCORES).read_bytes() == (tmp_path / "one" / SCORES).read_bytes()
    assert one["suite"]["num_prompts"] == 3 and len(one["results"]["run"]["scores"]["raw"]["tests.parts:Redness"]) == 3


def test_a_suite_says_how_much_of_it_was_trained_on(run_dir: Path, tmp_path: Path) -> None:
    suite = tmp_path / "mine.txt"
    suite.write_text(f"{load_prompts('shapes_train')[0]}\na red square above a red circle\n")
    said: list[str] = []
    wanted = Comparison(
        rewards=("shapes",), suite=str(suite), out=tmp_path,
        overrides={"evaluate.num_steps": 1, "evaluate.images_per_prompt": 1},
    )  # fmt: skip
    compare(run_dir, wanted, trust_code=True, report=said.append)
    assert json.loads((tmp_path / SCORES).read_text())["suite"]["num_trained_on"] == 1
    assert said[0].endswith("mine, 2 prompts x 1 seeds, 1 of them TRAINED ON")


def test_a_run_folders_code_runs_only_when_trusted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run_dir)]) == 2
    assert "pass --trust-code" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--rewards", "shapez"], "unknown reward 'shapez'"),
        (["--rewards", "shapes", "--option", "shapes.x=1"], "has no option 'x'"),
        (["--rewards", "shapes", "--option", "clip_score.model=x"], "--option clip_score: it is not among --rewards"),
        (["--option", "model"], "write REWARD.KEY=VALUE"),
        (["--suite", "nowhere.txt"], "no prompts 'nowhere.txt'"),
        (["--evaluate.num_prompts", "4000"], "evaluate.num_prompts = 4000 but"),
        (["--evaluate.num_step", "4"], "nearest valid one is evaluate.num_steps"),
        (["--step", "7"], "has no checkpoint of step 7; it has 1"),
    ],
)
def test_mistakes_are_named_before_the_model_loads(
    flags: list[str], expected: str, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solrl.comparison.load_policy", None)
    assert cli.main(["evaluate", str(run_dir), "--trust-code", *flags]) in (1, 2)
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1


def test_another_model_than_the_runs_is_noticed(run_dir: Path, tmp_path: Path) -> None:
    save_random_pipeline("flux", tmp_path / "other")
    with pytest.raises(SolrlError, match="other weights"):
        evaluated(run_dir, tmp_path / "out", overrides={"model.path": str(tmp_path / "other")})


def test_pipeline_defaults_are_those_of_the_diffusers_call(tmp_path: Path) -> None:
    flux, num_steps = load_policy(tiny_config(), CPU).with_defaults()  # type: ignore[operator]
    assert (flux.model.guidance, flux.model.cfg_scale, num_steps) == (3.5, 1.0, 28)
    folder = save_random_pipeline("sd3", tmp_path)
    plain, asked = (
        SD3Policy(family_config("sd3", folder, model={"cfg_scale": scale}).model, CPU) for scale in (1.0, 7.0)
    )
    found, num_steps = plain.with_defaults()
    assert (found.model.cfg_scale, num_steps) == (7.0, 28)
    latents, sigma, prompt = torch.ones(1, *plain.latent_shape), torch.tensor([0.5]), plain.encode(["a red circle"])
    with torch.no_grad():
        velocities = [policy.velocity(latents, sigma, prompt) for policy in (found, asked, plain)]
    assert torch.equal(velocities[0], velocities[1]) and not torch.equal(velocities[0], velocities[2])


def test_differences_are_paired_over_prompts_and_missing_scores_count_nowhere() -> None:
    def scores(values: list[list[float]], missing: tuple[int, int] | None = None) -> dict[str, Scores]:
        table = torch.tensor(values, dtype=torch.float64)
        present = torch.ones_like(table, dtype=torch.bool)
        if missing:
            present[missing], table[missing] = False, 0.0
        return {"r": Scores(table, present, {})}

    drawn = {"base": scores([[0.0], [10.0], [3.0]], missing=(2, 0)), "ema": scores([[1.0], [12.0], [9.0]])}
    how = {"num_steps": 1, "solver": "euler", "guidance": 1.0, "cfg_scale": 1.0}
    base, ema = Result(how, drawn, {}).rows()
    assert (base["mean"], base["num_missing"], "minus_base" in base) == (5.0, 1, False)
    assert base["stderr"] == pytest.approx(5.0)
    assert ema["mean"] == pytest.approx(22 / 3)
    assert ema["minus_base"] == pytest.approx(1.5) and ema["minus_base_stderr"] == pytest.approx(0.5)
    assert Result(how, drawn, {}).table()[1].endswith("(1 missing)")
    assert Result(how, drawn, {}).as_dict()["scores"]["base"]["r"] == [[0.0], [10.0], [None]]
