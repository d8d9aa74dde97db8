"""Flow-GRPO (arXiv 2505.05470), with its second sampler (Flow-CPS, arXiv 2509.05952) and its fast variant.

The first steps are drawn from the SDE that has the flow's marginals, and trained on. The fast variant draws noise only
in a window of steps, at a random place in the first half, and trains on the window; everything else is Euler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from solrl.config import Config
from solrl.groups import derive_seed, generator
from solrl.objectives.trajectory import TrajectoryObjective
from solrl.sde import StepFn, flow_cps, flow_sde
from solrl.types import UsageError


class FlowGRPO(TrajectoryObjective):
    """Settings of Flow-GRPO. Its fast variant is window, cps, noise_level 0.8, clip_range 1e-5, and no KL."""

    sde_type: Literal["sde", "cps"] = "sde"
    """sde: the paper's; cps: coefficient-preserving, without noise left over in the sample."""
    noise_level: float = Field(0.7, gt=0)
    """How much noise a step draws; the source has 0.7 for SD3.5, 0.9 for FLUX, 0.8 for fast. cps: below 1."""
    window: bool = False
    """Noise and training only in train.timestep_fraction of the steps, at a random place in the first half."""

    def check(self, config: Config) -> None:
        """See Objective."""
        super().check(config)
        half, size = config.regenerate.num_steps // 2, config.num_train_timesteps
        if self.window and size > half:
            raise UsageError(
                f"train.objective_options.window: {size} trained steps do not fit into the first half of "
                f"regenerate.num_steps = {config.regenerate.num_steps}: lower train.timestep_fraction "
                f"({config.train.timestep_fraction})"
            )
        if self.sde_type == "cps" and self.noise_level >= 1:
            raise UsageError("train.objective_options.noise_level must be below 1 for sde_type = cps")

    def step(self, sigmas: Tensor) -> StepFn:
        """See TrajectoryObjective."""
        if self.sde_type == "cps":
            return partial(flow_cps, noise_level=self.noise_level)
        return partial(flow_sde, noise_level=self.noise_level, second_sigma=float(sigmas[1]))

    def schedule(self, seeds: Sequence[int], num_steps: int, num_trained: int) -> tuple[Tensor, Tensor]:
        """See TrajectoryObjective."""
        steps = torch.arange(num_steps).expand(len(seeds), -1)
        if not self.window:
            return steps < num_steps - 1, steps < num_trained
        last = num_steps // 2 - num_trained
        starts = [int(generator(derive_seed(seed, "window")).integers(0, last, endpoint=True)) for seed in seeds]
        first = torch.tensor(starts).unsqueeze(1)
        inside = (first <= steps) & (steps < first + num_trained)
        return inside, inside
