"""Small real parts for tests: the embedded model with short rollouts, and rewards that cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.distributed import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def tiny_config(folder: Path | str = "runs/test", **sections: dict[str, Any]) -> Config:
    """A run that takes a second a step: 3 prompts, 6 candidates, 4 kept, 2 and 3 denoising steps."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny_flux", "height": 32, "width": 32, "max_text_tokens": 12},
        "lora": {"rank": 4, "alpha": 8},
        "prompts": {"per_step": 3},
        "explore": {"group_size": 6, "num_steps": 2, "solver": "euler", "precision": "full"},
        "regenerate": {"group_size": 4, "num_steps": 3, "solver": "euler"},
        "train": {"num_steps": 3, "timestep_fraction": 0.7, "learning_rate": 1e-3},
        "batch": {"rollout": 4, "train": 2, "decode": 4},
        "evaluate": {"every_steps": 0, "num_prompts": 2, "images_per_prompt": 2, "num_steps": 2},
        "output": {"dir": str(folder), "checkpoint_every_steps": 1, "audit_every_steps": 2},
    }
    top = {name: value for name, value in sections.items() if not isinstance(value, dict)}
    for name, values in sections.items():
        if isinstance(values, dict):
            settings[name] = settings.get(name, {}) | values
    return Config.model_validate(settings | top)


def stopwatch() -> Stopwatch:
    """A stopwatch for a test that does not look at it."""
    return Stopwatch(CPU)


def never() -> None:
    """A stop that never comes."""


class Redness:
    """Mean of the red channel: free, smooth, different for every image."""

    name = "redness"
    range = (0.0, 1.0)
    description = "mean of the red channel"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images[:, 0].mean((1, 2))


class Darkness:
    """How black an image is: a reward that any model exploits, whatever the prompt says."""

    name = "darkness"
    range = (0.0, 1.0)
    description = "1 - mean of all channels"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return 1 - images.mean((1, 2, 3))


class Blind(Redness):
    """Redness that judges nothing in its ``blind`` calls, the first of which has number 1."""

    name = "blind"

    def __init__(self, blind: Sequence[int]) -> None:
        self.blind, self.call = blind, 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.call += 1
        return super().__call__(images, prompts), torch.full((len(prompts),), self.call not in self.blind)


class Graininess:
    """Mean absolute difference of neighbouring pixels: highest for noise."""

    name = "graininess"
    range = (0.0, 1.0)
    description = "mean absolute difference of neighbouring pixels"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.diff(dim=-1).abs().mean((1, 2, 3)) + images.diff(dim=-2).abs().mean((1, 2, 3))


class Indifferent:
    """One half for every image: nothing can be learned from it."""

    name = "indifferent"
    range = (0.0, 1.0)
    description = "always 0.5"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(prompts),), 0.5)
