"""Flow-matching conventions and sigma grids.

x_sigma = (1 - sigma) clean + sigma noise, velocity = noise - clean, so clean = x_sigma - sigma velocity. sigma is in
[0, 1], 1 = noise. Grids are float64, fall from 1 and end with 0; the dtype of latents never rounds them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """clean, noise [B, ...], sigma [B] -> (1 - sigma) clean + sigma noise."""
    sigma = per_sample(sigma, clean)
    return (1 - sigma) * clean + sigma * noise


def clean_from_velocity(latents: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """latents, velocity [B, ...], sigma [B] -> the clean latents this velocity points to."""
    return latents - per_sample(sigma, latents) * velocity


def block_means(noise: Tensor, factor: int) -> Tensor:
    """Standard normal noise [B, C, H, W] -> [B, C, H / factor, W / factor], standard normal too: means, scaled."""
    return factor * torch.nn.functional.avg_pool2d(noise, factor)


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...], broadcastable against ``like`` [B, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> Tensor:
    """[num_steps + 1]: linspace(1, 1/num_steps) under sigma -> shift sigma / (1 + (shift - 1) sigma), then 0."""
    return _closed(_shift(torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64), shift))


def flux_sigmas(num_steps: int, num_tokens: int) -> Tensor:
    """FLUX's resolution-dependent grid [num_steps + 1].

    sigma' = e^mu / (e^mu + 1/sigma - 1) over linspace(1, 1/num_steps), mu linear in the number of image tokens through
    (256, 0.5) and (4096, 1.15): mu = 0.63 at 512 x 512 pixels (1024 tokens).
    """
    mu = 0.5 + (1.15 - 0.5) * (num_tokens - 256) / (4096 - 256)
    return shifted_sigmas(num_steps, math.exp(mu))


def sd3_sigmas(num_steps: int, shift: float = 3.0) -> Tensor:
    """SD3.5's grid [num_steps + 1] as the diffusers scheduler makes it: the shift is applied twice.

    The training grid's smallest sigma, shift(1/1000), is the end of a linspace from 1 that is shifted again; the last
    sigma before 0 is therefore 0.0089.
    """
    smallest = float(_shift(torch.tensor(1 / 1000, dtype=torch.float64), shift))
    return _closed(_shift(torch.linspace(1, smallest, num_steps, dtype=torch.float64), shift))


def sana_sigmas(num_steps: int) -> Tensor:
    """SANA's unshifted grid [num_steps + 1], rounded to bfloat16 as the reference draws it."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64).bfloat16().double()


def _shift(sigmas: Tensor, shift: float) -> Tensor:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _closed(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])
