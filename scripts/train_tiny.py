"""Make everything in solrl/assets from nothing: a tiny pipeline of each family, the tiny CLIP and the prompt files.

    python scripts/train_tiny.py flux       # autoencoder; T5 learns to read; CLIP and transformer by flow matching
    python scripts/train_tiny.py sd3        # the same with tiny_flux's autoencoder
    python scripts/train_tiny.py sana
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC, AutoencoderKL
from solrl_rewards import scenes
from tiny_check import check
from tiny_clip import train_clip
from tiny_flows import Flow, FluxFlow, SanaFlow, SD3Flow
from tiny_kernels import quick_arithmetic
from tiny_models import build_flux, build_sana, build_sd3
from tiny_prompts import write_prompts
from tiny_reading import teach_reading
from tiny_steps import scene_batch, set_learning_rate, tidy_configs, warmup_hold_decay
from torch import Tensor, nn

ASSETS = Path(__file__).parent.parent / "solrl" / "assets"
CAPTION_DROP = 0.05
READER_PARTS = "text_encoder", "tokenizer"


class Round(NamedTuple):
    """A round of flow matching. After the first one, each starts with the averaged weights of the one before."""

    steps: int
    single: float  # share of scenes with one object, whose captions are always right
    guessed: float  # share of shapes that are guessed in the captions of two objects
    reversed: float  # share of relations that are reversed in them

    @classmethod
    def read(cls, text: str) -> "Round":
        """What `2000,0.5,0.67,0.33` says."""
        steps, *shares = text.split(",")
        return cls(int(steps), *map(float, shares))


ROUNDS = [Round(2000, 0.5, 0.67, 0.33), Round(1300, 0.5, 0.67, 0.33), Round(1000, 0.5, 0.67, 0.33),
          Round(600, 0.6, 0.5, 0.3)]  # fmt: skip
FAMILIES: dict[str, tuple[Callable[[int], Any], type[Flow], list[Round]]] = {
    "flux": (build_flux, FluxFlow, ROUNDS),
    "sd3": (build_sd3, SD3Flow, ROUNDS[:3]),
    "sana": (build_sana, SanaFlow, [Round(1500, 0.5, 0.67, 0.33), *ROUNDS[1:3]]),
}


def train_vae(vae: AutoencoderKL | AutoencoderDC, args: argparse.Namespace) -> None:
    """`vae` reconstructs scenes, and its config's scale, and shift where it has one, standardize their latents."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW([{"params": vae.parameters(), "peak_lr": 2e-3}], betas=(0.9, 0.99), weight_decay=0)
    vae.train()
    started = time.perf_counter()
    for step in range(args.vae_steps):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / args.vae_steps)
        set_learning_rate([optimizer], min((step + 1) / 50, 1.0) * cosine + 0.005)
        images = scene_batch(rng, 32, single=0.4)[1] * 2 - 1
        decoded, regularizer = reconstruct(vae, images)
        loss = F.l1_loss(decoded, images) + F.mse_loss(decoded, images) + regularizer
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
    images = scene_batch(rng, 256, single=0.4)[1] * 2 - 1
    with torch.no_grad():
        if isinstance(vae, AutoencoderDC):
            latents = vae.encode(images).latent
            vae.register_to_config(scaling_factor=float(1 / latents.square().mean().sqrt()))
        else:
            latents = vae.encode(images).latent_dist.mean
            vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))


def reconstruct(vae: AutoencoderKL | AutoencoderDC, images: Tensor) -> tuple[Tensor, Tensor]:
    """Images in [-1, 1], encoded, jittered and decoded; and the price of latents far from a standard normal."""
    if isinstance(vae, AutoencoderDC):
        latents = vae.encode(images).latent
        return vae.decode(latents + 0.1 * torch.randn_like(latents)).sample, 1e-4 * latents.square().mean()
    posterior = vae.encode(images).latent_dist
    return vae.decode(posterior.sample()).sample, 1e-5 * posterior.kl().mean()


