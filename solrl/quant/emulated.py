"""NVFP4 by emulation: the dequantized input times the dequantized weight, anywhere, at more than full precision's cost.

The dequantized weight is kept, since it changes only when the weight does.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from solrl.quant.linear import InputScale, Operand, Quantized, QuantLinear
from solrl.quant.nvfp4 import NVFP4, dequantize, fake_quantize, quantize, weight_rounding


class EmulatedLinear(QuantLinear):
    """NVFP4's numbers, multiplied in the input's dtype.

    qweight [out, in/2] uint8, scales [out, in/16] float8_e4m3fn, and dequantized [out, in], which the product reads.
    """

    number_format: ClassVar[Literal["nvfp4", "fp8"]] = "nvfp4"
    kernel = "emulation in plain torch"
    scales_by_amax = True

    dequantized: Tensor  # [out, in]

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """See QuantLinear."""
        quantized = quantize(weight)
        return {
            "qweight": quantized.packed,
            "scales": quantized.scales,
            "global_scale": quantized.global_scale,
            "dequantized": dequantize(quantized, self.dtype),
        }

    def weight_values(self) -> Tensor:
        """See QuantLinear."""
        return self.dequantized.float()

    def rounding(self) -> tuple[Tensor, Tensor]:
        """See QuantLinear."""
        return weight_rounding(NVFP4(self.qweight, self.scales, self.global_scale))

    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear. On a CPU, outside of compiled graphs, an input that is not finite is a ValueError."""
        assert scale is not None
        if torch.compiler.is_compiling() or x.is_inference():
            return (fake_quantize(x, scale.amax, check=False),)
        is_cpu = x.device.type == "cpu"  # elsewhere a check would wait for the device
        workspace = self.shared.workspace(x.numel()) if is_cpu else None
        return (fake_quantize(x, scale.tensor_scale, check=is_cpu, workspace=workspace),)

    def reference_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """See QuantLinear."""
        assert scale is not None
        return (dequantize(quantize(x.reshape(-1, self.in_features), scale.amax), x.dtype).view(x.shape),)

    def input_values(self, quantized: Quantized) -> Tensor:
        """See QuantLinear."""
        return quantized.operand[0].reshape(-1, self.in_features).float()

    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """See QuantLinear."""
        return nn.functional.linear(quantized.operand[0], self.dequantized, self.bias)
