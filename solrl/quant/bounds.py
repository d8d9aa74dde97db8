"""How much faster a quantized explorer can make sampling at most: a bound from counted operations, not a promise.

It takes for granted that a product of matrices runs 4 times as fast in NVFP4 and twice as fast in FP8 as in the
policy's precision, that everything else takes time in proportion to its floating-point operations, and that quantizing
inputs costs nothing. Decoding and scoring are part of sampling and gain nothing; what a reward computes outside of
torch is not counted. All of this makes the true gain smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from solrl.config import StageConfig
from solrl.quant.layers import LayerFormat, counting_rows, quantized_share

SPEEDS = {"nvfp4": 4.0, "fp8": 2.0}
"""How many times as fast as the policy's precision a product in a format is taken to be."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one sample."""

    velocity: float  # one denoising step
    quantized: Mapping[str, float]  # format -> the part of a step that is quantized
    linear_share: float  # quantized share of the linear layers' part
    decode: float
    score: float


@dataclass(frozen=True)
class Bounds:
    """Speed of sampling with the quantized explorer over speed with a full-precision one, same numbers of steps."""

    step: float  # one denoising step
    rollout: float  # explore and regenerate, decoding and scoring included


def measure_work(
    transformer: nn.Module,
    plan: Sequence[LayerFormat],
    *,
    velocity: Callable[[], object],
    decode: Callable[[], object],
    score: Callable[[], object],
) -> Work:
    """Count what each function computes for one sample; ``velocity`` runs ``transformer`` unquantized, once."""
    rows: dict[str, int] = {}
    with counting_rows(transformer, rows):
        step = _operations(velocity)
    quantized: dict[str, float] = {}
    for layer in plan:
        if layer.format != "full":
            work = 2.0 * rows.get(layer.name, 0) * layer.shape[0] * layer.shape[1]
            quantized[layer.format] = quantized.get(layer.format, 0.0) + work
    return Work(step, quantized, quantized_share(plan, rows), _operations(decode), _operations(score))


def speed_bounds(explored: Work, redrawn: Work, explore: StageConfig, regenerate: StageConfig) -> Bounds:
    """What the explorer can gain at most in a run with these two stages, by the work of a sample of each."""
    full = explored.velocity
    quantized = full - sum(part * (1 - 1 / SPEEDS[name]) for name, part in explored.quantized.items())
    whole = regenerate.num_steps * redrawn.velocity + redrawn.decode + redrawn.score
    kept = regenerate.group_size * whole if regenerate.enabled else 0.0
    rest = explored.decode + explored.score
    before, after = (explore.group_size * (explore.num_steps * step + rest) + kept for step in (full, quantized))
    return Bounds(full / quantized, before / after)


def _operations(run: Callable[[], object]) -> float:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), _countable_attention():
        run()
    return float(counter.get_total_flops())


def _countable_attention() -> AbstractContextManager[object]:
    """The fused attention of CPUs is not counted, its parts are."""
    return nullcontext() if torch.cuda.is_available() else sdpa_kernel(SDPBackend.MATH)
