"""Inputs that meet every branch of the quantizers' arithmetic, and where two sets of bytes made of them differ."""

from __future__ import annotations

import torch
from torch import Tensor

from solrl.quant import kernels
from solrl.quant.nvfp4 import unswizzle_scales


def e4m3_numbers() -> Tensor:
    """All that are not negative, in order."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def matrix() -> Tensor:
    """[320, 80] float32: rows of very different sizes, zeros of both signs, subnormals, ties of codes and of scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 80, generator=generator)
    x[:64] *= torch.exp(4 * torch.randn(64, 1, generator=generator))
    x[64:80] *= 1e-37
    x[80:96] *= 1e-41
    x[96], x[97], x[98, 16:32], x[99, 4] = 0, -0.0, 0, -0.0
    x[100:110] *= 7e37
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6, -6])
    x[110:130] = grid.repeat(20, 5) * 2.0 ** torch.arange(-10, 10)[:, None]  # with amax 2688 * 2^n: exact ties
    numbers = e4m3_numbers()
    near = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([near, *(torch.nextafter(near, torch.tensor(to)) for to in (0.0, 1e9))]) * 6 * (3 / 2688)
    x[130:320] = (near[:, None] * grid / 6).reshape(-1)[: 126 * 48].repeat(3)[: 190 * 80].view(190, 80)
    return x


def cases() -> dict[str, Tensor]:
    """name|amax -> input of the NVFP4 quantizer; a name alone -> input of the FP8 one."""
    x = matrix()
    poisoned = x[:20].clone()
    poisoned[3, 20], poisoned[5, 0], poisoned[7, 79], poisoned[9, 50] = torch.nan, torch.inf, -torch.inf, -torch.nan
    return {
        "plain|3.0": x,
        "tensor amax|2688.0": x[:150],
        "amax 0|0.0": x[60:120],
        "amax is tiny|1e-40": x[60:120],
        "amax is huge|3e38": x[60:120],
        "bfloat16|64.0": x[:, :64].bfloat16(),
        "one row, one block|2.0": x[:1, :16],
        "129 rows of 3 blocks, tiles of 16 rows|4.0": x[:129, :48],
        "18 blocks, tiles of 16 rows|4.0": x[:180].reshape(50, 288),
        "poisoned|8.0": poisoned,
        "amax is NaN|nan": x[:2],
        "fp8 plain": torch.cat([x[:24], x[60:102], x[110:150]]),
        "fp8 bfloat16, odd width": x[60:112, :77].bfloat16(),
        "fp8 one element": x[:3, :1],
        "fp8 poisoned": poisoned,
    }


def quantized(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the operators make of a case on x's device: (codes, scales), on the CPU."""
    _, _, amax = name.partition("|")
    if amax:
        made = kernels.nvfp4_quantize(x, torch.tensor(float(amax), device=x.device))
    else:
        made = kernels.fp8_quantize_rows(x)
    codes, scales = made
    return codes.cpu(), scales.cpu()


def differences(name: str, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[str]:
    """How (codes, scales) differ from the reference's; the sign of NaN and the codes beside it are free."""
    codes, scales = expected
    if [(part.shape, part.dtype) for part in found] != [(part.shape, part.dtype) for part in expected]:
        return [f"{name}: shapes or dtypes"]
    is_nan = scales.float().isnan()
    wrong_scales = (raw(found[1]) != raw(scales)) & ~is_nan.repeat_interleave(scales.itemsize)
    lost = found[1].float().isnan() != is_nan
    if "|" in name:
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        blocks = unswizzle_scales(scales, rows, columns)
        is_free = blocks.float().isnan().repeat_interleave(columns // 2 // blocks.shape[1], 1)
    else:
        is_free = is_nan.expand_as(codes)
        lost = lost | (found[0].float().isnan() != codes.float().isnan()).any(1, keepdim=True)
    wrong_codes = (found[0].view(torch.uint8) != codes.view(torch.uint8)) & ~is_free
    counts = {"scales": wrong_scales, "codes": wrong_codes, "NaN": lost}
    return [f"{name}: {int(wrong.sum())} of {wrong.numel()} {what}" for what, wrong in counts.items() if wrong.any()]


def raw(x: Tensor) -> Tensor:
    """Every byte, in a row."""
    return x.contiguous().reshape(-1).view(torch.uint8)
