"""The shapes reward: near 1 for true pictures, low for every kind of mistake, the same in any batch."""

import dataclasses
import random

import pytest
import torch
from solrl_rewards import load_reward, scenes
from torch import Tensor

torch.set_num_threads(1)
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def draw(count: int, single: float, seed: int = 0) -> tuple[list[scenes.Caption], Tensor]:
    rng = random.Random(seed)
    drawn = [scenes.sample_scene(rng, single) for _ in range(count)]
    return [scene.caption for scene in drawn], scenes.render(drawn)


def score(images: Tensor, captions: list[scenes.Caption]) -> Tensor:
    return load_reward("shapes")(images, [str(caption) for caption in captions])


def change_first(caption: scenes.Caption, *, colour: int = 0, shape: int = 0) -> scenes.Caption:
    old_colour, old_shape = caption.objects[0]
    first = ((old_colour + colour) % 8, (old_shape + shape) % 4)
    return dataclasses.replace(caption, objects=(first, *caption.objects[1:]))


@pytest.mark.parametrize("single", [0.0, 1.0])
def test_true_pictures_score_near_one(single: float) -> None:
    captions, images = draw(120, single)
    rewards = score(images, captions)
    assert rewards.mean() > 0.95 and rewards.quantile(0.02) > 0.8 and rewards.max() <= 1


def test_another_colour_costs_most_of_a_single_object() -> None:
    captions, images = draw(120, single=1.0)
    assert score(images, [change_first(caption, colour=3) for caption in captions]).mean() < 0.1


@pytest.mark.parametrize("single", [0.0, 1.0])
def test_another_shape_costs(single: float) -> None:
    captions, images = draw(120, single)
    rewards = score(images, captions)
    for shift in (1, 2, 3):
        wrong = score(images, [change_first(caption, shape=shift) for caption in captions])
        assert (rewards - wrong).mean() > 0.25 and (wrong < rewards).float().mean() > 0.97


def test_the_opposite_relation_and_place_cost() -> None:
    captions, images = draw(120, single=0.0)
    opposite = [dataclasses.replace(caption, relation=OPPOSITE[caption.relation or ""]) for caption in captions]
    wrong = score(images, opposite)
    assert wrong.mean() < 0.7 * score(images, captions).mean()
    captions, images = draw(120, single=1.0)
    placed = [row for row, caption in enumerate(captions) if caption.place == "left"]
    wrong = score(images[placed], [dataclasses.replace(captions[row], place="right") for row in placed])
    assert len(placed) > 10 and (wrong < 0.7 * score(images[placed], [captions[row] for row in placed])).all()


def test_a_blank_image_and_noise_score_near_zero() -> None:
    captions, images = draw(64, single=0.5)
    assert score(torch.full_like(images, scenes.BACKGROUND), captions).max() < 0.05
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    assert score(noise, captions).max() < 0.3


def test_stray_paint_costs_more_the_more_there_is() -> None:
    image = scenes.render([scenes.Scene(scenes.parse("a red circle"), ((10.0, 10.0, 6.0),))])
    rewards = []
    for size in (0, 6, 9, 12):
        spoiled = image.clone()
        spoiled[0, :, 30 - size : 30, 30 - size : 30] = scenes.palette()[2][:, None, None]
        rewards.append(score(spoiled, [scenes.parse("a red circle")]).item())
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 4


def test_a_score_is_bitwise_independent_of_batch_and_order() -> None:
    captions, images = draw(24, single=0.5)
    rewards = score(images, captions)
    assert torch.equal(score(images.flip(0), captions[::-1]).flip(0), rewards)
    alone = torch.cat([score(images[row : row + 1], captions[row : row + 1]) for row in range(24)])
    assert torch.equal(alone, rewards)


def test_it_reads_half_precision_images_and_gives_float32() -> None:
    captions, images = draw(24, single=0.5)
    rewards = score(images.bfloat16(), captions)
    assert rewards.dtype == torch.float32 and torch.allclose(rewards, score(images, captions), atol=0.1)
    assert score(images[:0], []).shape == (0,)


def test_wrong_inputs_are_refused_in_one_line() -> None:
    reward = load_reward("shapes", device="cpu")
    image = torch.zeros(1, 3, 32, 32)
    cases = [
        (image, ["a red star"], "a red star"),
        (image, ["a red circle"] * 2, "2 prompts for 1 images"),
        (image[0], ["a red circle"], r"\[3, 32, 32\]"),
        (torch.zeros(1, 3, 64, 64), ["a red circle"], "32 x 32"),
        (image.to(torch.uint8), ["a red circle"], "uint8"),
        (image, "a red circle", "list of prompts"),
    ]
    for images, prompts, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            reward(images, prompts)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
