"""Seconds of host work in a step at the paper's geometry, without a model, beside 2 % of the paper's step time.

The work of rank 0 of 8: its share of the candidates, and what it does for all ranks (selection, ledger, images).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import facts, hardware, name_list, parser, table, whole_number, write_json
from solrl import ledger
from solrl.clock import Stopwatch
from solrl.config import EvaluateConfig, ExploreConfig
from solrl.errors import UsageError
from solrl.fidelity import kept_fidelity
from solrl.groups import Selection, derive_seed, group_advantages, group_seeds, noise, select_contrastive
from solrl.images import save_grid
from solrl.types import Scores, Seeds

BUDGET = 0.02
CAPTION = "a photo of a red cube to the left of a blue sphere, of about the usual length"
ROLLOUT_BATCH = 24
GRID = (8, 4)  # prompts and seeds of the image grid that an evaluation writes
EVERY = EvaluateConfig().every_steps
PREPROCESSING, GRID_PART = "preprocessing", "image grid, whole"
PARTS = ("seeds", "noise", "copies", PREPROCESSING, "selection", "ledger", GRID_PART)
CLIP = {  # openai/clip-vit-large-patch14
    "size": 224, "crop_size": 224, "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip

NOTES = f"""\
  seeds          SHA-256 names of all draws: every rank computes the seeds of all prompts
  noise          Philox normals: explored, regenerated and training noise, float32 on the CPU
  copies         latents and training noise from host to device; on a CPU a clone takes their place
  preprocessing  CLIP's resize to 224, crop and normalization of every explored and regenerated
                 image. It runs on the device that decoded the image: on a GPU it is no host work,
                 here it is the CPU's.
  selection      best and worst of every group, advantages, fidelity of the kept (all prompts)
  ledger         one line a candidate, all ranks' candidates, written and renamed by rank 0
  image grid     8 x 4 images as one PNG, when a step evaluates: one in {EVERY}, and so it is
                 counted in the sums
  2 % of step    of the paper's end-to-end seconds a step for Sol-RL on 8 B200 (Table 5)"""


class ProcessorTime(Stopwatch):
    """A stopwatch of one thread's processor time: other load on the machine does not count. On a GPU wall time."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        if self.device.type == "cuda":
            with super().phase(name):
                yield
            return
        begin = time.process_time()
        yield
        self.seconds[name] += time.process_time() - begin


@dataclass(frozen=True)
class Geometry:
    """A model's shapes and the paper's time of a step."""

    name: str
    latent_shape: tuple[int, ...]
    pixels: int
    train_batch: int
    num_timesteps: int  # trained per sample
    paper_step_s: float  # Table 5, end to end, "Ours"


@dataclass(frozen=True)
class Work:
    """How much a rank does."""

    prompts: int  # of this rank
    candidates: int
    keep: int
    ranks: int


MODELS = {
    "flux": Geometry("FLUX.1-dev 512 px", (1024, 64), 512, 12, 4, 169.0),
    "sd3": Geometry("SD3.5-L 1024 px", (16, 128, 128), 1024, 4, 6, 427.0),
    "sana": Geometry("SANA 1024 px", (32, 32, 32), 1024, 16, 6, 76.0),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for."""
    options_of = parser("host_overhead", __doc__.split("\n")[0])
    options_of.add_argument("--models", type=name_list, default=list(MODELS), help=f"of {','.join(MODELS)}")
    options_of.add_argument("--prompts", type=whole_number, default=6, help="prompts a rank (6)")
    options_of.add_argument("--candidates", type=whole_number, default=96, help="explored a prompt (96)")
    options_of.add_argument("--keep", type=whole_number, default=24, help="kept a prompt (24)")
    options_of.add_argument("--ranks", type=whole_number, default=8, help="ranks rank 0 gathers from (8)")
    options_of.add_argument("--repeats", type=whole_number, default=3, help="the fastest of so many, part by part (3)")
    options_of.add_argument("--max-pixels", type=whole_number, help="smaller images, for a quick look")
    options = options_of.parse_args(argv)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        raise UsageError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    if options.keep % 2 or options.keep > options.candidates:
        raise UsageError(f"--keep must be even and at most --candidates ({options.candidates}), got {options.keep}")
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Work(options.prompts, options.candidates, options.keep, options.ranks)
    results = {}
    for name in options.models:
        geometry = MODELS[name]
        if options.max_pixels:
            geometry = replace(geometry, pixels=min(geometry.pixels, options.max_pixels))
        results[geometry.name] = measure(geometry, work, device, options.repeats)
    known = facts(device)
    print(report(results, work, known))
    write_json(options.json, {
        "benchmark": "host_overhead", "arguments": list(argv), "environment": known, "work": vars(work),
        "seconds": results,
    })  # fmt: skip
    return 0


def measure(geometry: Geometry, work: Work, device: torch.device, repeats: int) -> dict[str, float]:
    """Part -> seconds a step, the fastest of the repeats."""
    runs = []
    for _ in range(repeats):
        clock = ProcessorTime(device)
        step(geometry, work, device, clock)
        runs.append(dict(clock.seconds))
    return {part: min(run[part] for run in runs) for part in PARTS}


