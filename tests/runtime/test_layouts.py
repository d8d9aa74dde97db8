"""A parameter in any layout goes to any other and back unchanged."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.runtime.layouts import Layout, Slice, fused, move_, moves, part, peft, plain, shape_of

SHAPES = {
    "blocks.0.attn.to_q.weight": (8, 6),
    "blocks.0.attn.to_q.bias": (8,),
    "blocks.0.attn.to_k.weight": (4, 6),
    "blocks.0.attn.to_k.bias": (4,),
    "blocks.0.attn.to_v.weight": (4, 6),
    "blocks.0.attn.to_v.bias": (4,),
    "blocks.0.attn.norm_q.weight": (2,),
    "blocks.0.mlp.gate_proj.weight": (5, 6),
    "blocks.0.mlp.up_proj.weight": (5, 6),
    "to_q.weight": (3, 3),
    "scale": (),
}
QKV = {"to_qkv": ["to_q", "to_k", "to_v"], "gate_up_proj": ["gate_proj", "up_proj"]}
COLUMNS: Layout = (
    {  # as tensor parallelism cuts what is reduced afterwards
        f"{name}@{rank}": [Slice(name, (*rest, half), (*rest, (0, half[1] - half[0])))]
        for name, shape in SHAPES.items()
        if shape
        for rank, half in enumerate(((0, shape[-1] // 2), (shape[-1] // 2, shape[-1])))
        for rest in [tuple((0, size) for size in shape[:-1])]
    }
    | {"scale": [Slice("scale", (), ())]}
)
LAYOUTS: dict[str, Layout] = {
    "diffusers": plain(SHAPES),
    "peft": peft(SHAPES, ["blocks.0.attn.to_q", "blocks.0.attn.to_v"]),
    "fused": fused(SHAPES, QKV),
    "columns": COLUMNS,
}


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def convert(tensors: dict[str, Tensor], source: Layout, target: Layout) -> dict[str, Tensor]:
    out = {name: torch.full(shape_of(slices), float("nan")) for name, slices in target.items()}
    move_(moves(SHAPES, source, target), tensors, out)
    return out


@pytest.mark.parametrize(("one", "other"), list(permutations(LAYOUTS, 2)))
def test_there_and_back_is_the_same_for_each_pair(one: str, other: str) -> None:
    first, second = LAYOUTS[one], LAYOUTS[other]
    mine = convert(values(SHAPES), plain(SHAPES), first)
    there = convert(mine, first, second)
    back = convert(there, second, first)
    assert back.keys() == mine.keys()
    assert all(torch.equal(back[name], mine[name]) for name in mine)
    assert sum(tensor.numel() for tensor in there.values()) == sum(tensor.numel() for tensor in mine.values())
    assert not any(bool(tensor.isnan().any()) for tensor in there.values())


def test_fused_projections_are_the_rows_of_their_parts_and_strangers_stay() -> None:
    tensors = values(SHAPES)
    got = convert(tensors, plain(SHAPES), fused(SHAPES, QKV))
    q, k, v = (tensors[f"blocks.0.attn.to_{x}.weight"] for x in "qkv")
    assert torch.equal(got["blocks.0.attn.to_qkv.weight"], torch.cat([q, k, v]))
    assert got["blocks.0.attn.to_qkv.bias"].shape == (16,)
    assert torch.equal(got["blocks.0.mlp.gate_up_proj.weight"][5:], tensors["blocks.0.mlp.up_proj.weight"])
    assert torch.equal(got["to_q.weight"], tensors["to_q.weight"])  # without to_k and to_v beside it
    assert len(got) == len(SHAPES) - 5


@pytest.mark.slow  # importing peft
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_are_those_that_peft_gives(prefix: str) -> None:
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["to_q"], lora_bias=False)
    model = nn.ModuleDict({"attn": nn.ModuleDict({"to_q": nn.Linear(6, 8), "to_k": nn.Linear(6, 4)})})
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes |= {"attn.to_q.lora_A.weight": (2, 6), "attn.to_q.lora_B.weight": (8, 2)}
    wrapped = get_peft_model(model, config) if prefix else inject_adapter_in_model(config, model)
    layout = peft(shapes, ["attn.to_q"], prefix=prefix)
    expected = {name: tuple(tensor.shape) for name, tensor in wrapped.state_dict().items()}
    assert {name: shape_of(slices) for name, slices in layout.items()} == expected


def test_every_move_is_an_atomic_slice() -> None:
    steps = moves(SHAPES, LAYOUTS["columns"], LAYOUTS["fused"])
    assert len(steps) == 2 * (len(SHAPES) - 1) + 1
    assert {step.target for step in steps} == LAYOUTS["fused"].keys()
    tensor = torch.arange(12.0).reshape(3, 4)
    assert part(tensor, ((1, 3), (0, 2))).tolist() == [[4, 5], [8, 9]]
    assert part(torch.tensor(2.0), ()).item() == 2


def test_what_cannot_be_converted_is_named() -> None:
    some = plain({"scale": ()})
    with pytest.raises(SolrlError, match=r"needs blocks\.0\..*, which the other layout does not hold"):
        moves(SHAPES, some, LAYOUTS["fused"])
    lora = SHAPES | {"blocks.0.attn.to_k.lora_A.weight": (2, 6)}
    with pytest.raises(SolrlError, match=r"to_k\.lora_A\.weight cannot be fused .*: merge the adapter"):
        fused(lora, QKV)
