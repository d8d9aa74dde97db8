"""What is compared with another implementation computes the same on both sides, or is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.peer_step import geometry, require_equal_counts, same_on_both_sides
from solrl.config import Config
from solrl.errors import SolrlError
from solrl.settings import load_config

SAMPLES, TIMESTEPS, STEPS = 64, 9, 10


@pytest.fixture
def config() -> Config:
    return same_on_both_sides(load_config("tiny_sd3", {}))


def test_a_side_that_passes_fewer_samples_through_the_transformer_is_not_compared(config: Config) -> None:
    trained = SAMPLES * TIMESTEPS
    step = {
        "rollout, without": SAMPLES * STEPS,
        "update, without": 2 * trained,  # old_policy and reference
        "update, with gradient": trained,
    }
    require_equal_counts(config, {name: float(count) for name, count in step.items()})
    for name in step:
        with pytest.raises(SolrlError, match="do not compute the same"):
            require_equal_counts(config, {**step, name: step[name] - SAMPLES})


def test_the_other_side_gets_the_geometry_of_this_one(config: Config, tmp_path: Path) -> None:
    told = geometry(config, tmp_path, torch.float32, 3)
    batch = told["sample"]["train_batch_size"]
    assert batch == told["train"]["batch_size"] == config.batch.rollout == config.batch.train
    assert batch * told["sample"]["num_batches_per_epoch"] == SAMPLES
    assert told["train"]["gradient_accumulation_steps"] == told["sample"]["num_batches_per_epoch"]  # one step a round
    assert int(told["sample"]["num_steps"] * told["train"]["timestep_fraction"]) == TIMESTEPS


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "tiny_flux"], "trains SD3.5 and tiny_flux is flux"),
        (["--train.kl_weight", "0"], "train.kl_weight above 0"),
        (["--train.objective", "awm"], "set train.objective = nft"),
        (["--batch.train", "4"], r"batch.train \(4\) must be a multiple"),
        ([], "holds no scripts/train_nft_sd3.py"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peer_step", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert re.search(line, error) and error.count("\n") == 1
