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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant.nvfp4 import NVFP4, TensorScale, Workspace, dequantize, fake_quantize, quantize, tensor_scale


class ActivationScale(NamedTuple):
    """A static amax in the forms that are read in a forward."""

    value: float  # reading it waits for no device
    amax: Tensor  # [] the layer's buffer
    tensor_scale: TensorScale


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
        self._quantized = torch.empty(0)
        self._memory = torch.empty(0)
        self._workspaces: dict[int, Workspace] = {}

    def quantized(self, x: Tensor, scale: ActivationScale) -> Tensor:
        """``fake_quantize(x, scale.amax)``, valid until the next call."""
        if torch.compiler.is_compiling() or x.is_inference():
            return fake_quantize(x, scale.amax, check=False)
        known = self._source is not None and self._source() is x
        if not known or self._version != x._version or self._amax != scale.value:
            is_cpu = x.device.type == "cpu"  # elsewhere a check would wait for the device
            workspace = self._workspace(x.numel()) if is_cpu else None
            self._quantized = fake_quantize(x, scale.tensor_scale, check=is_cpu, workspace=workspace)
            self._source, self._version, self._amax = weakref.ref(x, self._forget), x._version, scale.value
        return self._quantized

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self._source, self._quantized = None, torch.empty(0)

    def _workspace(self, numel: int) -> Workspace:
        """On a CPU fresh memory costs as much as the arithmetic: one piece serves all inputs, in turn."""
        if numel not in self._workspaces:
            if len(self._memory) < Workspace.room(numel):
                self._memory = torch.empty(Workspace.room(numel))
                self._workspaces.clear()
            self._workspaces[numel] = Workspace(numel, self._memory)
        return self._workspaces[numel]


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
        self._activation_scale: ActivationScale | None = None
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
        self._activation_scale = ActivationScale(float(self.act_amax), self.act_amax, tensor_scale(self.act_amax))

    @property
    def is_calibrated(self) -> bool:
        """Whether the activation amax is set."""
        return self._activation_scale is not None

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
            if self._activation_scale is None:
                raise SolrlError(f"{self.name} has no activation scale; calibrate the explorer before drawing with it")
            return self.shared.quantized(x, self._activation_scale)
        except ValueError as error:
            raise SolrlError(f"{self.name}: {error}") from error

    def _quantize(self, weight: Tensor) -> NVFP4:
        try:
            return quantize(weight.float())
        except ValueError as error:
            raise SolrlError(f"weight of {self.name}: {error}") from error
