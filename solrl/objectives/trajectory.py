"""What the policy gradients over denoising steps share (Flow-GRPO, DanceGRPO).

Each step is an action whose log-probability is a Gaussian's; the clipped ratio of policy and old_policy is weighted by
the sample's advantage. Both log-probabilities are computed in the update, from the trajectory that regeneration drew,
so on-policy the ratio is 1 however the rollout tree rounds. How far that tree's own log-probabilities are from them is
logged as ``rollout_log_ratio``.

Exploration chooses by the start of a trajectory alone (it draws no noise on the way), so what it keeps does not bias
the gradient of the noisy steps after that start.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from solrl.config import Config
from solrl.objectives.base import Batch, Objective, Point, clipped_surrogate
from solrl.sde import StepFn, sample_trajectory
from solrl.types import PathSampler, Trajectory, UsageError, VelocityFn


class TrajectoryObjective(Objective):
    """An objective that brings a stochastic sampler; the grid's last step is always Euler's, without noise."""

    clip_range: float = Field(1e-4, gt=0)
    """The ratio is clipped to 1 plus or minus this."""

    metrics: ClassVar[tuple[str, ...]] = ("ratio_error", "clip_fraction", "rollout_log_ratio")

    @abstractmethod
    def step(self, sigmas: Tensor) -> StepFn:
        """The step of a sampler on a grid."""

    @abstractmethod
    def schedule(self, seeds: Sequence[int], num_steps: int, num_trained: int) -> tuple[Tensor, Tensor]:
        """(steps that draw noise, ``num_trained`` of them that are trained on), both bool [B, num_steps].

        A row depends on its seed alone.
        """

    def check(self, config: Config) -> None:
        """See Objective."""
        name, train, num_steps = config.train.objective, config.train, config.train_stage.num_steps
        if not config.regenerate.enabled:
            drawn = "unquantized" if config.explore.precision == "full" else config.explore.precision
            raise UsageError(
                f"train.objective = {name} weighs samples by their likelihood under the policy, and with "
                f"regenerate.enabled = false it would get explored ones (precision {drawn}, no noise): its gradient "
                "would be biased. Set regenerate.enabled = true, or train.objective to nft, awm or dpo"
            )
        if config.explore.min_fidelity:
            raise UsageError(
                "explore.min_fidelity compares explored samples with redrawn ones, into which "
                f"train.objective = {name} puts noise that no explorer can know: set it to 0"
            )
        if config.regenerate.solver != "euler":
            raise UsageError(
                f"train.objective = {name} draws by its own noisy Euler steps: set regenerate.solver = euler"
            )
        if train.old_from_rollout:
            raise UsageError(
                f"train.objective = {name} needs ratios that are exactly 1 on-policy, and merged weights round "
                "differently: set train.old_from_rollout = false"
            )
        if config.num_train_timesteps > num_steps - 1:
            raise UsageError(
                f"train.objective = {name} trains at most {num_steps - 1} of regenerate.num_steps = {num_steps} steps, "
                f"the last one has no noise: lower train.timestep_fraction ({train.timestep_fraction})"
            )

    def sampler(self, config: Config) -> PathSampler:
        """See Objective."""

        def draw(velocity: VelocityFn, start: Tensor, sigmas: Tensor, seeds: Sequence[int]) -> Trajectory:
            noisy, trained = self.schedule(seeds, len(sigmas) - 1, config.num_train_timesteps)
            return sample_trajectory(
                velocity, start, sigmas, seeds, step=self.step(sigmas), noisy=noisy, trained=trained
            )

        return draw

    def points(self, batch: Batch, config: Config) -> Iterator[Point]:
        """See Objective."""
        assert batch.trajectory is not None
        way, device, clip = batch.trajectory, batch.clean.device, config.train.advantage_clip
        rows, sigmas = torch.arange(len(batch.seeds)), batch.sigmas.double()
        steps = way.trained.nonzero()[:, 1].view(len(rows), -1)  # [B, T]
        for t in range(config.num_train_timesteps):
            here, there = steps[:, t], steps[:, t] + 1
            sigma = sigmas[here].to(device)
            loss = partial(
                trajectory_loss, latents=way.latents[rows, here], following=way.latents[rows, there], sigma=sigma,
                next_sigma=sigmas[there].to(device), drawn_log_prob=way.log_probs[rows, here],
                advantages=batch.advantages.clamp(-clip, clip), step=self.step(batch.sigmas),
                clip_range=self.clip_range,
            )  # fmt: skip
            yield Point(way.latents[rows, here], sigma.float(), loss)


def trajectory_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    latents: Tensor,
    following: Tensor,
    sigma: Tensor,
    next_sigma: Tensor,
    drawn_log_prob: Tensor,
    advantages: Tensor,
    *,
    step: StepFn,
    clip_range: float,
    reference_velocity: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One loss per sample: (policy, kl, |ratio - 1|, whether clipped, |rollout's log-ratio|), [B] float32 each.

    A sample went from ``latents`` at ``sigma`` to ``following`` at ``next_sigma``; ``drawn_log_prob`` [B] is what the
    sampler said. policy = max(-A ratio, -A clamp(ratio)), ratio = exp(log p(following) - log p_old(following)); kl is
    the squared distance of the step's mean from the reference's over twice the sampler's variance.
    """
    now, before = (step(latents, v, sigma, next_sigma) for v in (velocity, old_velocity.detach()))
    old_log_prob = before.log_prob(following)
    policy, ratio = clipped_surrogate(now.log_prob(following) - old_log_prob, advantages, clip_range)
    kl = torch.zeros_like(policy)
    if reference_velocity is not None:
        kl = now.divergence(step(latents, reference_velocity.detach(), sigma, next_sigma).mean)
    error = (ratio.detach() - 1).abs()
    return policy, kl, error, (error > clip_range).float(), (old_log_prob - drawn_log_prob).abs()
