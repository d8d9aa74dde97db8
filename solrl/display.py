"""How a run goes, on the terminal: the plan, then a live display, or one line a step where there is no terminal."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from solrl.config import Config, RegenerateConfig, StageConfig
from solrl.objectives.base import open_objective

WIDTH = 80
"""Columns of a line in a log."""

BAR_WIDTH = 24

RECENT = 20
"""Steps that the remaining time is estimated from."""


class Display:
    """Shows steps as they end. On a terminal it repaints a few lines in place; elsewhere it writes a line a step."""

    def __init__(
        self, num_steps: int, *, reward: str, history: Sequence[Mapping[str, float]] = (), stream: IO[str] | None = None
    ) -> None:
        self.num_steps = num_steps
        self.reward = reward
        self.stream = sys.stderr if stream is None else stream
        self.current = "starting"
        self.row: Mapping[str, float] = {}
        self.heldout: list[tuple[float, float]] = []  # (mean, standard error), the first and the latest
        self.started = time.monotonic()
        self.ended: deque[float] = deque([self.started], maxlen=RECENT + 1)
        self.live: Live | None = None
        for row in history:
            self._take(row)
        console = Console(file=self.stream)
        if self.stream.isatty() and not console.is_dumb_terminal:
            self.live = Live(get_renderable=self._picture, console=console, refresh_per_second=1)

    def lines(self, lines: Sequence[str]) -> None:
        """Print lines that stay."""
        for line in lines:
            if self.live and self.live.is_started:
                self.live.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=self.stream, flush=True)

    def phase(self, name: str) -> None:
        """Say what is being done now; seen on a terminal only."""
        self.current = name
        self._show()

    def step(self, row: Mapping[str, float]) -> None:
        """A step ended with these metrics."""
        self._take(row)
        self.current = ""
        self._show()
        if row["step"] > 0:
            self.ended.append(time.monotonic())
        else:
            self.ended[-1] = time.monotonic()  # the evaluation before training is no step's time
        if not self.live:
            print(
                plain_line(row, self.num_steps, self._heldout_text(), self._remaining()), file=self.stream, flush=True
            )

    def close(self) -> None:
        """Leave the last picture on the terminal."""
        self.current = ""
        if self.live and self.live.is_started:
            self.live.stop()

    def _show(self) -> None:
        """Begin to paint with the first thing to show: lines printed before stay above."""
        if self.live and not self.live.is_started:
            self.live.start()

    def _take(self, row: Mapping[str, float]) -> None:
        mean = row.get(f"eval/{self.reward}/mean")
        if mean is not None:
            self.heldout = [*self.heldout[:1], (mean, row.get(f"eval/{self.reward}/stderr", 0.0))]
        self.row = {**self.row, **row} if row["step"] == 0 else row

    def _heldout_text(self) -> str:
        return f"{self.heldout[-1][0]:.3f}" if self.heldout else ""

    def _remaining(self) -> float | None:
        """Seconds to go, from the recent steps and whatever happened between them; None when unknown or done."""
        if len(self.ended) < 2 or self.row["step"] >= self.num_steps:
            return None
        pace = (self.ended[-1] - self.ended[0]) / (len(self.ended) - 1)
        return pace * (self.num_steps - self.row["step"])

    def _picture(self) -> Text:
        """Everything as one text: cheap to paint while the run computes."""
        step = int(self.row.get("step", 0))
        filled = BAR_WIDTH * step // max(self.num_steps, 1)
        text = Text.assemble(
            ("#" * filled, "green"),
            ("-" * (BAR_WIDTH - filled), "dim"),
            (f"  {step}/{self.num_steps}", "bold"),
            f"  elapsed {duration(time.monotonic() - self.started)}",
        )
        remaining = self._remaining()
        if remaining is not None:
            text.append(f"  eta {duration(remaining)}")
        text.append(f"  {self.current}", "dim")
        for part in (self._scores(), self._seconds()):
            if part:
                text.append("\n").append_text(part)
        return text

    def _scores(self) -> Text:
        parts = [(name, f"{self.row[key]:.3f}") for name, key in SHOWN if key in self.row]
        if self.heldout:
            (first, _), (last, error) = self.heldout[0], self.heldout[-1]
            parts.insert(1, ("held-out", f"{first:.3f} -> {last:.3f} +- {error:.3f}"))
        return Text.assemble(
            *(piece for name, value in parts for piece in ((f"{name} ", "dim"), (f"{value}  ", "bold")))
        )

    def _seconds(self) -> Text:
        parts = [("seconds  ", "dim")] if phases(self.row) else []
        for name, seconds in phases(self.row):
            if seconds >= 0.05:
                parts += [(f"{name} ", "dim"), (f"{seconds:.1f}  ", "")]
        return Text.assemble(*parts)


SHOWN = (
    ("reward", "reward/mean"),
    ("proxy", "proxy_reward/mean"),
    ("kept rank corr.", "fidelity/kept_spearman"),
    ("whole group", "fidelity/full_spearman"),
)


def phases(row: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, seconds) of a step in the order they ran; the total is no phase."""
    names = [key for key in row if key.startswith("time/") and key != "time/total_s"]
    return [(key.removeprefix("time/").removesuffix("_s"), row[key]) for key in names]


