"""Deterministic samplers over explicit sigmas: Euler and DPM-Solver++(2M), one velocity evaluation a step.

The state between two steps is (latents, previous clean prediction, step index), all that is needed to move a
trajectory elsewhere. Coefficients are float64, the state float32, whatever the model computes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from solrl.types import UsageError, VelocityFn

SOLVERS = ("euler", "dpm2")


@dataclass(frozen=True)
class SamplerState:
    """A trajectory after ``step`` steps."""

    latents: Tensor  # [B, ...] float32
    previous_clean: Tensor | None  # [B, ...] float32; None before the first step and for euler
    step: int


def sample(velocity_fn: VelocityFn, noise: Tensor, sigmas: Tensor, solver: str = "euler") -> Tensor:
    """noise [B, ...] -> clean latents [B, ...], float32, after len(sigmas) - 1 steps."""
    state = SamplerState(noise.float(), None, 0)
    for _ in range(len(sigmas) - 1):
        state = advance(velocity_fn, state, sigmas, solver)
    return state.latents


def advance(velocity_fn: VelocityFn, state: SamplerState, sigmas: Tensor, solver: str = "euler") -> SamplerState:
    """The state one step later. Raises ValueError for an unknown solver."""
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver}")
    latents, step = state.latents, state.step
    sigma = float(sigmas[step])
    velocity = velocity_fn(latents, torch.full((len(latents),), sigma, device=latents.device)).float()
    if solver == "euler":
        return SamplerState(latents + (float(sigmas[step + 1]) - sigma) * velocity, None, step + 1)
    keep, now, before = dpm2_coefficients(sigmas)[step]
    clean = latents - sigma * velocity
    latents = keep * latents + now * clean
    if before:
        assert state.previous_clean is not None
        latents = latents + before * state.previous_clean
    return SamplerState(latents, clean, step + 1)


def check_grid(sigmas: Tensor, solver: str, section: str = "") -> None:
    """UsageError where ``solver`` cannot step through ``sigmas``; ``section`` is that of the settings, "explore." say.

    dpm2 divides by the distance of neighbours, and SANA's grid, rounded to bfloat16, has equal ones from 258 steps on.
    """
    if solver == "dpm2" and not bool((sigmas.diff() < 0).all()):
        raise UsageError(
            f"{section}num_steps = {len(sigmas) - 1} is too fine for this model: neighbouring sigmas are equal, and "
            f"{section}solver = dpm2 divides by their distance; lower it, or set {section}solver = euler"
        )


def dpm2_coefficients(sigmas: Tensor) -> list[tuple[float, float, float]]:
    """Per step (a, b0, b1) of x <- a x + b0 m0 + b1 m1, m0 and m1 the current and previous clean predictions.

    DPM-Solver++(2M) in data prediction (Lu et al. 2022, Algorithm 2) with alpha = 1 - sigma: x <- (s'/s) x +
    (1 - s'/s) [m0 + (h/h0)/2 (m0 - m1)], lambda = log((1 - s)/s). First order in step 0, in step 1 (lambda(1) is
    minus infinity, so h/h0 = 0) and in the last step (s' = 0 gives x = m0).
    """
    check_grid(sigmas, "dpm2")
    s = [float(x) for x in sigmas]
    rows = []
    for i in range(len(s) - 1):
        ratio = s[i + 1] / s[i]
        extrapolation = 0.0
        if i >= 1 and s[i - 1] < 1 and s[i + 1] > 0:
            extrapolation = 0.5 * (_lambda(s[i + 1]) - _lambda(s[i])) / (_lambda(s[i]) - _lambda(s[i - 1]))
        rows.append((ratio, (1 - ratio) * (1 + extrapolation), -(1 - ratio) * extrapolation))
    return rows


def _lambda(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)
