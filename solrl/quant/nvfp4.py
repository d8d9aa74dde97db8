"""NVFP4 in plain torch: the arithmetic that every NVFP4 back end of solrl is held to, bit for bit.

NVFP4 stores a matrix [M, K] in three parts (K a multiple of 16):

  packed        4-bit E2M1 codes, two a byte, element 2k in the low nibble. A code is sign, two exponent bits, one
                mantissa bit: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}.
  scales        one E4M3 number for each 16 neighbours along K.
  global_scale  one FP32 number for the tensor; value = E2M1 * E4M3 * global_scale.

The tensor's largest magnitude, ``amax``, fixes the global scale (amax / 2688, so that the largest block scale is 448,
E4M3's largest number, and 448 * 6 = 2688). A block's scale maps the block's own largest magnitude to 6. The order of
the roundings is Transformer Engine's, because near-ties depend on it: with enc = min(2688 / amax, FLT_MAX),

    scale = E4M3(block_amax * (enc * (1/6))),   code = E2M1(x * min(1 / (scale * (1/enc)), FLT_MAX)),

round to nearest, ties to the even code, saturating at 6. A block of zeros has scale 0 and comes back as zeros; a tensor
of zeros takes enc = 1. A code keeps the sign of zero; its value does not, since no sum of products depends on it.

``amax`` may be given instead of measured ("static"): then a row's result no longer depends on its neighbours, and a
value above it clips. A static amax may be up to 256 times too large at no cost, since the block scales absorb it; one
that is too small costs accuracy at once.

FP4 has no NaN and no inf, and would swallow them as ordinary numbers. Here they are a ValueError, or, with
``check=False`` (no synchronisation with a device), the block's scale becomes NaN and so does what is computed from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
"""Neighbours along K that share a scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
FLOAT_MAX = torch.finfo(torch.float32).max

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_CHUNK = 131072
"""Elements that `fake_quantize` works on at a time on a CPU: they, their result and a scratch stay in the L2 cache."""


@dataclass(frozen=True)
class NVFP4:
    """A quantized matrix [M, K]."""

    packed: Tensor  # [M, K/2] uint8
    scales: Tensor  # [M, K/16] float8_e4m3fn
    global_scale: Tensor  # [] float32


class BlockCounts(NamedTuple):
    """How well a static amax fits a tensor."""

    blocks: int
    clipped: int
    """Blocks that hold a magnitude above amax (by more than the scale's rounding)."""
    subnormal: int
    """Nonzero blocks whose scale has lost precision: below E4M3's normal range, or zero."""


def quantize(x: Tensor, amax: Tensor | None = None, *, check: bool = True) -> NVFP4:
    """x [M, K] -> codes and scales; ``amax`` [] float32 replaces the measured largest magnitude."""
    _require_blocks(x)
    blocks = x.float().reshape(-1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    if check:
        _require_finite(x, block_amax)
    amax = block_amax.max() if amax is None else amax
    encode = _encode_scale(amax)
    scales = _ideal_scales(block_amax, encode, check).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks * _inverse(scales.float(), encode).unsqueeze(-1))
    return NVFP4(pack(codes.view(x.shape)), scales.view(x.shape[0], -1), amax / (E4M3_MAX * E2M1_MAX))


