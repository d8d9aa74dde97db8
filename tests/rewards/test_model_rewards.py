"""Rewards by models: the official implementations' numbers, in any batch and order, by their own settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_rewards import REWARDS
from solrl_rewards.image_reward import translate
from solrl_rewards.scoring import ModelReward

from tests.rewards import seeded
from tests.rewards.conftest import GOLDEN

Small = Callable[..., ModelReward]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip_score/paper": ("clip_score", {}),
    "clip_score/model": ("clip_score", {"preprocessing": "model"}),
    "pick_score": ("pick_score", {}),
    "aesthetic": ("aesthetic", {}),
    "image_reward": ("image_reward", {}),
    "hpsv2": ("hpsv2", {}),
}
NAMES = sorted({name for name, _ in CASES.values()})


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_official_implementation(small: Small, case: str) -> None:
    name, options = CASES[case]
    reward = small(name, **options)
    for size, expected in zip(seeded.SIZES, GOLDEN["scores"][case], strict=True):
        images = seeded.images(size)
        if name == "hpsv2":  # its package takes 8-bit images, and resizes them as floats
            images = (images * 255).round() / 255
        scores = reward(images, seeded.PROMPTS)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=0)
    assert GOLDEN["scores"].keys() == CASES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_score_does_not_depend_on_batch_size_or_order(small: Small, name: str) -> None:
    images, prompts = seeded.images((48, 48), 7), [*seeded.PROMPTS, "a green triangle", "x"]
    scores = small(name, batch_size=64)(images, prompts)
    assert scores.shape == (7,) and len(set(scores.tolist())) == 7
    order = [3, 0, 6, 2, 5, 1, 4]
    for batch_size in (1, 3):
        shuffled = small(name, batch_size=batch_size)(images[order], [prompts[row] for row in order])
        torch.testing.assert_close(shuffled, scores[order], atol=1e-5, rtol=1e-5)
    assert small(name)(images[:0], []).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_a_score_depends_on_the_prompt_where_it_should(small: Small, name: str) -> None:
    images = seeded.images((48, 48), 1).expand(2, -1, -1, -1)
    one, two = small(name)(images, ["a red circle", "a photo of two cats"]).tolist()
    assert (abs(one - two) < 1e-6) == (name == "aesthetic")


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_on_a_named_device_is_close_to_float32(small: Small, name: str) -> None:
    images = seeded.images((64, 64))
    reward = small(name, dtype="bfloat16", device="cpu")
    scores, exact = reward(images.half(), seeded.PROMPTS), small(name)(images, seeded.PROMPTS)
    assert scores.dtype == torch.float32 and not torch.equal(scores, exact)
    spread = {"pick_score": 0.15, "image_reward": 0.3}.get(name, 0.03)
    assert (scores - exact).abs().max() < spread


@pytest.mark.parametrize("name", NAMES)
def test_scoring_draws_no_random_numbers_and_ignores_autocast(small: Small, name: str) -> None:
    reward, images = small(name), seeded.images((48, 48))
    before = torch.get_rng_state()
    scores = reward(images, seeded.PROMPTS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reward(images, seeded.PROMPTS), scores)
    assert torch.equal(torch.get_rng_state(), before)
    assert not scores.requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 0}, "batch_size must be at least 1, got 0"), ({"dtype": "int8"}, "dtype must be one of")],
)
def test_wrong_settings_are_refused_before_loading(small: Small, name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_there_is_named_in_one_line(small: Small, name: str, tmp_path: Path) -> None:
    for missing in (str(tmp_path / "nowhere"), "someone/no-such-model"):
        with pytest.raises((ValueError, OSError), match=missing) as caught:
            small(name, model=missing)
        assert "\n" not in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_reward_says_how_to_read_it(small: Small, name: str) -> None:
    reward = small(name)
    assert name in REWARDS and reward.name == name
    assert reward.range[0] < reward.range[1] and len(reward.description) > 20


def test_weights_that_could_run_code_are_refused(small: Small, tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple:
            return (print, ("executed",))

    torch.save({"layers.0.weight": Harmful()}, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=r"head.pth is no file of weights"):
        small("aesthetic", head=str(tmp_path / "head.pth"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("layers.0.weight"), "has no 0.weight"),
        (lambda weights: weights.update(extra=torch.ones(1)), "has an unknown extra"),
        (lambda weights: weights.update({"layers.7.bias": torch.ones(2)}), r"has 7.bias of shape \[2\] for \[1\]"),
    ],
)
def test_weights_of_another_model_are_refused(small: Small, tmp_path: Path, change: Callable, message: str) -> None:
    weights = small("aesthetic").head.state_dict()  # type: ignore[attr-defined]
    weights = {f"layers.{name}": value for name, value in weights.items()}
    change(weights)
    torch.save(weights, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=message):
        small("aesthetic", head=str(tmp_path / "head.pth"))


def test_a_foreign_weight_in_an_image_reward_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="surprise is no weight of ImageReward"):
        translate({"surprise": torch.ones(1)})


def test_both_versions_of_hpsv2_are_read_from_their_own_file(small: Small) -> None:
    small("hpsv2", version="2.0")
    with pytest.raises(ValueError, match=r"one of 2.0, 2.1, got '3'"):
        small("hpsv2", version="3")
