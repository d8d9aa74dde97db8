"""Online DPO: Diffusion-DPO (arXiv 2311.12908) in flow-matching form on the best and the worst of each pool.

With ``regenerate.group_size`` = 2 the two kept candidates of a group are its pair. Which one wins is decided by their
final rewards; where those are equal, or one is missing, nothing is preferred, and only the KL term, if
``train.kl_weight`` asks for it, holds the policy to the adapter-free model there as everywhere. Both are noised alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from solrl.config import Config
from solrl.objectives.base import Batch, Objective, Point, noisings, velocity_distance
from solrl.types import UsageError


class DPO(Objective):
    """Settings of DPO."""

    beta: float = Field(100.0, gt=0)
    """Strength of the preference against the adapter-free model (for errors averaged over a sample's dimensions)."""

    metrics: ClassVar[tuple[str, ...]] = ("preference",)
    needs_reference: ClassVar[bool] = True

    def check(self, config: Config) -> None:
        """See Objective."""
        if config.regenerate.group_size != 2:
            raise UsageError(
                "train.objective = dpo compares the best and the worst of each group: set regenerate.group_size = 2 "
                f"(it is {config.regenerate.group_size})"
            )
        if config.batch.train % 2:
            raise UsageError(
                f"train.objective = dpo needs whole pairs: batch.train must be even, got {config.batch.train}"
            )

    def points(self, batch: Batch, config: Config) -> Iterator[Point]:
        """See Objective. Rows 2i and 2i + 1 are a pair."""
        alike = replace(batch, seeds=[seed for seed in batch.seeds[::2] for _ in range(2)])
        for latents, sigma, fresh in noisings(alike, config.num_train_timesteps):
            loss = partial(dpo_loss, target=fresh - batch.clean, advantages=batch.advantages, beta=self.beta)
            yield Point(latents, sigma, loss)


def dpo_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    reference_velocity: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(policy, kl, whether the winner is preferred), [B] float32 each; the first and the last are equal within a pair.

    velocities and ``target`` = noise - clean are [B, ...], rows 2i and 2i + 1 a pair whose winner has the higher of the
    ``advantages`` [B]; where they are equal nobody wins, and the first and the last are 0.
    policy = -log sigmoid(-beta/2 (d_winner - d_loser)), d = mean((v - target)^2) - mean((v_reference - target)^2);
    kl = mean((v - v_reference)^2) of each sample, whatever its advantage.
    """
    gain = velocity_distance(velocity, target) - velocity_distance(reference_velocity, target)
    sign = (advantages[::2] - advantages[1::2]).sign()
    margin = -0.5 * beta * sign * (gain[::2] - gain[1::2])
    policy = -functional.logsigmoid(margin) * sign.abs()
    prefers = (margin.detach() > 0).float()
    kl = velocity_distance(velocity, reference_velocity)
    return policy.repeat_interleave(2), kl, prefers.repeat_interleave(2)
