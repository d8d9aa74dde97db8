"""Is this training normal? A verdict in one line, with its reasons, from what a run has recorded.

health.py stops a run for what noise cannot produce. Here numbers with noise are weighed: no difference counts that its
standard error could explain. What was gained since before training is known prompt by prompt, with the error of that.
Errors of two later evaluations are added as if they were independent; prompts and noise are the same, so the true error
is smaller, and the verdict errs on the side of silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, TypeAlias

from solrl.config import Config
from solrl.image_statistics import STATISTICS
from solrl.intervals import student_quantile
from solrl.objectives.base import open_objective

Row: TypeAlias = Mapping[str, float]
Kind: TypeAlias = Literal["healthy", "too early", "no progress", "suspicious", "broken"]

MEANINGS: dict[Kind, str] = {
    "healthy": "the held-out reward rose beyond its error, and nothing else looks wrong",
    "too early": "what has been measured so far cannot tell",
    "no progress": "enough has been measured to see progress, and there is none",
    "suspicious": "something speaks against the rewards, or against the weights being better now than before",
    "broken": "worse than before training, or learning nothing for a mechanical reason",
}
"""From the best to the worst; the worst of what is found is the verdict."""

BAD: frozenset[Kind] = frozenset({"suspicious", "broken"})
"""Verdicts under which earlier weights may be better than the present ones."""

FALSE_ALARM = 1e-3
"""Chance that noise alone makes one statistic look fallen (one-sided), over all evaluations it was compared with."""

NO_RISE = 0.0228
"""Chance that noise alone makes a held-out reward look risen: two standard errors where there are many prompts. One
question, asked of one number, so more is risked than with alarms, which are raised about many."""

RESOLUTION = 0.5
"""Evaluations that would miss a gain of this many standard deviations of candidates' rewards can tell nothing."""

WINDOW = 10
"""Steps at the end of a run (and at most as many at its start) whose update metrics are looked at together."""

FEW_UPDATES = 5
"""Updates, or steps, from which "not one of them" is a finding."""

DRIFT = 2.0
"""Standard deviations of single images before training by which the mean of an image statistic may move: the average
image would have been among the 2 % strangest before."""

UNMOVED = 1e-3
"""The same below which nothing has moved; the demo's first eight steps move the slowest statistic by 0.01."""

STRANGE = 5.0
"""The same for images that are of another kind altogether, noise or a flat colour."""

NORM_FACTOR = 1.5
"""Factor by which the latents' norm may change; good runs change it by up to a quarter."""

MOVED = 0.5
"""Change of the policy's velocity by training, as a share of the velocity itself, from which little of the base model
is left; the demo, whose held-out reward nearly doubles, ends at 0.3."""

LEAP = 0.15
"""The same change by one update, from which updates undo each other. Good runs stay below 0.05 after their first steps
(Adam's, which are large); a run whose rate was too high passed 0.2 as its reward began to fall."""

ROUNDING = 1.5
"""By how much rounding may exceed what it was when old_policy was all but equal to the policy: 1.3 in bfloat16."""

CLIPPED = 0.9
"""Share of trained timesteps with a clipped ratio from which hardly any gradient is left."""


@dataclass(frozen=True)
class Finding:
    """One statement about a run, with its numbers, and the verdict that it alone would give.

    ``is_hint``: it says no more than why, and is worth reading only where something else is wrong.
    """

    kind: Kind
    text: str
    is_hint: bool = False


