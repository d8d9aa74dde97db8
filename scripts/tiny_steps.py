"""What the training loops of the tiny models share: scenes to learn from, their captions' tokens, the learning rate."""

import random
from collections.abc import Sequence

import torch
from solrl_rewards import scenes
from tiny_models import TEXT_LENGTH
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def warmup_hold_decay(step: int, steps: int, *, warmup: int = 100, hold: float = 0.6) -> float:
    """The learning rate's factor: a linear rise, 1 until `hold` of all steps, then a linear fall to 0.02."""
    return min((step + 1) / warmup, 1.0) * max(0.02, min(1.0, (1 - step / steps) / (1 - hold)))


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def caption_ids(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str]) -> Tensor:
    padded = tokenizer(
        list(captions), padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
    )
    return padded.input_ids  # [B, TEXT_LENGTH]


def scene_batch(rng: random.Random, size: int, single: float) -> tuple[list[str], Tensor]:
    """Captions, and their images in [0, 1]."""
    drawn = [scenes.sample_scene(rng, single) for _ in range(size)]
    return [str(scene.caption) for scene in drawn], scenes.render(drawn)