def plain_line(row: Mapping[str, float], num_steps: int, heldout: str, remaining: float | None) -> str:
    """One step in at most WIDTH columns; what does not fit is left out, the longest phases are named first."""
    pieces = [f"[{row['step']:>{len(str(num_steps))}}/{num_steps}]"]
    for name, key, digits in (("reward", "reward/mean", 3), ("rho", "fidelity/kept_spearman", 2)):
        if key in row:
            pieces.append(f"{name} {row[key]:.{digits}f}")
    if heldout:
        pieces.insert(2, f"held-out {heldout}")
    if remaining is not None:
        pieces.append(f"eta {duration(remaining)}")
    if "time/total_s" in row:
        pieces.append(f"{row['time/total_s']:.1f}s")
    line = " ".join(pieces)
    for name, seconds in sorted(phases(row), key=lambda phase: -phase[1]):
        longer = f"{line} {name} {seconds:.1f}"
        if len(longer) > WIDTH:
            break
        line = longer
    return line


def duration(seconds: float) -> str:
    """12s, 3m05s, 2h04m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole // 60 % 60:02d}m"


def plan_lines(config: Config, *, device: str, world_size: int, policy: str, explorer: str) -> list[str]:
    """What the run is about to do, with everything that was derived from the settings; at most WIDTH columns.

    ``policy`` and ``explorer`` say what the models are and in which precision they compute.
    """
    explore, regenerate, train = config.explore, config.regenerate, config.train
    samples = config.prompts.per_step * config.regenerate.group_size
    objective = open_objective(config)
    needs_reference = train.kl_weight > 0 or objective.needs_reference
    batches, passes = -(-samples // config.batch.train), 1 + (not config.is_on_policy) + needs_reference
    facts = {
        "run": f"{config.output.dir}, seed {config.seed}, {count(train.num_steps, 'step')}",
        "device": f"{device}, {count(world_size, 'process', 'processes')}",
        "policy": policy,
    }
    if explore.enabled:
        facts["explorer"] = explorer
        smaller = f", at {config.model.width // explore.downscale}x{config.model.height // explore.downscale}"
        facts["explore"] = _stage(explore, config, world_size) + (smaller if explore.downscale > 1 else "")
        facts["select"] = f"{_kept(regenerate)} of {explore.group_size} per prompt"
    if regenerate.enabled:
        with_noise = f", with the noise of {train.method}" if objective.sampler(config) else ""
        facts["regenerate"] = _stage(regenerate, config, world_size) + with_noise
    facts["update"] = (
        f"{train.method}, {samples} samples x {config.num_train_timesteps} timesteps = "
        f"{samples * config.num_train_timesteps} pairs, {passes} forward and 1 backward pass each; "
        f"{count(batches, 'micro-batch', 'micro-batches')} of "
        f"{config.batch.train}{_padding(samples, batches * config.batch.train)}, 1 optimizer step"
        + (f"; samples are {count(config.runtime.staleness, 'step')} old" if config.runtime.staleness else "")
    )
    facts["evaluate"] = _evaluation(config)
    return [line for name, text in facts.items() for line in labelled(name, text)]


def labelled(name: str, text: str) -> list[str]:
    """``text`` with its name before it, in lines of WIDTH columns."""
    return textwrap.wrap(f"{name:<11} {text}", WIDTH, subsequent_indent=" " * 12)


def _kept(regenerate: RegenerateConfig) -> str:
    """Which candidates of a group stay."""
    keep = regenerate.group_size
    match regenerate.selection:
        case "best_worst":
            return f"{keep // 2} best and {keep // 2} worst"
        case "extremes":
            return f"the {keep} furthest from the mean"
        case "middle":
            return f"the {keep} of middle rank"
        case "random":
            return f"any {keep}"


def _stage(stage: StageConfig, config: Config, world_size: int) -> str:
    """Samples of a stage, the micro-batches they are drawn in, and what filling those up costs."""
    samples, size = config.prompts.per_step * stage.group_size, config.batch.rollout
    batches = -(-samples // size)
    rounds = -(-batches // world_size)
    share = f", {rounds} a process" if world_size > 1 else ""
    return (
        f"{count(config.prompts.per_step, 'prompt')} x {stage.group_size} = {samples} samples, {stage.num_steps} "
        f"{stage.solver} steps, {count(batches, 'micro-batch', 'micro-batches')} of {size}{share}"
        f"{_padding(samples, rounds * world_size * size)}"
    )


def count(number: int, one: str, many: str = "") -> str:
    """As in "1 step", "2 steps"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _padding(samples: int, capacity: int) -> str:
    return "" if capacity == samples else f" (+{capacity / samples - 1:.0%} padding)"


def _evaluation(config: Config) -> str:
    chosen = config.evaluate
    when = f"every {chosen.every_steps} steps" if chosen.every_steps else "before and after"
    images = chosen.num_prompts * chosen.images_per_prompt
    return f"{when}: up to {images} images, {chosen.num_steps} {chosen.solver} steps, averaged weights (EMA)"
