"""NVFP4 by Transformer Engine, for comparison with the Sol-RL paper. Untested: nobody has run it on its hardware yet.

Its calls are checked against the released wheel's signatures (tests/test_te.py), and a run proves it as any other back
end; but it is only ever chosen by name. The recipe is `NVFP4BlockScaling` without random Hadamard transforms,
stochastic rounding and 16x16 weight blocks: the first two concern gradients, the third costs accuracy (and fails on
some GPUs). Inputs are scaled by their own amax, so a sample depends on its batch mates.

Transformer Engine keeps its own quantized weight; the one stored here besides is what proofs compare with.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from solrl.errors import UsageError
from solrl.quant.linear import InputScale, Operand, Quantized, QuantLinear
from solrl.quant.nvfp4 import NVFP4, dequantize, quantize, weight_rounding

ROWS = 16
"""Transformer Engine takes inputs of a multiple of this many rows."""


class TELinear(QuantLinear):
    """NVFP4 by `transformer_engine.pytorch.Linear` with a quantized weight. qweight and scales as in the reference."""

    number_format: ClassVar[Literal["nvfp4", "fp8"]] = "nvfp4"
    kernel = "Transformer Engine NVFP4BlockScaling, untested"
    scales_by_amax = True

    def __init__(self, weight: Tensor, bias: Tensor | None, **options: Any) -> None:
        """See QuantLinear; always ``is_dynamic``."""
        super().__init__(weight, bias, **(options | {"is_dynamic": True}))
        te, recipe = transformer_engine()
        self._autocast, self._recipe = te.autocast, recipe
        with torch.no_grad(), te.quantized_model_init(enabled=True, recipe=recipe):
            linear = te.Linear(
                self.in_features, self.out_features,
                bias=bias is not None, params_dtype=self.dtype, device=weight.device,
            )  # fmt: skip
            if bias is not None:
                linear.bias.copy_(bias)
            linear.weight.copy_(weight.detach().to(self.dtype))
        self.linear = linear.requires_grad_(False)

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        """See QuantLinear."""
        super().requantize_(weight)
        self.linear.weight.copy_(weight.to(self.dtype))

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """See QuantLinear."""
        quantized = quantize(weight)
        return {"qweight": quantized.packed, "scales": quantized.scales, "global_scale": quantized.global_scale}

    def weight_values(self) -> Tensor:
        """See QuantLinear."""
        return dequantize(NVFP4(self.qweight, self.scales, self.global_scale))

    def rounding(self) -> tuple[Tensor, Tensor]:
        """See QuantLinear."""
        return weight_rounding(NVFP4(self.qweight, self.scales, self.global_scale))

    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """x itself: Transformer Engine quantizes it inside, once for every layer that reads it."""
        return (x.reshape(-1, self.in_features),)

    reference_input = quantize_input

    def input_values(self, quantized: Quantized) -> Tensor:
        """See QuantLinear."""
        assert quantized.scale is not None
        return dequantize(quantize(quantized.operand[0], quantized.scale.amax))

    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """See QuantLinear. Missing rows are zeros, which move no scale."""
        rows = quantized.operand[0]
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        with self._autocast(enabled=True, recipe=self._recipe):
            y: Tensor = self.linear(padded)
        return y[: len(rows)].to(x.dtype).view(*x.shape[:-1], self.out_features)


def transformer_engine() -> tuple[Any, Any]:
    """(the module transformer_engine.pytorch, our recipe); UsageError where it is missing or refuses this machine."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import NVFP4BlockScaling
    except (
        ImportError,
        RuntimeError,
        OSError,
        AssertionError,
    ) as error:  # without its libraries it raises any of these
        raise UsageError(
            f"explore.backend = te: Transformer Engine cannot be imported ({str(error).splitlines()[0]}); "
            "pip install --no-build-isolation 'solrl[te]', or explore.backend = native"
        ) from error
    is_available, reason = te.is_nvfp4_available(return_reason=True)
    if not is_available:
        raise UsageError(f"explore.backend = te: {reason}")
    recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    return te, recipe
