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
