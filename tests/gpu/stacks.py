"""Transformer blocks with the library's own rollout tree and explorer, both compiled as a run compiles them."""

from __future__ import annotations

import torch
from torch import Tensor

from solrl.compute import compile_, repeated_blocks
from solrl.quant.backends import Backend
from solrl.quant.linear import QuantLinear
from solrl.quant.trees import RolloutTrees
from tests.gpu.blocks import REAL, RULES, TINY, adapters_of, inputs_of, stack_of


class Explored:
    """A family's blocks: ``full`` in bfloat16 and ``explorer`` in a format."""

    def __init__(
        self, family: str, number_format: str, kind: type[QuantLinear], device: torch.device, *, is_tiny: bool
    ) -> None:
        self.number_format = number_format
        self._family, self._shape, self._device = family, (TINY if is_tiny else REAL)[family], device
        self.what = self._shape.name
        self._stack = stack_of(family, self._shape, device)
        backend = Backend("fp8" if number_format == "fp8" else "nvfp4", {number_format: kind})
        self._trees = RolloutTrees(self._stack, backend, RULES[family])
        with self._trees.calibration():
            self._trees.explorer(*self.inputs(2))
        self._trees.set_activation_scales_()
        self.full, self.explorer = self._trees.rollout, self._trees.explorer
        for tree in (self.full, self.explorer):
            compile_(
                repeated_blocks(tree), "default", deterministic=False, backend="aot_eager" if is_tiny else "inductor"
            )

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """The same at every call."""
        return inputs_of(self._family, self._shape, batch, self._device)

    def requantize_(self, seed: int) -> None:
        """Both trees hold the weights of the adapters numbered ``seed``; raises unless every buffer stayed in place."""
        self._trees.requantize_(adapters_of(self._stack, seed))
