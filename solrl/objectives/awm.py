"""Advantage Weighted Matching (arXiv 2509.25050): policy gradients with the flow-matching loss as log-likelihood.

Clean samples are noised anew, and the negative error of the velocity stands for the log-probability that a likelihood
ratio is made of. As everywhere in solrl, samples are drawn from old_policy and the ratio is against it, which is the
source's ``off_policy``; with ``train.old_decay_rate`` = 0 old_policy is the policy and every ratio 1. Timesteps are
drawn as for DiffusionNFT, where the source shares one stratified set among the samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from solrl.config import Config
from solrl.objectives.base import Batch, Objective, Point, clipped_surrogate, noisings, velocity_distance

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]


class AWM(Objective):
    """Settings of AWM."""

    weighting: Weighting = "ghuber"
    """How the mean squared error m at time t makes the log-probability: -m, -m t, -m t^2, or a root of m times t."""
    power: float = Field(0.25, gt=0)
    """p of ghuber: ((m + 1e-10)^p - 1e-10^p) t / p."""
    clip_range: float = Field(1.0, ge=0)
    """The ratio is clipped to 1 plus or minus this."""
    advantage_max: float = Field(1.0, gt=0)
    """What an advantage of train.advantage_clip becomes."""
    old_weight: float = Field(1.0, ge=0)
    """Weight of the mean squared velocity distance to old_policy."""

    metrics: ClassVar[tuple[str, ...]] = ("ratio_error", "clip_fraction")

    def points(self, batch: Batch, config: Config) -> Iterator[Point]:
        """See Objective."""
        clip = config.train.advantage_clip
        advantages = batch.advantages.clamp(-clip, clip) / clip * self.advantage_max
        for latents, sigma, fresh in noisings(batch, config.num_train_timesteps):
            loss = partial(
                awm_loss, target=fresh - batch.clean, sigma=sigma, advantages=advantages, clip_range=self.clip_range,
                weighting=self.weighting, power=self.power, old_weight=self.old_weight,
            )  # fmt: skip
            yield Point(latents, sigma, loss)


def awm_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    target: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    *,
    reference_velocity: Tensor | None = None,
    clip_range: float = 1.0,
    weighting: Weighting = "ghuber",
    power: float = 0.25,
    old_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One loss per sample: (policy, kl, |ratio - 1|, whether clipped), [B] float32 each.

    velocities and ``target`` = noise - clean are [B, ...]; ``sigma`` and ``advantages`` (as they enter) are [B].
    policy = max(-A ratio, -A clamp(ratio)) + old_weight mean((v - v_old)^2); kl = mean((v - v_reference)^2).
    """
    now, before = (awm_log_prob(v, target, sigma, weighting, power) for v in (velocity, old_velocity.detach()))
    surrogate, ratio = clipped_surrogate((now - before).float(), advantages.float(), clip_range)
    policy = surrogate + old_weight * velocity_distance(velocity, old_velocity)
    error = (ratio.detach() - 1).abs()
    return policy, velocity_distance(velocity, reference_velocity), error, (error > clip_range).float()


def awm_log_prob(velocity: Tensor, target: Tensor, sigma: Tensor, weighting: Weighting, power: float) -> Tensor:
    """[B] float64: what stands for the log-probability of the clean sample behind ``target``."""
    error, t = (velocity.double() - target.double()).square().flatten(1).mean(1), sigma.double()
    if weighting == "huber":
        return -((error + 1e-10).sqrt() - 1e-5) * t
    if weighting == "ghuber":
        return -((error + 1e-10) ** power - 1e-10**power) * t / power
    return -error * t ** {"uniform": 0, "t": 1, "t2": 2}[weighting]
