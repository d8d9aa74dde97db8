"""A linear layer with a quantized weight and a quantized input: the state and the sync code that all back ends share.

The state is plain buffers that `requantize_` fills in place, so compiled graphs and captured CUDA graphs stay valid. A
back end is a subclass that says what is stored for a weight, how an input is quantized, and which kernel multiplies
them; it also gives the values that stored numbers stand for, by the reference arithmetic, so that the kernel can be
held to them (solrl/quant/proof.py).

NVFP4 scales its inputs by a static amax, so that a sample does not depend on its batch mates. It is measured by
calibration; until then the layer refuses to run.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant.nvfp4 import TensorScale, Workspace, tensor_scale

Operand: TypeAlias = tuple[Tensor, ...]
"""A quantized input as a back end's kernel reads it."""


class InputScale(NamedTuple):
    """An input's amax in the forms that are read in a forward."""

    amax: Tensor  # [] float32
    tensor_scale: TensorScale


class Quantized(NamedTuple):
    """A quantized input."""

    operand: Operand
    scale: InputScale | None  # None where each row has its own, in the operand


class Place(NamedTuple):
    """Where a layer stands among those that read one tensor one after another."""

    is_first: bool = True
    is_last: bool = True


class SharedInput:
    """Quantizes an input once for all layers that read it one after another (to_q, to_k, to_v, proj_mlp).

    One object serves a whole tree. What it remembers is reused only for the very same tensor, unchanged since, with an
    equal key; results are the same with and without it. It keeps no input alive, and forgets the quantized one when the
    input dies. In inference mode (whose tensors do not record changes) it only quantizes.

    While compiling, layers that were seen to read one tensor (``Place``) hand it on inside the graph.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._key: Hashable = None
        self._quantized: Quantized | None = None
        self._traced: tuple[Tensor, Quantized] | None = None
        self._memory = torch.empty(0)
        self._workspaces: dict[int, Workspace] = {}

    def quantized(self, x: Tensor, key: Hashable, quantize: Callable[[], Quantized]) -> Quantized:
        """``quantize()``, which must depend on x and ``key`` only; valid until the next call."""
        known = self._source is not None and self._source() is x
        if not (known and self._version == x._version and self._key == key) or self._quantized is None:
            self._quantized = quantize()
            self._source, self._version, self._key = weakref.ref(x, self._forget), x._version, key
        return self._quantized

    def traced(self, x: Tensor, place: Place, quantize: Callable[[], Quantized]) -> Quantized:
        """The same while compiling; a graph that holds all readers of x leaves nothing behind."""
        if place.is_first or self._traced is None or self._traced[0] is not x:
            quantized = quantize()
        else:
            quantized = self._traced[1]
        self._traced = None if place.is_last else (x, quantized)
        return quantized

    def workspace(self, numel: int) -> Workspace:
        """On a CPU fresh memory costs as much as the arithmetic: one piece serves all inputs, in turn."""
        if numel not in self._workspaces:
            if len(self._memory) < Workspace.room(numel):
                self._memory = torch.empty(Workspace.room(numel))
                self._workspaces.clear()
            self._workspaces[numel] = Workspace(numel, self._memory)
        return self._workspaces[numel]

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self._source, self._quantized = None, None


class QuantLinear(nn.Module, ABC):
    """y = x W^T + b with x and W quantized. Forward only: the result carries no gradient."""

    number_format: ClassVar[Literal["nvfp4", "fp8"]]
    kernel: ClassVar[str]
    """What computes the product, for people."""
    scales_by_amax: ClassVar[bool]
    """Whether an input is scaled by one amax for the whole tensor, rather than each row by its own."""

    qweight: Tensor  # the weight's codes
    scales: Tensor  # their scales
    global_scale: Tensor  # [] float32
    act_amax: Tensor  # [] float32, NaN until set
    bias: Tensor | None  # [out]

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        name: str = "",
        shared: SharedInput,
        is_dynamic: bool = False,
        is_convolution: bool = False,
    ) -> None:
        """weight [out, in], for inputs of ``dtype``; ``name`` appears in errors; ``bias`` is used as it is, not copied.

        ``is_dynamic``: an input is scaled by its own amax, and so depends on its batch mates. A 1x1 convolution takes
        [B, in, H, W] and returns [B, out, H, W].
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.name = name
        self.shared = shared
        self.place = Place()
        self.is_dynamic = is_dynamic
        self.is_convolution = is_convolution
        self.observed: Tensor | None = None
        self._observing = False
        self._scale: InputScale | None = None
        self._static_amax = math.nan  # act_amax as a number: reading it waits for no device
        self.register_buffer("bias", bias)
        for buffer_name, value in self._encoded(weight.detach()).items():
            self.register_buffer(buffer_name, value)
        self.register_buffer("act_amax", torch.full((), math.nan, device=weight.device))

    @abstractmethod
    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """What is stored for ``weight`` [out, in] float32: qweight, scales, global_scale. ValueError if not finite."""

    @abstractmethod
    def weight_values(self) -> Tensor:
        """[out, in] float32: what the stored numbers stand for."""

    @abstractmethod
    def rounding(self) -> tuple[Tensor, Tensor]:
        """The largest error that storing a weight makes, and the widest gap between numbers that can be stored.

        Both broadcast to [out, in].
        """

    @abstractmethod
    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """x [..., in] as the kernel reads it."""

    @abstractmethod
    def reference_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        """What ``quantize_input`` must be, in plain torch, bit for bit."""

    @abstractmethod
    def input_values(self, quantized: Quantized) -> Tensor:
        """[rows, in] float32: what a quantized input stands for."""

    @abstractmethod
    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        """Product and bias, [..., out] in x's dtype; of x only shape and dtype count."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.movedim(1, -1) if self.is_convolution else x
        try:
            y = self.multiply(self.quantized_input(rows), rows)
        except ValueError as error:
            raise SolrlError(f"{self.name}: {error}") from error
        return y.movedim(-1, 1) if self.is_convolution else y

    @torch.no_grad()
    def requantize_(self, weight: Tensor) -> None:
        """Hold ``weight`` [out, in], quantized from float32. In place: no buffer moves."""
        for name, value in self._encoded(weight).items():
            self.get_buffer(name).copy_(value)

    def stored(self) -> list[Tensor]:
        """The buffers that hold the weight."""
        return [self.qweight, self.scales, self.global_scale]

    def set_act_amax_(self, amax: float) -> None:
        """Quantize inputs for magnitudes up to ``amax`` from now on. In place."""
        if not (math.isfinite(amax) and amax > 0):
            raise SolrlError(f"{self.name}: an activation amax must be positive and finite, got {amax}")
        self.act_amax.fill_(amax)
        self._static_amax = float(self.act_amax)
        if self._scale is None:
            self._scale = InputScale(self.act_amax, tensor_scale(self.act_amax))
        for old, new in zip(self._scale.tensor_scale, tensor_scale(self.act_amax), strict=True):
            old.copy_(new)

    @property
    def needs_calibration(self) -> bool:
        """Whether the layer computes with a static amax."""
        return self.scales_by_amax and not self.is_dynamic

    @property
    def is_calibrated(self) -> bool:
        """Whether the static amax is set."""
        return self._scale is not None

    def start_observing(self) -> None:
        """From now on scale each input by its own amax and remember the largest."""
        self.observed = torch.zeros((), device=self.act_amax.device)
        self._observing = True

    def stop_observing(self) -> None:
        """Back to the static amax; ``observed`` stays."""
        self._observing = False

    def quantized_input(self, x: Tensor) -> Quantized:
        """x [..., in] as ``multiply`` takes it; quantized once for all layers that read it one after another."""
        if self.needs_calibration and not self._observing and self._scale is None:
            raise SolrlError(f"{self.name} has no activation scale; calibrate the explorer before drawing with it")
        if torch.compiler.is_compiling():
            return self.shared.traced(x, self.place, lambda: self._quantize_input(x))
        if self._observing or x.is_inference():
            return self._quantize_input(x)
        key = (self.number_format, self._static_amax if self.needs_calibration else None)
        return self.shared.quantized(x, key, lambda: self._quantize_input(x))

    def _quantize_input(self, x: Tensor) -> Quantized:
        scale = None
        if self._observing:
            assert self.observed is not None
            amax = x.abs().amax().float()
            self.observed = torch.maximum(self.observed, amax)
            scale = InputScale(amax, tensor_scale(amax)) if self.scales_by_amax else None
        elif self.is_dynamic and self.scales_by_amax:
            amax = x.abs().amax().float()
            scale = InputScale(amax, tensor_scale(amax))
        elif self.scales_by_amax:
            scale = self._scale
        return Quantized(self.quantize_input(x, scale), scale)

    def _encoded(self, weight: Tensor) -> dict[str, Tensor]:
        try:
            return self.encode(weight.float())
        except ValueError as error:
            raise SolrlError(f"weight of {self.name}: {error}") from error
