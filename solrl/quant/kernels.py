"""Quantizers of activations as torch operators: plain torch on a CPU, one pass of Triton on a GPU, the same bytes.

``torch.ops.solrl.nvfp4_quantize`` and ``torch.ops.solrl.fp8_quantize_rows`` make what `torch.nn.functional.scaled_mm`
reads. `torch.compile` takes each as one node, on any device and on fake tensors. They take no derivative.

On bad numbers the bytes follow one rule: a block (NVFP4) or a row (FP8) that holds NaN or inf gets the scale NaN, so
that it reaches the product. What such a block's codes are, and the sign of its NaN, depends on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.quant.nvfp4 import BLOCK, E4M3_MAX, quantize, swizzle_scales

FLOAT_MIN_NORMAL = torch.finfo(torch.float32).tiny


@torch.library.custom_op("solrl::nvfp4_quantize", mutates_args=(), device_types="cpu")
def nvfp4_quantize(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> packed [M, K/2] uint8 and scales, flat float8_e4m3fn; K a multiple of 16.

    ``amax`` [] float32 stands for the tensor's largest magnitude (the global scale, amax / 2688, is the caller's).
    Arithmetic and layouts are those of `solrl.quant.nvfp4`: element 2k in the low nibble, scales swizzled in tiles of
    128 rows by 4 scales, zeros in the padding. ValueError for other shapes.
    """
    _require_matrix(x, BLOCK)
    quantized = quantize(x, amax, check=False)
    return quantized.packed, swizzle_scales(quantized.scales)


@nvfp4_quantize.register_kernel("cuda")
def _(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    _require_matrix(x, BLOCK)
    packed, scales = _triton_kernels().nvfp4_quantize(x, amax)
    return packed, scales


@nvfp4_quantize.register_fake
def _(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    _require_matrix(x, BLOCK)
    rows, blocks = x.shape[0], x.shape[1] // BLOCK
    packed = x.new_empty(rows, x.shape[1] // 2, dtype=torch.uint8)
    return packed, x.new_empty(-(-rows // 128) * 128 * (-(-blocks // 4) * 4), dtype=torch.float8_e4m3fn)


@torch.library.custom_op("solrl::fp8_quantize_rows", mutates_args=(), device_types="cpu")
def fp8_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] float8_e4m3fn and scale [M, 1] float32, with x about codes * scale.

    scale = max(row's largest magnitude / 448, the smallest normal number), codes = E4M3(x * (1 / scale)), to nearest,
    ties to the even code. A row of zeros comes back as zeros. ValueError for what is no matrix.
    """
    _require_matrix(x, 1)
    return _fp8_rows(x)


@fp8_quantize_rows.register_kernel("cuda")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    _require_matrix(x, 1)
    kernels = _triton_kernels()
    if x.shape[1] > kernels.WIDEST_ROW:  # no activation: a whole weight taken as one row
        return _fp8_rows(x)
    codes, scale = kernels.fp8_quantize_rows(x)
    return codes, scale


@fp8_quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    _require_matrix(x, 1)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float()
    amax = values.abs().amax(1, keepdim=True)
    largest = torch.full_like(amax, E4M3_MAX)  # a Python number would turn division into multiplication
    scale = (amax / largest).clamp(min=FLOAT_MIN_NORMAL) + (amax - amax)  # inf - inf is NaN
    return (values * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def _require_matrix(x: Tensor, multiple: int) -> None:
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] % multiple:
        raise ValueError(f"a quantizer needs a matrix with rows of a multiple of {multiple}, got shape {list(x.shape)}")


def _triton_kernels() -> Any:
    """The module of Triton kernels, loaded where one is about to run."""
    try:
        from solrl.quant import triton_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise SolrlError(
            "quantizing on a GPU needs Triton, which torch's CUDA wheels bring: pip install triton"
        ) from None
    return triton_kernels
