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

Format: TypeAlias = Literal["nvfp4", "fp8", "full"]
Rules: TypeAlias = Sequence[tuple[str, str]]
"""Ordered (glob, format); beside the formats "auto", the explorer's own."""

DEFAULT_RULES: dict[str, Rules] = {
    "FluxTransformer2DModel": (("*norm*", "full"), ("*transformer_blocks.*", "auto")),
    "SD3Transformer2DModel": (("*norm*", "full"), ("transformer_blocks.*", "auto")),
    "SanaTransformer2DModel": (("transformer_blocks.*attn*", "auto"),),
}
"""By architecture: every linear of the transformer blocks but the modulation inside their norms.

The text stream (add_*, ff_context) is in: leaving it out costs SD3.5-Large 6 % of its multiplications. Half of SANA's
multiplications are the 1x1 convolutions of its feed-forward; they run as products of matrices where a rule names them,
``SANA_CONVOLUTIONS``, which is no default until its quality is measured.
"""
SANA_CONVOLUTIONS: Rules = (("*conv_inverted", "auto"), ("*conv_point", "auto"))
FLUX_RULES = DEFAULT_RULES["FluxTransformer2DModel"]

MULTIPLES: dict[str, tuple[int, int]] = {"nvfp4": (16, 32), "fp8": (16, 16)}
"""Outputs and inputs must be multiples of these: what the kernels need, and not all of them say so."""


@dataclass(frozen=True)
class LayerFormat:
    """One linear layer's number format and why."""

    name: str
    shape: tuple[int, int]  # (out, in)
    format: Format
    reason: str


def default_rules(transformer: nn.Module) -> Rules:
    """The rules of a transformer's architecture; UsageError where there are none."""
    architecture = type(transformer).__name__
    if architecture not in DEFAULT_RULES:
        raise UsageError(
            f"no rules are known for which layers of a {architecture} to quantize; write explore.quantize, as "
            '[["*norm*", "full"], ["*blocks.*", "auto"]]'
        )
    return DEFAULT_RULES[architecture]


def plan_layers(transformer: nn.Module, rules: Rules, number_format: str = "nvfp4") -> list[LayerFormat]:
    """Every product of matrices of a transformer without adapters, in its order, with the format the rules give it.

    These are its nn.Linear and its 1x1 convolutions. ``number_format`` is what "auto" stands for; with "fp8" a rule
    cannot ask for nvfp4.
    """
    layers = {name: module for name, module in transformer.named_modules() if _is_product(module)}
    known = (*get_args(Format), "auto")
    for glob, wanted in rules:
        if wanted not in known:
            raise UsageError(f"explore.quantize: format {wanted!r} of {glob!r} is unknown; use {', '.join(known)}")
        if wanted == "nvfp4" and number_format == "fp8":
            raise UsageError(f"explore.quantize: {glob!r} asks for nvfp4 and the explorer runs fp8; use fp8 or auto")
        if not any(fnmatchcase(name, glob) for name in layers):
            example = next(iter(layers), "none")
            raise UsageError(f"explore.quantize: {glob!r} matches no linear layer of the model (a name: {example})")
    resolved = [(glob, number_format if wanted == "auto" else wanted) for glob, wanted in rules]
    return [_plan(name, (len(module.weight), module.weight[0].numel()), resolved) for name, module in layers.items()]


def resolve_formats(transformer: nn.Module, rules: Rules, number_format: str = "nvfp4") -> dict[str, Format]:
    """Linear layer name -> number format."""
    return {layer.name: layer.format for layer in plan_layers(transformer, rules, number_format)}


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
    quantized = sum(work[layer.name] for layer in plan if layer.format != "full")
    return quantized / sum(work.values()) if any(work.values()) else 0.0


@contextmanager
def counting_rows(transformer: nn.Module, rows: dict[str, int]) -> Iterator[None]:
    """Inside, ``rows[layer name]`` grows by the input rows of every linear layer, quantized or not."""

    def count(name: str, module: nn.Module, x: Tensor) -> None:
        is_convolution = isinstance(module, nn.Conv2d) or (isinstance(module, QuantLinear) and module.is_convolution)
        rows[name] = rows.get(name, 0) + x.numel() // x.shape[1 if is_convolution else -1]

    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: count(name, module, args[0]))
        for name, module in transformer.named_modules()
        if isinstance(module, QuantLinear) or _is_product(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_product(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        is_pointwise = module.kernel_size == module.stride == module.dilation == (1, 1)
        return is_pointwise and module.groups == 1 and module.padding in (0, (0, 0), "valid")
    return isinstance(module, nn.Linear)


def _plan(name: str, shape: tuple[int, int], rules: Rules) -> LayerFormat:
    for glob, number_format in rules:
        if fnmatchcase(name, glob):
            outputs, inputs = MULTIPLES.get(number_format, (1, 1))
            if shape[0] % outputs or shape[1] % inputs:
                raise UsageError(
                    f"explore.quantize: {name} has {shape[1]} inputs and {shape[0]} outputs, {number_format.upper()} "
                    f'needs multiples of {inputs} and {outputs}; put ("{name}", "full") before {glob!r}'
                )
            return LayerFormat(name, shape, cast(Format, number_format), f"rule {glob}")
    return LayerFormat(name, shape, "full", "no rule")
