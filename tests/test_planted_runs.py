"""Real runs made to fail: short ones here, longer ones by the metrics they left (tests/data/verdict/README.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl.errors import SolrlError
from solrl.tracking import read_metrics
from solrl.train import train
from solrl.verdict import Verdict, judge
from tests.parts import tiny_config

DATA = Path(__file__).parent / "data" / "verdict"


def recorded(name: str, reward: str, at: int | None = None, prompts: int = 64) -> Verdict:
    """The verdict after step ``at`` of a run whose metrics are kept."""
    rows = [row for row in read_metrics(DATA / f"{name}.jsonl") if at is None or row["step"] <= at]
    settings = {"learning_rate": 3e-4, "num_steps": 16}
    return judge(tiny_config(reward={"name": reward}, train=settings, evaluate={"num_prompts": prompts}), rows)


@pytest.mark.parametrize("name", ["healthy_1", "healthy_2"])
def test_the_demo_is_healthy_and_never_looks_otherwise_on_its_way(name: str) -> None:
    kinds = [recorded(name, "shapes", at).kind for at in range(17)]
    assert kinds[:8] == ["too early"] * 8 and kinds[8:] == ["healthy"] * 9
    line = recorded(name, "shapes").line
    assert line.startswith("healthy: held-out shapes 0.376 -> 0.5") and "clip_score 0.586 -> 0.7" in line


def test_a_reward_that_is_exploited_is_seen_at_the_first_evaluation() -> None:
    early = recorded("exploited", "tests.parts:Darkness", at=4, prompts=24)
    assert early.line.startswith(
        "suspicious: shapes 0.275 -> 0.084 (-4.4 standard errors), which is not trained on: the rew"
    )
    late = recorded("exploited", "tests.parts:Darkness", prompts=24)
    assert late.kind == "broken" and "images' brightness 0.899 -> 0.557 (-16.1 times its spread before)" in late.line
    for watched in ("clip_score 0.529 -> -0.036 (-10.6", "shapes 0.275 -> 0.006 (-7.5"):
        assert f"{watched} standard errors), which is not trained on: the reward may be exploited" in late.line
    assert late.further[0].startswith("held-out tests.parts:Darkness 0.102 -> 0.433 (+116")


def test_images_that_become_noise_are_broken_although_their_reward_rises() -> None:
    found = recorded("noise", "tests.parts:Graininess", prompts=24)
    assert found.kind == "broken" and "held-out tests.parts:Graininess" in found.further[0]
    assert "images' sharpness" in found.line and "images' edge density" in found.line


def outcome(dir: Path, **sections: Any) -> Verdict:
    """The verdict after a real run."""
    config = tiny_config(dir, **sections)
    train(config)
    return judge(config, read_metrics(dir / "metrics.jsonl"))


@pytest.mark.slow
def test_a_constant_reward_is_no_progress_and_named(tmp_path: Path) -> None:
    """No group is ever left to train on, in any step, and the run goes through."""
    found = outcome(
        tmp_path / "run", reward={"name": "tests.parts:Indifferent"}, prompts={"per_step": 1}, train={"num_steps": 6}
    )
    assert found.kind == "no progress" and "all scores are equal in 6 of the last 6 groups" in found.line


@pytest.mark.slow
def test_a_constant_reward_ends_a_longer_run_with_the_reason(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "run", reward={"name": "tests.parts:Indifferent"}, prompts={"per_step": 22},
        explore={"group_size": 2}, regenerate={"group_size": 2}, train={"num_steps": 9},
    )  # fmt: skip
    with pytest.raises(SolrlError, match=r"step 3: 3 steps in a row .* in 66 of the last 66 groups all scores are equ"):
        train(config)


@pytest.mark.slow
def test_a_rate_too_small_to_change_an_image_is_broken(tmp_path: Path) -> None:
    found = outcome(
        tmp_path / "run", reward={"name": "tests.parts:Redness"}, prompts={"per_step": 1},
        train={"num_steps": 6, "learning_rate": 1e-13}, output={"audit_every_steps": 0},
    )  # fmt: skip
    assert found.kind == "broken" and "after 6 updates the held-out images are those from before" in found.line


@pytest.mark.slow
def test_a_rate_far_too_high_is_broken_by_reward_and_images(tmp_path: Path) -> None:
    """A few updates throw the policy so far that its images are noise, and soon all of them score 0."""
    found = outcome(
        tmp_path / "run", prompts={"per_step": 1}, train={"num_steps": 11, "learning_rate": 2e-2, "kl_weight": 0.0},
        evaluate={"num_prompts": 16}, output={"audit_every_steps": 0, "checkpoint_every_steps": 20},
    )  # fmt: skip
    assert found.kind == "broken" and "worse than before training" in found.line
    assert "images' sharpness" in found.line and "all scores are equal in" in found.line