def step(geometry: Geometry, work: Work, device: torch.device, clock: Stopwatch) -> None:
    """All host work of one step, in the micro-batches of the loop."""
    groups = work.prompts * work.ranks
    with clock.phase("seeds"):
        seeds = group_seeds(0, 1, groups, work.candidates)
    explored = [seed for row in seeds[: work.prompts] for seed in row]
    draw(explored, geometry, device, clock)

    proxy = torch.rand(groups, work.candidates, dtype=torch.float64)
    present = torch.ones_like(proxy, dtype=torch.bool)
    rewards = Scores(torch.rand(groups, work.keep, dtype=torch.float64), present[:, : work.keep], {})
    with clock.phase("selection"):
        selection = select_contrastive(proxy, work.keep, present)
        kept = selection.pick(seeds)
        group_advantages(rewards.values, rewards.present)
        kept_fidelity(proxy.gather(1, selection.indices), rewards.values, rewards.present)
    regenerated = [seed for row in kept[: work.prompts] for seed in row]
    draw(regenerated, geometry, device, clock)
    train(regenerated, geometry, device, clock)
    write(seeds, Scores(proxy, present, {}), selection, rewards, geometry, clock)


def draw(seeds: Sequence[int], geometry: Geometry, device: torch.device, clock: Stopwatch) -> None:
    """What a rollout does around its model: noise, copies, and the reward's preprocessing of the images."""
    from solrl_rewards.preprocessing import Preprocessing

    preprocess = Preprocessing.from_config(CLIP)
    images = torch.rand(ROLLOUT_BATCH, 3, geometry.pixels, geometry.pixels, device=device)
    for part in _parts(seeds, ROLLOUT_BATCH):
        with clock.phase("noise"):
            start = noise(part, geometry.latent_shape)
        copy(start, device, clock)
        with clock.phase(PREPROCESSING):
            preprocess(images[: len(part)])


def train(seeds: Sequence[int], geometry: Geometry, device: torch.device, clock: Stopwatch) -> None:
    """What an update does around its model: fresh noise for every sample and trained timestep."""
    for part in _parts(seeds, geometry.train_batch):
        for timestep in range(geometry.num_timesteps):
            with clock.phase("seeds"):
                names = [derive_seed(seed, f"train/{timestep}") for seed in part]
            with clock.phase("noise"):
                fresh = noise(names, geometry.latent_shape)
            copy(fresh, device, clock)


def copy(host: Tensor, device: torch.device, clock: Stopwatch) -> None:
    """Host to device, or a clone where they are one."""
    with clock.phase("copies"):
        host.clone() if device.type == "cpu" else host.to(device)


def write(
    seeds: Seeds, proxy: Scores, selection: Selection, rewards: Scores, geometry: Geometry, clock: Stopwatch
) -> None:
    """What rank 0 writes: the ledger of all candidates, and an image grid."""
    prompts = [CAPTION] * len(seeds)
    coarse = torch.rand(GRID[0] * GRID[1], 3, 16, 16)  # smooth images: a PNG of noise costs more than any picture
    images = F.interpolate(coarse, size=geometry.pixels, mode="bilinear").unflatten(0, GRID)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with clock.phase("ledger"):
            entries = ledger.step_entries(
                prompts, seeds, ExploreConfig(group_size=len(seeds[0])), precision="emulated_nvfp4",
                policy_version=0, proxy=proxy, selection=selection, rewards=rewards,
            )  # fmt: skip
            ledger.write(folder, 1, entries)
        with clock.phase(GRID_PART):
            save_grid(folder / "grid.png", images, [CAPTION] * GRID[0], rewards=torch.rand(*GRID))


def report(results: dict[str, dict[str, float]], work: Work, known: dict[str, object]) -> str:
    """Everything as text, at most 100 columns."""
    by_name = {geometry.name: geometry for geometry in MODELS.values()}
    rows = [[part, *(f"{found[part]:.3f}" for found in results.values())] for part in PARTS]
    total = {name: sum(found.values()) - found[GRID_PART] * (1 - 1 / EVERY) for name, found in results.items()}
    rest = {name: total[name] - found[PREPROCESSING] for name, found in results.items()}
    rows += [
        ["sum", *(f"{value:.2f}" for value in total.values())],
        ["sum without preprocessing", *(f"{value:.2f}" for value in rest.values())],
        ["2 % of step", *(f"{BUDGET * by_name[name].paper_step_s:.2f}" for name in results)],
    ]
    own = work.prompts * work.candidates
    return "\n".join([
        f"host_overhead: a rank with {work.prompts} prompts x {work.candidates} = {own} candidates, {work.keep} kept a "
        f"prompt; {work.ranks} ranks",
        hardware(known),
        "processor seconds a step (wall on a GPU)",
        "",
        table(["", *results], rows),
        "",
        NOTES,
    ])  # fmt: skip


def _parts(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (seeds[first : first + size] for first in range(0, len(seeds), size))
