"""What is found out before a model loads, and which reward is which."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from solrl.scorer import open_reward
from solrl.session import open_session
from solrl.types import UsageError
from tests.parts import ALONE, Redness, never, tiny_config


class Nameless:
    """Scores, but says nothing about itself."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.zeros(len(prompts))


def test_a_reward_must_say_what_it_is() -> None:
    with pytest.raises(UsageError, match=r"tests\.test_session:Nameless has no name, range, description"):
        open_reward("reward.name", "tests.test_session:Nameless", {})


@pytest.mark.parametrize(
    ("setting", "section"),
    [("reward.name", {"reward": {"name": "nope"}}), ("evaluate.rewards", {"evaluate": {"rewards": ["nope"]}})],
)
def test_a_wrong_reward_is_named_by_its_setting_before_the_model_loads(
    setting: str, section: dict[str, dict[str, object]]
) -> None:
    config = tiny_config(model={"path": "no/such/model"}, **section)
    with pytest.raises(UsageError, match=rf"{setting}: unknown reward 'nope'"):
        open_session(config, ALONE, never)


def test_the_trained_reward_is_evaluated_with_its_own_options() -> None:
    """Named among the watched rewards as well, it must not be replaced by one without its options."""
    name = "tests.parts:Redness"
    session = open_session(tiny_config(reward={"name": name}, evaluate={"rewards": [name, "shapes"]}), ALONE, never)
    assert isinstance(session.reward, Redness) and list(session.watched) == ["shapes"]
