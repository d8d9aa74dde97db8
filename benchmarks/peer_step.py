"""An optimizer step and a rollout of DiffusionNFT: solrl and the paper's own code, in turn, at equal geometry.

The other side is a checkout of github.com/NVlabs/DiffusionNFT, whose script trains SD3.5. Both sides draw with one
solver and one grid, in micro-batches of equal size. Samples that pass through either transformer are counted, and where
the two counts differ nothing is reported. Scoring is left out. docs/peer_speed.md says how to read the numbers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import facts, hardware, parse, parser, table, whole_number, write_json
from benchmarks.iteration_breakdown import step_seconds
from benchmarks.peer_driver import pass_name
from solrl.config import Config
from solrl.distributed import World, start
from solrl.errors import SolrlError, UsageError
from solrl.intervals import interval
from solrl.models.loading import compute_dtype, model_source
from solrl.models.sd3 import SD3Policy
from solrl.prompts import load_prompts
from solrl.session import open_session
from solrl.settings import load_config

SOLVERS = {"euler": "flow", "dpm2": "dpm2"}
"""solrl's name -> theirs."""
PARTS = ("rollout", "update")
FIXED: dict[str, Any] = {
    "compile": "off",
    "model.cfg_scale": 1.0,
    "model.gradient_checkpointing": False,
    "model.init_lora": None,
    "lora.enabled": True,
    "lora.rank": 32,
    "lora.alpha": 64.0,
    "lora.targets": SD3Policy.lora_targets,
    "explore.enabled": False,
    "regenerate.enabled": True,
    "train.objective": "nft",
    "train.old_from_rollout": False,
    "runtime.staleness": 0,
}
"""What the other script has written into it, or has not at all, in solrl's settings."""
PRESET = ("compile", "lora.targets", "explore.enabled")
"""Those of them that a configuration file need not have: they are put over it."""
DRIVER = Path(__file__).with_name("peer_driver.py")


def main(argv: Sequence[str]) -> int:
    """Measure both sides, print seconds and ratios."""
    options_of = parser("peer_step", __doc__.split("\n")[0])
    options_of.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a clone of NVlabs/DiffusionNFT")
    options_of.add_argument("--config", default="tiny_sd3", help="TOML file or shipped name of an SD3.5 (tiny_sd3);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--rounds", type=whole_number, default=5, help="turns of each side (5)")
    options_of.add_argument("--steps", type=whole_number, default=1, help="timed steps of a turn (1)")
    options = parse(options_of, argv)
    config = same_on_both_sides(load(options.config, options.overrides))
    if not (options.checkout / "scripts" / "train_nft_sd3.py").is_file():
        raise UsageError(
            f"{options.checkout} holds no scripts/train_nft_sd3.py: git clone github.com/NVlabs/DiffusionNFT"
        )
    rounds = []
    with start(config.cpu_threads, config.deterministic) as world:
        for number in range(1, options.rounds + 1):
            here = ours(config, world, options.steps)
            there = theirs(options.checkout.resolve(), config, world, options.steps)
            require_equal_counts(here, there)
            rounds.append({"solrl": here, "DiffusionNFT": there})
            print(f"round {number} of {options.rounds}", file=sys.stderr)
        known = facts(world.device)
    print(report(config, rounds, known))
    write_json(
        options.json, {"benchmark": "peer_step", "arguments": list(argv), "environment": known, "rounds": rounds}
    )
    return 0


def load(name_or_path: str, overrides: Mapping[str, Any]) -> Config:
    """The settings with ``PRESET`` and then ``overrides`` put over them."""
    return load_config(name_or_path, {name: FIXED[name] for name in PRESET} | dict(overrides))


def same_on_both_sides(config: Config) -> Config:
    """``config`` in the other script's micro-batches. Raises UsageError where only one side can do as it says."""
    if config.model.family != "sd3":
        raise UsageError(
            f"the other side trains SD3.5 and {config.model.path} is {config.model.family}: --config tiny_sd3"
        )
    needed = [f"{name} = {_words(value)}" for name, value in FIXED.items() if attrgetter(name)(config) != value]
    if not config.train.kl_weight:
        needed.append("train.kl_weight above 0")
    if not (config.train.old_decay_rate and config.train.old_decay_cap):
        needed.append("train.old_decay_rate and train.old_decay_cap above 0")
    if config.model.width != config.model.height:
        needed.append(f"model.width = {config.model.height}, as model.height")
    if needed:
        raise UsageError(f"the other side can do nothing else: set {', '.join(needed)}")
    batch, group, samples = config.batch.train, config.regenerate.group_size, _num_samples(config)
    if batch % group or samples % batch:
        raise UsageError(
            f"batch.train ({batch}) must be a multiple of regenerate.group_size ({group}) and divide the {samples} "
            "samples of a step"
        )
    micro_batches = config.batch.model_copy(update={"rollout": batch, "decode": batch})
    return config.model_copy(update={"batch": micro_batches})


