"""What the training of the tiny models shares: scenes, tokens of their captions, the learning rate, saved configs."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

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


def tidy_configs(folder: Path) -> None:
    """Every config.json in `folder` asks for float32, in which the models compute, and names no local path."""
    for path in folder.rglob("config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        if "dtype" in config:
            config["dtype"] = "float32"  # transformers would otherwise compute in the bfloat16 of the file
        path.write_text(json.dumps(config, indent=2) + "\n")
