"""The quantizers as Triton kernels: one read of the input and one write of the result. Bit for bit those of kernels.py.

Every rounding is spelled out in float32 and integer arithmetic: no FP4 or FP8 conversion instruction, so the bytes are
the same on every GPU and in Triton's interpreter (whose own FP8 conversion of subnormals is wrong). Launched with
``enable_fp_fusion=False``, since a fused multiply-add rounds once where the reference rounds twice. Magnitudes are
compared as integers, whose order is the same and in which NaN stands above inf: a floating-point maximum would drop it.

Triton is imported here and nowhere else; import this module only where a kernel is about to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of a tile of the NVFP4 kernel; divides the 128 rows that a tile of swizzled scales takes."""
BLOCKS = 8
"""Blocks of 16 columns of a tile of the NVFP4 kernel."""
WIDEST_ROW = 65536
"""Elements of a row that a program of the FP8 kernel can hold."""


def nvfp4_quantize(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """`solrl.quant.kernels.nvfp4_quantize` on x's device: a GPU, or a CPU under TRITON_INTERPRET=1."""
    rows, columns = x.shape
    padded_rows, padded_blocks = triton.cdiv(rows, 128) * 128, triton.cdiv(columns // 16, 4) * 4
    x = x if x.stride(1) == 1 else x.contiguous()
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(padded_rows * padded_blocks, dtype=torch.uint8, device=x.device)
    grid = (padded_rows // ROWS * triton.cdiv(padded_blocks, BLOCKS),)
    with torch.cuda.device_of(x):
        nvfp4_kernel[grid](
            x, amax, packed, scales, rows, columns, x.stride(0), ROWS=ROWS, BLOCKS=BLOCKS, enable_fp_fusion=False
        )
    return packed, scales.view(torch.float8_e4m3fn)


def fp8_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`solrl.quant.kernels.fp8_quantize_rows` on x's device: a GPU, or a CPU under TRITON_INTERPRET=1."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):
        fp8_rows_kernel[(rows,)](
            x, codes, scale, columns, x.stride(0), WIDTH=width, num_warps=min(max(width // 1024, 1), 16),
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scale


@triton.jit(do_not_specialize=["num_rows"])
def nvfp4_kernel(
    x_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program quantizes ROWS x BLOCKS blocks; those outside of x are the zeros that the scales are padded with."""
    num_blocks = num_columns // 16
    padded_blocks = tl.cdiv(num_blocks, 4) * 4
    tiles_across = tl.cdiv(padded_blocks, BLOCKS)
    first_row = (tl.program_id(0) // tiles_across) * ROWS
    row = tl.arange(0, ROWS)
    block = (tl.program_id(0) % tiles_across) * BLOCKS + tl.arange(0, BLOCKS)
    is_inside = (first_row + row < num_rows)[:, None] & (block < num_blocks)[None, :]

    column = block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    source = x_ptr + first_row.to(tl.int64) * row_stride
    x = tl.load(source + row[:, None, None] * row_stride + column, mask=is_inside[:, :, None], other=0.0)
    x = _float32(x)
    bits = x.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, axis=2)

    amax = tl.load(amax_ptr)
    encode = tl.div_rn(2688.0, amax)
    encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
    encode = tl.where(amax == 0.0, 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    ideal = largest.to(tl.float32, bitcast=True) * (encode * 0.16666667163372040)
    is_nan = (largest >= 0x7F800000) | (ideal != ideal)
    ideal = tl.where(is_nan, 0.0, tl.where(ideal > 448.0, 448.0, ideal))
    scale_code = _e4m3(ideal)
    inverse = tl.div_rn(1.0, _from_e4m3(scale_code) * decode)
    inverse = tl.where(inverse > 3.4028234663852886e38, 3.4028234663852886e38, inverse)

    code = _e2m1(tl.abs(x) * inverse[:, :, None]) | ((bits >> 28) & 8)
    low, high = tl.split(tl.reshape(code, (ROWS, BLOCKS, 8, 2)))
    pair = block[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    target = packed_ptr + first_row.to(tl.int64) * (num_columns // 2)
    tl.store(
        target + row[:, None, None] * (num_columns // 2) + pair, (low | (high << 4)).to(tl.uint8),
        mask=is_inside[:, :, None],
    )  # fmt: skip

    scale_code = tl.where(is_inside, tl.where(is_nan, 0x7F, scale_code), 0)
    tile_row, tile_block = (first_row + row)[:, None] % 128, block[None, :] % 4
    tile = (first_row // 128).to(tl.int64) * (padded_blocks // 4) + block[None, :] // 4
    place = tile * 512 + (tile_row % 32) * 16 + (tile_row // 32) * 4 + tile_block
    tl.store(scales_ptr + place, scale_code.to(tl.uint8), mask=(block < padded_blocks)[None, :])


@triton.jit
def fp8_rows_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One program quantizes one row, which it holds whole."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = _float32(tl.load(x_ptr + row * row_stride + column, mask=column < num_columns, other=0.0))
    bits = x.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, axis=0)
    is_nan = largest >= 0x7F800000
    scale = tl.div_rn(tl.where(is_nan, 0, largest).to(tl.float32, bitcast=True), 448.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    code = tl.where(is_nan, 0x7F, _e4m3(tl.abs(x) * tl.div_rn(1.0, scale)) | ((bits >> 24) & 0x80))
    tl.store(codes_ptr + row * num_columns + column, code.to(tl.uint8), mask=column < num_columns)
    nan = tl.full((), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + row, tl.where(is_nan, nan, scale))


@triton.jit
def _float32(x: tl.tensor) -> tl.tensor:
    """Exactly x. bfloat16 is the upper half of a float32; the interpreter's conversion of subnormals is wrong."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _e4m3(x: tl.tensor) -> tl.tensor:
    """float32 in [0, 448] -> the nearest E4M3 number's code, ties to the even one.

    From 2^-6 on a code is exponent and mantissa, shifted and rebiased; below, codes count multiples of 2^-9, to which
    adding 2^14 (whose last place that is) rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _from_e4m3(code: tl.tensor) -> tl.tensor:
    """A code 0 .. 0x7E -> float32."""
    normal = ((code + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _e2m1(x: tl.tensor) -> tl.tensor:
    """Nonnegative float32 -> the nearest E2M1 number's code 0 .. 7, ties to the even one; NaN gets 7.

    As in `_e4m3`: one mantissa bit, exponent and mantissa from 1 on, multiples of 0.5 below.
    """
    x = tl.where(x < 6.0, x, 6.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    subnormal = (x + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(x < 1.0, subnormal, normal)
