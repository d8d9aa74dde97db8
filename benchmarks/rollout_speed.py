"""What makes rollouts faster, one change at a time: compiling, fewer steps, the number format. Beside Sol-RL's Table 5.

Each arm draws and scores the same seeds, once to warm up and then timed: wall time on a GPU, processor time on a CPU,
which others may use as well. The baseline is the strongest naive scaling
there is: all N candidates at the full number of steps, with LoRA merged into the weights, compiled where the config
compiles. The bound counts operations only (solrl/quant/bounds.py): no arm can be faster than it says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.common import facts, hardware, name_list, parse, parser, table, whole_number, write_json
from benchmarks.step_overhead import Meter
from solrl.clock import Stopwatch
from solrl.compute import compile_mode
from solrl.config import Config, StageConfig
from solrl.display import count
from solrl.distributed import World, start
from solrl.errors import UsageError
from solrl.groups import group_seeds
from solrl.prompts import step_prompts
from solrl.quant.bounds import SPEEDS, Work
from solrl.session import Session, open_session
from solrl.settings import load_config

PAPER = {"FLUX.1": (184, 79), "SD3.5-Large": (451, 187), "SANA": (65, 46)}
"""Seconds of the rollout in Table 5, naive and ours; 8 B200 GPUs, 24 kept of 96, 6 and 10 steps."""
PAPER_FEWER = 960 / 816
"""What fewer steps give in the paper's setting: 96 x 10 velocities against 96 x 6 + 24 x 10."""
QUICK: dict[str, Any] = {
    "prompts.per_step": 1, "explore.group_size": 8, "explore.num_steps": 2, "regenerate.group_size": 2,
    "regenerate.num_steps": 4, "batch.rollout": 2, "batch.train": 2, "batch.decode": 2,
}  # fmt: skip
BASELINE = "naive scaling"
PARTS = ("denoise", "decode", "score", "requantize")


@dataclass(frozen=True)
class Arm:
    """One way of drawing a step's rollouts: median seconds, and the operations that the bound counts."""

    name: str
    over: str  # the arm that it adds one change to
    seconds: dict[str, float]  # PARTS
    operations: float  # of denoising and decoding, in units of the policy's precision

    @property
    def rollout(self) -> float:
        """Seconds of drawing, as the paper counts it: decode is in it, score is not."""
        return self.seconds["denoise"] + self.seconds["decode"]

    @property
    def whole(self) -> float:
        """Seconds of everything measured."""
        return sum(self.seconds.values())


def main(argv: Sequence[str]) -> int:
    """Run the arms, print the decomposition."""
    options_of = parser("rollout_speed", __doc__.split("\n")[0])
    options_of.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--precision", type=name_list, default=["auto"], metavar="P,..",
                            help="explorer's formats, an arm each (auto: the cheapest that is native)")  # fmt: skip
    options_of.add_argument("--repeats", type=whole_number, default=3, help="timed draws of each arm (3)")
    options_of.add_argument("--quick", action="store_true", help="one prompt, 2 of 8 kept, 2 and 4 steps, in full and "
                            "fp8: to see that it works, on a CPU")  # fmt: skip
    options = parse(options_of, argv)
    quick = QUICK if options.quick else {}
    precisions = ["fp8"] if options.quick and options.precision == ["auto"] else options.precision
    config = load_config(options.config, quick | options.overrides)
    if not (config.explore.enabled and config.regenerate.enabled):
        raise UsageError("rollout_speed compares two stages with one: explore and regenerate must both be enabled")
    with start(config.cpu_threads, config.deterministic) as world:
        measured, notes = run(config, precisions, world, options.repeats)
        known = facts(world.device)
    print(report(config, measured, notes, options.repeats, known))
    write_json(options.json, {
        "benchmark": "rollout_speed", "arguments": list(argv), "environment": known, "paper": PAPER, "notes": notes,
        "arms": [asdict(arm) for arm in measured],
    })  # fmt: skip
    return 0


def run(config: Config, precisions: Sequence[str], world: World, repeats: int) -> tuple[list[Arm], list[str]]:
    """The arms in the order in which changes add up, and what was left out."""
    mode = compile_mode(config, world.device)
    compiled = "" if mode == "off" else ", compiled"
    naive = config.explore.model_copy(update={"num_steps": config.regenerate.num_steps,
                                              "solver": config.regenerate.solver})  # fmt: skip
    two_stages = {"explore": config.explore, "rollout": config.regenerate}
    arms, notes = list[Arm](), list[str]()

    def measure(name: str, over: str, session: Session, stages: Mapping[str, StageConfig]) -> str:
        print(f"drawing {name} ...", file=sys.stderr, flush=True)
        arms.append(measure_arm(name, over, session, stages, repeats=repeats))
        return name

    eager = ""
    if mode == "off":
        notes.append("compiling is off here (--compile default turns it on), so no arm shows what it gives")
    else:
        session = _session(config, world, {"compile": "off"}, precision="full")
        eager = measure(f"{BASELINE}, eager", "", session, {"rollout": naive})
        del session  # its weights make room for the next one's
    session = _session(config, world, {}, precision="full")
    base = measure(f"{BASELINE}{compiled}", eager, session, {"rollout": naive})
    fewer = measure(f"two stages{compiled}", base, session, two_stages)
    del session
    for precision in precisions:
        session = _session(config, world, {}, precision=precision)
        if session.trees.backend.number_format is None:
            notes.append(f"--precision {precision} is full precision here: {session.precision_line}")
            continue
        low = measure(f"two stages, {session.precision}{compiled}", fewer, session, two_stages)
        if config.explore.tiny_decoder is not None:
            session = _session(config, world, {}, precision=precision, with_tiny=True)
            measure(f"{low}, tiny decoder", low, session, two_stages)
    return arms, notes


