"""What all model families share: loading, adapters, decoding in slices.

Every policy's transformer carries two peft adapters of the same shape: "default" is the policy, "old" is old_policy,
which every rollout is drawn from. With adapters off it is the reference policy.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solrl.config import Config, LoraConfig, ModelConfig
from solrl.groups import candidate_seed, noise
from solrl.types import LoraPair, Policy, SolrlError, UsageError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
FAMILIES = {"flux": "solrl.models.flux:FluxPolicy"}


def load_policy(config: Config, device: torch.device) -> Policy:
    """The policy a config names, on ``device``: frozen weights, equal adapters "default" (active) and "old".

    A layer's initial adapter is A ~ N(0, 1/rank) and B = 0, drawn from the run seed.
    """
    policy = _family(config.model.family)(config.model, device)
    policy.requires_grad_(False).eval()
    add_adapters(policy.transformer, config.lora, config.seed)
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    return policy


def _family(name: str) -> Any:
    target = FAMILIES.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise UsageError(f"model.family {name!r} is unknown; known: {', '.join(FAMILIES)}, or package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"model.family {name!r} cannot be imported: {error}") from error


def model_source(model: ModelConfig) -> str:
    """The folder or hub id that diffusers loads."""
    embedded = ASSETS / model.path
    if (embedded / "model_index.json").is_file():
        return str(embedded)
    if Path(model.path).is_dir() and not (Path(model.path) / "model_index.json").is_file():
        raise SolrlError(f"model.path {model.path} is not a diffusers folder: model_index.json is missing")
    return model.path


def load_pipeline(pipeline_class: Any, model: ModelConfig, device: torch.device) -> Any:
    """A diffusers pipeline of ``pipeline_class`` with its modules on ``device``; a SolrlError says what is missing."""
    dtype = compute_dtype(model, device)
    source = model_source(model)
    quiet_loading()
    try:
        pipeline = pipeline_class.from_pretrained(source, revision=model.revision, dtype=dtype)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = (
            ""
            if Path(source).is_dir()
            else "; no such folder, so the hub was asked: check the name, its licence, hf auth login"
        )
        raise SolrlError(f"model.path {model.path} cannot be loaded: {first}{hint}") from error
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.to(device)
            for parameter in module.parameters():
                # Memory-mapped weights lie at odd addresses, on which a CPU's kernels round differently.
                parameter.data = parameter.data.clone()
    return pipeline


def quiet_loading() -> None:
    """No progress bars while local files are read."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of frozen weights and compute."""
    if model.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def add_adapters(transformer: Any, lora: LoraConfig, run_seed: int) -> None:
    """Add "default" and "old"; raises UsageError where the targets match no layer."""
    import peft

    # Two adapters on one model are what is wanted here; peft warns about them.
    warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute", category=UserWarning)
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


def lora_state(transformer: nn.Module, name: str) -> dict[str, LoraPair]:
    """Layer name -> the adapter's live weights (views, not copies), in the model's order."""
    return {
        layer_name: LoraPair(
            layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach(), float(layer.scaling[name])
        )
        for layer_name, layer in _adapter_layers(transformer).items()
    }


def lora_parameters(transformer: nn.Module, name: str) -> list[Tensor]:
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


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scaled VAE latents [B, c, h, w] -> images [B, 3, H, W], float32 in [0, 1]."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    image = vae.decode(scaled, return_dict=False)[0]
    return (image.float() / 2 + 0.5).clamp(0, 1)
