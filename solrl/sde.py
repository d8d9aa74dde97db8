"""Sampling with noise: the steps whose likelihood a policy gradient needs, and the trajectories they make.

A step from sigma to a lower sigma' draws from a Gaussian around a mean that is made of latents and velocity. All three
samplers are Euler's step where their noise level is 0. Coefficients are float64; state, mean and log-probabilities are
float32, whatever the model computes in. The noise of a step comes from the sample's seed, so a trajectory can be drawn
again anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from solrl.flow import per_sample
from solrl.groups import derive_seed, noise
from solrl.types import Trajectory, VelocityFn


@dataclass(frozen=True)
class Transition:
    """The Gaussian that a step draws from."""

    mean: Tensor  # [B, ...] float32
    std: Tensor  # [B] float32
    kl_std: Tensor  # [B] float32: what a distance of two means is measured in
    is_density: bool = True
    """Whether ``log_prob`` is the Gaussian's; else it is the negative squared distance alone."""

    def log_prob(self, following: Tensor) -> Tensor:
        """following [B, ...] -> [B] float32: the log-density, averaged over a sample's dimensions (not summed)."""
        square = (following - self.mean).square().flatten(1).mean(1)
        if not self.is_density:
            return -square
        return -square / (2 * self.std**2) - self.std.log() - 0.5 * math.log(2 * math.pi)

    def divergence(self, other: Tensor) -> Tensor:
        """The mean [B, ...] of another step -> [B]: mean squared distance of the means over 2 ``kl_std`` squared."""
        return (self.mean - other).square().flatten(1).mean(1) / (2 * self.kl_std**2)


StepFn: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Transition]
"""(latents [B, ...], velocity [B, ...], sigma [B] float64, the next sigma [B] float64) -> Transition."""


def flow_sde(
    latents: Tensor, velocity: Tensor, sigma: Tensor, following: Tensor, *, noise_level: float, second_sigma: float
) -> Transition:
    """Flow-GRPO's step (arXiv 2505.05470), s = noise_level sqrt(sigma / (1 - sigma)), dt = sigma' - sigma.

    mean = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt, std = s sqrt(-dt). ``second_sigma``, the
    grid's, stands for sigma in 1 - sigma where sigma is 1. A KL is measured in s, without the sqrt(-dt).
    """
    dt = following - sigma
    s = noise_level * (sigma / (1 - torch.where(sigma == 1, second_sigma, sigma))).sqrt()
    keep = 1 + s**2 / (2 * sigma) * dt
    move = (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return Transition(_mix(latents, keep, velocity, move), (s * (-dt).sqrt()).float(), s.float())


def flow_cps(latents: Tensor, velocity: Tensor, sigma: Tensor, following: Tensor, *, noise_level: float) -> Transition:
    """Flow-GRPO's coefficient-preserving step (arXiv 2509.05952): no more noise at sigma' than sigma' says.

    With x0 = x - sigma v and e = x + (1 - sigma) v: std = sigma' sin(noise_level pi / 2),
    mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) e. As in the source, its log_prob lacks the 1 / (2 std^2).
    """
    std = following * math.sin(noise_level * math.pi / 2)
    clean, fresh = 1 - following, (following**2 - std**2).sqrt()
    mean = _mix(latents, clean + fresh, velocity, (1 - sigma) * fresh - sigma * clean)
    return Transition(mean, std.float(), std.float(), is_density=False)


def dance_sde(latents: Tensor, velocity: Tensor, sigma: Tensor, following: Tensor, *, noise_level: float) -> Transition:
    """DanceGRPO's step (arXiv 2505.07818) with eta = noise_level, dt = sigma' - sigma.

    mean = x + v dt - eta^2 / 2 score dt, score = -(x - (1 - sigma) x0) / sigma^2, std = eta sqrt(-dt).
    """
    dt = following - sigma
    pull = 0.5 * noise_level**2 * dt / sigma**2  # of x - (1 - sigma) x0 = sigma x + (1 - sigma) sigma v
    mean = _mix(latents, 1 + pull * sigma, velocity, dt + pull * (1 - sigma) * sigma)
    std = (noise_level * (-dt).sqrt()).float()
    return Transition(mean, std, std)


def sample_trajectory(
    velocity_fn: VelocityFn,
    start: Tensor,
    sigmas: Tensor,
    seeds: Sequence[int],
    *,
    step: StepFn,
    noisy: Tensor,
    trained: Tensor,
) -> Trajectory:
    """start [B, ...] -> the way to clean latents: ``step`` where ``noisy`` [B, N], and Euler's step elsewhere.

    ``trained`` [B, N] goes into the result as it is. The noise of step i is that of each seed's purpose ``sde/i``.
    """
    latents = start.float()
    states, log_probs = [latents], []
    for i in range(len(sigmas) - 1):
        sigma, following = (torch.full((len(start),), float(s), dtype=torch.float64) for s in sigmas[i : i + 2])
        sigma, following, draws = sigma.to(start.device), following.to(start.device), noisy[:, i].to(start.device)
        velocity = velocity_fn(latents, sigma.float()).float()
        moved = latents + (float(sigmas[i + 1]) - float(sigmas[i])) * velocity
        log_prob = torch.zeros_like(sigma, dtype=torch.float32)
        if noisy[:, i].any():
            transition = step(latents, velocity, sigma, following)
            fresh = noise([derive_seed(seed, f"sde/{i}") for seed in seeds], start.shape[1:]).to(start.device)
            drawn = transition.mean + per_sample(transition.std, fresh) * fresh
            moved = torch.where(per_sample(draws, drawn), drawn, moved)
            log_prob = torch.where(draws, transition.log_prob(moved), log_prob)
        latents = moved
        states.append(latents)
        log_probs.append(log_prob)
    return Trajectory(torch.stack(states, 1), torch.stack(log_probs, 1), trained)


def _mix(latents: Tensor, keep: Tensor, velocity: Tensor, move: Tensor) -> Tensor:
    """keep x + move v, float32; keep and move [B] float64."""
    return per_sample(keep.float(), latents) * latents.float() + per_sample(move.float(), velocity) * velocity.float()
