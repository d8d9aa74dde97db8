"""The explorer climbs when audits leave no doubt, in the order it says, and a resumed run stands on the same rung."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import solrl.learner
from benchmarks import fidelity_gate
from benchmarks.arms import Run
from solrl import ledger
from solrl.checkpoint import checkpoint_path, read_checkpoint
from solrl.config import Config
from solrl.fidelity import pooled_correlation, spearman
from solrl.gate import AUDITS, Rung, ladder, too_low
from solrl.quant.linear import QuantLinear
from solrl.replay import replay
from solrl.session import open_session
from solrl.train import train
from tests.children import in_child, signal_at
from tests.parts import ALONE, Redness, never, tiny_config


def gated(dir: Path | str = "runs/test", **sections: Any) -> Config:
    return tiny_config(dir, **({"output": {"audit_every_steps": 1}} | sections))


def rows(correlations: Sequence[float], rung: int = 0) -> list[dict[str, float]]:
    return [{"step": i, "fidelity/full_spearman": r, "explore/rung": rung} for i, r in enumerate(correlations, 1)]


def test_more_steps_come_first_then_the_higher_precisions() -> None:
    config = gated(explore={"num_steps": 2}, regenerate={"num_steps": 7})
    steps = [Rung(2, "nvfp4"), Rung(4, "nvfp4"), Rung(6, "nvfp4"), Rung(7, "nvfp4")]
    assert ladder(config, "nvfp4") == [*steps, Rung(7, "fp8"), Rung(7, "full")]
    assert ladder(config, "full") == [Rung(2, "full"), Rung(4, "full"), Rung(6, "full"), Rung(7, "full")]
    already = gated(explore={"num_steps": 9}, regenerate={"num_steps": 7})
    assert ladder(already, "fp8") == [Rung(9, "fp8"), Rung(9, "full")]


def test_the_interval_of_a_correlation_holds_the_true_one_as_often_as_it_says() -> None:
    """Groups of 24 from a bivariate normal; Spearman's rho of it is 6 / pi asin(r / 2)."""
    generator, true, held = torch.Generator().manual_seed(0), 6 / math.pi * math.asin(0.7 / 2), 0
    for _ in range(400):
        x = torch.randn(4, 24, generator=generator, dtype=torch.float64)
        y = 0.7 * x + math.sqrt(1 - 0.49) * torch.randn(4, 24, generator=generator, dtype=torch.float64)
        found = pooled_correlation(spearman(x, y).tolist(), 24)
        held += found.low <= true <= found.high
    assert 0.92 < held / 400 < 0.99


def test_groups_that_differ_widen_the_interval_and_more_of_them_narrow_it() -> None:
    alike, unlike = pooled_correlation([0.5] * 4, 48), pooled_correlation([0.1, 0.9, 0.2, 0.8], 48)
    assert unlike.high - unlike.low > 1.5 * (alike.high - alike.low)
    many = pooled_correlation([0.5] * 16, 48)
    assert many.high - many.low == pytest.approx((alike.high - alike.low) / 2, rel=0.1)
    assert math.isfinite(pooled_correlation([1.0, -1.0], 8).mean)
    with pytest.raises(ValueError, match="at least 4"):
        pooled_correlation([0.5], 3)


def test_it_climbs_only_when_the_whole_interval_is_below() -> None:
    config = gated(explore={"min_fidelity": 0.8, "group_size": 48})
    assert too_low(config, rows([0.7])) is None  # one group of 48 leaves 0.8 possible
    found = too_low(config, rows([0.7] * 6))
    assert found is not None and found.mean == pytest.approx(0.7) and found.high < 0.8
    assert too_low(config, rows([0.95] * 6)) is None
    assert too_low(config, [*rows([0.7] * 6), {"step": 7}]) is None  # asked at audits only
    assert too_low(gated(explore={"group_size": 48}), rows([0.1] * 6)) is None  # off


def test_fewer_than_three_audits_never_climb_and_audits_that_differ_take_more() -> None:
    config = gated(explore={"min_fidelity": 0.8, "group_size": 48})
    assert too_low(config, rows([0.1] * 2)) is None and too_low(config, rows([0.1] * 3)) is not None
    assert (
        too_low(config, rows([0.2, 0.9, 0.3])) is None and too_low(config, rows([0.2, 0.9, 0.3, 0.1] * 2)) is not None
    )


