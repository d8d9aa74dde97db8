"""Bytes that rollout tree and explorer add to a frozen transformer, from its shapes alone (solrl/quant/trees.py).

The rollout tree owns the weights of adapted layers; all else lies in the base's storages. The explorer owns the codes
and scales of quantized layers, and shares the rollout tree's storages for what is not quantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from solrl.quant.layers import LayerFormat, Rules, default_rules, plan_layers
from solrl.quant.nvfp4 import BLOCK

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class TreeBytes:
    """What a transformer and its two copies take."""

    base: int
    rollout: int
    """Added by the rollout tree."""
    explorer: int
    """Added by the explorer; 0 in full precision, where it is the rollout tree."""
    unquantized: int = 0
    """What the explorer takes from the rollout tree's storages, and has to hold itself where those are sharded."""

    @property
    def added(self) -> int:
        """By both together."""
        return self.rollout + self.explorer


def tree_bytes(transformer: nn.Module, targets: Sequence[str], precision: str, rules: Rules | None = None) -> TreeBytes:
    """Bytes for a transformer without adapters, as on the meta device; ``targets`` name the layers that get one.

    ``precision``: nvfp4, fp8, emulated_nvfp4 or full. ``rules``: None for the architecture's own.
    """
    base = sum(parameter.numel() * parameter.element_size() for parameter in transformer.parameters())
    rollout = sum(
        module.weight.numel() * module.weight.element_size()
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and _is_adapted(name, targets)
    )
    if precision == "full":
        return TreeBytes(base, rollout, 0)
    number_format = "fp8" if precision == "fp8" else "nvfp4"
    plan = plan_layers(transformer, default_rules(transformer) if rules is None else rules, number_format)
    kept = next(transformer.parameters()).element_size() if precision == "emulated_nvfp4" else 0
    size = next(transformer.parameters()).element_size()
    quantized = sum(size * math.prod(layer.shape) for layer in plan if layer.format != "full")
    return TreeBytes(base, rollout, sum(layer_bytes(layer, dequantized=kept) for layer in plan), base - quantized)


def layer_bytes(layer: LayerFormat, *, dequantized: int = 0) -> int:
    """The buffers of one layer of the explorer, its bias apart, which is the base's; 0 for one that is not quantized.

    NVFP4's scales are padded to tiles of 128 rows by 4, as its kernel reads them. Emulation does not do that, but keeps
    ``dequantized`` bytes for each weight as well.
    """
    outputs, inputs = layer.shape
    if layer.format == "full":
        return 0
    scalars = 2 * FLOAT  # the weight's global scale and the input's amax
    if layer.format == "fp8":
        return outputs * inputs + outputs * FLOAT + scalars
    codes, blocks = outputs * inputs // 2, inputs // BLOCK
    if dequantized:
        return codes + outputs * blocks + outputs * inputs * dequantized + scalars
    return codes + -(-outputs // 128) * 128 * (-(-blocks // 4) * 4) + scalars


def _is_adapted(name: str, targets: Sequence[str]) -> bool:
    """As peft matches names: the whole, or its end."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
