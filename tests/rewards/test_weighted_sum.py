"""Sums of rewards: in their own units, missing where a part is."""

from collections.abc import Sequence

import pytest
import torch
from solrl_rewards import load_reward
from torch import Tensor

from tests.parts import Redness

HERE = "tests.rewards.test_weighted_sum"


class Blueness:
    """Mean of the blue channel; black images are missing."""

    name = "blueness"
    range = (-1.0, 2.0)
    description = "mean of the blue channel"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        values = self.scale * images[:, 2].mean((1, 2))
        return values, values != 0


class Broken(Redness):
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return super().__call__(images, prompts) * torch.nan


def test_the_sum_is_weight_times_reward_and_missing_where_a_part_is() -> None:
    weights = {"tests.parts:Redness": 2, f"{HERE}:Blueness": -0.5}
    reward = load_reward("weighted_sum", weights=weights, options={f"{HERE}:Blueness": {"scale": 4.0}})
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images[1, 2] = 0
    values, present = reward(images, ["a", "b", "c"])
    assert present.tolist() == [True, False, True] and values[1] == 0
    expected = 2 * images[:, 0].mean((1, 2)) - 0.5 * 4 * images[:, 2].mean((1, 2))
    torch.testing.assert_close(values[[0, 2]], expected[[0, 2]])
    assert reward.range == (-1.0, 2.5) and reward.description == "2 redness + -0.5 blueness"


def test_a_part_that_turns_nan_is_named() -> None:
    reward = load_reward("weighted_sum", weights={f"{HERE}:Broken": 1.0})
    with pytest.raises(ValueError, match="redness returned nan"):
        reward(torch.rand(1, 3, 2, 2), ["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {}}, "needs weights"),
        ({"weights": {"shapes": 0}}, "must be a number other than 0, got 0"),
        ({"weights": {"shapes": float("nan")}}, "got nan"),
        ({"weights": {"shapes": "1"}}, "got '1'"),
        ({"weights": {"shape": 1}}, "did you mean 'shapes'"),
        ({"weights": {"shapes": 1}, "options": {"ocr": {}}}, "options for ocr, which has no weight"),
        ({"weights": {"shapes": 1}, "options": {"shapes": {"colour": 1}}}, "no option 'colour'"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward("weighted_sum", **options)


def test_a_normalized_sum_hands_over_its_parts_and_their_weights() -> None:
    weights = {"tests.parts:Redness": 2, f"{HERE}:Blueness": -0.5}
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images[1, 2] = 0
    reward = load_reward("normalized_sum", weights=weights)
    parts, present = reward(images, ["a", "b", "c"])
    total, same = load_reward("weighted_sum", weights=weights)(images, ["a", "b", "c"])
    assert parts.shape == (3, 2) and torch.equal(present, same)
    torch.testing.assert_close(parts @ torch.tensor(reward.part_weights), total)
