"""The shapes world: captions survive parsing, scenes fit the image and make their captions true."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from solrl_rewards import scenes

torch.set_num_threads(1)
PROMPTS = Path(__file__).parents[2] / "solrl" / "assets" / "prompts"


def draw(count: int, seed: int = 0, single: float = 0.5) -> list[scenes.Scene]:
    rng = random.Random(seed)
    return [scenes.sample_scene(rng, single) for _ in range(count)]


def test_every_caption_is_parsed_back() -> None:
    objects = list(itertools.product(range(8), range(4)))
    captions = [scenes.Caption((one,), place=place) for one in objects for place in (None, *scenes.PLACES)]
    pairs = itertools.product(objects, objects, scenes.RELATIONS)
    captions += [scenes.Caption((one, two), relation=relation) for one, two, relation in pairs]
    assert all(scenes.parse(str(caption)) == caption for caption in captions)


def test_a_is_an_before_a_vowel_and_both_are_read() -> None:
    assert str(scenes.parse("a orange cross")) == "an orange cross"
    assert str(scenes.parse("an red circle above an orange cross")) == "a red circle above an orange cross"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red circle",
        "a pink circle",
        "a red star",
        "a red circle on the moon",
        "a red circle left of",
        "a red circle beside a blue square",
        "a red circle left of a blue",
        "a red circle on the left on the left",
        "a red circle a blue square",
    ],
)
def test_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="shapes world") as caught:
        scenes.parse(text)
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_equal_seeds_draw_equal_scenes() -> None:
    assert draw(50) == draw(50)
    assert draw(50) != draw(50, seed=1)


def test_objects_lie_inside_the_image_where_the_caption_says() -> None:
    for scene in draw(500):
        for x, y, radius in scene.layout:
            assert radius <= min(x, y) and max(x, y) <= scenes.SIZE - radius
        caption = scene.caption
        if caption.relation or caption.place:
            reference = scene.layout[1] if caption.relation else (scenes.SIZE / 2, scenes.SIZE / 2)
            right, down = scenes.DIRECTIONS[caption.relation or caption.place or ""]
            assert right * (scene.layout[0][0] - reference[0]) + down * (scene.layout[0][1] - reference[1]) > 3


def test_the_share_of_single_objects_is_as_asked() -> None:
    share = sum(len(scene.layout) == 1 for scene in draw(2000, single=0.25)) / 2000
    assert abs(share - 0.25) < 0.03
    assert all(len(scene.layout) == 2 for scene in draw(50, single=0.0))


def test_images_lie_in_range_and_show_the_paint_at_the_centre() -> None:
    drawn = draw(200, single=1.0)
    images = scenes.render(drawn)
    assert images.shape == (200, 3, scenes.SIZE, scenes.SIZE) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    for scene, image in zip(drawn, images, strict=True):
        x, y, _ = scene.layout[0]
        paint = scenes.palette()[scene.caption.objects[0][0]]
        assert torch.allclose(image[:, int(y), int(x)], paint, atol=1e-5)


def test_a_scene_looks_the_same_in_any_batch() -> None:
    drawn = draw(20)
    images = scenes.render(drawn)
    assert all(torch.equal(scenes.render([scene])[0], image) for scene, image in zip(drawn, images, strict=True))


def test_prompt_files_are_captions_and_training_shares_none_with_held_out() -> None:
    train, heldout, single = (
        (PROMPTS / f"shapes_{name}.txt").read_text().splitlines() for name in ("train", "heldout", "single")
    )
    assert [len(train), len(heldout), len(single)] == [1024, 64, 64]
    assert len({*train, *heldout}) == 1024 + 64
    assert all(scenes.parse(line).relation for line in train + heldout)
    assert all(len(scenes.parse(line).objects) == 1 for line in single)
    assert all(str(scenes.parse(line)) == line for line in train + heldout + single)
