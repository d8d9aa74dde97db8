"""Proof that quantized layers compute what they say, made at the start of every run and by `solrl doctor`.

For each layer a kernel's result is compared with two products in float64: that of the numbers its quantized operands
stand for, which it must meet to rounding, and that of the unquantized ones, whose distance is the format's fingerprint.
For normally distributed numbers that distance is about 0.135 in NVFP4, 0.037 in FP8, 0.003 in bfloat16: far enough
apart that none can pass for another. The bytes that the quantizer makes are compared with the reference arithmetic, and
the stored weight with the one it should be. On a GPU the kernels that ran are counted by name as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.quant.linear import Quantized, QuantLinear, SharedInput

KERNEL_ERROR = 1e-2
"""Largest relative distance of a kernel's result from the product of its operands' values."""
FINGERPRINTS = {"nvfp4": (0.08, 0.2), "fp8": (0.02, 0.06)}
"""Relative distance from the unquantized product, for normally distributed inputs and weights."""
FULL_ERROR = 0.01
"""Below it a product is one in bfloat16 or more."""
ROWS = 160
"""Rows of the test inputs: more than one tile of 128 scales, and not a multiple of it."""
BIAS_ROUNDING = 2.0**-8
"""A result in bfloat16 is rounded at the size of the bias, too."""


@dataclass(frozen=True)
class LayerProof:
    """What was measured for one layer."""

    name: str
    number_format: str
    kernel: str
    shape: tuple[int, int]  # (out, in)
    kernel_error: float
    """Distance from the product of the operands' values."""
    format_error: float
    """Distance from the unquantized product."""


@dataclass(frozen=True)
class Proof:
    """What was proved about all quantized layers of a tree, for environment.json."""

    num_layers: int
    kernels: dict[str, int]  # "format: kernel" -> layers
    kernel_error: float  # the largest
    format_error: dict[str, tuple[float, float]]  # format -> (smallest, largest) over layers with their own weights
    fingerprint: dict[str, tuple[float, float]]  # format -> (smallest, largest) over shapes, normal weights

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class KernelTime(NamedTuple):
    """One kind of GPU kernel in a profile."""

    name: str
    calls: int
    microseconds: float


def prove(layers: Iterable[tuple[QuantLinear, Tensor]]) -> Proof:
    """Prove each layer with the weight [out, in] it should hold, and a layer with normal weights for each shape.

    Raises a SolrlError that names the first layer that is not what it says.
    """
    found: list[LayerProof] = []
    fresh: dict[tuple[type[QuantLinear], tuple[int, int]], LayerProof] = {}
    for layer, weight in layers:
        kind = (type(layer), (layer.out_features, layer.in_features))
        if kind not in fresh:
            fresh[kind] = prove_kind(layer, name=layer.name)
        found.append(prove_layer(layer, weight))
    kernels: dict[str, int] = {}
    for proof in found:
        key = f"{proof.number_format}: {proof.kernel}"
        kernels[key] = kernels.get(key, 0) + 1
    return Proof(
        len(found),
        kernels,
        _rounded(max((proof.kernel_error for proof in found), default=0.0)),
        _ranges(found),
        _ranges(fresh.values()),
    )


