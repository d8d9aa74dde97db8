"""Diffusers pipelines from a folder or the hub; what is missing is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl.config import ModelConfig
from solrl.models.encoders import rests_on_host, warn_once
from solrl.models.skeleton import skeleton_pipeline
from solrl.types import SolrlError, UsageError

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def model_source(model: ModelConfig) -> str:
    """The folder or hub id that diffusers loads."""
    embedded = ASSETS / model.path
    if (embedded / "model_index.json").is_file():
        return str(embedded)
    if Path(model.path).is_dir() and not (Path(model.path) / "model_index.json").is_file():
        raise SolrlError(f"model.path {model.path} is not a diffusers folder: model_index.json is missing")
    return model.path


def transformer_settings(model: ModelConfig) -> dict[str, Any]:
    """The transformer's config.json; of a hub id, the file that was loaded with it."""
    from huggingface_hub import hf_hub_download

    folder = Path(model_source(model))
    file = folder / "transformer" / "config.json"
    if not folder.is_dir():
        file = Path(hf_hub_download(model.path, "transformer/config.json", revision=model.revision))
    settings: dict[str, Any] = json.loads(file.read_text())
    return settings


def load_pipeline(pipeline_class: Any, model: ModelConfig, device: torch.device) -> Any:
    """A diffusers pipeline of ``pipeline_class`` with its modules on ``device``; a SolrlError says what is missing.

    With ``model.shard`` the transformer stays on the CPU, from where it is sharded (solrl/sharding.py). On the meta
    device there are no weights, and nothing is downloaded (solrl/models/skeleton.py).
    """
    from safetensors import SafetensorError

    source = model_source(model)
    if device.type == "meta":
        return skeleton_pipeline(pipeline_class, model, source, compute_dtype(model, device))
    quiet_loading()
    try:
        found = pipeline_class.load_config(source, revision=model.revision)["_class_name"]
        if found == pipeline_class.__name__:
            pipeline = pipeline_class.from_pretrained(
                source, revision=model.revision, dtype=compute_dtype(model, device), use_safetensors=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise SolrlError(f"model.path {model.path} cannot be loaded: {_why_not(error, model)}") from error
    if found != pipeline_class.__name__:
        raise UsageError(
            f"model.path {model.path} holds a {found}, and model.family {model.family} needs a "
            f"{pipeline_class.__name__}: {_family_of(found)}"
        )
    warn_once(pipeline_class)
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            rests = name.startswith("text_encoder") and rests_on_host(model, device)
            waits = name == "transformer" and model.shard
            module.to("cpu" if rests or waits else device)
            for parameter in module.parameters():
                # Memory-mapped weights lie at odd addresses, on which a CPU's kernels round differently.
                parameter.data = parameter.data.clone()
    return pipeline


def _family_of(pipeline_class: str) -> str:
    """What to do about a folder of another class."""
    classes = {"FluxPipeline": "flux", "StableDiffusion3Pipeline": "sd3", "SanaPipeline": "sana"}
    if pipeline_class in classes:
        return f"set model.family = {classes[pipeline_class]}"
    return f"no family takes a {pipeline_class}; known are {', '.join(classes)}"


def _why_not(error: BaseException, model: ModelConfig) -> str:
    """Why loading failed and what to do, in one line: the first cause that is known, else the error's first line."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    name, absent = model.path, f"there is no folder {model.path}, and"
    known: dict[type[BaseException], str] = {
        hub.GatedRepoError: f"the hub asks for consent: accept the licence at hf.co/{name}, then run `hf auth login`",
        hub.RevisionNotFoundError: f"it has no revision {model.revision}: check model.revision",
        hub.RepositoryNotFoundError: f"{absent} the hub shows no such model: check the name, or run `hf auth login`",
        hub.HFValidationError: f"{absent} it is no hub id: check the path",
        hub.LocalEntryNotFoundError: f"{absent} it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE "
        f"is set: run `hf download {name}` where there is a network",
        SafetensorError: "a weights file is damaged: copy or download it again",
    }
    cause: BaseException | None = error
    while cause is not None:
        for kind, text in known.items():
            if isinstance(cause, kind):
                return text
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
