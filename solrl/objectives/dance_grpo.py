"""DanceGRPO (arXiv 2505.07818): a constant-noise SDE, trained on a random subset of its steps.

As in the source's FLUX script: all steps but the last draw noise, the image is that of the last clean prediction, each
sample trains its own random share of the noisy steps, and there is no KL term. Its advantages are those of
``train.advantage_std`` = sample. Unlike there, the samples of a group start from noises of their own: the start is what
exploration chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from solrl.groups import derive_seed, generator
from solrl.objectives.trajectory import TrajectoryObjective
from solrl.sde import StepFn, dance_sde


class DanceGRPO(TrajectoryObjective):
    """Settings of DanceGRPO."""

    noise_level: float = Field(0.3, gt=0)
    """eta: the noise of a step has variance eta^2 times the step's length in sigma."""

    def step(self, sigmas: Tensor) -> StepFn:
        """See TrajectoryObjective."""
        return partial(dance_sde, noise_level=self.noise_level)

    def schedule(self, seeds: Sequence[int], num_steps: int, num_trained: int) -> tuple[Tensor, Tensor]:
        """See TrajectoryObjective."""
        noisy = (torch.arange(num_steps) < num_steps - 1).repeat(len(seeds), 1)
        trained = torch.zeros_like(noisy)
        for row, seed in zip(trained, seeds, strict=True):
            row[torch.from_numpy(generator(derive_seed(seed, "steps")).permutation(num_steps - 1)[:num_trained])] = True
        return noisy, trained