def dequantize(quantized: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [M, K] that codes and scales stand for."""
    values = decode_e2m1(unpack(quantized.packed)).unflatten(-1, (-1, BLOCK))
    return (values * (quantized.scales.float() * quantized.global_scale).unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize(x: Tensor, amax: Tensor | None = None, *, check: bool = True, out: Tensor | None = None) -> Tensor:
    """``dequantize(quantize(x, amax), x.dtype)`` for x [..., K], bit for bit and several times faster.

    ``out``: flat float32 workspace of at least as many elements; the result lies in it when x is float32.
    """
    _require_blocks(x)
    source = x.float().reshape(-1)
    result = torch.empty_like(source) if out is None else out[: source.numel()]
    is_whole = torch.compiler.is_compiling() or x.device.type != "cpu"
    step = source.numel() if is_whole else min(_CHUNK, source.numel())
    scratch = torch.empty(step, device=x.device)

    # Magnitudes are compared as integers: for nonnegative floats the order is the same (NaN above inf), and faster.
    peaks = torch.empty(source.numel() // BLOCK, dtype=torch.int32, device=x.device)
    for values, peak in zip(_bits(source).split(step), peaks.split(step // BLOCK), strict=True):
        magnitudes = torch.bitwise_and(values, 0x7FFFFFFF, out=_bits(scratch[: values.numel()]))
        torch.amax(_blocks(magnitudes), -1, out=peak)
    block_amax = peaks.view(torch.float32)
    if check:
        _require_finite(x, block_amax)

    amax = block_amax.max() if amax is None else amax
    encode = _encode_scale(amax)
    scales = _round_e4m3(_ideal_scales(block_amax, encode, check))
    inverse = _inverse(scales, encode)
    # What is below 7 rounds to at most 6 by itself: all, unless amax is too small or a block's scale is subnormal.
    is_clamped = is_whole or not float((block_amax * inverse).max()) < 7
    decode = scales.mul_(amax / (E4M3_MAX * E2M1_MAX))
    pieces = [_blocks(part).split(step // BLOCK) for part in (source, result)]
    factors = [part.unsqueeze(-1).split(step // BLOCK) for part in (inverse, decode)]
    for values, target, to_codes, to_values in zip(*pieces, *factors, strict=True):
        torch.mul(values, to_codes, out=target)
        _round_e2m1_(target, _blocks(scratch)[: len(target)], is_clamped)
        target.mul_(to_values)
    return result.view(x.shape).to(x.dtype)


def count_blocks(x: Tensor, amax: Tensor) -> BlockCounts:
    """What quantizing x [..., K] with a static ``amax`` does to its blocks."""
    block_amax = x.float().reshape(-1, BLOCK).abs().amax(-1)
    encode = _encode_scale(amax)
    scales = block_amax * (encode * (1 / E2M1_MAX))
    clipped = scales > E4M3_MAX
    subnormal = (scales.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() < E4M3_MIN_NORMAL) & (block_amax > 0)
    return BlockCounts(block_amax.numel(), int(clipped.sum()), int(subnormal.sum()))


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 -> codes 0..15 in uint8: nearest, ties to the even code, saturating; NaN becomes +-6."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, midpoint in enumerate(_MIDPOINTS):  # the midpoint between codes `lower` and `lower + 1`
        code += (magnitude > midpoint) if lower % 2 == 0 else (magnitude >= midpoint)
    code = torch.where(x.isnan(), torch.full_like(code, 7), code)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: Tensor) -> Tensor:
    """Codes 0..15 -> float32; code 8, minus zero, is 0."""
    table = torch.tensor([*_VALUES, *(0.0 - value for value in _VALUES)], device=code.device)
    return table[code.long()]


def pack(code: Tensor) -> Tensor:
    """Codes [..., K] -> bytes [..., K/2], element 2k in the low nibble."""
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] -> codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scales [M, K/16] -> the flat order that FP4 matrix units read: tiles of 128 rows by 4 scales, 512 bytes each.

    Scale (r, c) of a tile is its byte (r % 32) * 16 + (r // 32) * 4 + c. Missing rows and columns are zeros: whatever
    lies there is read too, and a stray NaN would reach the result.
    """
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e4m3fn)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _encode_scale(amax: Tensor) -> Tensor:
    """[] the factor that maps ``amax`` to 2688; 1 where amax is 0."""
    return ((E4M3_MAX * E2M1_MAX) / amax).clamp_(max=FLOAT_MAX).masked_fill_(amax == 0, 1.0)


def _ideal_scales(block_amax: Tensor, encode: Tensor, is_finite: bool) -> Tensor:
    """Block scales before their rounding to E4M3, at most 448; NaN where the block is not finite."""
    if not is_finite:
        block_amax = block_amax + (block_amax - block_amax)  # inf - inf is NaN
    return (block_amax * (encode * (1 / E2M1_MAX))).clamp_(max=E4M3_MAX)


def _inverse(scales: Tensor, encode: Tensor) -> Tensor:
    """What a block's values are multiplied by before their rounding to E2M1."""
    return (scales * encode.reciprocal()).reciprocal_().clamp_(max=FLOAT_MAX)


def _round_e4m3(x: Tensor) -> Tensor:
    """float32 in [0, 448] -> the nearest E4M3 number, ties to even, as float32.

    Adding and subtracting 1.5 * 2^23 steps rounds to a multiple of the step, which is 2^-3 of x's power of two.
    """
    power = (_bits(x) & 0x7F800000).view(torch.float32).clamp_(min=E4M3_MIN_NORMAL)
    return x.add(power, alpha=1.5 * 2.0**20).sub_(power, alpha=1.5 * 2.0**20)


def _round_e2m1_(x: Tensor, scratch: Tensor, is_clamped: bool) -> None:
    """Round x to E2M1 in place: nearest, ties to the even code; saturating at 6 if ``is_clamped``. Zero becomes +0.

    The step is half of x's power of two, and 0.5 below 1. Adding and subtracting 1.5 * 2^23 steps rounds to it.
    """
    if is_clamped:
        x.clamp_(-E2M1_MAX, E2M1_MAX)
    torch.bitwise_and(_bits(x), 0x7F800000, out=_bits(scratch))
    scratch.clamp_(min=1.0)
    x.add_(scratch, alpha=1.5 * 2.0**22).sub_(scratch, alpha=1.5 * 2.0**22)


def _require_blocks(x: Tensor) -> None:
    if x.numel() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 needs rows of a multiple of {BLOCK} elements, got shape {list(x.shape)}")


def _require_finite(x: Tensor, block_amax: Tensor) -> None:
    if not math.isfinite(block_amax.max()):
        bad = (~x.isfinite()).nonzero()
        where = f"first at {bad[0].tolist()}" if len(bad) else "too large for float32"
        raise ValueError(f"NVFP4 input of shape {list(x.shape)} holds {len(bad)} non-finite values, {where}")
