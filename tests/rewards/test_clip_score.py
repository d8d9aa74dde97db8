"""CLIPScore: transformers' own cosine, the same in any batch, and a tiny model that knows the shapes world."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_rewards import load_reward, scenes
from solrl_rewards.clip_score import ClipScore, Preprocessing, embedded_model
from torch import Tensor

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reward() -> ClipScore:
    made = load_reward("clip_score", batch_size=16)
    assert isinstance(made, ClipScore)
    return made


def draw(count: int, seed: int = 0) -> tuple[list[str], Tensor]:
    rng = random.Random(seed)
    drawn = [scenes.sample_scene(rng) for _ in range(count)]
    return [str(scene.caption) for scene in drawn], scenes.render(drawn)


def preprocessing_config() -> dict:
    return json.loads((Path(embedded_model()) / "preprocessor_config.json").read_text())


def test_a_score_is_the_cosine_that_the_model_itself_gives(reward: ClipScore) -> None:
    prompts, images = draw(6)
    tokens = reward.tokenizer(prompts, padding="max_length", max_length=12, truncation=True, return_tensors="pt")
    mean, deviation = (torch.tensor(preprocessing_config()[key])[:, None, None] for key in ("image_mean", "image_std"))
    with torch.no_grad():
        output = reward.model(**tokens, pixel_values=(images - mean) / deviation)
    expected = output.logits_per_image.diag() / reward.model.logit_scale.exp()
    scores = reward(images, prompts)
    assert scores.shape == (6,) and scores.dtype == torch.float32
    assert torch.allclose(scores, expected, atol=1e-5)


def test_a_score_does_not_depend_on_batch_or_order(reward: ClipScore) -> None:
    prompts, images = draw(40)
    scores = reward(images, prompts)
    assert torch.allclose(reward(images.flip(0), prompts[::-1]).flip(0), scores, atol=1e-5)
    alone = torch.cat([reward(images[row : row + 1], prompts[row : row + 1]) for row in range(8)])
    assert torch.allclose(alone, scores[:8], atol=1e-5)
    assert reward(images[:0], []).shape == (0,)


def test_the_embedded_model_prefers_the_true_caption(reward: ClipScore) -> None:
    prompts, images = draw(128, seed=1)
    true, shuffled = reward(images, prompts), reward(images, prompts[1:] + prompts[:1])
    assert (true > shuffled).float().mean() > 0.95
    assert true.min() >= -1 and true.max() <= 1 and true.std() > 0.01


def test_long_prompts_are_cut_and_foreign_words_are_read(reward: ClipScore) -> None:
    _, images = draw(2)
    assert reward(images, ["a red circle " * 50, "ein blauer Kreis"]).isfinite().all()


def test_bfloat16_gives_nearly_the_same_in_float32(reward: ClipScore) -> None:
    prompts, images = draw(16)
    scores = load_reward("clip_score", dtype="bfloat16", device="cpu")(images, prompts)
    assert scores.dtype == torch.float32 and torch.allclose(scores, reward(images, prompts), atol=0.05)


@pytest.mark.parametrize(("size", "resample", "mode"), [((64, 64), 3, "bicubic"), ((48, 80), 2, "bilinear")])
def test_resizing_is_pils_to_two_grey_levels(size: tuple[int, int], resample: int, mode: str) -> None:
    height, width = size
    levels = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    picture = Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)
    config = preprocessing_config() | {"resample": resample, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    prepare = Preprocessing(config)
    assert prepare.mode == mode
    ours = prepare(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255)
    shorter = min(size)
    small = picture.resize((width * 32 // shorter, height * 32 // shorter), Image.Resampling(resample))
    left, top = (small.width - 32) // 2, (small.height - 32) // 2
    theirs = torch.from_numpy(np.array(small.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1)[None] / 255
    assert ours.shape == (1, 3, 32, 32) and (ours - theirs).abs().max() < 2.01 / 255


@pytest.mark.parametrize(
    ("options", "message"), [({"batch_size": 0}, "at least 1, got 0"), ({"dtype": "int8"}, "got 'int8'")]
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward("clip_score", **options)


def test_wrong_inputs_are_refused(reward: ClipScore) -> None:
    with pytest.raises(ValueError, match="2 prompts for 1 images"):
        reward(torch.zeros(1, 3, 32, 32), ["a red circle"] * 2)
    with pytest.raises(ValueError, match="float images"):
        reward(torch.zeros(3, 32, 32), ["a", "b", "c"])
