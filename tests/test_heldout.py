"""What an evaluation measures: means and gains over prompts, with the errors that belong to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from solrl.errors import RewardFailed, SolrlError
from solrl.evaluate import Evaluation, saved_means
from solrl.types import Scores

PROMPTS = ["a", "b", "c"]


def evaluation(rows: list[list[float | None]]) -> Evaluation:
    values = torch.tensor([[value or 0.0 for value in row] for row in rows], dtype=torch.float64)
    present = torch.tensor([[value is not None for value in row] for row in rows])
    return Evaluation({"shapes": Scores(values, present, {})}, {})


def test_a_gain_has_the_error_of_its_differences() -> None:
    before, after = evaluation([[0.1, 0.3], [0.5, 0.7], [0.8, 1.0]]), evaluation([[0.2, 0.4], [0.6, 1.0], [0.9, 1.1]])
    found = after.metrics(before.means())
    assert found["eval/shapes/gain"] == pytest.approx(0.4 / 3)  # 0.1, 0.2, 0.1
    assert found["eval/shapes/gain_stderr"] == pytest.approx(0.1 / 3)
    assert found["eval/shapes/stderr"] == pytest.approx((0.13 / 3) ** 0.5)  # of 0.3, 0.8 and 1.0
    assert not [name for name in before.metrics({}) if "gain" in name]


def test_a_prompt_without_a_score_is_in_no_gain() -> None:
    before, after = (
        evaluation([[0.1, 0.3], [None, None], [0.8, 1.0]]),
        evaluation([[0.2, None], [0.6, 1.0], [1.2, 1.2]]),
    )
    found = after.metrics(before.means())
    assert found["eval/shapes/gain"] == pytest.approx(0.15)  # 0.2 - 0.2 and 1.2 - 0.9
    assert found["eval/shapes/mean"] == pytest.approx((0.2 + 0.8 + 1.2) / 3)


def test_where_no_prompt_has_a_score_in_both_there_is_no_gain() -> None:
    before, after = evaluation([[0.1], [None]]), evaluation([[None], [0.3]])
    assert after.metrics(before.means()) == {"eval/shapes/mean": 0.3, "eval/shapes/stderr": 0.0}


def test_a_reward_that_judged_no_image_fails_by_its_name() -> None:
    with pytest.raises(
        RewardFailed, match=r"^reward shapes could judge none of the 2 held-out images: look at why .*$"
    ):
        evaluation([[None], [None]])


def test_saved_means_are_those_of_the_evaluation(tmp_path: Path) -> None:
    first = evaluation([[0.1, 1 / 3], [None, 0.7], [None, None]])
    first.save(tmp_path, 0, PROMPTS)
    saved = saved_means(tmp_path, 0, PROMPTS)
    assert saved.keys() == {"shapes"} and saved["shapes"].nan_to_num(-1).equal(first.means()["shapes"].nan_to_num(-1))
    assert saved_means(tmp_path, 8, PROMPTS) == {}


def test_an_evaluation_of_other_prompts_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    evaluation([[0.1]]).save(tmp_path, 0, ["a"])
    with pytest.raises(SolrlError, match=r"step_000000.json has other prompts .* restore prompts.heldout"):
        saved_means(tmp_path, 0, ["b"])
    (tmp_path / "heldout" / "step_000000.json").write_text("{")
    with pytest.raises(SolrlError, match=r"is damaged .* delete it"):
        saved_means(tmp_path, 0, ["a"])
