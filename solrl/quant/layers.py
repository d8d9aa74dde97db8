"""Which linear layers of a transformer run in which number format: ordered (glob, format) rules, first match wins.

A layer that no rule matches stays in full precision. Quantization pays where the input's rows are tokens; embedders,
modulation (one row a sample) and the output projection are sensitive and cost next to nothing, so they are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, cast, get_args

from torch import Tensor, nn

from solrl.errors import UsageError
from solrl.quant.linear import QuantLinear
from solrl.quant.nvfp4 import BLOCK

Format: TypeAlias = Literal["nvfp4", "full"]
Rules: TypeAlias = Sequence[tuple[str, str]]

FLUX_RULES: Rules = (("*norm*", "full"), ("*transformer_blocks.*", "nvfp4"))
"""Every linear of the double and single blocks but the modulation inside their norms."""


@dataclass(frozen=True)
class LayerFormat:
    """One linear layer's number format and why."""

    name: str
    shape: tuple[int, int]  # (out, in)
    format: Format
    reason: str


def plan_layers(transformer: nn.Module, rules: Rules) -> list[LayerFormat]:
    """Every nn.Linear of a transformer without adapters, in its order, with the format the rules give it."""
    linears = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    for glob, number_format in rules:
        if number_format not in get_args(Format):
            raise UsageError(f"explore.quantize: format {number_format!r} of {glob!r} is unknown; use nvfp4 or full")
        if not any(fnmatchcase(name, glob) for name in linears):
            example = next(iter(linears), "none")
            raise UsageError(f"explore.quantize: {glob!r} matches no linear layer of the model (a name: {example})")
    return [_plan(name, (module.out_features, module.in_features), rules) for name, module in linears.items()]


def resolve_formats(transformer: nn.Module, rules: Rules) -> dict[str, Format]:
    """Linear layer name -> number format."""
    return {layer.name: layer.format for layer in plan_layers(transformer, rules)}


def format_report(plan: Sequence[LayerFormat]) -> list[str]:
    """The plan as text, one line for all layers that differ in their block number only."""
    groups: dict[tuple[str, tuple[int, int], Format, str], int] = {}
    for layer in plan:
        key = (re.sub(r"\.\d+\.", ".*.", layer.name), layer.shape, layer.format, layer.reason)
        groups[key] = groups.get(key, 0) + 1
    width = max((len(key[0]) for key in groups), default=0)
    return [
        f"{count:4d} x {name:{width}}  {shape[0]:5d} x {shape[1]:<5d}  {number_format:5}  {reason}"
        for (name, shape, number_format, reason), count in groups.items()
    ]


def quantized_share(plan: Sequence[LayerFormat], rows: Mapping[str, int]) -> float:
    """Share of the linear layers' multiplications that are quantized, given the input rows each layer saw."""
    work = {layer.name: rows.get(layer.name, 0) * layer.shape[0] * layer.shape[1] for layer in plan}
    quantized = sum(work[layer.name] for layer in plan if layer.format == "nvfp4")
    return quantized / sum(work.values()) if any(work.values()) else 0.0


@contextmanager
def counting_rows(transformer: nn.Module, rows: dict[str, int]) -> Iterator[None]:
    """Inside, ``rows[layer name]`` grows by the input rows of every linear layer, quantized or not."""

    def count(name: str, x: Tensor) -> None:
        rows[name] = rows.get(name, 0) + x.numel() // x.shape[-1]

    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: count(name, args[0]))
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear | QuantLinear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plan(name: str, shape: tuple[int, int], rules: Rules) -> LayerFormat:
    for glob, number_format in rules:
        if fnmatchcase(name, glob):
            if number_format == "nvfp4" and shape[1] % BLOCK:
                raise UsageError(
                    f"explore.quantize: {name} has {shape[1]} inputs, NVFP4 needs a multiple of {BLOCK}; "
                    f'put ("{name}", "full") before {glob!r}'
                )
            return LayerFormat(name, shape, cast(Format, number_format), f"rule {glob}")
    return LayerFormat(name, shape, "full", "no rule")
