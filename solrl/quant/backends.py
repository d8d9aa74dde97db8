"""Which number format the explorer runs in on this machine, by which kernel, and why.

``auto`` takes the cheapest format that the machine computes natively and has just computed right: NVFP4, else FP8, else
full precision. Nothing that is asked for by name is ever replaced by something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from solrl.config import ExploreConfig
from solrl.errors import SolrlError, UsageError
from solrl.quant.bounds import SPEEDS, Bounds
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.linear import QuantLinear, SharedInput
from solrl.quant.native import NativeLinear
from solrl.quant.proof import LayerProof, prove_kind
from solrl.quant.te import TELinear

Precision: TypeAlias = Literal["full", "fp8", "nvfp4", "emulated_nvfp4"]

FP4_CAPABILITY = (10, 0)
FP8_CAPABILITY = (8, 9)
CPU_REASON = "a CPU gains nothing from FP8 or FP4; emulated_nvfp4 would cost up to 1.5 times as much a step"
TRIED_SHAPE = (384, 256)
"""(out, in) of the layer that a back end is tried with."""


@dataclass(frozen=True)
class Backend:
    """What the explorer computes with."""

    precision: Precision
    layers: Mapping[str, type[QuantLinear]] = field(default_factory=dict)
    """The layer for each number format that its rules may name; empty for full precision."""
    reason: str = ""
    """Why ``auto`` took nothing cheaper; empty where it was not asked."""

    @property
    def number_format(self) -> Literal["fp8", "nvfp4"] | None:
        """What the rules' "auto" stands for."""
        if self.precision == "full":
            return None
        return "fp8" if self.precision == "fp8" else "nvfp4"


FULL = Backend("full")
EMULATED = Backend("emulated_nvfp4", {"nvfp4": EmulatedLinear, "fp8": Fp8Linear})
FP8 = Backend("fp8", {"fp8": Fp8Linear})


def choose_backend(explore: ExploreConfig, device: torch.device) -> Backend:
    """What ``explore.precision`` and ``explore.backend`` mean on ``device``; UsageError for what cannot run there."""
    if explore.backend != "auto" and explore.precision != "nvfp4":
        raise UsageError(f"explore.backend = {explore.backend} is for explore.precision = nvfp4 only")
    if explore.precision == "full":
        return FULL
    if explore.precision == "emulated_nvfp4":
        return EMULATED
    fp8 = fp8_layer(device)
    if explore.precision == "fp8":
        if isinstance(fp8, str):
            raise UsageError(f"explore.precision = fp8 cannot run here: {fp8}; use full, or auto for what can")
        return Backend("fp8", {"fp8": fp8})
    nvfp4 = nvfp4_layer(device, explore.backend)
    if not isinstance(nvfp4, str):
        also = {} if isinstance(fp8, str) else {"fp8": fp8}
        return Backend("nvfp4", {"nvfp4": nvfp4} | also)
    if explore.precision == "nvfp4":
        works = "full" if isinstance(fp8, str) else "fp8 or full"
        raise UsageError(
            f"explore.precision = nvfp4 cannot run here: {nvfp4}; what can: {works}, or emulated_nvfp4 for its numbers "
            "without its speed"
        )
    if device.type == "cpu":
        return Backend("full", reason=CPU_REASON)
    if isinstance(fp8, str):
        return Backend("full", reason=f"no NVFP4 ({nvfp4}), no FP8 ({fp8})")
    return Backend("fp8", {"fp8": fp8}, reason=f"no NVFP4: {nvfp4}")


def describe(backend: Backend, num_steps: int, linear_share: float = 0.0, bounds: Bounds | None = None) -> str:
    """One line for the user: format, kernel, quantized share of the linear layers' work, bound of the gain, and why."""
    why = f" (auto: {backend.reason})" if backend.reason else ""
    if backend.number_format is None or bounds is None:
        return f"full precision, {num_steps} steps{why}"
    layer = backend.layers[backend.number_format]
    share = f"{linear_share:.0%} of the linear layers' work"
    if backend.precision == "emulated_nvfp4":
        return (
            f"emulated NVFP4 ({layer.kernel}), {num_steps} steps, {share}: FP4's numbers at up to 1.5 times the cost "
            "of full precision; for studying fidelity, not for speed"
        )
    name, speed = backend.precision.upper(), SPEEDS[backend.number_format]
    return (
        f"{name} ({layer.kernel}), {num_steps} steps, {share}; if {name} products take 1/{speed:.0f} of the time, at "
        f"most {bounds.step:.2f}x a step, {bounds.rollout:.2f}x explore + regenerate with decode and scoring{why}"
    )


def nvfp4_layer(device: torch.device, backend: str = "auto") -> type[QuantLinear] | str:
    """The layer that computes NVFP4 on ``device``, or why there is none."""
    lacking = _lacking("FP4", FP4_CAPABILITY, device)
    return lacking or _first_that_runs([TELinear if backend == "te" else NativeLinear], device)


def fp8_layer(device: torch.device) -> type[QuantLinear] | str:
    """The layer that computes FP8 on ``device``, or why there is none."""
    lacking = None if device.type == "cpu" else _lacking("FP8", FP8_CAPABILITY, device)
    return lacking or _first_that_runs([Fp8Linear, Fp8TensorLinear], device)


def _lacking(name: str, capability: tuple[int, int], device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{name} needs an NVIDIA GPU of compute capability {capability[0]}.{capability[1]}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, {name} needs "
            f"{capability[0]}.{capability[1]}"
        )
    return None


def try_layer(kind: type[QuantLinear], device: torch.device) -> LayerProof:
    """Prove a layer of ``kind`` on ``device``; SolrlError, or what its kernel raises, where it is not right."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    like = torch.ones(TRIED_SHAPE, dtype=dtype, device=device)
    return prove_kind(kind(like, None, dtype=dtype, shared=SharedInput()), name=f"a layer of {kind.kernel}")


def _first_that_runs(kinds: list[type[QuantLinear]], device: torch.device) -> type[QuantLinear] | str:
    """The first layer that is proved here, or why the last one is not."""
    refusal = ""
    for kind in kinds:
        try:
            try_layer(kind, device)
        except (RuntimeError, ValueError, NotImplementedError, SolrlError) as error:
            refusal = f"{kind.kernel}: {str(error).strip().splitlines()[0]}"
        else:
            return kind
    return refusal
