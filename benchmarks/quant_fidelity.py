"""Do quantized rollouts show as much, and what was asked for? Inception and CLIP scores beside Sol-RL's Table 4.

Every number format draws the same prompts from the same seeds with the full number of steps. Without weights of
Inception the classes are told by the CLIP model that gives the CLIP score: its embedding of an image against those of
the class names. Differences are paired, with a bootstrap interval over prompts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from solrl_rewards.clip_score import ClipScore
from solrl_rewards.scenes import COLOUR_NAMES, SHAPE_NAMES, Caption
from torch import Tensor, nn

from benchmarks.common import facts, hardware, name_list, parse, parser, table, whole_number, write_json
from solrl.clock import Stopwatch
from solrl.config import Config, StageConfig
from solrl.distributed import World, start
from solrl.errors import UsageError
from solrl.groups import group_seeds
from solrl.images import save_grid
from solrl.models.loading import quiet_loading
from solrl.rollout import rollout
from solrl.session import Session, open_session
from solrl.settings import load_config

Classifier = Callable[[Tensor], Tensor]
"""Images [B, 3, H, W] in [0, 1] -> class probabilities [B, C]."""

PAPER = {"FLUX.1": (16.84, 17.85, 27.44, 27.10), "SANA": (16.02, 15.94, 29.53, 29.43),
         "SD3.5-Large": (16.42, 17.60, 28.37, 28.34)}  # fmt: skip
"""Table 4: Inception Score in BF16 and NVFP4, CLIP score times 100 in BF16 and NVFP4."""
RESAMPLES = 1000
INCEPTION_SIDE = 299
INCEPTION_MEAN, INCEPTION_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHOWN_PROMPTS, SHOWN_SEEDS = 4, 2


@dataclass(frozen=True)
class Drawn:
    """The images of one number format, P prompts x M seeds."""

    precision: str
    images: Tensor  # [P, M, 3, H, W] float32
    classes: Tensor  # [P, M, C] float64
    clip: Tensor  # [P, M] float64


def main(argv: Sequence[str]) -> int:
    """Draw in every format, print both scores and their differences."""
    options_of = parser("quant_fidelity", __doc__.split("\n")[0])
    options_of.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--precision", type=name_list, default=["emulated_nvfp4", "fp8"], metavar="P,..",
                            help="formats beside full precision (emulated_nvfp4,fp8)")  # fmt: skip
    options_of.add_argument("--prompts", type=whole_number, default=64, help="held-out prompts, from the top (64)")
    options_of.add_argument("--images", type=whole_number, default=4, help="images a prompt (4)")
    options_of.add_argument("--clip", metavar="MODEL", help="CLIPModel folder or hub id (the embedded tiny one)")
    options_of.add_argument("--classes", type=Path, metavar="FILE", help="class names for CLIP, one a line (the 32 "
                            "objects of the shapes world)")  # fmt: skip
    options_of.add_argument("--inception", type=Path, metavar="FILE", help="state dict of torchvision's inception_v3, "
                            "which then tells the classes")  # fmt: skip
    options_of.add_argument("--png", type=Path, metavar="FILE", help="draw same-seed pairs, as the paper's Figure 6")
    options = parse(options_of, argv)
    quiet_loading()
    sizes = {"evaluate.num_prompts": options.prompts, "evaluate.images_per_prompt": options.images}
    config = load_config(options.config, sizes | options.overrides)
    with start(config.cpu_threads, config.deterministic) as world:
        clip = ClipScore(options.clip, device=world.device)
        tell = inception(options.inception, world.device) if options.inception else zero_shot(clip, options.classes)
        drawn, prompts = list[Drawn](), list[str]()
        for precision in dict.fromkeys(["full", *options.precision]):
            print(f"drawing in {precision} ...", file=sys.stderr, flush=True)
            session = _session(config, world, precision)
            prompts = session.heldout_prompts
            drawn.append(draw(session, prompts, tell, clip))
        known = facts(world.device)
    telling = "Inception" if options.inception else "CLIP's zero-shot classes"
    print(report(config, drawn, telling, known))
    if options.png:
        save_pairs(options.png, drawn, prompts)
    write_json(options.json, {
        "benchmark": "quant_fidelity", "arguments": list(argv), "environment": known, "paper": PAPER,
        "classes": telling, "formats": {each.precision: summary(each, drawn[0]) for each in drawn},
    })  # fmt: skip
    return 0


def inception(path: Path, device: torch.device) -> Classifier:
    """torchvision's inception_v3 with the weights in ``path``; images are resized and normalized as it expects."""
    try:
        from torchvision.models import inception_v3
    except ImportError:
        raise UsageError("--inception needs torchvision: pip install torchvision") from None
    model: nn.Module = inception_v3(weights=None, init_weights=False, transform_input=True)
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"--inception {path}: no state dict of inception_v3: {str(error).splitlines()[0]}") from None
    model = model.eval().requires_grad_(False).to(device)
    average, deviation = (torch.tensor(x, device=device).view(3, 1, 1) for x in (INCEPTION_MEAN, INCEPTION_STD))

    def tell(images: Tensor) -> Tensor:
        side = (INCEPTION_SIDE, INCEPTION_SIDE)
        pixels = F.interpolate(images, side, mode="bilinear", antialias=True, align_corners=False)
        return model((pixels - average) / deviation).double().softmax(-1)

    return tell


def zero_shot(clip: ClipScore, path: Path | None) -> Classifier:
    """The CLIP model as a classifier among the names in ``path``, by default the objects of the shapes world."""
    if path is None:
        shapes, colours = range(len(SHAPE_NAMES)), range(len(COLOUR_NAMES))
        names = [str(Caption(((colour, shape),))) for colour in colours for shape in shapes]
    else:
        try:
            names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise UsageError(f"--classes {path}: {error.strerror}") from None
        if len(names) < 2:
            raise UsageError(f"--classes {path} must hold at least two names, one a line")

    def tell(images: Tensor) -> Tensor:
        cosines = clip.model.images(clip.preprocess(images)) @ clip.model.texts(names).T
        return (clip.model.temperature * cosines).double().softmax(-1)

    return tell