@dataclass(frozen=True)
class Verdict:
    """``reasons`` decide ``kind``, ``further`` is what else was found."""

    kind: Kind
    reasons: tuple[str, ...]
    further: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Verdict and reasons in one line."""
        return f"{self.kind}: {'; '.join(self.reasons)}"


def is_evaluated(config: Config, row: Row) -> bool:
    """Whether the row of a step holds an evaluation of the trained reward."""
    return row["step"] > 0 and f"eval/{config.reward.name}/mean" in row


def stops_early(config: Config, rows: Sequence[Row]) -> bool:
    """Whether train.early_stop ends the run at its last row."""
    limit = config.train.early_stop
    if limit == "off" or not rows or not is_evaluated(config, rows[-1]):
        return False
    order = list(MEANINGS)
    return order.index(judge(config, rows).kind) >= order.index(limit)


def judge(config: Config, rows: Sequence[Row]) -> Verdict:
    """The verdict on a run of ``config`` after the steps that ``rows`` of metrics.jsonl tell of."""
    steps = [row for row in rows if row["step"] > 0]
    findings = [
        _heldout(config, rows, steps),
        *_panel(config, rows),
        *_trend(steps),
        *_images(rows),
        *_groups(steps),
        *_update(config, steps),
    ]
    order = list(MEANINGS)
    hints = tuple(finding.text for finding in findings if finding.is_hint)
    stated = sorted((f for f in findings if not f.is_hint), key=lambda finding: -order.index(finding.kind))
    kind = stated[0].kind
    reasons = tuple(f.text for f in stated if f.kind == kind or (kind in BAD and f.kind in BAD))
    rest = tuple(finding.text for finding in stated[len(reasons) :])
    if kind in ("healthy", "too early"):
        return Verdict(kind, reasons, rest + hints)
    return Verdict(kind, reasons + hints, rest)


@dataclass(frozen=True)
class Point:
    """A held-out mean at a step, and what it gained since before training, with their standard errors over prompts."""

    step: int
    mean: float
    error: float
    gain: float
    gain_error: float

    def z(self, later: Point) -> float:
        """Standard errors by which ``later`` lies higher; 0 where there is no error to compare with.

        Of as many degrees of freedom as there are prompts but one; where errors are added there are more.
        """
        gain, error = later.gain, later.gain_error
        if self.step:
            gain, error = later.mean - self.mean, math.hypot(self.error, later.error)
        return gain / error if error else 0.0


def _points(rows: Sequence[Row], reward: str) -> list[Point]:
    """The evaluations of a reward, oldest first. Where no gain was recorded it is that of two independent means."""
    key = f"eval/{reward}"
    points: list[Point] = []
    for row in rows:
        if f"{key}/mean" in row:
            mean, error = row[f"{key}/mean"], row.get(f"{key}/stderr", 0.0)
            base = points[0] if points else Point(int(row["step"]), mean, error, 0.0, 0.0)
            gain = row.get(f"{key}/gain", mean - base.mean)
            gain_error = row.get(f"{key}/gain_stderr", math.hypot(error, base.error))
            points.append(Point(int(row["step"]), mean, error, gain, gain_error))
    return points


def _alarm(looks: int, freedom: int) -> float:
    """Standard errors that count as a fall, when the value is compared with ``looks`` others (Bonferroni)."""
    return student_quantile(1 - FALSE_ALARM / max(looks, 1), max(freedom, 1))


def _rise(config: Config) -> float:
    """Standard errors that count as a rise of a held-out mean."""
    return student_quantile(1 - NO_RISE, max(config.evaluate.num_prompts - 1, 1))


def _change(name: str, before: Point, after: Point) -> str:
    since = f" at step {before.step}" if before.step else ""
    return f"{name} {before.mean:.3f}{since} -> {after.mean:.3f} ({before.z(after):+.1f} standard errors)"


def _heldout(config: Config, rows: Sequence[Row], steps: Sequence[Row]) -> Finding:
    """The held-out mean of the trained reward: the number that decides."""
    name, points = config.reward.name, _points(rows, config.reward.name)
    if len(points) < 2:
        return Finding("too early", f"held-out {name} has been measured {len(points)} times: it takes two")
    base, last, best = points[0], points[-1], max(points, key=lambda point: point.mean)
    text, rise = f"held-out {_change(name, base, last)}", _rise(config)
    alarm = _alarm(len(points) - 1, config.evaluate.num_prompts - 1)
    if base.z(last) <= -alarm:
        return Finding("broken", f"{text}: worse than before training")
    if best.z(last) <= -alarm:
        return Finding("suspicious", f"held-out {_change(name, best, last)}: the best is behind")
    if base.z(last) >= rise:
        return Finding("healthy", text)
    if last.gain and not last.gain_error:
        return Finding("too early", f"held-out {name} is measured on one prompt, which has no standard error")
    spread = median([row["reward/std"] for row in steps if "reward/std" in row] or [0.0])
    missed = rise * last.gain_error
    if spread and missed > RESOLUTION * spread:
        return Finding(
            "too early", f"{text}: a gain below {missed:.2g} would not be seen (evaluate.num_prompts is too small)"
        )
    averaged = round(1 / (1 - config.train.ema_decay))
    if last.step < averaged:
        return Finding("too early", f"{text} after {last.step} steps: the weights are an average over {averaged}")
    return Finding("no progress", f"{text} after {last.step} steps")


def _panel(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Rewards that are measured and not trained on: they fall when the trained one is being exploited."""
    trained = _points(rows, config.reward.name)
    names = sorted({key.split("/")[1] for row in rows for key in row if key.startswith("eval/")} - {config.reward.name})
    for name in names:
        points = _points(rows, name)
        if len(points) < 2:
            continue
        last = points[-1]
        before = min(points[0], max(points, key=lambda point: point.mean), key=lambda point: point.z(last))
        if before.z(last) <= -_alarm(len(points) - 1, config.evaluate.num_prompts - 1):
            rose = len(trained) > 1 and trained[0].z(trained[-1]) >= _rise(config)
            why = ": the reward may be exploited" if rose else ""
            yield Finding("suspicious", f"{_change(name, before, last)}, which is not trained on{why}")
        else:
            yield Finding("healthy", f"{_change(name, points[0], last)}, not trained on")
    if not names:
        yield Finding(
            "healthy", "no second reward is watched (evaluate.rewards), so exploiting the first would not show"
        )


