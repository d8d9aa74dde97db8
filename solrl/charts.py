"""Charts and tables as HTML with SVG, without any library: what the report is drawn with.

Only lines are in the SVG, which stretches with the page (strokes keep their width); every word is HTML on top of it, so
type stays legible at any width. Colours are the page's CSS variables; values go along for the page's hover script.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 300.0
"""The SVG's own units; what they are on screen is up to the page."""

MOST_POINTS = 1000
"""A longer series is thinned evenly; its last point always stays."""

WORK_COLORS = {"explore": 1, "score": 2, "regenerate": 3, "select": 4, "update": 5, "requantize": 6, "audit": 7}
"""Of the page's colours, that of each kind of work; whatever else there is has 8, the grey."""


@dataclass(frozen=True)
class Series:
    """One curve: its points, how it is drawn, and in which of the page's colours (1 to 8)."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 1
    style: str = "line"  # line | faint | dashed | dots (joined by a thin line)
    errors: Sequence[float] | None = None  # half lengths of error bars


@dataclass(frozen=True)
class Scale:
    """Data range to SVG units."""

    low: float
    high: float
    length: float

    def __call__(self, value: float) -> float:
        """Where ``value`` lies, 0 to ``length``."""
        return (value - self.low) / (self.high - self.low) * self.length

    def percent(self, value: float) -> str:
        """The same as a CSS length."""
        return f"{self(value) / self.length:.2%}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    summary: str,
    end: float = 0,
    unit: str = "",
    levels: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over steps, from 0 to ``end`` at least. ``levels`` are named horizontal lines; ``summary`` is read out
    instead of the picture."""
    series = [thinned(s) for s in series if len(s.xs)]
    if not series:
        return ""
    reach = [
        y + sign * e for s in series for y, e in zip(s.ys, s.errors or [0] * len(s.ys), strict=True) for sign in (-1, 1)
    ]
    x_scale = _scale([0.0, end, *(x for s in series for x in s.xs)], WIDTH, margin=0)
    y_scale = _scale([*reach, *(value for value, _ in levels)], HEIGHT, margin=0.06)
    drawn = "".join(_curve(s, x_scale, y_scale) for s in series)
    return _figure(title, unit, series, x_scale, y_scale, drawn, summary, levels)


def stacked_chart(title: str, xs: Sequence[float], layers: Sequence[Series], *, summary: str, unit: str = "") -> str:
    """Areas on top of each other, the first layer at the bottom; all over the same ``xs``."""
    if not xs:
        return ""
    layers = [thinned(layer) for layer in layers]
    xs = layers[0].xs
    if len(xs) == 1:  # an area needs a width
        xs, layers = [xs[0] - 0.5, xs[0] + 0.5], [_doubled(layer) for layer in layers]
    tops: list[list[float]] = [[0.0] * len(xs)]
    for layer in layers:
        tops.append([below + y for below, y in zip(tops[-1], layer.ys, strict=True)])
    x_scale, y_scale = _scale(xs, WIDTH, margin=0), Scale(0, max(tops[-1]) * 1.04 or 1.0, HEIGHT)
    drawn = []
    for layer, below, above in zip(layers, tops, tops[1:], strict=False):
        corners = [*zip(xs, above, strict=True), *reversed([*zip(xs, below, strict=True)])]
        points = " ".join(f"{x_scale(x):.1f},{HEIGHT - y_scale(y):.1f}" for x, y in corners)
        drawn.append(f'<polygon class="c{layer.color}" points="{points}"/>')
    return _figure(title, unit, layers, x_scale, y_scale, "".join(drawn), summary, ())


def sparkline(xs: Sequence[float], ys: Sequence[float]) -> str:
    """A curve the size of a word; decoration beside the numbers it shows."""
    if len(xs) < 2:
        return ""
    s = thinned(Series("", xs, ys))
    x_scale, y_scale = _scale(s.xs, WIDTH, margin=0), _scale(s.ys, HEIGHT, margin=0.1)
    return f'<svg class="spark" {_BOX} aria-hidden="true">{_curve(s, x_scale, y_scale)}</svg>'


def table(caption: str, head: str, lines: Sequence[str]) -> str:
    """A table of ready cells that scrolls sideways where the page is too narrow for it."""
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    rows = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{title}{rows}</table></div>'


def smoothed(series: Series, window: int, color: int) -> Series:
    """The mean of the last ``window`` points at each point (of all there are, at the start)."""
    means = []
    for i in range(len(series.ys)):
        part = series.ys[max(0, i + 1 - window) : i + 1]
        means.append(math.fsum(part) / len(part))
    return Series(f"{series.name}, mean of {window} steps", series.xs, means, color)