@torch.no_grad()
def draw(session: Session, prompts: list[str], tell: Classifier, clip: ClipScore) -> Drawn:
    """The session's explorer draws every prompt from the fixed seeds of held-out evaluation, with all steps."""
    config, alone = session.config, World(0, 1, session.world.device)
    seeds = group_seeds(config.evaluate.seed, 0, len(prompts), config.evaluate.images_per_prompt, "evaluate")
    stage = StageConfig(
        group_size=len(seeds[0]), num_steps=config.regenerate.num_steps, solver=config.regenerate.solver
    )
    images, classes, scores = list[Tensor](), list[Tensor](), list[Tensor]()
    for part in rollout(
        session.explorer, session.policy.encode(prompts), prompts, seeds, stage,
        batch=config.batch, world=alone, clock=Stopwatch(alone.device), stop=lambda: None, phase="draw",
    ):  # fmt: skip
        images.append(part.images.float().cpu())
        classes.append(tell(part.images.float()).cpu())
        scores.append(clip(part.images, part.prompts).double().cpu())
    shape = (len(prompts), len(seeds[0]))
    whole = (torch.cat(parts).unflatten(0, shape) for parts in (images, classes, scores))
    return Drawn(session.precision, *whole)


def inception_score(classes: Tensor) -> float:
    """[B, C] -> exp of the mean KL divergence of an image's classes from the mean image's (Salimans et al., 2016)."""
    divergence = torch.special.xlogy(classes, classes) - torch.special.xlogy(classes, classes.mean(0))
    return math.exp(float(divergence.sum(1).mean()))


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """[..., 3, H, W] twice -> decibels [...]; infinite where they are equal."""
    return -10 * (images - reference).double().square().mean((-3, -2, -1)).log10()


def interval(statistic: Callable[[Tensor], float], count: int) -> tuple[float, float]:
    """95 % bootstrap interval of ``statistic(rows)``: ``count`` prompts drawn with replacement, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    values = [statistic(torch.randint(count, (count,), generator=generator)) for _ in range(RESAMPLES)]
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


def summary(each: Drawn, full: Drawn) -> dict[str, Any]:
    """Both scores, and how they and the images differ from full precision's."""
    found: dict[str, Any] = {"inception_score": inception_score(each.classes.flatten(0, 1)),
                             "clip_score": float(each.clip.mean())}  # fmt: skip
    if each is full:
        return found

    def difference(rows: Tensor) -> float:
        ours, theirs = (inception_score(one.classes[rows].flatten(0, 1)) for one in (each, full))
        return ours - theirs

    clip = (each.clip - full.clip).mean(1)
    everyone = torch.arange(len(clip))
    return found | {
        "inception_difference": [difference(everyone), *interval(difference, len(clip))],
        "clip_difference": [float(clip.mean()), *interval(lambda rows: float(clip[rows].mean()), len(clip))],
        "psnr_db": float(psnr(each.images, full.images).median()),
    }


def report(config: Config, drawn: Sequence[Drawn], telling: str, known: dict[str, Any]) -> str:
    """A row a format, then the paper's."""
    rows, papers = [], []
    for each in drawn:
        found = summary(each, drawn[0])
        row = [each.precision, f"{found['inception_score']:.2f}", "", f"{found['clip_score']:.4f}", "", ""]
        if each is not drawn[0]:
            row[2], row[4] = (_with_interval(found[f"{name}_difference"]) for name in ("inception", "clip"))
            row[5] = f"{found['psnr_db']:.1f}"
        rows.append(row)
    for model, (full, fp4, clip, clip_fp4) in PAPER.items():
        papers.append([model, f"{full:.2f}", f"{fp4:.2f}", f"{fp4 / full - 1:+.1%}", f"{clip:.2f}", f"{clip_fp4:.2f}",
                       f"{clip_fp4 / clip - 1:+.1%}"])  # fmt: skip
    prompts, images = drawn[0].clip.shape
    return "\n".join([
        f"quant_fidelity: {config.model.path}, {prompts} held-out prompts x {images} images, "
        f"{config.regenerate.num_steps} steps, classes by {telling}",
        hardware(known),
        "",
        table(["", "IS", "difference [95 %]", "CLIP score", "difference [95 %]", "PSNR dB"], rows),
        "",
        table(["Table 4", "IS BF16", "NVFP4", "change", "CLIP BF16", "NVFP4", "change"], papers),
        "",
        "PSNR: median over images of the same seed. Inception Scores compare only within one classifier and number of "
        "images.",
    ])  # fmt: skip


def save_pairs(path: Path, drawn: Sequence[Drawn], prompts: list[str]) -> None:
    """A row a prompt; for each seed the image of every format, full precision first."""
    images = torch.stack([each.images[:SHOWN_PROMPTS, :SHOWN_SEEDS] for each in drawn], 2).flatten(1, 2)
    order = ", ".join(each.precision for each in drawn)
    save_grid(path, images, prompts[:SHOWN_PROMPTS], title=f"same seeds side by side: {order}")
    print(f"wrote {path}")


def _with_interval(numbers: Sequence[float]) -> str:
    middle, low, high = numbers
    return f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"


def _session(config: Config, world: World, precision: str) -> Session:
    tree = config.model_dump()
    tree["explore"] |= {"enabled": True, "precision": precision, "tiny_decoder": None}
    return open_session(Config.model_validate(tree), world, lambda: None)