def test_groups_that_differ_among_themselves_rarely_climb_above_the_threshold() -> None:
    """As recorded audits do: a mean of 0.9, and between groups three times the scatter that their size explains."""
    config, rng, climbs = gated(explore={"min_fidelity": 0.8, "group_size": 24}), random.Random(0), 0
    for _ in range(400):
        audits = rows([math.tanh(math.atanh(0.9) + rng.gauss(0, 0.67)) for _ in range(3)])
        climbs += too_low(config, audits) is not None
    assert climbs <= 0.025 * 400


def test_audits_of_an_earlier_rung_or_long_ago_do_not_count() -> None:
    config = gated(explore={"min_fidelity": 0.8, "group_size": 48})
    assert too_low(config, [*rows([0.1] * 6), *rows([0.85], rung=1)]) is None
    assert too_low(config, [*rows([0.1] * 20), *rows([0.9] * AUDITS)]) is None


def test_noise_about_the_threshold_rarely_climbs() -> None:
    config, rng = gated(explore={"min_fidelity": 0.8, "group_size": 48}), random.Random(0)
    climbs = 0
    for _ in range(200):
        z = [math.atanh(0.8) + rng.gauss(0, math.sqrt(1.06 / 45)) for _ in range(6)]
        climbs += too_low(config, rows([math.tanh(each) for each in z])) is not None
    assert climbs <= 0.05 * 200


@pytest.mark.parametrize(
    "sections",
    [{"regenerate": {"enabled": False}}, {"explore": {"enabled": False}}, {"output": {"audit_every_steps": 0}}],
)
def test_a_gate_that_nothing_would_feed_is_refused(sections: dict[str, Any]) -> None:
    explore = {"min_fidelity": 0.8} | sections.pop("explore", {})
    with pytest.raises(ValidationError, match=r"explore\.min_fidelity needs both stages"):
        gated(explore=explore, **sections)


def test_climbing_to_another_precision_replaces_the_explorer_calibrated_and_proved() -> None:
    explore = {"precision": "emulated_nvfp4", "num_steps": 3, "min_fidelity": 0.8}
    session = open_session(gated(explore=explore), ALONE, never)
    state = session.state_dict()
    assert session.ladder == [Rung(3, "emulated_nvfp4"), Rung(3, "fp8"), Rung(3, "full")]
    session.climb_to(session.next_rung() or 0)
    layers = [m for m in session.explorer.transformer.modules() if isinstance(m, QuantLinear)]
    assert layers and {layer.number_format for layer in layers} == {"fp8"}
    assert session.precision == "fp8" and "FP8" in session.precision_line and session.proof
    assert session.sync().num_layers == len(session.trees.adapted)  # the pointers of the new tree are known
    session.climb_to(session.next_rung() or 0)
    assert session.explorer.transformer is session.rollout_policy.transformer and session.next_rung() is None
    assert not any(name.startswith("activation/") for name in session.state_dict())
    session.load_state_dict(state)  # down again, with the scales that were measured then
    assert session.precision == "emulated_nvfp4" and session.rung == 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in session.state_dict().items())


def finished(folder: Path, arm: str, seed: int, final: float, num_steps: Sequence[int], rhos: Sequence[float]) -> Run:
    """A run of the ablation with these explored steps and audits, one a step."""
    explore, train_settings = {"num_steps": num_steps[0], "group_size": 10}, {"num_steps": len(num_steps)}
    run = Run(arm, seed, tiny_config(folder / arm / str(seed), explore=explore, train=train_settings))
    (run.folder / "lora").mkdir(parents=True)
    table: list[dict[str, float]] = [{"step": 0, "eval/shapes/mean": 0.4}]
    for step, (count, rho) in enumerate(zip(num_steps, rhos, strict=True), 1):
        table.append({"step": step, "fidelity/full_spearman": rho, "explore/num_steps": count})
    table[-1]["eval/shapes/mean"] = final
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return run