def thinned(series: Series) -> Series:
    """At most MOST_POINTS points of ``series``, the last one among them."""
    stride = -(-len(series.xs) // MOST_POINTS)
    if stride <= 1:
        return series
    keep = [*range(len(series.xs) - 1, -1, -stride)][::-1]
    errors = [series.errors[i] for i in keep] if series.errors else None
    return Series(
        series.name, [series.xs[i] for i in keep], [series.ys[i] for i in keep], series.color, series.style, errors
    )


def number(value: float) -> str:
    """A value as people read it: about three significant digits, whole numbers without a point."""
    size = abs(value)
    if size < 1e9 and value == int(value):
        return f"{int(value):,}"
    for limit, form in ((1e9, ".3g"), (100, ",.0f"), (10, ".1f"), (1, ".2f"), (0.001, ".3f")):
        if size >= limit:
            return format(value, form)
    return f"{value:.1e}"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """At most about ``count`` round values in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


_BOX = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none"'


def _doubled(layer: Series) -> Series:
    return Series(layer.name, [layer.xs[0] - 0.5, layer.xs[0] + 0.5], [layer.ys[0]] * 2, layer.color)


def _scale(values: Sequence[float], length: float, margin: float) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        room = 0.5 if margin == 0 else max(abs(low) * 0.1, 1e-6)
        return Scale(low - room, high + room, length)
    room = (high - low) * margin
    return Scale(low - room, high + room, length)


def _curve(series: Series, x_scale: Scale, y_scale: Scale) -> str:
    points = [(x_scale(x), HEIGHT - y_scale(y)) for x, y in zip(series.xs, series.ys, strict=True)]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    joined = f'<path class="c{series.color} {series.style}" d="{line}"/>'
    if series.style != "dots" and len(points) > 1:
        return joined
    bars = ""
    if series.errors:
        spans = [e / (y_scale.high - y_scale.low) * HEIGHT for e in series.errors]
        bars = "".join(f"M{x:.1f} {y - s:.1f}V{y + s:.1f}" for (x, y), s in zip(points, spans, strict=True))
        bars = f'<path class="c{series.color} bar" d="{bars}"/>'
    dots = "".join(f"M{x:.1f} {y:.1f}h0.01" for x, y in points)  # a round cap on no line is a dot, however stretched
    return f'{joined}{bars}<path class="c{series.color} dot" d="{dots}"/>'


def _figure(
    title: str,
    unit: str,
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale,
    drawn: str,
    summary: str,
    levels: Sequence[tuple[float, str]],
) -> str:
    grid, words = [], []
    rows = ticks(y_scale.low, y_scale.high)
    digits = max(0, -math.floor(math.log10(rows[1] - rows[0]) + 1e-9)) if len(rows) > 1 else 3
    for value in rows:
        grid.append(f"M0 {HEIGHT - y_scale(value):.1f}H{WIDTH:.0f}")
        words.append(f'<span class="y" style="bottom:{y_scale.percent(value)}">{value:,.{digits}f}</span>')
    columns = [x for x in ticks(x_scale.low, x_scale.high) if x == int(x)] or [x_scale.low]
    words += [f'<span class="x" style="left:{x_scale.percent(x)}">{x:,.0f}</span>' for x in columns]
    lines = ""
    for value, name in levels:
        lines += f"M0 {HEIGHT - y_scale(value):.1f}H{WIDTH:.0f}"
        words.append(f'<span class="level" style="bottom:{y_scale.percent(value)}">{html.escape(name)}</span>')
    names = "".join(
        f'<li class="c{s.color} {s.style}">{html.escape(s.name)}</li>' for s in series if s.style != "faint"
    )
    return (
        f'<figure class="chart"><figcaption><b>{html.escape(title)}</b> <span class="unit">{html.escape(unit)}</span>'
        f'<ul class="legend">{names}</ul></figcaption>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{html.escape(summary)}" '
        f'data-points="{html.escape(_points(series, x_scale))}">'
        f'<svg {_BOX} aria-hidden="true"><path class="grid" d="{"".join(grid)}"/>'
        f'<path class="levels" d="{lines}"/>{drawn}</svg>'
        f'{"".join(words)}<div class="rule" hidden></div><div class="tip" hidden></div></div>'
        '<div class="xlabel">step</div></figure>'
    )


def _points(series: Sequence[Series], x_scale: Scale) -> str:
    """All values by step, for the hover script: {x, at (percent), s: [[name, color, values or null]]}."""
    xs = sorted({x for s in series for x in s.xs})
    curves = []
    for s in series:
        values = dict(zip(s.xs, s.ys, strict=True))
        errors = dict(zip(s.xs, s.errors, strict=True)) if s.errors else {}
        texts = [
            None if x not in values else number(values[x]) + (f" \u00b1 {number(errors[x])}" if x in errors else "")
            for x in xs
        ]
        curves.append([s.name, s.color, texts])
    at = [round(100 * x_scale(x) / WIDTH, 2) for x in xs]
    return json.dumps({"x": xs, "at": at, "s": curves}, separators=(",", ":"))
