"""The trained adapter in the layout diffusers loads, with a model card.

diffusers takes alpha == rank where a file says nothing, and else what its metadata says. So alpha / rank
is multiplied into lora_B, and the metadata says alpha == rank: every reader arrives at the same weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch

from solrl.checkpoint import Checkpoint, best_checkpoint, list_checkpoints, newest_checkpoint, read_checkpoint
from solrl.config import Config
from solrl.errors import SolrlError
from solrl.files import saving, write_atomic
from solrl.models.base import ASSETS, WEIGHTS
from solrl.settings import load_config
from solrl.types import LoraPair

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
    """Export the averaged adapter (``raw``: the policy) of a run's checkpoint: the newest, the best, or one step's.

    Loads no model: a checkpoint holds the adapters.
    """
    config, checkpoint = load_config(run_dir), pick_checkpoint(run_dir, step)
    pairs = checkpoint_adapters(checkpoint, config, "policy" if raw else "ema")
    rewards = {config.reward.name: checkpoint.heldout} if checkpoint.heldout is not None and not raw else {}
    weights = "policy" if raw else "average (EMA)"
    return export_lora(out, pairs, config, step=checkpoint.step, weights=weights, rewards=rewards)


def checkpoint_adapters(checkpoint: Checkpoint, config: Config, kind: Literal["policy", "ema"]) -> dict[str, LoraPair]:
    """Layer name -> the adapter that a checkpoint holds: the policy itself, or its average."""
    scale = config.lora.alpha / config.lora.rank
    prefix = f"{kind}/"
    halves = {name.removeprefix(prefix): t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
    layers = sorted(name.removesuffix(".A") for name in halves if name.endswith(".A"))
    return {layer: LoraPair(halves[f"{layer}.A"], halves[f"{layer}.B"], scale) for layer in layers}


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


def model_card(config: Config, *, step: int, weights: str, layers: Sequence[str], rewards: Mapping[str, float]) -> str:
    """The README of an exported adapter: the exact call first, then how it was trained."""
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
    return f"""---
library_name: diffusers
tags: [text-to-image, lora, reinforcement-learning, solrl]
{base}---
# LoRA of {config.model.path}, trained on the reward "{config.reward.name}"

```python
{pipeline_call(config)}
```

alpha / rank is folded into the weights: load them at scale 1.

- **Weights**: {weights}, after step {step}. Rank {lora.rank} on {len(layers)} layers ({", ".join(kinds)}).
- **Method**: {train.method}, {config.prompts.per_step} prompts a step; {two_stage}.
- **Update**: AdamW, learning rate {train.learning_rate:g}, KL weight {train.kl_weight:g}, run seed {config.seed}.
- **Evaluation**: {config.evaluate.num_steps} steps, {config.evaluate.solver}, {guidance}.
{table}"""


def pipeline_call(config: Config) -> str:
    """The diffusers code that draws with the exported adapter as the run's evaluation does (with the Euler solver)."""
    model = config.model
    pipeline = PIPELINES.get(model.family, "DiffusionPipeline")
    setup, arguments = _family_call(config)
    names = [pipeline, *(["FlowMatchEulerDiscreteScheduler"] if setup else [])]
    imports = ["import torch", f"from diffusers import {', '.join(sorted(names))}"]
    source, revision = f'"{model.path}"', f', revision="{model.revision}"' if model.revision else ""
    if _is_embedded(config):
        imports = ["from importlib.resources import files", "", *imports]
        source = f'str(files("solrl") / "assets" / "{model.path}")'
    dtype = "torch.float32" if model.dtype == "float32" or _is_embedded(config) else "torch.bfloat16"
    return "\n".join(
        [
            *imports,
            "",
            f"pipe = {pipeline}.from_pretrained({source}{revision}, torch_dtype={dtype})",
            *([] if _is_embedded(config) else ['pipe.to("cuda")']),
            *setup,
            'pipe.load_lora_weights("path/to/this/folder")',
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


def _is_embedded(config: Config) -> bool:
    name = config.model.path
    return Path(name).name == name and (ASSETS / name / "model_index.json").is_file()
