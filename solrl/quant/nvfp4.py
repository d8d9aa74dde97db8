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
from collections.abc import Sequence
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
"""Elements that `fake_quantize` works on at a time: they, their result and a scratch stay in a core's L2 cache."""


@dataclass(frozen=True)
class NVFP4:
    """A quantized matrix [M, K]."""

    packed: Tensor  # [M, K/2] uint8
    scales: Tensor  # [M, K/16] float8_e4m3fn
    global_scale: Tensor  # [] float32


class TensorScale(NamedTuple):
    """What follows from a tensor's amax, in the terms of the formula above."""

    sixth: Tensor  # [] enc * (1/6)
    decode: Tensor  # [] 1/enc
    global_scale: Tensor  # [] amax / 2688


class BlockCounts(NamedTuple):
    """How well a static amax fits a tensor."""

    blocks: int
    clipped: int
    """Blocks that hold a magnitude above amax (by more than the scale's rounding)."""
    subnormal: int
    """Nonzero blocks whose scale has lost precision: below E4M3's normal range, or zero."""


def tensor_scale(amax: Tensor) -> TensorScale:
    """The scales of a tensor with largest magnitude ``amax`` [] float32."""
    largest = torch.full_like(amax, E4M3_MAX * E2M1_MAX)  # a Python number would turn division into multiplication
    encode = torch.where(amax == 0, 1.0, (largest / amax).clamp(max=FLOAT_MAX))
    return TensorScale(encode * (1 / E2M1_MAX), encode.reciprocal(), amax / largest)


