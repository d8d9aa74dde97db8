"""One parameter under several names and cuts: the layouts of a trainer, of the store, of an engine that fuses weights.

Every layout is told in terms of one plain naming, that of the model as it is saved: which slice of which plain
parameter lies where in which parameter of its own. Two layouts need not know each other: their common refinement gives
the moves that turn one into the other (PivotRL, Appendix B.2), as copies between buffers that exist. LoRA factors are
parameters like others and keep a name of their own; those of fused projections are no slices of anything (the fused
lora_B would be block diagonal), so fusing is for merged weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime.transfer import Box, refine

Shapes: TypeAlias = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Slice:
    """``box`` of the plain parameter ``name`` lies at ``own`` of the layout's parameter."""

    name: str
    box: Box
    own: Box


Layout: TypeAlias = Mapping[str, Sequence[Slice]]
"""The layout's parameters: what each consists of."""


@dataclass(frozen=True)
class Move:
    """Copy one box of a parameter into one of another."""

    source: str
    source_box: Box
    target: str
    target_box: Box


def plain(shapes: Shapes) -> dict[str, list[Slice]]:
    """Every parameter by its own name, as diffusers and transformers save it."""
    return renamed({name: name for name in shapes}, shapes)


def peft(
    shapes: Shapes, adapted: Iterable[str], *, adapter: str = "default", prefix: str = ""
) -> dict[str, list[Slice]]:
    """As PEFT names them: what it wraps (``adapted``: modules) moves to base_layer, LoRA factors name the adapter.

    ``prefix``: "base_model.model." for a whole PeftModel, nothing for adapters inside of a diffusers model.
    """
    wrapped = set(adapted)
    names = {}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        owner, _, factor = module.rpartition(".")
        if module in wrapped:
            names[name] = f"{prefix}{module}.base_layer.{leaf}"
        elif owner in wrapped and factor in ("lora_A", "lora_B"):
            names[name] = f"{prefix}{module}.{adapter}.{leaf}"
        else:
            names[name] = f"{prefix}{name}"
    return renamed(names, shapes)


def fused(shapes: Shapes, groups: Mapping[str, Sequence[str]]) -> dict[str, list[Slice]]:
    """Sibling modules stacked by rows: ``{"to_qkv": ["to_q", "to_k", "to_v"]}``; an incomplete set of siblings stays.

    An engine's judge: ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}``.
    """
    layout = plain(shapes)
    fusing = {part for parts in groups.values() for part in parts}
    loose = next(
        (name for name in shapes if ".lora_" in name and name.split(".lora_")[0].split(".")[-1] in fusing), None
    )
    if loose is not None:
        raise SolrlError(f"{loose} cannot be fused with its siblings: merge the adapter into the weights first")
    for whole, parts in groups.items():
        for name in [name for name in shapes if _module(name) == parts[0]]:
            siblings = [_beside(name, part) for part in parts]
            if not all(sibling in layout for sibling in siblings):
                continue
            rows, slices = 0, []
            for sibling in siblings:
                box, rest = _all(shapes[sibling]), tuple((0, size) for size in shapes[sibling][1:])
                slices.append(Slice(sibling, box, ((rows, rows + box[0][1]), *rest)))
                rows += box[0][1]
                del layout[sibling]
            layout[_beside(name, whole)] = slices
    return layout


def renamed(names: Mapping[str, str], shapes: Shapes) -> dict[str, list[Slice]]:
    """Every plain parameter whole, under the name that ``names`` gives it."""
    return {own: [Slice(name, _all(shapes[name]), _all(shapes[name]))] for name, own in names.items()}


def moves(shapes: Shapes, source: Layout, target: Layout) -> list[Move]:
    """The copies that fill every parameter of ``target`` from those of ``source``: one for each atomic slice."""
    found, held, wanted = [], _by_plain_name(source), _by_plain_name(target)
    for name, needs in wanted.items():
        has = held.get(name, [])
        for box in refine(shapes[name], *([piece.box for _, piece in side] for side in (has, needs))):
            holders = [(owner, piece) for owner, piece in has if _inside(box, piece.box)]
            for receiver, need in needs:
                if _inside(box, need.box):
                    if not holders:
                        raise SolrlError(f"{receiver} needs {name}, which the other layout does not hold")
                    owner, piece = holders[0]
                    found.append(Move(owner, _moved(box, piece), receiver, _moved(box, need)))
    return found


def move_(steps: Iterable[Move], source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """``target`` holds what ``source`` does, in its own layout."""
    for step in steps:
        part(target[step.target], step.target_box).copy_(part(source[step.source], step.source_box))


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of ``tensor`` that ``box`` cuts out."""
    for dimension, (begin, end) in enumerate(box):
        tensor = tensor.narrow(dimension, begin, end - begin)
    return tensor


def shape_of(slices: Iterable[Slice]) -> tuple[int, ...]:
    """The shape of a layout's parameter."""
    return tuple(max(end for _, end in edges) for edges in zip(*(piece.own for piece in slices), strict=True))


def _by_plain_name(layout: Layout) -> dict[str, list[tuple[str, Slice]]]:
    found: dict[str, list[tuple[str, Slice]]] = {}
    for own, slices in layout.items():
        for piece in slices:
            found.setdefault(piece.name, []).append((own, piece))
    return found


def _all(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _inside(box: Box, outer: Box) -> bool:
    return all(a <= begin and end <= b for (begin, end), (a, b) in zip(box, outer, strict=True))


def _moved(box: Box, piece: Slice) -> Box:
    """A box of the plain parameter, in the coordinates of the layout's."""
    return tuple(
        (begin - a + c, end - a + c) for (begin, end), (a, _), (c, _) in zip(box, piece.box, piece.own, strict=True)
    )


def _module(name: str) -> str:
    """``blocks.0.to_q.weight`` -> ``to_q``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _beside(name: str, module: str) -> str:
    """("blocks.0.to_q.weight", "to_k") -> "blocks.0.to_k.weight"."""
    path, _, leaf = name.rpartition(".")
    return ".".join(filter(None, (path.rpartition(".")[0], module, leaf)))
