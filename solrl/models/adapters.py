"""LoRA adapters on a transformer.

Every policy's transformer carries two peft adapters of the same shape: "default" is the policy, "old" is old_policy,
which every rollout is drawn from. With adapters off it is the reference policy.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl.config import LoraConfig
from solrl.groups import candidate_seed, noise
from solrl.types import LoraPair, UsageError

WEIGHTS = "pytorch_lora_weights.safetensors"
"""The file name that ``load_lora_weights`` looks for in a folder."""


def add_adapters(transformer: Any, lora: LoraConfig, run_seed: int) -> None:
    """Add "default" and "old"; raises UsageError where the targets match no layer."""
    import peft

    # Two adapters on one model are what is wanted here; peft warns about them.
    warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute", category=UserWarning)
    if not lora.targets:
        raise UsageError("lora.targets is unset, and this model's family has no default: name the layers to adapt")
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    for name in ("default", "old"):
        try:
            transformer.add_adapter(settings, name)
        except ValueError as error:
            raise UsageError(f"lora.targets {list(lora.targets)} match no layer of this model") from error
    for name in ("default", "old"):
        for parameter in lora_parameters(transformer, name):  # diffusers gives them the base's dtype
            parameter.data = parameter.data.float()
        for number, pair in enumerate(lora_state(transformer, name).values()):
            seed = candidate_seed(run_seed, 0, 0, number, "lora")
            pair.a.copy_(noise([seed], pair.a.shape)[0] / math.sqrt(lora.rank))
            pair.b.zero_()
    for layer in _adapter_layers(transformer).values():
        layer.set_adapter("default")


@torch.no_grad()
def start_adapters_from(transformer: nn.Module, folder: Path, lora: LoraConfig) -> None:
    """Both adapters are the one exported to ``folder``; raises UsageError unless it fits ``lora`` exactly.

    As in diffusers, a file's scale is alpha / rank of its metadata, and 1 without them.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
            made = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UsageError(f"model.init_lora: {folder / WEIGHTS} cannot be read: {error}") from error
    if made.get("transformer.rank_pattern") or made.get("transformer.alpha_pattern"):
        raise UsageError(f"model.init_lora: {folder} has ranks or scales that differ between layers")
    alpha, rank = made.get("transformer.lora_alpha"), made.get("transformer.r")
    scale = alpha / rank if alpha and rank else 1.0
    adapters = [lora_state(transformer, name) for name in ("default", "old")]
    wanted = {f"transformer.{layer}.lora_{half}.weight" for layer in adapters[0] for half in "AB"}
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise UsageError(
            f"model.init_lora: {folder} adapts other layers than this run ({len(odd)} differ, first {odd[0]}): set "
            "lora.targets to the layers it was trained with"
        )
    for pairs in adapters:
        for layer, pair in pairs.items():
            a, b = (tensors[f"transformer.{layer}.lora_{half}.weight"] for half in "AB")
            if a.shape != pair.a.shape or b.shape != pair.b.shape:
                raise UsageError(
                    f"model.init_lora: {folder} has rank {len(a)}, lora.rank is {lora.rank}: make them equal"
                )
            pair.a.copy_(a)
            pair.b.copy_(b * (scale / pair.scale))


def lora_state(transformer: nn.Module, name: str) -> dict[str, LoraPair]:
    """Layer name -> the adapter's live weights (views, not copies), in the model's order."""
    return {
        layer_name: LoraPair(
            layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach(), float(layer.scaling[name])
        )
        for layer_name, layer in _adapter_layers(transformer).items()
    }


def lora_parameters(transformer: nn.Module, name: str) -> list[nn.Parameter]:
    """The adapter's parameters: A and B of each layer, in the order of ``lora_state``."""
    layers = _adapter_layers(transformer).values()
    return [matrix[name].weight for layer in layers for matrix in (layer.lora_A, layer.lora_B)]


@contextmanager
def adapter(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Inside, ``name`` is active and frozen (None: no adapter, the reference policy); after, "default" trains again."""
    layers = list(_adapter_layers(transformer).values())
    for layer in layers:
        if name is None:
            layer.enable_adapters(False)
        else:
            layer.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        for layer in layers:
            if name is None:
                layer.enable_adapters(True)
            layer.set_adapter("default")


def _adapter_layers(transformer: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer)}
