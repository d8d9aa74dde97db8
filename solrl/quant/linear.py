"""A linear layer with NVFP4 weights and activations, computed by emulation.

The state is what any NVFP4 back end needs, in plain buffers that `requantize_` fills in place: packed weight, block
scales, global scale, activation amax, bias. Emulation multiplies the dequantized activation by the dequantized weight;
the latter is kept, since it changes only when the weight does.

Activations are quantized with a static amax, so that a sample does not depend on its batch mates. It is measured by
calibration; until then the layer refuses to run.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant.nvfp4 import NVFP4, dequantize, fake_quantize, quantize


class SharedInput:
    """Quantizes an activation once for all layers that read it one after another (to_q, to_k, to_v, proj_mlp).

    One object serves a whole tree. What it remembers is reused only for the very same tensor, unchanged since, with an
    equal amax; results are the same with and without it. It keeps no activation alive, and forgets the quantized one
    when the activation dies. While compiling, and in inference mode (whose tensors do not record changes), it only
    quantizes.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._amax = 0.0
        self._quantized: Tensor | None = None
        self._workspace: Tensor | None = None

    def quantized(self, x: Tensor, amax: Tensor, amax_value: float) -> Tensor:
        """``fake_quantize(x, amax)``, valid until the next call. ``amax_value`` is amax as a number."""
        if torch.compiler.is_compiling() or x.is_inference():
            return fake_quantize(x, amax, check=False)
        known = self._source is not None and self._source() is x
        if not known or self._version != x._version or self._amax != amax_value or self._quantized is None:
            self._source = None  # a failure below leaves nothing half remembered
            self._quantized = fake_quantize(x, amax, check=x.device.type == "cpu", out=self._room(x))
            self._source, self._version, self._amax = weakref.ref(x, self._forget), x._version, amax_value
        return self._quantized

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self._source = self._quantized = None

    def _room(self, x: Tensor) -> Tensor | None:
        """On a CPU fresh memory costs as much as the arithmetic, so one workspace is used again and again."""
        if x.device.type != "cpu":
            return None
        if self._workspace is None or self._workspace.numel() < x.numel():
            self._workspace = torch.empty(x.numel())
        return self._workspace


class QuantLinear(nn.Module):
    """y = x W^T + b with NVFP4 x and W. Forward only: the result carries no gradient."""

    qweight: Tensor  # [out, in/2] uint8
    scales: Tensor  # [out, in/16] float8_e4m3fn
    global_scale: Tensor  # [] float32
    act_amax: Tensor  # [] float32, NaN until set
    bias: Tensor | None  # [out]
    dequantized: Tensor  # [out, in] in the dtype of compute

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, name: str = "", shared: SharedInput
    ) -> None:
        """weight [out, in]; ``name`` appears in errors; ``bias`` is used as it is, not copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.name = name
        self.shared = shared
        self.observed: Tensor | None = None
        self._observing = False
        self._act_amax: float | None = None  # act_amax as a number, so that reading it never waits for a device
        self.register_buffer("bias", bias)
        quantized = self._quantize(weight.detach())
        self.register_buffer("qweight", quantized.packed)
        self.register_buffer("scales", quantized.scales)
        self.register_buffer("global_scale", quantized.global_scale)
        self.register_buffer("act_amax", torch.full((), math.nan, device=weight.device))
        self.register_buffer("dequantized", dequantize(quantized, dtype), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return nn.functional.linear(self._quantized_input(x), self.dequantized, self.bias)

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        """Hold ``weight`` [out, in], quantized from float32. In place: no buffer moves."""
        quantized = self._quantize(weight)
        self.qweight.copy_(quantized.packed)
        self.scales.copy_(quantized.scales)
        self.global_scale.copy_(quantized.global_scale)
        self.dequantized.copy_(dequantize(quantized, self.dequantized.dtype))

    def set_act_amax_(self, amax: float) -> None:
        """Quantize activations for magnitudes up to ``amax`` from now on."""
        if not (math.isfinite(amax) and amax > 0):
            raise SolrlError(f"{self.name}: an activation amax must be positive and finite, got {amax}")
        self.act_amax.fill_(amax)
        self._act_amax = float(self.act_amax)

    @property
    def is_calibrated(self) -> bool:
        """Whether the activation amax is set."""
        return self._act_amax is not None

    def start_observing(self) -> None:
        """From now on quantize each input by its own amax and remember the largest."""
        self.observed = torch.zeros((), device=self.act_amax.device)
        self._observing = True

    def stop_observing(self) -> None:
        """Back to the static amax; ``observed`` stays."""
        self._observing = False

    def _quantized_input(self, x: Tensor) -> Tensor:
        try:
            if self._observing:
                assert self.observed is not None
                amax = x.abs().amax().float()
                self.observed = torch.maximum(self.observed, amax)
                return fake_quantize(x, amax)
            if self._act_amax is None:
                raise SolrlError(f"{self.name} has no activation scale; calibrate the explorer before drawing with it")
            return self.shared.quantized(x, self.act_amax, self._act_amax)
        except ValueError as error:
            raise SolrlError(f"{self.name}: {error}") from error

    def _quantize(self, weight: Tensor) -> NVFP4:
        try:
            return quantize(weight.float())
        except ValueError as error:
            raise SolrlError(f"weight of {self.name}: {error}") from error