def prove_kind(like: QuantLinear, *, name: str) -> LayerProof:
    """A layer as ``like`` but with normally distributed weight and bias has its format's fingerprint."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(like.out_features, like.in_features, generator=generator).to(like.act_amax.device, like.dtype)
    bias = torch.randn(like.out_features, generator=generator).to(weight)
    layer = type(like)(
        weight, bias, dtype=like.dtype, name=name, shared=SharedInput(), is_dynamic=like.is_dynamic,
        is_convolution=like.is_convolution,
    )  # fmt: skip
    if layer.needs_calibration:
        layer.set_act_amax_(64.0)
    check_bytes(layer, weight.float().cpu())
    proof = prove_layer(layer, weight.float())
    lower, upper = FINGERPRINTS[layer.number_format]
    if not lower <= proof.format_error <= upper:
        raise _failure(layer, f"its error on normal numbers is {proof.format_error:.3f}, not {lower} to {upper}")
    return proof


@torch.no_grad()
def prove_layer(layer: QuantLinear, weight: Tensor) -> LayerProof:
    """The layer holds ``weight`` [out, in] float32 as its format allows, and its kernel multiplies by it."""
    check_weight(layer, weight)
    check_bytes(layer, weight)
    x = _test_input(layer)
    scale_of = layer.quantized_input(x)
    operand = tuple(part.clone() for part in scale_of.operand)  # a workspace is used again
    quantized = Quantized(operand, scale_of.scale)
    for part, expected in zip(operand, layer.reference_input(x, quantized.scale), strict=True):
        _require_equal(layer, "input", part, expected)
    y = (layer(x[:, :, None, None])[..., 0, 0] if layer.is_convolution else layer(x)).double()
    bias = torch.zeros((), device=x.device) if layer.bias is None else layer.bias
    y = y - bias.double()
    meant = layer.input_values(quantized).double() @ layer.weight_values().double().t()
    plain = x.double() @ weight.double().t()
    size, allowed = float(meant.norm()), KERNEL_ERROR
    if size == 0:  # a weight of zeros, as layers have that a training run began with
        if bool(y.abs().max() > BIAS_ROUNDING * bias.abs().max()):
            raise _failure(layer, "its weight is zero and its result is not its bias")
        return _layer_proof(layer, 0.0, 0.0)
    allowed += BIAS_ROUNDING * float(bias.double().norm()) * (ROWS if bias.dim() else 1) ** 0.5 / size
    kernel_error, format_error = float((y - meant).norm()) / size, float((y - plain).norm() / plain.norm())
    if not kernel_error <= allowed:
        raise _failure(layer, _diagnosis(layer, y, meant, kernel_error, format_error))
    if format_error < FINGERPRINTS[layer.number_format][0]:
        raise _failure(layer, _diagnosis(layer, y, meant, kernel_error, format_error))
    return _layer_proof(layer, kernel_error, format_error)


def check_weight(layer: QuantLinear, weight: Tensor) -> None:
    """What is stored stands for ``weight`` as exactly as the format allows."""
    values = layer.weight_values()
    bad = int((~values.isfinite()).sum())
    if bad:
        raise _failure(layer, f"{bad} of the {values.numel()} numbers its stored weight stands for are not finite")
    allowed, _ = layer.rounding()
    wrong = int(((values - weight).abs() > allowed).sum())
    if wrong:
        raise _failure(
            layer,
            f"{wrong} of its {values.numel()} weights are not those it should hold: stale, misplaced or misscaled",
        )


def check_bytes(layer: QuantLinear, weight: Tensor) -> None:
    """What is stored is what the layer's arithmetic makes of ``weight``, there where ``weight`` is, bit for bit."""
    reference = layer.encode(weight)
    for name, part in zip(("qweight", "scales", "global_scale"), layer.stored(), strict=True):
        _require_equal(layer, f"weight ({name})", part, reference[name].to(part.device))


def count_products(kernels: Sequence[KernelTime]) -> dict[str, tuple[int, float]]:
    """Format -> (matrix products whose name says that they ran in it, their share of the time of all kernels)."""
    total = sum(kernel.microseconds for kernel in kernels)
    counts: dict[str, tuple[int, float]] = {"nvfp4": (0, 0.0), "fp8": (0, 0.0)}
    for kernel in kernels:
        number_format = product_format(kernel.name)
        if number_format:
            calls, share = counts[number_format]
            counts[number_format] = (calls + kernel.calls, share + kernel.microseconds / total)
    return counts


def product_format(name: str) -> str | None:
    """The format that a GPU kernel's name says it multiplies matrices in: "nvfp4", "fp8" or None.

    cuBLASLt's nvjet kernels spell their operand types: oo for E2M1 (with 16-element UE4M3 scales), qq for E4M3.
    CUTLASS and older cuBLAS kernels name the types.
    """
    low = name.lower()
    if re.search(r"nvjet(_sm\d+)?_oo|vec16ue4m3", low):
        return "nvfp4"
    if re.search(r"nvjet(_sm\d+)?_qq", low):
        return None if re.search(r"vec\d+u", low) else "fp8"  # block scales: MXFP8, which is not ours
    if "gemm" in low or "cutlass" in low:
        if re.search(r"e2m1|ue4m3xf4", low):
            return "nvfp4"
        if re.search(r"(?<!u)e4m3", low):
            return "fp8"
    return None


