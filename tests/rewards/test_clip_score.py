"""CLIPScore: transformers' own cosine, the same in any batch, and a tiny model that knows the shapes world."""

import json
import random
from pathlib import Path

import pytest
import torch
from solrl_rewards import load_reward, scenes
from solrl_rewards.clip_score import ClipScore, embedded_model
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
    tokens = reward.model.tokenizer(prompts, padding="max_length", max_length=12, truncation=True, return_tensors="pt")
    mean, deviation = (torch.tensor(preprocessing_config()[key])[:, None, None] for key in ("image_mean", "image_std"))
    with torch.no_grad():
        output = reward.model.model(**tokens, pixel_values=(images - mean) / deviation)
    expected = output.logits_per_image.diag() / reward.model.model.logit_scale.exp()
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


def test_an_unknown_preprocessing_is_refused() -> None:
    with pytest.raises(ValueError, match="paper or model, got 'mine'"):
        load_reward("clip_score", preprocessing="mine")


def test_wrong_inputs_are_refused(reward: ClipScore) -> None:
    with pytest.raises(ValueError, match="2 prompts for 1 images"):
        reward(torch.zeros(1, 3, 32, 32), ["a red circle"] * 2)
    with pytest.raises(ValueError, match="float images"):
        reward(torch.zeros(3, 32, 32), ["a", "b", "c"])