def measure_arm(name: str, over: str, session: Session, stages: Mapping[str, StageConfig], *, repeats: int) -> Arm:
    """Draw each stage with its policy, score it, bring the trees to the weights; once to warm up, then timed."""
    config, world = session.config, session.world
    prompts = step_prompts(session.train_prompts, config.seed, 1, config.prompts.per_step)
    conditioning = session.policy.encode(prompts)
    seeds = group_seeds(config.seed, 1, len(prompts), config.explore.group_size)
    policies = {"explore": session.explorer, "rollout": session.rollout_policy}
    on_gpu = world.device.type == "cuda"
    now = time.perf_counter if on_gpu else time.process_time
    meter, times = Meter(now), list[dict[str, float]]()
    meter.synchronize = torch.cuda.synchronize if on_gpu else None
    with ExitStack() as stack:
        for policy in policies.values():
            stack.enter_context(meter.watch(policy, "decode", "decode"))
        for _ in range(repeats + 1):
            meter.seconds.clear()
            clock = Stopwatch(world.device, now)
            for stage_name, stage in stages.items():
                drawn = [row[: stage.group_size] for row in seeds]
                session.draw(policies[stage_name], conditioning, prompts, drawn, stage, phase="draw", clock=clock)
            with clock.phase("requantize"):
                session.sync()
            seconds = {part: clock.seconds.get(part, 0.0) for part in PARTS} | {"decode": meter.seconds["decode"]}
            times.append(seconds | {"denoise": clock.seconds["draw"] - seconds["decode"]})
    medians = {part: median(each[part] for each in times[1:]) for part in PARTS}
    works = {stage: session.work(config.explore.downscale if stage == "explore" else 1) for stage in stages}
    return Arm(name, over, medians, len(prompts) * operations(works, stages))


def operations(works: Mapping[str, Work], stages: Mapping[str, StageConfig]) -> float:
    """Of one prompt's denoising and decoding, a quantized product counted by the time it takes at best."""
    total = 0.0
    for name, stage in stages.items():
        work = works[name]
        saved = sum(part * (1 - 1 / SPEEDS[form]) for form, part in work.quantized.items()) * (name == "explore")
        total += stage.group_size * (stage.num_steps * (work.velocity - saved) + work.decode)
    return total


def report(config: Config, arms: Sequence[Arm], notes: Sequence[str], repeats: int, known: dict[str, Any]) -> str:
    """The arms, what each change gave, and the paper's rows."""
    explore, keep = config.explore, config.regenerate
    by_name = {arm.name: arm for arm in arms}
    base = next(by_name[arm.over] for arm in arms if arm.name.startswith("two stages"))
    rows = [
        [arm.name, *(f"{arm.seconds[part]:.2f}" for part in PARTS), f"{arm.rollout:.2f}",
         *(f"{ratio:.2f}x" for ratio in (base.rollout / arm.rollout, base.operations / arm.operations,
                                         base.whole / arm.whole))]
        for arm in arms
    ]  # fmt: skip
    clock = "wall" if known["cuda"] else "processor"
    steps = [f"{arm.name}: rollout {by_name[arm.over].rollout / arm.rollout:.2f} times as fast as {arm.over}, at most "
             f"{by_name[arm.over].operations / arm.operations:.2f}"
             for arm in arms if arm.over]  # fmt: skip
    papers = [
        [f"paper, {model}", f"{naive}", f"{ours}", f"{naive / ours:.2f}x", f"{PAPER_FEWER:.2f}x",
         f"{naive / ours / PAPER_FEWER:.2f}x"]
        for model, (naive, ours) in PAPER.items()
    ]  # fmt: skip
    return "\n".join([
        f"rollout_speed: {config.model.path}, {count(config.prompts.per_step, 'prompt')}, {keep.group_size} of "
        f"{explore.group_size} kept, {explore.num_steps} and {keep.num_steps} steps, reward {config.reward.name}",
        hardware(known),
        f"{clock} seconds, median of {repeats} draws after one to warm up; speed-ups over the baseline, {base.name}",
        "",
        table(["", *PARTS, "rollout", "speed-up", "its bound", "with all"], rows),
        "",
        *steps,
        *(f"note: {note}" for note in notes),
        "",
        table(["Table 5, rollout", "naive s", "ours s", "speed-up", "fewer steps", "left for the rest"], papers),
        "",
        "rollout: denoise + decode, as in the paper. with all: score and requantize, too. its bound: if products take "
        + ", ".join(f"1/{speed:.0f} of the time in {name.upper()}" for name, speed in SPEEDS.items())
        + " and all else goes by its operations. In arms that are not compiled, or emulated, time does not.",
    ])  # fmt: skip


def _session(config: Config, world: World, top: dict[str, Any], *, precision: str, with_tiny: bool = False) -> Session:
    """The config's session with one explorer and, unless it is the arm's point, the full decoder."""
    tree = config.model_dump() | top
    tree["explore"] |= {"precision": precision}
    if not with_tiny:
        tree["explore"]["tiny_decoder"] = None
    return open_session(Config.model_validate(tree), world, lambda: None)