def _trend(steps: Sequence[Row]) -> Iterator[Finding]:
    """The slope of the training reward, by least squares."""
    points = [(row["step"], row["reward/mean"]) for row in steps if "reward/mean" in row]
    if len(points) < WINDOW:
        return
    xs, ys = zip(*points, strict=True)
    middle, level = fmean(xs), fmean(ys)
    spread = math.fsum((x - middle) ** 2 for x in xs)
    slope = math.fsum((x - middle) * (y - level) for x, y in points) / spread
    rest = math.fsum((y - level - slope * (x - middle)) ** 2 for x, y in points)
    error = math.sqrt(rest / (len(points) - 2) / spread)
    if not error:
        return
    z, freedom = slope / error, len(points) - 2
    alarm, rise = _alarm(1, freedom), student_quantile(1 - NO_RISE, freedom)
    text = f"training reward {slope:+.2g} a step ({z:+.1f} standard errors)"
    yield Finding("suspicious" if z <= -alarm else "healthy", text, is_hint=-alarm < z < rise)


def _images(rows: Sequence[Row]) -> Iterator[Finding]:
    """Drift of the held-out images, in units of the spread between images before training."""
    measured = [row for row in rows if all(f"images/{name}/mean" in row for name in STATISTICS)]
    if len(measured) < 2:
        return
    first, last = measured[0], measured[-1]
    drifts = {}
    for name in STATISTICS:
        before, after, spread = first[f"images/{name}/mean"], last[f"images/{name}/mean"], first[f"images/{name}/std"]
        if not spread:  # a single image, or images that are all alike
            continue
        drifts[name] = (after - before) / spread
        if abs(drifts[name]) > DRIFT:
            kind: Kind = "broken" if abs(drifts[name]) > STRANGE else "suspicious"
            moved = f"{before:.3g} -> {after:.3g} ({drifts[name]:+.1f} times its spread before)"
            yield Finding(kind, f"images' {name.replace('_', ' ')} {moved}")
    updates = sum(row.get("health/policy_change", 0) > 0 for row in rows if row["step"] <= last["step"])
    if updates >= FEW_UPDATES and drifts and all(abs(drift) < UNMOVED for drift in drifts.values()):
        yield Finding("broken", f"after {updates} updates the held-out images are those from before training")


