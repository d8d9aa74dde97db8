"""The share of a training step that is not the model: not velocity evaluations, decode, scoring or backward.

Runs the real ``train()`` with timers around its functions. A timer counts its own time without that of timed functions
it calls, so the parts add up to the step.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import facts, hardware, parse, parser, table, whole_number, write_json
from solrl.config import Config
from solrl.errors import UsageError
from solrl.session import Session
from solrl.settings import load_config

MODEL = ("velocity", "decode", "scoring", "backward")
TARGET = 0.02


class Meter:
    """Seconds by name; the time of a timed function does not count for the timed function that called it.

    Only of the thread that made it: what another one does beside it takes nobody's time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.synchronize: Callable[[], None] | None = None
        self._inner: list[float] = []
        self._thread = threading.get_ident()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` under a timer."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **named)
            begin = self.clock()
            self._inner.append(0.0)
            try:
                result = function(*arguments, **named)
                if self.synchronize:
                    self.synchronize()
                return result
            finally:
                spent = self.clock() - begin
                self.seconds[name] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return run

    @contextmanager
    def watch(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Inside, ``owner.attribute`` is timed as ``name``."""
        original = getattr(owner, attribute)
        is_own = attribute in vars(owner)
        setattr(owner, attribute, self.timed(name, original))
        try:
            yield
        finally:
            if is_own:
                setattr(owner, attribute, original)
            else:
                delattr(owner, attribute)


@dataclass(frozen=True)
class Step:
    """One step: its wall seconds, and the seconds of its timed parts."""

    wall: float
    parts: dict[str, float]

    @property
    def model(self) -> float:
        """Seconds in the model."""
        return sum(self.parts.get(name, 0.0) for name in MODEL)

    @property
    def overhead(self) -> float:
        """Seconds outside of it, by subtraction: what no timer saw is overhead as well."""
        return self.wall - self.model


def main(argv: Sequence[str]) -> int:
    """Run a few steps, print where their time went."""
    options_of = parser("step_overhead", __doc__.split("\n")[0])
    options_of.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                            " its settings can be overridden as --section.key value")  # fmt: skip
    options_of.add_argument("--steps", type=whole_number, default=4,
                            help="steps to run, at least 3: one to warm up, plain ones, and a last one with "
                            "evaluation, audit and checkpoint (4)")  # fmt: skip
    options = parse(options_of, argv)
    if options.steps < 3:
        raise UsageError(f"--steps must be at least 3, got {options.steps}")
    config = load_config(options.config, options.overrides)
    steps = measure(config, options.steps)
    known = facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(report(config, steps, known))
    shares = _shares(config, steps)
    write_json(options.json, {
        "benchmark": "step_overhead", "arguments": list(argv), "environment": known, "overhead_share": shares,
        "steps": [{"wall": step.wall, "parts": step.parts} for step in steps],
    })  # fmt: skip
    return 0 if shares["amortised"] < TARGET else 1


def measure(config: Config, num_steps: int) -> list[Step]:
    """Steps 2 .. num_steps of a run in a temporary folder; the last one evaluates, audits and saves."""
    loop: Any = importlib.import_module("solrl.train")  # solrl.train, the name, is the function
    meter, steps = Meter(), list[Step]()
    before: dict[str, float] = {}
    begin = time.perf_counter()

    def on_step(metrics: dict[str, float]) -> None:
        nonlocal begin, before
        now = time.perf_counter()
        parts = {name: seconds - before.get(name, 0.0) for name, seconds in meter.seconds.items()}
        steps.append(Step(now - begin, {name: seconds for name, seconds in parts.items() if seconds}))
        before, begin = dict(meter.seconds), time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tree = config.model_dump()
        tree["train"] |= {"num_steps": num_steps}
        tree["evaluate"] |= {"every_steps": 0}
        tree["output"] |= {"dir": Path(folder) / "run", "checkpoint_every_steps": num_steps,
                           "audit_every_steps": num_steps if config.output.audit_every_steps else 0}  # fmt: skip
        open_session = loop.open_session

        def opened(*arguments: Any) -> Session:
            session = open_session(*arguments)
            if session.world.device.type == "cuda":
                meter.synchronize = torch.cuda.synchronize
            for owner, attribute, name in _timed_parts(session):
                stack.enter_context(meter.watch(owner, attribute, name))
            return session

        stack.callback(setattr, loop, "open_session", open_session)
        loop.open_session = opened
        loop.train(Config.model_validate(tree), on_step=on_step)
    return steps[1:]


def _timed_parts(session: Session) -> list[tuple[Any, str, str]]:
    """(owner, attribute, name): the model's parts first, then everything worth a name."""
    from solrl.checkpoint import RunFolder
    from solrl.distributed import OrderFreeSum
    from solrl.tracking import Tracking

    # by path: some of these names are functions in solrl itself
    names = ("train", "rollout", "objectives.base", "objectives.nft", "recorder", "ledger")
    train, rollout, objectives, nft, recorder, ledger = (importlib.import_module(f"solrl.{name}") for name in names)
    policy, learner_class = type(session.policy), type(session.learner)
    return [
        (policy, "velocity", "velocity"),
        (policy, "decode", "decode"),
        (rollout, "call_parts", "scoring"),
        (torch.Tensor, "backward", "backward"),
        (policy, "encode", "encode prompts"),
        (rollout, "noise", "noise from seeds"),
        (objectives, "noise", "noise from seeds"),
        (rollout, "sample", "solver steps"),
        (nft, "nft_loss", "loss"),
        (OrderFreeSum, "add", "gradient sums"),
        (OrderFreeSum, "result", "gradient sums"),
        (torch.nn.utils, "clip_grad_norm_", "gradient norm"),
        (session.learner.optimizer, "step", "optimizer"),
        (learner_class, "update", "update, the rest"),
        (train, "select", "select"),
        (type(session.trees), "requantize_", "requantize"),
        (ledger, "step_entries", "ledger"),
        (ledger, "write", "ledger"),
        (Tracking, "log", "metrics, display"),
        (RunFolder, "save", "checkpoint"),
        (recorder, "export_checkpoint", "LoRA export"),
        (recorder, "save_grid", "image grid"),
        (recorder, "kept_fidelity", "fidelity"),
        (recorder, "full_fidelity", "fidelity"),
        (recorder, "check", "health"),
        (recorder, "clean_norms", "health"),
        (recorder.Recorder, "record", "record, the rest"),
        (train, "run_step", "run_step, the rest"),
    ]


def report(config: Config, steps: Sequence[Step], known: dict[str, Any]) -> str:
    """A table of a plain step and of one with everything, and the share over a run."""
    plain, whole = _average(steps[:-1]), steps[-1]
    names = sorted({*plain.parts, *whole.parts} - {*MODEL}, key=lambda name: -plain.parts.get(name, 0.0))
    rows = [[name, *_cells(plain, plain.parts.get(name, 0.0)), *_cells(whole, whole.parts.get(name, 0.0))]
            for name in [*MODEL, *names]]  # fmt: skip
    hidden = [step.wall - sum(step.parts.values()) for step in (plain, whole)]
    rows += [["untimed", *_cells(plain, hidden[0]), *_cells(whole, hidden[1])],
             ["whole step", *_cells(plain, plain.wall), *_cells(whole, whole.wall)],
             ["not the model", *_cells(plain, plain.overhead), *_cells(whole, whole.overhead)]]  # fmt: skip
    share = _shares(config, steps)["amortised"]
    explore, keep = config.explore, config.regenerate
    return "\n".join([
        f"step_overhead: {config.model.path}, {config.prompts.per_step} prompts x {explore.group_size} candidates x "
        f"{explore.num_steps} steps, {keep.group_size} kept x {keep.num_steps} steps, reward {config.reward.name}",
        hardware(known),
        f"mean of {len(steps) - 1} plain steps, and one that also evaluates, audits and saves",
        "",
        table(["", "plain s", "share", "with all s", "share"], rows),
        "",
        f"not the model, over a run with one such step in {_every(config)}: {100 * share:.2f} % "
        f"(target: under {100 * TARGET:.0f} %)",
    ])  # fmt: skip


def _shares(config: Config, steps: Sequence[Step]) -> dict[str, float]:
    plain, whole, every = _average(steps[:-1]), steps[-1], _every(config)
    overhead = (every - 1) * plain.overhead + whole.overhead
    wall = (every - 1) * plain.wall + whole.wall
    return {
        "plain": plain.overhead / plain.wall, "with_all": whole.overhead / whole.wall, "amortised": overhead / wall,
    }  # fmt: skip


def _every(config: Config) -> int:
    """Steps between two that evaluate; the other rare work is counted with it."""
    return config.evaluate.every_steps or config.train.num_steps


def _average(steps: Sequence[Step]) -> Step:
    names = {name for step in steps for name in step.parts}
    parts = {name: sum(step.parts.get(name, 0.0) for step in steps) / len(steps) for name in names}
    return Step(sum(step.wall for step in steps) / len(steps), parts)


def _cells(step: Step, seconds: float) -> list[str]:
    return [f"{seconds:.3f}", f"{100 * seconds / step.wall:.2f} %"]
