"""What is compared with another implementation computes the same on both sides, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import peer_step
from benchmarks.__main__ import main
from benchmarks.peer_step import geometry, load, ours, require_equal_counts, same_on_both_sides
from solrl.config import Config
from solrl.errors import SolrlError
from tests.parts import ALONE

SAMPLES, TIMESTEPS = 64, 9
SMALL = {
    "prompts.per_step": "1", "regenerate.group_size": "2", "regenerate.num_steps": "3", "batch.train": "2",
    "train.timestep_fraction": "0.4",
}  # fmt: skip
COUNTED = {"rollout, without gradient": 6.0, "update, without gradient": 4.0, "update, with gradient": 2.0}
"""SMALL: 2 samples, 3 steps, 1 timestep, and beside the policy's velocity those of old_policy and reference."""


@pytest.fixture
def config() -> Config:
    return same_on_both_sides(load("tiny_sd3", {}))


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_our_own_samples_through_the_transformer_are_counted(cfg_scale: float) -> None:
    config = same_on_both_sides(load("tiny_sd3", SMALL))
    guided = config.model_copy(update={"model": config.model.model_copy(update={"cfg_scale": cfg_scale})})
    found = ours(guided, ALONE, num_steps=1)
    times = 2 if cfg_scale > 1 else 1  # every velocity costs two
    assert {name: found[name] for name in COUNTED} == {name: times * count for name, count in COUNTED.items()}
    assert set(found) == {*COUNTED, "rollout", "update"}


def test_sides_that_pass_different_numbers_of_samples_are_not_compared() -> None:
    here = {"rollout": 1.0, "update": 3.0, **COUNTED}
    require_equal_counts(here, {**here, "rollout": 2.0})
    more = {**here, "rollout, with gradient": 2.0}
    fewer = [{key: value for key, value in here.items() if key != name} for name in COUNTED]
    halved = [{**here, name: here[name] / 2} for name in COUNTED]
    for there in (more, *fewer, *halved):
        for pair in ((here, there), (there, here)):
            with pytest.raises(SolrlError, match="do not compute the same"):
                require_equal_counts(*pair)
    with pytest.raises(SolrlError, match="do not compute the same"):
        require_equal_counts({"rollout": 1.0}, {"rollout": 1.0})  # nothing was counted


@pytest.mark.parametrize("there", [COUNTED, {**COUNTED, "update, without gradient": 2.0}])
def test_the_report_holds_the_counts_or_there_is_none(
    there: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train_nft_sd3.py").touch()
    monkeypatch.setattr(peer_step, "theirs", lambda *_: {"rollout": 1.0, "update": 3.0, **there})
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    out = tmp_path / "out.json"
    code = main(["peer_step", str(tmp_path), "--rounds", "1", "--json", str(out), *words])
    shown = capsys.readouterr()
    if there == COUNTED:
        assert code == 0 and "update, with gradient: 2; update, without gradient: 4\n" in shown.out
        assert json.loads(out.read_text())["rounds"][0]["solrl"].items() >= COUNTED.items()
    else:
        assert code != 0 and "do not compute the same" in shown.err and not shown.out and not out.exists()


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
        (["--train.kl_weight", "0"], "set train.kl_weight above 0$"),
        (["--train.objective", "awm"], "set train.objective = nft$"),
        (["--train.old_decay_rate", "0"], "set train.old_decay_rate and train.old_decay_cap above 0$"),
        (["--train.old_from_rollout", "true"], "set train.old_from_rollout = false$"),
        (["--lora.rank", "4"], "set lora.rank = 32$"),
        (["--lora.rank", "4", "--lora.alpha", "8"], "set lora.rank = 32, lora.alpha = 64.0$"),
        (["--lora.targets", "attn.to_q"], "set lora.targets = attn.to_q attn.to_k .* attn.to_add_out$"),
        (["--lora.enabled", "false"], "set lora.enabled = true$"),
        (["--model.cfg_scale", "4"], "set model.cfg_scale = 1.0$"),
        (["--model.gradient_checkpointing", "true"], "set model.gradient_checkpointing = false$"),
        (["--model.init_lora", "somewhere"], "set model.init_lora = none$"),
        (["--model.width", "64"], "set model.width = 32, as model.height$"),
        (["--explore.enabled", "true"], "set explore.enabled = false$"),
        (["--explore.enabled", "true", "--regenerate.enabled", "false"], "explore.enabled = false, regenerate.enabled"),
        (["--runtime.staleness", "1"], "set runtime.staleness = 0$"),
        (["--batch.train", "4"], r"batch.train \(4\) must be a multiple"),
        ([], "holds no scripts/train_nft_sd3.py"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peer_step", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert re.search(line, error, re.MULTILINE) and error.count("\n") == 1