def _groups(steps: Sequence[Row]) -> Iterator[Finding]:
    """Whether there was anything to learn from."""
    recent = [row for row in steps if "health/groups" in row and "health/zero_std_groups" in row][-WINDOW:]
    groups = sum(int(row["health/groups"]) for row in recent)
    equal = sum(int(row["health/zero_std_groups"]) for row in recent)
    if equal == 0:
        return
    text = f"all scores are equal in {equal} of the last {groups} groups"
    yield Finding("no progress", text, is_hint=equal < groups or len(recent) < FEW_UPDATES)


def _update(config: Config, steps: Sequence[Row]) -> Iterator[Finding]:
    """Gradient, distances and norms."""
    updates = [row for row in steps if row.get("health/policy_change", 0) > 0][-WINDOW:]
    if len(updates) >= FEW_UPDATES and not any(row.get("health/synced_bytes", 1) for row in updates[-FEW_UPDATES:]):
        text = f"the last {FEW_UPDATES} updates changed not one byte of the weights that draw samples"
        yield Finding("broken", f"{text}: train.learning_rate may be too small ({config.train.learning_rate:g})")
    yield from _norms(config, steps)
    clipped = [row["health/clip_fraction"] for row in updates if "health/clip_fraction" in row]
    if clipped and fmean(clipped) > CLIPPED:
        yield Finding("no progress", f"the ratio is clipped at {fmean(clipped):.0%} of trained timesteps")
    gradients = [row["grad_norm"] for row in steps if "grad_norm" in row]
    limit, recent = config.train.max_grad_norm, gradients[-WINDOW:]
    if len(recent) >= FEW_UPDATES and min(recent) > limit:
        yield Finding("no progress", f"every gradient is clipped (norm {median(recent):.2g}, limit {limit:g})", True)
    elif len(recent) >= FEW_UPDATES and median(recent) > 3 * median(gradients[:WINDOW]):
        text = f"the gradient's norm grew from {median(gradients[:WINDOW]):.2g} to {median(recent):.2g}"
        yield Finding("no progress", f"{text}: a lower train.learning_rate may help", True)


def _norms(config: Config, steps: Sequence[Row]) -> Iterator[Finding]:
    """How far latents and velocities have moved."""
    norms = [row["health/clean_norm"] for row in steps if "health/clean_norm" in row]
    if not norms:
        return
    before, after = fmean(norms[:FEW_UPDATES]), fmean(norms[-FEW_UPDATES:])
    if not before / NORM_FACTOR < after < before * NORM_FACTOR:
        yield Finding("suspicious", f"the latents' norm went from {before:.3g} to {after:.3g}")
    if open_objective(config).sampler(config):  # then distances are those of the sampler's means
        return
    velocity = math.sqrt(1 + before**2)  # root mean square of noise - clean
    moved = [math.sqrt(row["loss/kl"]) / velocity for row in steps[-FEW_UPDATES:] if "loss/kl" in row]
    if moved and fmean(moved) > MOVED:
        yield Finding("suspicious", f"training has changed the velocity by {fmean(moved):.0%} of its size")
    leaps = [distance / velocity for distance in _distances(config, steps)]
    if len(leaps) >= WINDOW and fmean(leaps[-FEW_UPDATES:]) > LEAP:
        share = fmean(leaps[-FEW_UPDATES:])
        yield Finding(
            "suspicious",
            f"an update changes the velocity by {share:.0%} of its size: train.learning_rate is too high",
        )


def _distances(config: Config, steps: Sequence[Row]) -> Iterator[float]:
    """Root mean square change of the velocity by one update, before each update but the first; never more than it was.

    old_policy is an average with decay d, which lags d / (1 - d) updates behind, and with runtime.staleness by those
    steps more; nothing where it is the policy itself. What rounding alone puts between two velocities is known from the
    first such update, when there is hardly any lag, and left out: in bfloat16 it is 0.005 of them.
    """
    key, rounding = "health/velocity_old_distance", math.inf
    for number, row in enumerate(row for row in steps if key in row):
        decay = min(config.train.old_decay_rate * number, config.train.old_decay_cap)
        lag = decay / (1 - decay) + config.runtime.staleness
        if lag:
            distance = math.sqrt(row[key])
            rounding = min(rounding, ROUNDING * distance if lag < 1 else 0.0)
            yield max(distance - rounding, 0.0) / lag
