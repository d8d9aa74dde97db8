"""What was trained in the layout diffusers loads, with a model card: a LoRA, or after full fine-tuning a transformer.

diffusers takes alpha == rank where a file says nothing, and else what its metadata says. So alpha / rank
is multiplied into lora_B, and the metadata says alpha == rank: every reader arrives at the same weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from solrl.checkpoint import Checkpoint, best_checkpoint, list_checkpoints, newest_checkpoint, read_checkpoint
from solrl.config import Config
from solrl.errors import SolrlError
from solrl.files import saving, write_atomic
from solrl.learner import BUFFER, trained_weights
from solrl.models.adapters import WEIGHTS
from solrl.models.loading import ASSETS, transformer_settings
from solrl.settings import load_config
from solrl.types import LoraPair, Weights

TRANSFORMER = "diffusion_pytorch_model.safetensors"
"""The file name that ``from_pretrained`` looks for in a transformer's folder."""

PIPELINES = {"flux": "FluxPipeline", "sd3": "StableDiffusion3Pipeline", "sana": "SanaPipeline"}
"""Model family -> diffusers class; others load through DiffusionPipeline, which reads the class from the folder."""


def export_lora(
    folder: Path,
    pairs: Mapping[str, LoraPair],
    config: Config,
    *,
    step: int,
    weights: str,
    rewards: Mapping[str, float] | None = None,
) -> Path:
    """``folder`` holds the adapter and its card, each replaced atomically; returns the weights' path.

    ``weights`` says in a few words what is exported ("average of the policy (EMA)", say); ``rewards`` are held-out
    means, by name, for the card.
    """
    ranks = {pair.a.shape[0] for pair in pairs.values()}
    if len(ranks) != 1:
        raise SolrlError(f"cannot export an adapter with ranks {sorted(ranks)}: it must have exactly one")
    rank = ranks.pop()
    tensors = {}
    for layer, pair in pairs.items():
        tensors[f"transformer.{layer}.lora_A.weight"] = pair.a.detach().float().cpu().contiguous()
        tensors[f"transformer.{layer}.lora_B.weight"] = (pair.b.detach().float() * pair.scale).cpu().contiguous()
    adapter = {
        "transformer.r": rank,
        "transformer.lora_alpha": rank,
        "transformer.target_modules": sorted(pairs),
    }
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(adapter, sort_keys=True), "solrl_step": str(step)}
    path = folder / WEIGHTS
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, safetensors.torch.save(tensors, metadata))
    card = model_card(config, step=step, weights=weights, layers=list(pairs), rewards=rewards or {})
    write_atomic(folder / "README.md", card.encode())
    return path


def export_run(run_dir: Path, out: Path, *, step: int | Literal["best"] | None = None, raw: bool = False) -> Path:
    """Export the averaged weights (``raw``: the policy) of a run's checkpoint: the newest, the best, or one step's.

    Loads no model: a checkpoint holds all that was trained.
    """
    return export_checkpoint(out, pick_checkpoint(run_dir, step), load_config(run_dir), raw=raw)


def export_checkpoint(out: Path, checkpoint: Checkpoint, config: Config, *, raw: bool = False) -> Path:
    """``out`` holds the averaged weights (``raw``: the policy) of a checkpoint: a LoRA, or a whole transformer."""
    weights: Any = checkpoint_weights(checkpoint, config, "policy" if raw else "ema")
    if not config.lora.enabled:
        weights = weights | _buffers(checkpoint)
    rewards = {config.reward.name: checkpoint.heldout} if checkpoint.heldout is not None and not raw else {}
    export: Any = export_lora if config.lora.enabled else export_transformer
    what = "policy" if raw else "average (EMA)"
    path: Path = export(out, weights, config, step=checkpoint.step, weights=what, rewards=rewards)
    return path


def export_transformer(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Config,
    *,
    step: int,
    weights: str,
    rewards: Mapping[str, float],
) -> Path:
    """``folder`` holds a transformer for diffusers' ``from_pretrained``, and its card; returns the weights' path.

    Each file is replaced atomically; its dtype is that of the card's call. Arguments as in ``export_lora``.
    """
    dtype = getattr(torch, _dtype(config))
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / TRANSFORMER
    write_atomic(path, safetensors.torch.save(stored, {"format": "pt", "solrl_step": str(step)}))
    write_atomic(folder / "config.json", (json.dumps(transformer_settings(config.model), indent=2) + "\n").encode())
    write_atomic(folder / "README.md", model_card(config, step=step, weights=weights, rewards=rewards).encode())
    return path


def checkpoint_weights(checkpoint: Checkpoint, config: Config, kind: Literal["policy", "ema"]) -> Weights:
    """What a checkpoint holds of the policy itself, or of its average."""
    prefix = f"{kind}/"
    tensors = {name.removeprefix(prefix): t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
    return trained_weights(tensors, config)


def _buffers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """What a transformer's file holds beside its parameters."""
    return {name.removeprefix(BUFFER): t for name, t in checkpoint.tensors.items() if name.startswith(BUFFER)}


def pick_checkpoint(run_dir: Path, step: int | Literal["best"] | None) -> Checkpoint:
    """The newest checkpoint of a run, its best by held-out reward, or that of one step."""
    known = list_checkpoints(run_dir)
    if step == "best":
        step = best_checkpoint(run_dir)
        if step is None:
            raise SolrlError(f"no checkpoint of {run_dir} was evaluated: choose one by its step, or the newest")
    if step is not None and step not in known:
        raise SolrlError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, known)) or 'none'}")
    checkpoint = newest_checkpoint(run_dir) if step is None else read_checkpoint(known[step])
    if checkpoint is None:
        raise SolrlError(f"{run_dir} has no checkpoint yet: nothing to export")
    return checkpoint


