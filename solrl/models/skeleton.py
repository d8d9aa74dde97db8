"""A pipeline's modules without their weights, on the meta device: shapes to plan with, in no memory and no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl.config import ModelConfig
from solrl.errors import UsageError
from solrl.models.architectures import PUBLISHED, Part


def skeleton_pipeline(pipeline_class: Any, model: ModelConfig, source: str, dtype: torch.dtype) -> Any:
    """A ``pipeline_class`` whose modules are on the meta device, in ``dtype``; it has no tokenizers.

    Parts are those of a local folder's config files, or of the published numbers; UsageError where it is neither.
    """
    folder = Path(source)
    if (folder / "model_index.json").is_file():
        parts = _parts_of(folder)
    elif source in PUBLISHED:
        parts = PUBLISHED[source]
    else:
        raise UsageError(
            f"model.path {model.path} is no local folder, and its architecture is not among the known ones "
            f"({', '.join(PUBLISHED)}): download it, and give the folder"
        )
    made = {name: _make(*part) for name, part in parts.items()}
    for part in made.values():
        if isinstance(part, nn.Module):
            nn.Module.to(part, dtype)  # the classes' own `to` warns about weights that nobody loads
    names = pipeline_class._get_signature_keys(pipeline_class)[0]
    return pipeline_class(**{name: made.get(name) for name in names})


def _parts_of(folder: Path) -> dict[str, Part]:
    """Each part's class and settings, from the files that diffusers reads; tokenizers are left out."""
    parts: dict[str, Part] = {}
    for name, value in json.loads((folder / "model_index.json").read_text()).items():
        if not isinstance(value, list) or value[1] is None:
            continue
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        if (folder / name / file).is_file():
            parts[name] = (value[1], json.loads((folder / name / file).read_text()))
    return parts


def _make(class_name: str, settings: dict[str, Any]) -> Any:
    import diffusers
    import transformers

    with torch.device("meta"):
        if hasattr(diffusers, class_name):
            return getattr(diffusers, class_name).from_config(settings)
        kind = getattr(transformers, class_name)
        return kind(kind.config_class(**settings))