def quantize(x: Tensor, amax: Tensor | TensorScale | None = None, *, check: bool = True) -> NVFP4:
    """x [M, K] -> codes and scales; ``amax`` [] float32 replaces the measured largest magnitude."""
    _require_blocks(x)
    blocks = x.float().reshape(-1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    if check:
        _require_finite(x, block_amax)
    block_amax = block_amax + (block_amax - block_amax)  # inf - inf is NaN
    scale = _scale(amax, block_amax)
    scales = (block_amax * scale.sixth).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = (scales.float() * scale.decode).reciprocal().clamp(max=FLOAT_MAX)
    codes = encode_e2m1(blocks * inverse.unsqueeze(-1))
    return NVFP4(pack(codes.view(x.shape)), scales.view(x.shape[0], -1), scale.global_scale)


def dequantize(quantized: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [M, K] that codes and scales stand for."""
    values = decode_e2m1(unpack(quantized.packed)).unflatten(-1, (-1, BLOCK))
    return (values * (quantized.scales.float() * quantized.global_scale).unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize(
    x: Tensor, amax: Tensor | TensorScale | None = None, *, check: bool = True, workspace: Workspace | None = None
) -> Tensor:
    """``dequantize(quantize(x, amax), x.dtype)`` for x [..., K], bit for bit; on a CPU several times faster.

    With a ``workspace`` of x's size the result lies in it, until its next use, when x is float32.
    """
    _require_blocks(x)
    if torch.compiler.is_compiling() or x.device.type != "cpu" or not check:
        rows = x.reshape(-1, x.shape[-1])
        return dequantize(quantize(rows, amax, check=check), x.dtype).view(x.shape)
    work = workspace or Workspace(x.numel())
    source = x.float().reshape(-1)
    work.measure(source)
    scale = _scale(amax, work.block_amax)
    if not work.compute_scales(scale):
        _require_finite(x, work.block_amax)
    work.round(source)
    return work.result.view(x.shape).to(x.dtype)


class Workspace:
    """Memory of `fake_quantize` for inputs of one size, to be used again and again, and its three passes.

    Operations are few and their views are made once, because a tensor operation costs as much as thousands of elements
    of arithmetic; elementwise passes go chunk by chunk, because memory costs more than arithmetic.
    """

    def __init__(self, numel: int, memory: Tensor | None = None) -> None:
        """``memory``: flat float32, at least ``room(numel)`` long; several workspaces may take turns in it."""
        memory = torch.empty(self.room(numel)) if memory is None else memory
        blocks, self.step = numel // BLOCK, min(_CHUNK, numel)
        sizes = [numel, self.step, blocks, blocks, blocks, blocks]
        parts = memory[: sum(sizes)].split(sizes)
        self.result, scratch, self.block_amax, self.scales, self.inverse, self.power = parts
        self._peaks = _chunks(_bits(self.block_amax), self.step // BLOCK)
        self._targets = _chunks(_blocks(self.result), self.step // BLOCK)
        self._to_codes = _chunks(self.inverse.unsqueeze(-1), self.step // BLOCK)
        self._to_values = _chunks(self.scales.unsqueeze(-1), self.step // BLOCK)
        self._scratch = [_blocks(scratch)[: len(target)] for target in self._targets]
        self._is_clamped = True

    @staticmethod
    def room(numel: int) -> int:
        """How many floats a workspace takes."""
        return numel + min(_CHUNK, numel) + 4 * (numel // BLOCK)

    def measure(self, source: Tensor) -> None:
        """``block_amax`` holds each block's largest magnitude (NaN above inf).

        Magnitudes are compared as integers: for nonnegative floats the order is the same, and it is faster.
        """
        pieces = _chunks(_blocks(_bits(source)), self.step // BLOCK)
        for values, scratch, peaks in zip(pieces, self._scratch, self._peaks, strict=True):
            magnitudes = torch.bitwise_and(values, 0x7FFFFFFF, out=_bits(scratch))
            torch.amax(magnitudes, -1, out=peaks)

    def compute_scales(self, scale: TensorScale) -> bool:
        """The factors to codes and back; False if the input may hold something that is not finite."""
        torch.mul(self.block_amax, scale.sixth, out=self.scales).clamp_(max=E4M3_MAX)
        _round(self.scales, self.power, E4M3_MIN_NORMAL, 3)
        torch.mul(self.scales, scale.decode, out=self.inverse).reciprocal_().clamp_(max=FLOAT_MAX)
        largest = float(torch.mul(self.block_amax, self.inverse, out=self.power).max())
        self.scales.mul_(scale.global_scale)
        # What is below 7 rounds to at most 6 by itself: all, unless amax is too small or a block's scale is subnormal.
        self._is_clamped = not largest < 7
        return math.isfinite(largest)

    def round(self, source: Tensor) -> None:
        """``result`` holds the quantized values."""
        pieces = _chunks(_blocks(source), self.step // BLOCK)
        chunks = zip(pieces, self._targets, self._to_codes, self._to_values, self._scratch, strict=True)
        for values, target, to_codes, to_values, scratch in chunks:
            torch.mul(values, to_codes, out=target)
            if self._is_clamped:
                target.clamp_(-E2M1_MAX, E2M1_MAX)
            _round(target, scratch, 1.0, 1)
            target.mul_(to_values)


def count_blocks(x: Tensor, amax: Tensor) -> BlockCounts:
    """What quantizing x [..., K] with a static ``amax`` does to its blocks."""
    block_amax = x.float().reshape(-1, BLOCK).abs().amax(-1)
    ideal = block_amax * tensor_scale(amax).sixth
    scales = ideal.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    subnormal = (scales < E4M3_MIN_NORMAL) & (block_amax > 0)
    return BlockCounts(block_amax.numel(), int((ideal > E4M3_MAX).sum()), int(subnormal.sum()))


def weight_rounding(quantized: NVFP4) -> tuple[Tensor, Tensor]:
    """(largest error that quantizing can have made, widest gap between values that can be stored), [M, K] each.

    Half the widest gap, of E2M1's 4 and 6, is one block scale (the rounding of that scale and of the result adds a
    little); where block scales are subnormal, their own rounding (at most 2^-10) times the largest code, 6.
    """
    scales = quantized.scales.float().repeat_interleave(BLOCK, -1)
    return (scales * 1.05 + E2M1_MAX * 2.0**-10) * quantized.global_scale, 2 * scales * quantized.global_scale


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


def unswizzle_scales(flat: Tensor, rows: int, width: int) -> Tensor:
    """The scales [rows, width/16] that ``swizzle_scales`` laid out; ``width`` counts elements."""
    columns = width // BLOCK
    tiles = flat.view(torch.uint8).view(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    scales = tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :columns].contiguous()
    return scales.view(torch.float8_e4m3fn)


def _round(x: Tensor, scratch: Tensor, min_normal: float, mantissa_bits: int) -> None:
    """Round x in place to a float format without overflow: to nearest, ties to the even code. Zero becomes +0.

    The step is 2^-mantissa_bits of x's power of two, and constant below ``min_normal``. Adding and subtracting
    1.5 * 2^23 steps rounds to a multiple of it.
    """
    torch.bitwise_and(_bits(x), 0x7F800000, out=_bits(scratch))
    scratch.clamp_(min=min_normal)
    steps = 1.5 * 2.0 ** (23 - mantissa_bits)
    x.add_(scratch, alpha=steps).sub_(scratch, alpha=steps)


def _scale(amax: Tensor | TensorScale | None, block_amax: Tensor) -> TensorScale:
    if isinstance(amax, TensorScale):
        return amax
    return tensor_scale(block_amax.max() if amax is None else amax)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _chunks(x: Tensor, size: int) -> Sequence[Tensor]:
    return (x,) if len(x) <= size else x.split(size)


def _require_blocks(x: Tensor) -> None:
    if x.numel() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 needs rows of a multiple of {BLOCK} elements, got shape {list(x.shape)}")


def _require_finite(x: Tensor, block_amax: Tensor) -> None:
    if not math.isfinite(block_amax.max()):
        bad = (~x.isfinite()).nonzero()
        where = f"first at {bad[0].tolist()}" if len(bad) else "too large for float32"
        raise ValueError(f"NVFP4 input of shape {list(x.shape)} holds {len(bad)} non-finite values, {where}")
