"""What a tiny pipeline can draw: its mean rewards on the prompt files, and a picture of its samples."""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, SanaPipeline
from PIL import Image
from solrl_rewards import load_reward, scenes
from tiny_models import TEXT_LENGTH
from torch import Tensor


def sample(pipeline: DiffusionPipeline, prompts: list[str], num_steps: int) -> Tensor:
    """One image a prompt, the n-th from seed n, without guidance."""
    images = []
    call: dict[str, object] = {}
    if isinstance(pipeline, SanaPipeline):
        call = {"complex_human_instruction": None, "use_resolution_binning": False}
        call["sigmas"] = [1 - step / num_steps for step in range(num_steps)]
    for start in range(0, len(prompts), 64):
        batch = prompts[start : start + 64]
        generators = [torch.Generator().manual_seed(seed) for seed in range(start, start + len(batch))]
        output = pipeline(
            batch,
            height=scenes.SIZE,
            width=scenes.SIZE,
            num_inference_steps=num_steps,
            guidance_scale=1.0,
            max_sequence_length=TEXT_LENGTH,
            generator=generators,
            output_type="pt",
            **call,
        )
        images.append(output.images.float())
    return torch.cat(images)  # [B, 3, SIZE, SIZE]


def save_grid(images: Tensor, columns: int, path: Path, scale: int = 3) -> None:
    """A PNG of the images, row by row."""
    rows = images.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    picture = Image.fromarray((rows * 255).round().byte().numpy())
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)


def check(args: argparse.Namespace) -> None:
    """Prints the mean rewards of `args.model` and saves a grid of samples, half of single objects and half of two."""
    pipeline = DiffusionPipeline.from_pretrained(args.model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    rewards = {"shapes": load_reward("shapes")}
    if args.clip.exists():
        rewards["clip_score"] = load_reward("clip_score", model=str(args.clip))
    shown = []
    for name in ("shapes_single", "shapes_heldout"):
        lines = (args.prompts / f"{name}.txt").read_text().splitlines()
        prompts = [lines[row % len(lines)] for row in range(args.images)]
        for num_steps in args.num_steps:
            images = sample(pipeline, prompts, num_steps)
            for reward_name, reward in rewards.items():
                answer = reward(images, prompts)
                scores = answer[0] if isinstance(answer, tuple) else answer
                print(f"{name} {num_steps} steps: {reward_name} {scores.mean():.3f} +- {scores.std():.3f}", flush=True)
        shown.append(images[:64])
    save_grid(torch.cat(shown), 16, args.grid)
