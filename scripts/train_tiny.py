"""Make everything in solrl/assets from nothing: the tiny FLUX pipeline, the tiny CLIP and the prompt files.

    python scripts/train_tiny.py flux       # autoencoder, then text encoders and transformer by flow matching
    python scripts/train_tiny.py clip       # contrastively, against in-batch captions and one changed word each
    python scripts/train_tiny.py prompts
    python scripts/train_tiny.py check      # measure what is there

Without further flags each command repeats the recipe of what ships. All randomness is seeded and schedules count steps,
so a run repeats itself exactly on the same machine with the same number of threads.
"""

import argparse
import copy
import math
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline
from diffusers.models.activations import GELU
from solrl_rewards import scenes
from tiny_check import check_flux
from tiny_clip import train_clip
from tiny_kernels import quick_arithmetic
from tiny_models import TEXT_LENGTH, build_flux
from tiny_prompts import write_prompts
from tiny_steps import caption_ids, scene_batch, set_learning_rate, tidy_configs, warmup_hold_decay
from torch import Tensor, nn

ASSETS = Path(__file__).parent.parent / "solrl" / "assets"
CAPTION_DROP = 0.05


def train_vae(vae: AutoencoderKL, args: argparse.Namespace) -> None:
    """`vae` reconstructs scenes, and its config's shift and scale standardize their latents."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW([{"params": vae.parameters(), "peak_lr": 2e-3}], betas=(0.9, 0.99), weight_decay=0)
    vae.train()
    started = time.perf_counter()
    for step in range(args.vae_steps):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / args.vae_steps)
        set_learning_rate([optimizer], min((step + 1) / 50, 1.0) * cosine + 0.005)
        images = scene_batch(rng, 32, single=0.4)[1] * 2 - 1
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        loss = F.l1_loss(decoded, images) + F.mse_loss(decoded, images) + 1e-5 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == args.vae_steps - 1:
            error = F.mse_loss(decoded, images).item()
            print(
                f"vae {step} loss {loss.item():.4f} mse {error:.5f} {time.perf_counter() - started:.0f} s", flush=True
            )
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(scene_batch(rng, 256, single=0.4)[1] * 2 - 1).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))


def flow_optimizers(modules: nn.ModuleDict, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer's blocks, AdamW for everything else."""
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        if args.optimizer == "muon" and parameter.ndim == 2 and "transformer_blocks" in name:
            hidden.append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": 0.01, "peak_lr": args.lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": args.lr},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.98))]
    if hidden:
        muon = [{"params": hidden, "peak_lr": args.muon_lr}]
        optimizers.append(torch.optim.Muon(muon, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    return optimizers


class FluxFlow(nn.Module):
    """The flow-matching loss of a FluxPipeline's transformer and text encoders."""

    def __init__(self, pipeline: FluxPipeline) -> None:
        super().__init__()
        self.trained = nn.ModuleDict(
            {name: getattr(pipeline, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
        )
        self.pipeline = (pipeline,)  # in a tuple: not a submodule, so that copies of it stay cheap
        side = scenes.SIZE // 4
        for module in self.trained.modules():
            if isinstance(module, (nn.GELU, GELU)):
                module.approximate = "none"  # within 5e-4 of the tanh form that inference uses, and three times as fast
        self.image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Standardized, packed latents of images in [0, 1]."""
        vae = self.pipeline[0].vae
        latents = vae.encode(images * 2 - 1).latent_dist.mean
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return FluxPipeline._pack_latents(latents, *latents.shape)  # [B, 64, 16]

    def loss(self, captions: Sequence[str], clean: Tensor, generator: torch.Generator) -> Tensor:
        """Mean squared error of the velocity at logit-normal noise levels."""
        (pipeline,), batch = self.pipeline, len(captions)
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(batch, generator=generator) + 0.2)
        noised = clean.lerp(noise, sigma[:, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = self.trained["transformer"](
                hidden_states=noised,
                timestep=sigma,
                guidance=torch.ones(batch),
                pooled_projections=self.trained["text_encoder"](
                    caption_ids(pipeline.tokenizer, captions)
                ).pooler_output,
                encoder_hidden_states=self.trained["text_encoder_2"](caption_ids(pipeline.tokenizer_2, captions))[0],
                txt_ids=torch.zeros(TEXT_LENGTH, 3),
                img_ids=self.image_ids,
                return_dict=False,
            )[0]
        return F.mse_loss(velocity.float(), noise - clean)


def encoded_scenes(flow: FluxFlow, rng: random.Random, args: argparse.Namespace) -> tuple[list[str], Tensor]:
    """`args.scenes` captions, and the latents of their images."""
    captions, latents = [], []
    for _ in range(args.scenes // args.batch_size):
        batch, images = scene_batch(rng, args.batch_size, args.single)
        captions += batch
        latents.append(flow.encode(images))
    return captions, torch.cat(latents)


def train_flow(flow: FluxFlow, args: argparse.Namespace) -> None:
    """Trains `flow.trained`, saving its moving average in `args.out` every `save_every` steps and at the end."""
    rng, generator = random.Random(args.seed + 1), torch.Generator().manual_seed(args.seed + 1)
    flow.trained.train().requires_grad_(True)
    parameters = list(flow.trained.parameters())
    average = copy.deepcopy(flow.trained).eval().requires_grad_(False)
    averaged = list(average.parameters())
    optimizers = flow_optimizers(flow.trained, args)
    captions, latents = encoded_scenes(flow, rng, args)
    running, started = 0.0, time.perf_counter()
    for step in range(args.steps):
        set_learning_rate(optimizers, warmup_hold_decay(step, args.steps))
        if step * args.batch_size % args.scenes < args.batch_size:
            order = torch.randperm(args.scenes, generator=generator)
        chosen = order[step * args.batch_size % args.scenes :][: args.batch_size]
        prompts = ["" if rng.random() < CAPTION_DROP else captions[index] for index in chosen.tolist()]
        loss = flow.loss(prompts, latents[chosen], generator)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        share = 1 - min(0.998, (step + 1) / (step + 10))
        for mean, parameter in zip(averaged, parameters, strict=True):
            mean.lerp_(parameter.detach(), share)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            elapsed = time.perf_counter() - started
            print(f"flow {step + 1} loss {running:.4f} {elapsed / (step + 1):.3f} s/step {elapsed:.0f} s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_pipeline(flow.pipeline[0], average, args.out)


def save_pipeline(pipeline: FluxPipeline, average: nn.ModuleDict, out: Path) -> None:
    """`out` holds the pipeline with the averaged modules, in bfloat16; it is replaced whole."""
    modules = {name: copy.deepcopy(module).to(torch.bfloat16) for name, module in average.items()}
    modules["vae"] = copy.deepcopy(pipeline.vae).to(torch.bfloat16)
    fresh = out.with_name(out.name + ".new")
    FluxPipeline(**(pipeline.components | modules)).save_pretrained(fresh)
    tidy_configs(fresh)
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)


def train_flux(args: argparse.Namespace) -> None:
    """Trains the tiny FLUX pipeline and saves it in `args.out`."""
    pipeline = build_flux(args.seed)
    if args.vae is None:
        torch.manual_seed(args.seed)  # the autoencoder samples its posterior from the global generator
        train_vae(pipeline.vae, args)
        pipeline.vae.save_pretrained(args.out.with_name(args.out.name + "_vae"))
    else:
        pipeline.register_modules(vae=AutoencoderKL.from_pretrained(args.vae).requires_grad_(False))
    with quick_arithmetic():
        train_flow(FluxFlow(pipeline), args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    flux = commands.add_parser("flux", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flux.set_defaults(run=train_flux)
    flux.add_argument("--out", type=Path, default=ASSETS / "tiny_flux", help="folder to write")
    flux.add_argument("--steps", type=int, default=3300, help="flow-matching steps")
    flux.add_argument("--vae-steps", type=int, default=500, help="autoencoder steps")
    flux.add_argument("--vae", type=Path, help="folder of a trained autoencoder to use instead")
    flux.add_argument("--batch-size", type=int, default=64, help="scenes in a step")
    flux.add_argument("--single", type=float, default=0.5, help="share of scenes with one object")
    flux.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="for the matrices of the blocks")
    flux.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate of AdamW")
    flux.add_argument("--muon-lr", type=float, default=2e-3, help="peak learning rate of Muon, on AdamW's scale")
    flux.add_argument("--scenes", type=int, default=24576, help="scenes drawn and encoded beforehand")
    flux.add_argument("--save-every", type=int, default=500, help="steps between saves")
    clip = commands.add_parser("clip", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    clip.set_defaults(run=train_clip)
    clip.add_argument("--out", type=Path, default=ASSETS / "tiny_clip", help="folder to write")
    clip.add_argument("--steps", type=int, default=1500, help="contrastive steps")
    clip.add_argument("--batch-size", type=int, default=128, help="scenes in a step")
    clip.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of AdamW")
    prompts = commands.add_parser("prompts", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    prompts.set_defaults(run=write_prompts)
    prompts.add_argument("--out", type=Path, default=ASSETS / "prompts", help="folder to write")
    prompts.add_argument("--train", type=int, default=1024, help="training prompts, with two objects")
    prompts.add_argument("--heldout", type=int, default=64, help="held-out prompts, with two objects")
    prompts.add_argument("--single", type=int, default=64, help="prompts with one object")
    check = commands.add_parser("check", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    check.set_defaults(run=check_flux)
    check.add_argument("--model", type=Path, default=ASSETS / "tiny_flux", help="pipeline folder")
    check.add_argument("--clip", type=Path, default=ASSETS / "tiny_clip", help="CLIP folder")
    check.add_argument("--prompts", type=Path, default=ASSETS / "prompts", help="folder of the prompt files")
    check.add_argument("--images", type=int, default=512, help="images a prompt file")
    check.add_argument("--num-steps", type=int, nargs="+", default=[6, 10], help="sampling steps")
    check.add_argument("--grid", type=Path, default=Path("tiny_flux.png"), help="picture to write")
    for command in (flux, clip, prompts, check):
        command.add_argument("--seed", type=int, default=1, help="of all randomness")
        command.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
