"""What an update's time is made of, and what compiling it and merging old_policy change.

One policy, all arms in turn in every round, so that other load on the machine hits them alike: the ratios to the eager
update are paired. Processor time on a CPU, wall time on a GPU, where every part waits for its kernels. Code is compiled
before the first round; its seconds are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.common import facts, hardware, parse, parser, table, whole_number, write_json
from benchmarks.step_overhead import Meter
from solrl.compute import eagerly
from solrl.distributed import OrderFreeSum, World, start
from solrl.errors import UsageError
from solrl.groups import group_seeds, noise
from solrl.learner import Learner, TrainingSet
from solrl.session import Session, open_session
from solrl.settings import load_config

PARTS = ("old and reference", "error of merged old", "policy forward", "backward", "reduction", "all else")
"""The error is measured once in an update, in the first micro-batch."""


@dataclass(frozen=True)
class Arm:
    """A way of computing the update."""

    name: str
    is_compiled: bool
    is_merged: bool

    def __call__(self, session: Session) -> AbstractContextManager[Any]:
        """Inside, the session's updates are computed this way."""
        session.learner.merged_old = session.rollout_policy if self.is_merged else None
        return nullcontext() if self.is_compiled else eagerly()


ARMS = (
    Arm("eager", False, False),
    Arm("eager, merged old", False, True),
    Arm("compiled", True, False),
    Arm("compiled, merged old", True, True),
)


def main(argv: Sequence[str]) -> int:
    """Time updates of every arm, print parts and ratios."""
    options_of = parser("update_speed", __doc__.split("\n")[0])
    options_of.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--rounds", type=whole_number, default=3, help="updates of each arm (3)")
    options_of.add_argument("--micro-batches", type=whole_number, default=1, help="micro-batches of an update (1)")
    options_of.add_argument("--eager", action="store_true", help="leave out the compiled arms")
    options = parse(options_of, argv)
    config = load_config(options.config, {"compile": "off" if options.eager else "default"} | options.overrides)
    if not options.eager and config.compile == "off":
        raise UsageError("compile = off has nothing to compile: use --eager")
    arms = [arm for arm in ARMS if not (options.eager and arm.is_compiled)]
    with start(config.cpu_threads, config.deterministic) as world:
        session = open_session(config, world, lambda: None)
        data = training_set(session, options.micro_batches)
        rounds, first = measure(session, data, arms, world, options.rounds)
        known = facts(world.device)
    shape = f"{options.micro_batches} x {config.batch.train} samples x {config.num_train_timesteps} timesteps"
    print(f"update_speed: {config.model.path}, {shape}, KL weight {config.train.kl_weight}, {session.compile_mode}")
    print(hardware(known))
    print(report(arms, rounds, first))
    write_json(options.json, {
        "benchmark": "update_speed", "arguments": list(argv), "environment": known, "rounds": rounds, "first": first,
    })  # fmt: skip
    return 0


def training_set(session: Session, micro_batches: int) -> TrainingSet:
    """Made-up samples of the right shapes: time does not depend on values."""
    size = session.config.batch.train
    seeds = group_seeds(0, 0, 1, micro_batches * size)[0]
    clean = noise(seeds, session.policy.latent_shape).to(session.policy.device)
    return TrainingSet(
        seeds=seeds,
        groups=[0] * len(seeds),
        advantages=torch.linspace(-1, 1, len(seeds)),
        weights=torch.ones(len(seeds)),
        clean=dict(enumerate(clean)),
        conditioning=session.policy.encode(session.train_prompts[:1]),
    )


def measure(
    session: Session, data: TrainingSet, arms: Sequence[Arm], world: World, num_rounds: int
) -> tuple[list[dict[str, dict[str, float]]], dict[str, float]]:
    """Per round and arm the seconds of PARTS and "update"; and each arm's wall seconds of the update before them."""
    on_gpu = world.device.type == "cuda"
    meter = Meter(time.perf_counter if on_gpu else time.process_time)
    meter.synchronize = torch.cuda.synchronize if on_gpu else None

    def update(arm: Arm) -> dict[str, float]:
        with arm(session):
            meter.seconds.clear()
            whole = meter.timed("all else", session.learner.update)
            whole(data, world, lambda: None)
        seconds = {part: meter.seconds[part] for part in PARTS}
        return seconds | {"update": sum(seconds.values())}

    first = {}
    with ExitStack() as stack:
        stack.enter_context(meter.watch(Learner, "_frozen_velocities", "old and reference"))
        stack.enter_context(meter.watch(Learner, "_merged_error", "error of merged old"))
        stack.enter_context(meter.watch(torch.Tensor, "backward", "backward"))
        stack.enter_context(meter.watch(OrderFreeSum, "add", "reduction"))
        stack.enter_context(meter.watch(OrderFreeSum, "result", "reduction"))
        velocity: Callable[..., Any] = session.policy.velocity
        forward = meter.timed("policy forward", velocity)
        session.policy.velocity = lambda *given: (forward if torch.is_grad_enabled() else velocity)(*given)  # type: ignore[method-assign]
        for arm in arms:
            begin = time.perf_counter()
            update(arm)
            first[arm.name] = time.perf_counter() - begin
        return [{arm.name: update(arm) for arm in arms} for _ in range(num_rounds)], first


def report(arms: Sequence[Arm], rounds: Sequence[dict[str, dict[str, float]]], first: dict[str, float]) -> str:
    """Medians of seconds by part, the paired ratio to eager, and the first update."""

    def of(arm: Arm, part: str) -> list[float]:
        return [one[arm.name][part] for one in rounds]

    eager = arms[0]
    rows = [[part, *(f"{median(of(arm, part)):.3f}" for arm in arms)] for part in (*PARTS, "update")]
    for title, keys in (
        ("speed-up", ("update",)),
        ("of old and reference", PARTS[:1]),
        ("of policy forward and backward", PARTS[2:4]),
    ):
        ratios = [
            median(sum(one[eager.name][k] for k in keys) / sum(one[arm.name][k] for k in keys) for one in rounds)
            for arm in arms
        ]
        rows.append([title, *(f"{ratio:.2f}x" for ratio in ratios)])
    rows.append(["first update, wall s", *(f"{first[arm.name]:.1f}" for arm in arms)])
    return table([f"median of {len(rounds)}, s", *(arm.name for arm in arms)], rows)
