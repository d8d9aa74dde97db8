"""NVFP4 by torch's scaled_mm, which hands it to cuBLASLt on Blackwell GPUs.

Our quantizer makes the input's codes and scales in one pass; the product, both global scales and the bias are one
kernel. No machine of ours has run that kernel yet: what a run rests on is the proof it makes at its start.

`unswizzling_mm` stands in for it elsewhere: it reads the very same buffers, in the same layout, in plain torch. Tests
and `solrl doctor` use it to check everything around the kernel where there is no such GPU. No run computes with it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from solrl.quant.kernels import nvfp4_quantize
from solrl.quant.linear import InputScale, Operand, Quantized, QuantLinear
from solrl.quant.nvfp4 import NVFP4, dequantize, quantize, swizzle_scales, unswizzle_scales, weight_rounding


class NativeLinear(QuantLinear):
    """NVFP4 on FP4 hardware. qweight [out, in/2] uint8; scales flat float8_e4m3fn, swizzled and padded with zeros."""

    number_format: ClassVar[Literal["nvfp4", "fp8"]] = "nvfp4"
    kernel = "torch scaled_mm, two-level scales"
    scales_by_amax = True

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """See QuantLinear."""
        quantized = quantize(weight)
        return {
            "qweight": quantized.packed,
            "scales": swizzle_scales(quantized.scales),
            "global_scale": quantized.global_scale,
        }

    def weight_values(self) -> Tensor:
        """See QuantLinear."""
        return dequantize(self._weight())

    def rounding(self) -> tuple[Tensor, Tensor]:
        """See QuantLinear."""
        return weight_rounding(self._weight())

    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear."""
        assert scale is not None
        return nvfp4_quantize(x.reshape(-1, self.in_features).contiguous(), scale.amax)

    def reference_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear."""
        assert scale is not None
        quantized = quantize(x.reshape(-1, self.in_features), scale.amax, check=False)
        return quantized.packed, swizzle_scales(quantized.scales)

    def input_values(self, quantized: Quantized) -> Tensor:
        """See QuantLinear."""
        assert quantized.scale is not None
        packed, scales = quantized.operand
        blocks = unswizzle_scales(scales, len(packed), self.in_features)
        return dequantize(NVFP4(packed, blocks, quantized.scale.tensor_scale.global_scale))

    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """See QuantLinear. The kernel gives bfloat16 (a bias is not allowed beside a float32 result)."""
        assert quantized.scale is not None
        packed, scales = quantized.operand
        y = self.product(
            packed, scales, quantized.scale.tensor_scale.global_scale, self.qweight, self.scales, self.global_scale,
            None if self.bias is None else self.bias.bfloat16(),
        )  # fmt: skip
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @staticmethod
    def product(
        x: Tensor,
        x_scales: Tensor,
        x_global: Tensor,
        w: Tensor,
        w_scales: Tensor,
        w_global: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """[M, in/2] and [out, in/2] codes with their scales -> x W^T + bias, [M, out] bfloat16."""
        recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        return scaled_mm(
            x.view(torch.float4_e2m1fn_x2), w.view(torch.float4_e2m1fn_x2).t(),
            scale_a=[x_scales, x_global], scale_recipe_a=recipe, swizzle_a=swizzle,
            scale_b=[w_scales, w_global], scale_recipe_b=recipe, swizzle_b=swizzle,
            bias=bias, output_dtype=torch.bfloat16,
        )  # fmt: skip

    def _weight(self) -> NVFP4:
        blocks = unswizzle_scales(self.scales, self.out_features, self.in_features)
        return NVFP4(self.qweight, blocks, self.global_scale)


def unswizzling_mm(
    x: Tensor, x_scales: Tensor, x_global: Tensor, w: Tensor, w_scales: Tensor, w_global: Tensor, bias: Tensor | None
) -> Tensor:
    """What `NativeLinear.product` must give, from its operands: low nibble first, tiles of 128 x 4 scales."""
    columns = 2 * x.shape[1]
    left = dequantize(NVFP4(x, unswizzle_scales(x_scales, len(x), columns), torch.ones_like(x_global)))
    right = dequantize(NVFP4(w, unswizzle_scales(w_scales, len(w), columns), torch.ones_like(w_global)))
    y = (left @ right.t()) * (x_global * w_global)
    return (y if bias is None else y + bias.float()).bfloat16()


class StandInLinear(NativeLinear):
    """NativeLinear with `unswizzling_mm` in the kernel's place."""

    kernel = "stand-in for torch scaled_mm, in plain torch"
    product = staticmethod(unswizzling_mm)
