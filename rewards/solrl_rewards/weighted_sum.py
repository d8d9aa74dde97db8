"""A weighted sum of rewards, in the units that each of them has.

[reward]
name = "weighted_sum"
[reward.options]
weights = { pick_score = 1.0, hpsv2 = 2.0 }
options = { hpsv2 = { version = "2.0" } }
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from solrl_rewards import load_reward
from solrl_rewards.inputs import check_inputs


class WeightedSum:
    """The sum of weight times reward; missing where one of them is."""

    name = "weighted_sum"

    def __init__(self, weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`weights` by name or dotted path; `options` of those that take some."""
        options = options or {}
        if not weights:
            raise ValueError(f"{self.name} needs weights, such as {{ pick_score = 1.0, hpsv2 = 2.0 }}")
        for name, weight in weights.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not math.isfinite(weight)
                or not weight
            ):
                raise ValueError(f"{self.name}: the weight of {name} must be a number other than 0, got {weight!r}")
        for name in options:
            if name not in weights:
                raise ValueError(f"{self.name} has options for {name}, which has no weight")
        self.parts = [(float(weight), load_reward(name, **options.get(name, {}))) for name, weight in weights.items()]
        ends = [sorted(weight * end for end in reward.range) for weight, reward in self.parts]
        self.range = (sum(low for low, _ in ends), sum(high for _, high in ends))
        self.description = " + ".join(f"{weight:g} {reward.name}" for weight, reward in self.parts)

    def scores_of_parts(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images and B prompts -> [B, R] float32 rewards, unweighted; [B] whether all R are present."""
        check_inputs(self.name, images, prompts)
        columns = []
        present = torch.ones(len(prompts), dtype=torch.bool, device=images.device)
        for _, reward in self.parts:
            answer = reward(images, prompts)
            values, is_present = answer if isinstance(answer, tuple) else (answer, torch.ones_like(present))
            if values.shape != present.shape:
                raise ValueError(f"{reward.name} must return {len(prompts)} scores, got shape {list(values.shape)}")
            values, is_present = values.float().to(images.device), is_present.to(images.device)
            bad = is_present & ~values.isfinite()
            if bad.any():
                raise ValueError(f"{reward.name} returned {float(values[bad][0])}")
            columns.append(torch.where(is_present, values, 0.0))
            present &= is_present
        return torch.stack(columns, 1) * present[:, None], present

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] float32 sums, [B] whether all parts are present."""
        scores, present = self.scores_of_parts(images, prompts)
        return scores @ torch.tensor([weight for weight, _ in self.parts], device=scores.device), present
