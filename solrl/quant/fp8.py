"""FP8 (E4M3) by torch's scaled_mm: on Ada, Hopper and later GPUs, and on CPUs.

Every row of the input and of the weight has its own scale, so a sample does not depend on its batch mates and nothing
has to be calibrated. Where the device's library refuses that, one scale for each tensor has to do: `Fp8TensorLinear`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from solrl.quant.kernels import fp8_quantize_rows
from solrl.quant.linear import InputScale, Operand, Quantized, QuantLinear
from solrl.quant.nvfp4 import E4M3_MAX, FLOAT_MAX

HALF_STEP = 2.0**-4
"""E4M3 has 3 mantissa bits: rounding moves a number by at most this share of it,"""
HALF_SUBNORMAL_STEP = 2.0**-10
"""or by this where numbers are subnormal."""
WIDEST_GAP = 32.0
"""Between E4M3's largest numbers."""


class Fp8Linear(QuantLinear):
    """One scale a row. qweight [out, in] float8_e4m3fn, scales [out] float32; global_scale is 1."""

    number_format: ClassVar[Literal["nvfp4", "fp8"]] = "fp8"
    kernel = "torch scaled_mm, a scale for each row"
    scales_by_amax = False
    scaling: ClassVar[ScalingType] = ScalingType.RowWise

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """See QuantLinear."""
        _require_finite(weight)
        codes, scale = fp8_quantize_rows(weight)
        return {"qweight": codes, "scales": scale.flatten(), "global_scale": scale.new_ones(())}

    def weight_values(self) -> Tensor:
        """See QuantLinear."""
        return self.qweight.float() * self.scales.unsqueeze(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """See QuantLinear. Half a step of the stored number; the scale's own rounding adds a little."""
        scales = self.scales.unsqueeze(1)
        error = self.weight_values().abs() * (HALF_STEP * 1.1) + scales * HALF_SUBNORMAL_STEP * 1.01
        return error, scales * WIDEST_GAP

    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear."""
        return fp8_quantize_rows(x.reshape(-1, self.in_features).contiguous())

    def reference_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear."""
        codes, scales = fp8_quantize_rows(x.reshape(-1, self.in_features).cpu())
        return codes.to(x.device), scales.to(x.device)

    def input_values(self, quantized: Quantized) -> Tensor:
        """See QuantLinear."""
        codes, scales = quantized.operand
        return codes.float() * scales

    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """See QuantLinear."""
        codes, scales = quantized.operand
        return self._scaled_mm(codes, scales, self.scales.unsqueeze(0), x)

    def _scaled_mm(self, codes: Tensor, scale: Tensor, weight_scale: Tensor, x: Tensor) -> Tensor:
        # GPUs give bfloat16 only
        dtype = x.dtype if x.device.type == "cpu" else torch.bfloat16
        product = scaled_mm(
            codes, self.qweight.t(), scale, self.scaling, weight_scale, self.scaling,
            bias=None if self.bias is None else self.bias.to(dtype), output_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
        return product.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Fp8TensorLinear(Fp8Linear):
    """One scale a tensor: the weight's, repeated in ``scales``, and the input's, static as NVFP4's."""

    kernel = "torch scaled_mm, a scale for each tensor (a scale for each row is refused here)"
    scales_by_amax = True
    scaling = ScalingType.TensorWise

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """See QuantLinear."""
        _require_finite(weight)
        codes, scale = fp8_quantize_rows(weight.reshape(1, -1))
        scales = scale.flatten().expand(len(weight)).contiguous()
        return {"qweight": codes.view_as(weight), "scales": scales, "global_scale": scale.new_ones(())}

    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear. What is above the static amax becomes the amax; NaN stays."""
        assert scale is not None
        rows = x.reshape(-1, self.in_features).float()
        codes = (rows * (E4M3_MAX / scale.amax).clamp(max=FLOAT_MAX)).clamp(-E4M3_MAX, E4M3_MAX)
        return (codes.to(torch.float8_e4m3fn),)

    reference_input = quantize_input

    def input_values(self, quantized: Quantized) -> Tensor:
        """See QuantLinear."""
        assert quantized.scale is not None
        return quantized.operand[0].float() * (quantized.scale.amax / E4M3_MAX)

    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """See QuantLinear."""
        assert quantized.scale is not None
        return self._scaled_mm(quantized.operand[0], quantized.scale.amax / E4M3_MAX, self.scales[0], x)


def _require_finite(weight: Tensor) -> None:
    bad = int((~weight.isfinite()).sum())
    if bad:
        raise ValueError(f"{bad} of {weight.numel()} values are not finite")