def model_card(
    config: Config, *, step: int, weights: str, layers: Sequence[str] = (), rewards: Mapping[str, float]
) -> str:
    """The README of what was exported: the exact call first, then how it was trained."""
    lora, train, explore, keep = config.lora, config.train, config.explore, config.regenerate
    measured = "".join(f"| {name} | {value:.4f} |\n" for name, value in rewards.items())
    table = f"\n| held-out reward | mean |\n|---|---|\n{measured}" if measured else ""
    two_stage = (
        f"{explore.group_size} candidates a prompt explored in {explore.num_steps} steps "
        f"({explore.solver}, {explore.precision}), {keep.group_size} kept and drawn again in {keep.num_steps} steps"
        if explore.enabled and keep.enabled
        else f"{config.train_stage.group_size} candidates a prompt drawn in {config.train_stage.num_steps} steps"
    )
    kinds = sorted({re.sub(r"^\w+\.\d+\.", "", layer) for layer in layers})
    guidance = f"guidance {config.model.guidance:g}, CFG {config.model.cfg_scale:g}"
    is_hub_id = not _is_embedded(config) and not Path(config.model.path).exists()
    base = f"base_model: {config.model.path}\n" if is_hub_id else ""
    tag, title, note, size = ("", "Transformer", "", "The whole transformer")
    if lora.enabled:
        tag, title = "lora, ", "LoRA"
        note = "\nalpha / rank is folded into the weights: load them at scale 1.\n"
        size = f"Rank {lora.rank} on {len(layers)} layers ({', '.join(kinds)})"
    return f"""---
library_name: diffusers
tags: [text-to-image, {tag}reinforcement-learning, solrl]
{base}---
# {title} of {config.model.path}, trained on the reward "{config.reward.name}"

```python
{pipeline_call(config)}
```
{note}
- **Weights**: {weights}, after step {step}. {size}.
- **Method**: {train.method}, {config.prompts.per_step} prompts a step; {two_stage}.
- **Update**: AdamW, learning rate {train.learning_rate:g}, KL weight {train.kl_weight:g}, run seed {config.seed}.
- **Evaluation**: {config.evaluate.num_steps} steps, {config.evaluate.solver}, {guidance}.
{table}"""


def pipeline_call(config: Config) -> str:
    """The diffusers code that draws with what was exported as the run's evaluation does (with the Euler solver)."""
    model = config.model
    pipeline = PIPELINES.get(model.family, "DiffusionPipeline")
    setup, arguments = _family_call(config)
    is_full = not config.lora.enabled
    names = [pipeline, *(["FlowMatchEulerDiscreteScheduler"] if setup else []), *(["AutoModel"] if is_full else [])]
    imports = ["import torch", f"from diffusers import {', '.join(sorted(names))}"]
    source, revision = f'"{model.path}"', f', revision="{model.revision}"' if model.revision else ""
    if _is_embedded(config):
        imports = ["from importlib.resources import files", "", *imports]
        source = f'str(files("solrl") / "assets" / "{model.path}")'
    dtype, transformer = f"torch.{_dtype(config)}", ", transformer=transformer" if is_full else ""
    load = f'transformer = AutoModel.from_pretrained("path/to/this/folder", torch_dtype={dtype})'
    return "\n".join(
        [
            *imports,
            "",
            *([load] if is_full else []),
            f"pipe = {pipeline}.from_pretrained({source}{revision}{transformer}, torch_dtype={dtype})",
            *([] if _is_embedded(config) else ['pipe.to("cuda")']),
            *setup,
            *([] if is_full else ['pipe.load_lora_weights("path/to/this/folder")']),
            "image = pipe(",
            '    "a prompt",',
            f"    height={model.height},",
            f"    width={model.width},",
            f"    num_inference_steps={config.evaluate.num_steps},",
            f"    max_sequence_length={model.max_text_tokens},",
            *(f"    {argument}," for argument in arguments),
            ").images[0]",
        ]
    )


def _family_call(config: Config) -> tuple[list[str], list[str]]:
    """(lines before the call, further arguments): what a family's pipeline must be told to draw as our policy does."""
    model, num_steps = config.model, config.evaluate.num_steps
    if model.family in ("sd3", "sana"):
        arguments = [f"guidance_scale={model.cfg_scale}"]
    else:
        arguments = [f"guidance_scale={model.guidance}"]
        if model.cfg_scale > 1:
            arguments += ['negative_prompt=""', f"true_cfg_scale={model.cfg_scale}"]
    if model.family != "sana":
        return [], arguments
    arguments += ["complex_human_instruction=None", "use_resolution_binning=False"]
    arguments += [f"sigmas=torch.linspace(1, 0, {num_steps + 1}).bfloat16()[:-1].tolist()"]
    return ["pipe.scheduler = FlowMatchEulerDiscreteScheduler()"], arguments


def _dtype(config: Config) -> str:
    """What an export is loaded in."""
    return "float32" if config.model.dtype == "float32" or _is_embedded(config) else "bfloat16"


def _is_embedded(config: Config) -> bool:
    name = config.model.path
    return Path(name).name == name and (ASSETS / name / "model_index.json").is_file()
