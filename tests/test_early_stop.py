"""A run that goes wrong ends where it is told to, keeps everything, and leaves the weights from before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from solrl.checkpoint import best_checkpoint, list_checkpoints
from solrl.cli import main
from solrl.config import Config
from solrl.export import WEIGHTS, checkpoint_weights, pick_checkpoint
from solrl.settings import load_config
from solrl.train import train
from tests.parts import tiny_config


def exploited(dir: Path, **train_settings: Any) -> Config:
    """Darkness, at a rate that leaves nothing of the model within a few steps; step 1 is still a good one."""
    return tiny_config(
        dir,
        reward={"name": "tests.parts:Darkness"},
        prompts={"per_step": 2},
        train={"num_steps": 6, "learning_rate": 1e-2} | train_settings,
        evaluate={"every_steps": 1, "num_prompts": 6, "rewards": ["shapes"]},
        output={"audit_every_steps": 0, "checkpoint_every_steps": 10},
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(exploited(tmp_path_factory.mktemp("runs") / "stopped", early_stop="suspicious"))


def states(dir: Path) -> dict[int, dict[str, Any]]:
    return {step: json.loads((path / "state.json").read_text()) for step, path in list_checkpoints(dir).items()}


@pytest.mark.slow
def test_it_ends_at_the_first_bad_verdict_with_everything_saved(stopped: Path) -> None:
    steps = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    found = states(stopped)
    assert 1 < steps[-1] < 6 and max(found) == steps[-1]
    assert found[steps[-1]]["verdict"] in ("suspicious", "broken")
    assert found[steps[-1] - 1]["verdict"] == "too early"
    assert found[steps[-1]]["heldout"] > found[steps[-1] - 1]["heldout"]  # the trained reward never looked better
    assert "Is this training normal?" in (stopped / "report.html").read_text()


@pytest.mark.slow
def test_what_is_left_in_lora_is_the_best_checkpoint_of_a_good_verdict(stopped: Path) -> None:
    best, last = best_checkpoint(stopped), max(list_checkpoints(stopped))
    assert best is not None and best == last - 1
    pairs = checkpoint_weights(pick_checkpoint(stopped, best), load_config(stopped), "ema")
    exported = safetensors.torch.load_file(stopped / "lora" / WEIGHTS)
    for name, pair in pairs.items():
        assert exported[f"transformer.{name}.lora_A.weight"].equal(pair.a)
    assert f"after step {best}." in (stopped / "lora" / "README.md").read_text()
    assert f"after step {best}." in (stopped / "lora_raw" / "README.md").read_text()


@pytest.mark.slow
def test_a_resume_does_not_go_on_unless_early_stop_is_taken_back(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = max(list_checkpoints(stopped))
    train(exploited(stopped, early_stop="suspicious"), resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert f"early stop after step {last}, as train.early_stop says" in said
    assert "rolled back to the best checkpoint" in said and max(list_checkpoints(stopped)) == last
    train(exploited(stopped, num_steps=last + 1), resume=True)
    assert max(list_checkpoints(stopped)) == last + 1


@pytest.mark.slow
def test_report_answers_in_a_line(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(stopped)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(("verdict suspicious: ", "verdict broken: ")) and said.endswith("report.html")