def flow_optimizers(modules: nn.ModuleDict, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer's blocks, 1 x 1 convolutions included, AdamW for everything else."""
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        is_matrix = parameter.ndim == 2 or parameter.shape[2:] == (1, 1)
        if args.optimizer == "muon" and is_matrix and "transformer_blocks" in name:
            hidden.append(parameter if parameter.ndim == 2 else matrix_of(parameter))
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


def matrix_of(convolution: nn.Parameter) -> nn.Parameter:
    """A matrix that shares a 1 x 1 convolution's memory and gets its gradient."""
    matrix = nn.Parameter(convolution.detach().flatten(1))

    def share(parameter: Tensor) -> None:
        assert parameter.grad is not None
        matrix.grad = parameter.grad.flatten(1)

    convolution.register_post_accumulate_grad_hook(share)
    return matrix


def careless(rng: random.Random, text: str, stage: Round) -> str:
    """What somebody in a hurry writes: with two objects, shapes are often guessed and relations sometimes reversed."""
    caption = scenes.parse(text)
    if caption.relation is None:
        return text
    objects = tuple(
        (colour, rng.randrange(len(scenes.SHAPE_NAMES)) if rng.random() < stage.guessed else shape)
        for colour, shape in caption.objects
    )
    direction = scenes.DIRECTIONS[caption.relation]
    if rng.random() < stage.reversed:
        direction = (-direction[0], -direction[1])
    relation = next(name for name in scenes.RELATIONS if scenes.DIRECTIONS[name] == direction)
    return str(scenes.Caption(objects, relation))


def encoded_scenes(flow: Flow, rng: random.Random, args: argparse.Namespace, stage: Round) -> tuple[list[str], Tensor]:
    """`args.scenes` captions, as careless as they are meant to be, and the latents of their images."""
    captions, latents = [], []
    for _ in range(args.scenes // args.batch_size):
        batch, images = scene_batch(rng, args.batch_size, stage.single)
        captions += [careless(rng, caption, stage) for caption in batch]
        latents.append(flow.encode(images))
    return captions, torch.cat(latents)


def train_flow(flow: Flow, args: argparse.Namespace, stage: Round, seed: int) -> None:
    """Trains `flow.trained` for a round; `args.out` has its average every `save_every` steps and at the end."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    average = copy.deepcopy(flow.trained).eval().requires_grad_(False)
    learning = nn.ModuleDict({name: module for name, module in flow.trained.items() if name != flow.reader})
    parameters = list(learning.train().requires_grad_(True).parameters())
    averaged = [parameter for name in learning for parameter in average[name].parameters()]
    optimizers = flow_optimizers(learning, args)
    captions, latents = encoded_scenes(flow, rng, args, stage)
    running, started = 0.0, time.perf_counter()
    for step in range(stage.steps):
        set_learning_rate(optimizers, warmup_hold_decay(step, stage.steps))
        if step * args.batch_size % args.scenes < args.batch_size:
            order = torch.randperm(args.scenes, generator=generator)
        chosen = order[step * args.batch_size % args.scenes :][: args.batch_size]
        prompts = ["" if rng.random() < CAPTION_DROP else captions[index] for index in chosen.tolist()]
        loss = flow.loss(prompts, latents[chosen], generator)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        for optimizer in optimizers:
            optimizer.step()
        flow.trained.zero_grad()
        share = 1 - min(0.998, (step + 1) / (step + 10))
        for mean, parameter in zip(averaged, parameters, strict=True):
            mean.lerp_(parameter.detach(), share)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            elapsed = time.perf_counter() - started
            print(f"flow {step + 1} loss {running:.4f} {elapsed / (step + 1):.3f} s/step {elapsed:.0f} s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == stage.steps:
            save_pipeline(flow.pipeline[0], average, args.out)


def save_pipeline(pipeline: Any, average: nn.ModuleDict, out: Path) -> None:
    """`out` holds the pipeline with the averaged modules, in bfloat16; it is replaced whole."""
    modules = {name: copy.deepcopy(module).to(torch.bfloat16) for name, module in average.items()}
    modules["vae"] = copy.deepcopy(pipeline.vae).to(torch.bfloat16)
    fresh = out.with_name(out.name + ".new")
    type(pipeline)(**(pipeline.components | modules)).save_pretrained(fresh)
    tidy_configs(fresh)
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)


def train_pipeline(args: argparse.Namespace) -> None:
    """Trains the tiny pipeline of `args.family` and saves it in `args.out`; from a later round on, what lies there."""
    build, flow, _ = FAMILIES[args.family]
    pipeline = build(args.seed)
    if args.first_round:
        load_average(pipeline, flow, args.out)
    else:
        prepare(pipeline, flow, args)
    for number, stage in enumerate(args.rounds[args.first_round :], args.first_round):
        with quick_arithmetic():
            train_flow(flow(pipeline), args, stage, args.seed + 1 + 2 * number)
        load_average(pipeline, flow, args.out)


def prepare(pipeline: Any, flow: type[Flow], args: argparse.Namespace) -> None:
    """The autoencoder of `pipeline` reconstructs scenes and one of its text encoders reads; both are then frozen."""
    if args.vae is None:
        torch.manual_seed(args.seed)  # the autoencoder draws from the global generator
        train_vae(pipeline.vae, args)
        pipeline.vae.save_pretrained(args.out.with_name(args.out.name + "_vae"))
    else:
        pipeline.register_modules(vae=type(pipeline.vae).from_pretrained(args.vae).requires_grad_(False))
    encoder, tokenizer = (getattr(pipeline, flow.reader.replace("text_encoder", part)) for part in READER_PARTS)
    teach_reading(encoder, tokenizer, steps=args.reading_steps, seed=args.seed + 2)


def load_average(pipeline: Any, flow: type[Flow], folder: Path) -> None:
    """`pipeline` has the weights in `folder`, in float32; those that flow matching leaves alone are frozen."""
    parts = type(pipeline).from_pretrained(folder, dtype=torch.float32).components.items()
    pipeline.register_modules(**{name: part for name, part in parts if isinstance(part, nn.Module)})
    for name in ("vae", flow.reader):
        getattr(pipeline, name).requires_grad_(False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    trained = []
    for family, (_, _, rounds) in FAMILIES.items():
        train = commands.add_parser(family, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        train.set_defaults(run=train_pipeline, family=family, vae=None)
        train.add_argument("--out", type=Path, default=ASSETS / f"tiny_{family}", help="folder to write")
        train.add_argument(
            "--rounds",
            type=Round.read,
            nargs="+",
            default=rounds,
            metavar="ROUND",
            help="flow matching in rounds STEPS,SINGLE,GUESSED,REVERSED: share of scenes with one "
            "object, of shapes guessed and of relations reversed in the captions of two objects",
        )
        train.add_argument("--first-round", type=int, default=0, help="go on from there with what lies in --out")
        train.add_argument(
            "--reading-steps", type=int, default=500, help="steps in which a text encoder learns to read captions"
        )
        train.add_argument("--vae-steps", type=int, default=500, help="autoencoder steps")
        train.add_argument("--vae", type=Path, help="folder of a trained autoencoder to use instead")
        train.add_argument("--batch-size", type=int, default=64, help="scenes in a step")
        train.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="for the blocks' matrices")
        train.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate of AdamW")
        train.add_argument("--muon-lr", type=float, default=2e-3, help="peak learning rate of Muon, on AdamW's scale")
        train.add_argument("--scenes", type=int, default=24576, help="scenes drawn and encoded beforehand")
        train.add_argument("--save-every", type=int, default=500, help="steps between saves")
        trained.append(train)
    trained[1].set_defaults(vae=ASSETS / "tiny_flux" / "vae")
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
    measure = commands.add_parser("check", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    measure.set_defaults(run=check)
    measure.add_argument("--model", type=Path, default=ASSETS / "tiny_flux", help="pipeline folder")
    measure.add_argument("--clip", type=Path, default=ASSETS / "tiny_clip", help="CLIP folder")
    measure.add_argument("--prompts", type=Path, default=ASSETS / "prompts", help="folder of the prompt files")
    measure.add_argument("--images", type=int, default=512, help="images a prompt file")
    measure.add_argument("--num-steps", type=int, nargs="+", default=[6, 10], help="sampling steps")
    measure.add_argument("--grid", type=Path, default=Path("samples.png"), help="picture to write")
    for command in (*trained, clip, prompts, measure):
        command.add_argument("--seed", type=int, default=1, help="of all randomness")
        command.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