def test_the_ablation_prints_climbs_fidelity_by_half_and_the_paired_difference(tmp_path: Path) -> None:
    made = []
    for seed in (0, 1):
        made.append(finished(tmp_path, "as set", seed, 0.5 + seed / 10, [1, 1, 1, 1], [0.2, 0.3, 0.25, 0.35]))
        made.append(finished(tmp_path, "gated", seed, 0.52 + seed / 10, [1, 3, 5, 5], [0.2, 0.6, 0.8, 0.9]))
    assert all(run.is_finished for run in made)
    lines = fidelity_gate.report(made).splitlines()
    assert lines[2].split() == ["as", "set,", "seed", "0", "none", "0.250", "0.300", "0.400", "->", "0.500", "120"]
    assert "3 from 2, 5 from 3" in lines[3] and lines[3].split()[-5:] == ["0.850", "0.400", "->", "0.520", "420"]
    assert lines[-1].startswith("held-out reward, gated minus as set: +0.020 [+0.020, +0.020] (95% interval, 2 seeds)")


class Fickle(Redness):
    """Redness with a different sign for different latents: what few steps show says nothing of what many do."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return (1e4 * images.mean((1, 2, 3))).sin()


def climbing(dir: Path) -> Config:
    """Audits of nearly no correlation: as few as may climb do; two rungs of steps and two of precision."""
    return gated(
        dir,
        reward={"name": "tests.test_gate:Fickle"},
        prompts={"per_step": 1},
        explore={"group_size": 24, "num_steps": 2, "min_fidelity": 0.95, "precision": "emulated_nvfp4"},
        regenerate={"group_size": 2, "num_steps": 3},
        train={"num_steps": 10},
        batch={"rollout": 12, "train": 2, "decode": 12},
        evaluate={"num_prompts": 1},
        output={"audit_every_steps": 1, "checkpoint_every_steps": 1},
    )


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(climbing(tmp_path_factory.mktemp("runs") / "climbed"))


def metrics(dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_climbs_step_by_step_and_says_so_everywhere(climbed: Path) -> None:
    steps = metrics(climbed)[1:]
    rungs = [(row["explore/rung"], row["explore/num_steps"]) for row in steps]
    assert rungs == [*[(0, 2)] * 3, *[(1, 3)] * 3, *[(2, 3)] * 3, (3, 3)]
    drawn = [ledger.read(climbed, step)[0] for step in (3, 4, 7, 10)]
    assert [entry.num_steps for entry in drawn] == [2, 3, 3, 3]
    assert [entry.precision for entry in drawn] == ["emulated_nvfp4", "emulated_nvfp4", "fp8", "full"]
    climbs = json.loads((climbed / "environment.json").read_text())["climbs"]
    assert [climb["after_step"] for climb in climbs] == [3, 6, 9] and climbs[1]["proof"]
    assert int(read_checkpoint(checkpoint_path(climbed, 9)).tensors["explore/rung"]) == 3
    page = (climbed / "report.html").read_text()
    assert "The explorer climbed" in page and "from step 7 on rung 2 of" in page
    assert steps[-1]["fidelity/full_spearman"] == pytest.approx(1)  # at the top it draws what is regenerated


@pytest.mark.slow
def test_a_resume_stands_on_the_rung_of_its_checkpoint_and_goes_on_bit_for_bit(
    climbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        signal_at(monkeypatch, solrl.learner.Learner, "_average", 5)
        train(climbing(tmp_path / "cut"))

    assert in_child(killed)[0] == -signal.SIGKILL
    assert metrics(tmp_path / "cut")[-1]["step"] == 4
    assert in_child(lambda: train(climbing(tmp_path / "cut"), resume=True)) == (0, "")
    for ours, theirs in zip(metrics(tmp_path / "cut"), metrics(climbed), strict=True):
        assert {k: v for k, v in ours.items() if k[:5] != "time/"} == {
            k: v for k, v in theirs.items() if k[:5] != "time/"
        }
    mine, whole = (read_checkpoint(checkpoint_path(dir, 10)).tensors for dir in (tmp_path / "cut", climbed))
    assert mine.keys() == whole.keys() and all(torch.equal(mine[name], whole[name]) for name in whole)
    climbs = [json.loads((dir / "environment.json").read_text())["climbs"] for dir in (tmp_path / "cut", climbed)]
    assert [climb["after_step"] for climb in climbs[0]] == [climb["after_step"] for climb in climbs[1]]


@pytest.mark.slow
def test_a_ledger_entry_is_replayed_on_the_rung_that_drew_it(climbed: Path) -> None:
    replay(climbed, 8, 0, report=lambda line: None, trust_code=True)  # raises where a score differs from the ledger's
