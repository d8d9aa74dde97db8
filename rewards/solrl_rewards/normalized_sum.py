"""A sum of rewards that are put on one scale first, each within its group (GDPO, arXiv 2601.05242).

In a plain sum the reward with the widest spread decides. Here each reward is standardized among the candidates of a
prompt, and the weights apply to that. What is a group is known to the trainer alone, so this reward hands over its
parts and their weights; records and evaluation show the plain weighted sum. Options are those of weighted_sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from solrl_rewards.weighted_sum import WeightedSum


class NormalizedSum(WeightedSum):
    """The rewards by themselves, to be standardized within each group and summed by weight."""

    name = "normalized_sum"

    def __init__(self, weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(weights, options)
        self.part_weights = tuple(weight for weight, _ in self.parts)
        self.description += ", each standardized within its group for training"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B, R] float32 rewards, [B] whether all are present."""
        return self.scores_of_parts(images, prompts)
