"""What rollout tree and explorer cost in memory: the formula, held to real trees, for the real architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, SanaTransformer2DModel, SD3Transformer2DModel
from torch import nn

from solrl.models.architectures import FLUX_1_DEV, SANA_1600M, SD35_LARGE, SD35_MEDIUM
from solrl.quant.backends import EMULATED, FP8, FULL, Backend
from solrl.quant.layers import SANA_CONVOLUTIONS, default_rules, format_report, plan_layers
from solrl.quant.memory import TreeBytes, tree_bytes
from solrl.quant.native import StandInLinear
from solrl.quant.trees import RolloutTrees
from tests.test_trees import TARGETS, transformer

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
GB = 1e9


def on_meta(made: Callable[[], Any]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = made().to(torch.bfloat16)
    return model


def flux_1_dev() -> nn.Module:
    return on_meta(lambda: FluxTransformer2DModel(**FLUX_1_DEV[1]))


def sd35_large() -> nn.Module:
    return on_meta(lambda: SD3Transformer2DModel(**SD35_LARGE[1]))


def sd35_medium() -> nn.Module:
    return on_meta(lambda: SD3Transformer2DModel(**SD35_MEDIUM[1]))


def sana_1600m() -> nn.Module:
    return on_meta(lambda: SanaTransformer2DModel(**SANA_1600M[1]))


REAL = {
    "flux_1_dev": (flux_1_dev, 11.90, (3.59, 4.84), (3.59, 8.61)),
    "sd35_large": (sd35_large, 8.06, (1.80, 3.00), (1.80, 5.35)),
    "sd35_medium": (sd35_medium, 2.24, (0.70, 0.82), (0.70, 1.46)),
    "sana_1600m": (sana_1600m, 1.60, (1.61, 0.45), (1.61, 0.80)),
}
"""Name -> (architecture, billions of parameters, GB added by (rollout tree, explorer) in NVFP4 and in FP8)."""


@pytest.mark.parametrize("name", list(REAL))
def test_an_explorer_of_a_real_architecture_adds_its_quantized_copies_only(name: str) -> None:
    made, billions, nvfp4, fp8 = REAL[name]
    model = made()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    for precision, (rollout, explorer) in {"nvfp4": nvfp4, "fp8": fp8}.items():
        found = tree_bytes(model, ATTENTION, precision)
        assert found.rollout / GB == pytest.approx(rollout, abs=0.01)
        assert found.explorer / GB == pytest.approx(explorer, abs=0.01)
    assert tree_bytes(model, ATTENTION, "full").explorer == 0


def test_flux_explores_with_five_gigabytes_not_twenty_four() -> None:
    found = tree_bytes(flux_1_dev(), ATTENTION, "nvfp4")
    assert found.base / GB == pytest.approx(23.80, abs=0.01)
    assert found.explorer / found.base < 0.21
    assert found.added == found.rollout + found.explorer


def test_only_embedders_modulation_and_output_stay_full_in_the_real_architectures() -> None:
    """And the feed-forward of SANA, which is made of convolutions."""
    in_blocks = {"norm1", "norm1_context", "norm"}
    for name, (made, *_) in REAL.items():
        model = made()
        plan = plan_layers(model, default_rules(model))
        for layer in plan:
            first, *others = layer.name.split(".")
            is_block = first in ("transformer_blocks", "single_transformer_blocks")
            stays = others[1] in in_blocks | ({"ff"} if name == "sana_1600m" else set()) if is_block else True
            assert (layer.format == "full") == stays, layer.name
        assert len(format_report(plan)) < 45


def test_sanas_convolutions_are_products_of_matrices_by_choice() -> None:
    model = sana_1600m()
    rules = [*default_rules(model), *SANA_CONVOLUTIONS]
    extra = {layer.name for layer in plan_layers(model, rules) if layer.format == "nvfp4"} - {
        layer.name for layer in plan_layers(model, default_rules(model)) if layer.format == "nvfp4"
    }
    assert {name.rpartition(".")[2] for name in extra} == {"conv_inverted", "conv_point"} and len(extra) == 40
    assert tree_bytes(model, ATTENTION, "nvfp4", rules).explorer > tree_bytes(model, ATTENTION, "nvfp4").explorer


@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        ("full", FULL),
        ("fp8", FP8),
        ("emulated_nvfp4", EMULATED),
        ("nvfp4", Backend("nvfp4", {"nvfp4": StandInLinear})),
    ],
)
def test_the_formula_is_what_real_trees_own(precision: str, backend: Backend) -> None:
    adapted = transformer()
    plain = RolloutTrees(adapted, FULL).rollout
    trees = RolloutTrees(adapted, backend)
    base = _storages(adapted)
    rollout = {pointer: size for pointer, size in _storages(trees.rollout).items() if pointer not in base}
    explorer = {pointer: size for pointer, size in _storages(trees.explorer).items() if pointer not in base | rollout}
    shared = [size for pointer, size in _storages(trees.explorer).items() if pointer not in explorer]
    assert tree_bytes(plain, TARGETS, precision) == TreeBytes(
        sum(parameter.numel() * 4 for parameter in plain.parameters()),
        sum(rollout.values()),
        sum(explorer.values()),
        sum(shared) if explorer else 0,
    )


def _storages(tree: nn.Module) -> dict[int, int]:
    """Where each tensor of a tree lies -> bytes."""
    tensors = [*tree.parameters(), *tree.buffers()]
    return {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