def check_products(kernels: Sequence[KernelTime], expected: dict[str, int]) -> dict[str, Any]:
    """``count_products`` as JSON, checked: as many products in each format as ``expected``."""
    counts = count_products(kernels)
    for number_format, number in expected.items():
        calls = counts[number_format][0]
        if calls != number:
            dearest = sorted(kernels, key=lambda kernel: -kernel.microseconds)[:3]
            raise SolrlError(
                f"the explorer ran {calls} {number_format.upper()} matrix products, its layers asked for {number}; "
                f"the dearest kernels were {', '.join(kernel.name[:60] for kernel in dearest)}; "
                "use explore.precision = full and report these names"
            )
    return {
        number_format: {"products": calls, "share_of_gpu_time": round(share, 2)}
        for number_format, (calls, share) in counts.items()
        if calls
    }


def profile(run: Callable[[], object]) -> list[KernelTime]:
    """The GPU kernels that ``run`` launched."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    return [
        KernelTime(event.key, event.count, event.self_device_time_total)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]


def _test_input(layer: QuantLinear) -> Tensor:
    """Normal numbers [ROWS, in]; for a static amax as far below it as calibration leaves room."""
    x = torch.randn(ROWS, layer.in_features, generator=torch.Generator().manual_seed(2))
    if layer.needs_calibration:
        x *= float(layer.act_amax) / 64
    return x.to(layer.act_amax.device, layer.dtype)


def _require_equal(layer: QuantLinear, what: str, found: Tensor, expected: Tensor) -> None:
    one, other = (part.contiguous().reshape(-1).view(torch.uint8) for part in (found, expected))
    if one.shape != other.shape:
        raise _failure(layer, f"its quantized {what} has {len(one)} bytes, the reference {len(other)}")
    wrong = int((one != other).sum())
    if not wrong:
        return
    reason = f"{wrong} of {len(one)} bytes of its quantized {what} differ from the reference"
    if layer.number_format == "nvfp4" and torch.equal((one >> 4) | (one << 4), other):
        reason += ": the nibbles are swapped"
    elif torch.equal(one.sort().values, other.sort().values):
        reason += ": they are the right ones in the wrong order"
    raise _failure(layer, reason)


def _diagnosis(layer: QuantLinear, y: Tensor, meant: Tensor, kernel_error: float, format_error: float) -> str:
    name = layer.number_format.upper()
    if not y.isfinite().all():
        return f"{layer.kernel} gave {int((~y.isfinite()).sum())} numbers that are not finite for finite operands"
    if format_error < FULL_ERROR:
        return (
            f"it computes in full precision, not in {name}: its error is {format_error:.4f}, {name}'s at least "
            f"{FINGERPRINTS[layer.number_format][0]}"
        )
    lower, upper = FINGERPRINTS["fp8"]
    if layer.number_format == "nvfp4" and lower <= format_error <= upper:
        return f"it computes in FP8, not in NVFP4: its error is {format_error:.3f}"
    factor = float((y * meant).sum() / meant.square().sum())
    if float((y - factor * meant).norm() / meant.norm()) <= KERNEL_ERROR * max(abs(factor), 1):
        return f"a scale is wrong: {layer.kernel} gave {factor:.4g} times the product of its operands"
    return (
        f"{layer.kernel} is {kernel_error:.3f} away from the product of its operands (at most {KERNEL_ERROR}): it "
        "reads codes or scales in another order than they are stored in"
    )


def _failure(layer: QuantLinear, reason: str) -> SolrlError:
    return SolrlError(f"{layer.name or 'a test layer'} is not proved to run in {layer.number_format.upper()}: {reason}")


def _layer_proof(layer: QuantLinear, kernel_error: float, format_error: float) -> LayerProof:
    shape = (layer.out_features, layer.in_features)
    return LayerProof(layer.name, layer.number_format, layer.kernel, shape, kernel_error, format_error)


def _ranges(proofs: Iterable[LayerProof]) -> dict[str, tuple[float, float]]:
    errors: dict[str, list[float]] = {}
    for proof in proofs:
        errors.setdefault(proof.number_format, []).append(proof.format_error)
    return {name: (_rounded(min(found)), _rounded(max(found))) for name, found in errors.items()}


def _rounded(x: float) -> float:
    return float(f"{x:.2g}")
