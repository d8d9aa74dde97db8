"""What an objective is to the learner: where a micro-batch's velocities are asked for, and the loss at each point.

An objective that needs only clean latents noises them anew (``noisings``). One that needs the way they were drawn
brings the sampler that draws them (``trajectory.py``). The learner treats both alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor

from solrl.config import Config, Section
from solrl.flow import noised
from solrl.groups import derive_seed, generator, noise
from solrl.plugins import find_class
from solrl.types import PathSampler, Trajectory, UsageError

OBJECTIVES = {
    "nft": "solrl.objectives.nft:NFT",
    "awm": "solrl.objectives.awm:AWM",
    "flow_grpo": "solrl.objectives.flow_grpo:FlowGRPO",
    "dance_grpo": "solrl.objectives.dance_grpo:DanceGRPO",
    "dpo": "solrl.objectives.dpo:DPO",
}


@dataclass(frozen=True)
class Batch:
    """A training micro-batch of B samples."""

    seeds: list[int]  # each sample's latent seed
    advantages: Tensor  # [B] float32
    clean: Tensor  # [B, ...] float32
    trajectory: Trajectory | None  # of B rows, for an objective with a sampler
    sigmas: Tensor  # [num_steps + 1] float64: the grid they were drawn on


@dataclass(frozen=True)
class Point:
    """One trained timestep of each sample of a micro-batch."""

    latents: Tensor  # [B, ...] float32: where the velocity is asked for
    sigma: Tensor  # [B] float32
    loss: Callable[..., tuple[Tensor, ...]]
    """(velocity, old velocity, reference_velocity=) -> policy loss, KL, and one for each of ``metrics``, all [B].

    Old and reference velocity come without gradient; the latter is None where nobody needs it.
    """


class Objective(Section):
    """A loss. Its fields are its own settings, given as ``train.objective_options``."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of what ``Point.loss`` returns beside the two losses; their means are logged."""
    needs_reference: ClassVar[bool] = False
    """Whether the adapter-free model's velocity is needed even without a KL term."""

    def check(self, config: Config) -> None:
        """Raises UsageError where ``config`` asks for something that this objective cannot learn from."""

    @abstractmethod
    def points(self, batch: Batch, config: Config) -> Iterator[Point]:
        """The ``config.num_train_timesteps`` points of a micro-batch."""

    def sampler(self, config: Config) -> PathSampler | None:
        """What draws the samples that are trained on; None: the stage's own solver."""
        return None


def open_objective(config: Config) -> Objective:
    """The objective of a run, checked against its other settings; UsageError says what is wrong and what to do."""
    name = config.train.objective
    kind = find_class("train.objective", name, OBJECTIVES)
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise UsageError(f"train.objective: {name} is no subclass of solrl.objectives.base.Objective")
    try:
        objective = kind.model_validate(config.train.objective_options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UsageError(
            f"train.objective_options.{key}: {problem['msg']}; the settings of {name} are "
            f"{', '.join(kind.model_fields) or 'none'}"
        ) from None
    if name != "nft" and config.train.beta != 1:
        raise UsageError(f"train.beta is DiffusionNFT's and train.objective is {name}: leave it out")
    objective.check(config)
    return objective


def noisings(batch: Batch, num_timesteps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per timestep (noised latents [B, ...], sigma [B], their noise [B, ...]); each row depends on its seed alone."""
    sigmas = train_sigmas(batch.seeds, batch.sigmas, num_timesteps).to(batch.clean.device)
    for t in range(num_timesteps):
        seeds = [derive_seed(seed, f"train/{t}") for seed in batch.seeds]
        fresh = noise(seeds, batch.clean.shape[1:]).to(batch.clean.device)
        yield noised(batch.clean, fresh, sigmas[:, t]), sigmas[:, t], fresh


def train_sigmas(seeds: Sequence[int], sigmas: Tensor, num_timesteps: int) -> Tensor:
    """[B, T] float32: per sample T different sigmas of the rollout grid, 1 included and 0 not."""
    grid = sigmas[:-1].float()
    picks = [generator(derive_seed(seed, "sigmas")).permutation(len(grid)) for seed in seeds]
    return torch.stack([grid[torch.from_numpy(p[:num_timesteps])] for p in picks])


def velocity_distance(velocity: Tensor, other: Tensor | None) -> Tensor:
    """[B, ...] twice -> [B] mean squared difference, float32; zeros where there is no other."""
    if other is None:
        return velocity.new_zeros(len(velocity), dtype=torch.float32)
    return (velocity.float() - other.detach().float()).square().flatten(1).mean(1)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """(loss, ratio), both [B]: max(-A ratio, -A clamp(ratio, 1 +- clip_range)), ratio = exp(log_ratio) (PPO)."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio
