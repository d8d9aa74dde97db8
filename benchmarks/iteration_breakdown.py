"""Where a training step's time goes: naive scaling, plain DiffusionNFT and two stages, beside Sol-RL's Table 5.

Each arm is the run's own step (`solrl.train.run_step`) under other settings, on fresh weights, after one step to warm
up. The labels are those of the paper's Figure 3(a): K-in-N (P), K samples trained on out of N drawn in precision P.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from benchmarks.common import facts, hardware, parse, parser, table, whole_number, write_json
from benchmarks.step_overhead import Meter
from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.display import count
from solrl.distributed import World, start
from solrl.quant.backends import choose_backend
from solrl.session import Session, open_session
from solrl.settings import load_config
from solrl.train import run_step

PHASES = ("explore", "regenerate", "score", "select", "update", "requantize")
PAPER = {"FLUX.1": (184, 79, 274, 169), "SD3.5-Large": (451, 187, 691, 427), "SANA": (65, 46, 95, 76)}
"""Seconds of Table 5: rollout naive and ours, end to end naive and ours; 8 B200 GPUs."""


@dataclass(frozen=True)
class Arm:
    """One way of making a step, and its mean seconds."""

    name: str
    label: str
    seconds: dict[str, float]  # PHASES, "decode" (a part of explore and regenerate), "total"

    @property
    def rollout(self) -> float:
        """Seconds of drawing, decode included."""
        return self.seconds["explore"] + self.seconds["regenerate"]


def main(argv: Sequence[str]) -> int:
    """Run the arms, print both tables."""
    options_of = parser("iteration_breakdown", __doc__.split("\n")[0])
    options_of.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--steps", type=whole_number, default=2, help="timed steps of each arm (2)")
    options = parse(options_of, argv)
    config = load_config(options.config, options.overrides)
    with start(config.cpu_threads, config.deterministic) as world:
        arms = settings(config)
        if choose_backend(config.explore, world.device).precision == "full":
            del arms["quantized, one stage"]  # it would be naive scaling again
        measured = [measure(name, arm, world, options.steps) for name, arm in arms.items()]
        known = facts(world.device)
    print(report(config, measured, options.steps, known))
    write_json(options.json, {
        "benchmark": "iteration_breakdown", "arguments": list(argv), "environment": known,
        "arms": {arm.name: {"label": arm.label, "seconds": arm.seconds} for arm in measured}, "paper": PAPER,
    })  # fmt: skip
    return 0


def settings(config: Config) -> dict[str, Config]:
    """The run's settings (two stages) and what the paper compares them with."""
    keep = config.regenerate
    whole = {"num_steps": keep.num_steps, "solver": keep.solver, "tiny_decoder": None}
    one_stage = {"enabled": False}
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "plain NFT": {"explore": {"enabled": False}},
        "naive scaling": {"explore": whole | {"precision": "full"}, "regenerate": one_stage},
        "quantized, one stage": {"explore": whole, "regenerate": one_stage},
        "two stages": {},
    }
    return {name: _changed(config, sections) for name, sections in changes.items()}


def measure(name: str, config: Config, world: World, num_steps: int) -> Arm:
    """Mean seconds of steps of a fresh session without audits."""
    session = open_session(_changed(config, {"output": {"audit_every_steps": 0}}), world, lambda: None)
    return Arm(name, _label(session), step_seconds(session, num_steps))


def step_seconds(session: Session, num_steps: int) -> dict[str, float]:
    """Means of steps 2 .. num_steps + 1, as ``Arm.seconds``: wall time on a GPU, processor time on a CPU."""
    device = session.world.device
    on_gpu = device.type == "cuda"
    now = time.perf_counter if on_gpu else time.process_time
    meter, steps = Meter(now), list[dict[str, float]]()
    meter.synchronize = torch.cuda.synchronize if on_gpu else None
    with ExitStack() as stack:
        for policy in (session.explorer, session.rollout_policy):
            stack.enter_context(meter.watch(policy, "decode", "decode"))
        for step in range(1, num_steps + 2):
            meter.seconds.clear()
            clock = Stopwatch(device, now)
            run_step(session, step, clock)
            timed = {key.removeprefix("time/").removesuffix("_s"): value for key, value in clock.metrics().items()}
            steps.append(timed | meter.seconds)
    keys = (*PHASES, "decode", "total")
    return {key: mean(step.get(key, 0.0) for step in steps[1:]) for key in keys}


def report(config: Config, arms: Sequence[Arm], num_steps: int, known: dict[str, Any]) -> str:
    """Figure 3(a) as a table, then Table 5 with the paper's rows."""
    by_name = {arm.name: arm for arm in arms}
    naive, ours = by_name["naive scaling"], by_name["two stages"]
    explore, keep = config.explore, config.regenerate
    calls = explore.group_size * keep.num_steps
    fewer = calls / (explore.group_size * explore.num_steps + keep.group_size * keep.num_steps)
    clock = "wall" if known["cuda"] else "processor"
    return "\n".join([
        f"iteration_breakdown: {config.model.path}, {count(config.prompts.per_step, 'prompt')}, "
        f"reward {config.reward.name}, {explore.num_steps} and {keep.num_steps} denoising steps",
        hardware(known),
        f"mean of {num_steps} after one to warm up; {clock} seconds (share of the step)",
        "",
        table(["", *(arm.name for arm in arms)], [["", *(arm.label for arm in arms)], *_phase_rows(arms)]),
        "",
        table(["Table 5", "rollout naive", "ours", "speed-up", "whole naive", "ours", "speed-up", "rest of ours"], [
            _row("here", naive.rollout, ours.rollout, naive.seconds["total"], ours.seconds["total"]),
            *(_row(f"paper, {model}", *numbers) for model, numbers in PAPER.items()),
        ]),
        "",
        f"Fewer velocity evaluations alone would make the rollout {fewer:.2f} times as fast; the kept are decoded and "
        "scored twice.",
        "rest of ours: what is not rollout, in the two-stage step. The paper's speed-ups are computed from its seconds",
    ])  # fmt: skip


def _phase_rows(arms: Sequence[Arm]) -> list[list[str]]:
    def cells(seconds: Mapping[str, float]) -> dict[str, float]:
        parts = {phase: seconds[phase] for phase in PHASES}
        return parts | {"all else": seconds["total"] - sum(parts.values()), "whole step": seconds["total"],
                        "of it decode": seconds["decode"]}  # fmt: skip

    columns = [cells(arm.seconds) for arm in arms]
    return [
        [name, *(f"{column[name]:.2f} ({100 * column[name] / column['whole step']:3.0f} %)" for column in columns)]
        for name in columns[0]
    ]


def _row(name: str, rollout: float, our_rollout: float, whole: float, our_whole: float) -> list[str]:
    digits = 2 if whole < 50 else 0
    seconds = [f"{x:.{digits}f}" for x in (rollout, our_rollout, whole, our_whole)]
    return [name, *seconds[:2], f"{rollout / our_rollout:.2f}x", *seconds[2:], f"{whole / our_whole:.2f}x",
            f"{100 * (1 - our_rollout / our_whole):.0f} %"]  # fmt: skip


def _label(session: Session) -> str:
    config = session.config
    return f"{config.regenerate.group_size}-in-{config.pool_size} ({_precision(session)})"


def _precision(session: Session) -> str:
    return session.precision if session.config.explore.enabled else "full"


def _changed(config: Config, sections: dict[str, dict[str, Any]]) -> Config:
    tree = config.model_dump()
    for section, values in sections.items():
        tree[section] |= values
    return Config.model_validate(tree)