def ours(config: Config, world: World, num_steps: int) -> dict[str, float]:
    """Mean seconds of a step after one to warm up, and the samples that a step passed through the transformers."""
    session = open_session(config, world, lambda: None)
    passed: dict[str, float] = defaultdict(float)
    for part, policy in (("rollout", session.rollout_policy), ("update", session.policy)):
        policy.transformer.register_forward_hook(counter(passed, part))
    seconds = step_seconds(session, num_steps)
    a_step = {name: samples / (num_steps + 1) for name, samples in passed.items()}
    return {"rollout": seconds["regenerate"], "update": seconds["update"]} | a_step


def counter(passed: dict[str, float], part: str) -> Callable[..., None]:
    """A forward hook that adds the samples of each call to ``passed``."""

    def count(_: Any, __: Any, output: Any) -> None:
        passed[pass_name(part)] += len(output[0])

    return count


def theirs(checkout: Path, config: Config, world: World, num_steps: int) -> dict[str, float]:
    """The same of the other side, in a process of its own. Raises SolrlError where it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "test"):
            (folder / f"{split}.txt").write_text("\n".join(load_prompts(config.prompts.train)))
        (folder / "geometry.json").write_text(
            json.dumps(geometry(config, folder, compute_dtype(config.model, world.device), num_steps + 2))
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **address}
        threads = {"OMP_NUM_THREADS": str(config.cpu_threads), "WANDB_MODE": "disabled"}
        ended = subprocess.run(
            [sys.executable, DRIVER, checkout, folder / "geometry.json", folder / "result.json"],
            cwd=folder, env={**os.environ, **alone, **threads}, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
            raise SolrlError(f"the other side failed: {last} (it needs pip install absl-py ml_collections wandb)")
        steps = json.loads((folder / "result.json").read_text())[1:]
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in sorted(set().union(*steps))}


def geometry(config: Config, folder: Path, dtype: torch.dtype, num_epochs: int) -> dict[str, dict[str, Any]]:
    """``config`` in the other side's words: section -> name -> value."""
    keep, train, batch = config.regenerate, config.train, config.batch.train
    num_batches = _num_samples(config) // batch
    return {
        "text": {"tokens": config.model.max_text_tokens},
        "": {"num_epochs": num_epochs, "debug": True, "resolution": config.model.height, "seed": config.seed,
             "mixed_precision": "no" if dtype == torch.float32 else "bf16", "prompt_fn": "general_ocr",
             "dataset": str(folder), "logdir": str(folder), "decay_type": 1, "beta": train.beta,
             "reward_fn": {"jpeg_compressibility": 1.0}},
        "pretrained": {"model": model_source(config.model)},
        "sample": {"num_steps": keep.num_steps, "guidance_scale": 1.0, "deterministic": True,
                   "solver": SOLVERS[keep.solver], "num_image_per_prompt": keep.group_size, "train_batch_size": batch,
                   "num_batches_per_epoch": num_batches},
        "train": {"batch_size": batch, "gradient_accumulation_steps": num_batches, "beta": train.kl_weight,
                  "timestep_fraction": train.timestep_fraction, "learning_rate": train.learning_rate},
    }  # fmt: skip


def counts(side: Mapping[str, float]) -> dict[str, float]:
    """The samples that a step of one side passed through its transformer, by part and gradient."""
    return {name: side[name] for name in sorted(side) if name not in PARTS}


def require_equal_counts(here: Mapping[str, float], there: Mapping[str, float]) -> None:
    """Raise SolrlError unless both sides passed as many samples through the transformer."""
    if not counts(here) or counts(here) != counts(there):
        raise SolrlError(f"the two sides do not compute the same: a step passed samples through the transformer "
                         f"{counts(there)} there, {counts(here)} here")  # fmt: skip


def report(config: Config, rounds: Sequence[dict[str, dict[str, float]]], known: dict[str, Any]) -> str:
    """Medians and paired ratios."""
    keep = config.regenerate
    rows = []
    for part in PARTS:
        here, there = ([each[side][part] for each in rounds] for side in ("solrl", "DiffusionNFT"))
        ratios = [b / a for a, b in zip(here, there, strict=True)]
        mean, half = interval(ratios, 0.95)
        spread = "" if math.isnan(half) else f" [{mean - half:.2f}, {mean + half:.2f}]"
        rows.append([part, f"{median(here):.3f}", f"{median(there):.3f}", f"{mean:.2f}{spread}"])
    return "\n".join([
        f"peer_step: {config.model.path}, {config.prompts.per_step} prompts of {keep.group_size} samples, "
        f"{keep.num_steps} steps of {keep.solver}, {config.num_train_timesteps} of them trained, "
        f"micro-batches of {config.batch.train}",
        hardware(known),
        f"{'wall' if known['cuda'] else 'processor'} seconds, medians of {len(rounds)} turns; equal counts of samples",
        "samples through the transformer in a step, counted on both sides:",
        "; ".join(f"{name}: {samples:.0f}" for name, samples in counts(rounds[0]["solrl"]).items()),
        "",
        table(["", "solrl", "DiffusionNFT", "ratio, 95 % interval"], rows),
    ])  # fmt: skip


def _num_samples(config: Config) -> int:
    return config.prompts.per_step * config.regenerate.group_size


def _words(value: Any) -> str:
    """As it is written after a flag."""
    return " ".join(value) if isinstance(value, tuple) else str(value).lower()
