"""The part of the report about processes that change roles: who did what and when, queues, throughput, decisions."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solrl.charts import HEIGHT, WIDTH, WORK_COLORS, Series, line_chart, number, stacked_chart, table, ticks
from solrl.decisions import Line
from solrl.timeline import KINDS, Span, Step, read_steps

MOST_STEPS, MOST_SPANS = 4, 1200
"""Of the timeline: the last steps of the run, as far as they fit."""
MOST_DECISIONS = 40
"""Of the table: the last ones."""
COLORS = WORK_COLORS | {"shift": 4, "train": 5, "idle": 8}
"""Of the page's colours; a role's are those of its work."""
ROLES = ("explore", "score", "train")
GAP = 0.01
"""Between two steps, as a share of the width."""


def roles_section(run_dir: Path) -> str:
    """HTML; empty where the run never had roles."""
    steps = read_steps(run_dir)
    if not steps:
        return ""
    shown = _last(steps)
    return (
        f'<section><h2>Roles</h2><p class=note>{_summary(steps)} The <a href="https://ui.perfetto.dev">Perfetto</a> '
        "viewer opens the file that <code>solrl trace RUN -o trace.json</code> writes: the same, zoomable.</p>"
        f'{_timeline(shown)}<div class="pair">{_shares(steps)}{_throughput(steps)}</div>{_decisions(shown)}</section>'
    )


def _summary(steps: Sequence[Step]) -> str:
    lines = [line for step in steps for line in step.lines]
    shifts = [line for line in lines if line["event"] == "shift"]
    failed = [line for line in shifts if line["error"] is not None]
    seconds = math.fsum(line["of_which_shifting_s"] for line in shifts)
    idle = math.fsum(step.busy_seconds()["idle"] for step in steps)
    whole = math.fsum(step.num_processes * step.seconds for step in steps) or 1.0
    raised = sum(line["event"] == "raised" for line in lines)
    quarantined = [line["rank"] for line in lines if line["event"] == "quarantine"]
    text = (
        f"Processes changed roles {len(shifts):,} times in {len(steps)} steps, {_time(seconds / max(len(shifts), 1))} "
        f"each without what they were at; {idle / whole:.0%} of their time they had nothing to do."
    )
    if failed:
        text += f" {len(failed)} times a role did not come up and the previous one was back."
    if raised:
        text += f" {raised} jobs raised and were tried again."
    if quarantined:
        text += f" No jobs any more went to process {', '.join(map(str, sorted(set(quarantined))))}."
    return text


def _last(steps: Sequence[Step]) -> list[Step]:
    count, spans = 1, len(steps[-1].busy)
    for step in reversed(steps[:-1]):
        spans += len(step.busy)
        if count == MOST_STEPS or spans > MOST_SPANS:
            break
        count += 1
    return list(steps[-count:])


class _Axis:
    """Times of the shown steps side by side, whatever lay between them, to the SVG's units."""

    def __init__(self, steps: Sequence[Step]) -> None:
        gap = GAP * math.fsum(step.seconds for step in steps)
        self.starts, self.seconds = list[float](), -gap
        for step in steps:
            self.starts.append(self.seconds + gap)
            self.seconds = self.starts[-1] + step.seconds
        self.seconds = self.seconds or 1.0

    def __call__(self, place: int, since: float) -> float:
        """``since`` the beginning of the step at ``place``."""
        return (self.starts[place] + since) / self.seconds * WIDTH


def _timeline(steps: Sequence[Step]) -> str:
    axis = _Axis(steps)
    rows = [_lane(f"process {rank}", _spans(steps, rank, axis)) for rank in range(steps[0].num_processes)]
    for role, words in (("explore", "wait to be drawn"), ("score", "wait to be scored")):
        most = max((waiting[role] for step in steps for _, waiting in step.queues), default=0)
        rows.append(_lane(f"{words}, up to {most}", _queue(steps, role, most, axis), "queue"))
    borders = "".join(
        f'<span class="x" style="left:{axis(place, 0) / WIDTH:.2%}">step {step.number}</span>'
        for place, step in enumerate(steps)
    )
    scale = "".join(
        f'<span class="x" style="left:{at / axis.seconds:.2%}">{number(at)} s</span>' for at in ticks(0, axis.seconds)
    )
    used = {span.kind for step in steps for span in step.busy}
    legend = "".join(f'<li class="c{COLORS[kind]} area">{kind}</li>' for kind in KINDS if kind in used)
    legend += "".join(
        f'<li class="c{COLORS[role]} area faint">role {role}</li>' for role in ("explore", "score", "train")
    )
    span = f"step {steps[0].number}" if len(steps) == 1 else f"the last {len(steps)} steps"
    return (
        f'<figure class="chart lanes"><figcaption><b>Who did what: {span}</b> <span class="unit">a lane a process; '
        "solid: at work, pale: in a role and idle; hover for details</span>"
        f'<ul class="legend">{legend}</ul></figcaption>'
        f'<div class="lane head"><span></span><div>{borders}</div></div>{"".join(rows)}'
        f'<div class="lane foot"><span></span><div>{scale}</div></div></figure>'
    )


def _lane(name: str, drawn: str, style: str = "") -> str:
    box = (
        f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" aria-label="{html.escape(name)}"'
    )
    return f'<div class="lane {style}"><span>{html.escape(name)}</span><svg {box}>{drawn}</svg></div>'


def _spans(steps: Sequence[Step], rank: int, axis: _Axis) -> str:
    parts = []
    for place, step in enumerate(steps):
        for spans, style in ((step.roles, "held"), (step.busy, "work")):
            parts += [_rect(place, step, span, style, axis) for span in spans if span.rank == rank]
    return "".join(parts)


def _rect(place: int, step: Step, span: Span, style: str, axis: _Axis) -> str:
    left, right = axis(place, span.began - step.began), axis(place, span.ended - step.began)
    low, high = (0.0, HEIGHT) if style == "held" else (HEIGHT * 0.16, HEIGHT * 0.84)
    what = f"role {span.kind}" if style == "held" else _what(span)
    return (
        f'<rect class="c{COLORS[span.kind]} {style}" x="{left:.2f}" y="{low:.0f}" width="{max(right - left, 0.4):.2f}" '
        f'height="{high - low:.0f}"><title>{html.escape(what)}, {_time(span.seconds)}</title></rect>'
    )


def _what(span: Span) -> str:
    facts = span.facts
    if facts["event"] == "shift":
        return f"shift to {facts['wanted']}" + (f" failed, {facts['role']} is back" if facts["error"] else "")
    if facts["event"] == "phase":
        return f"{span.kind}, all processes"
    ends = {"result": "", "yielded": ", given back", "raised": ", raised"}
    return f"{span.kind}: job {facts['job']}{ends[facts['ended']]}"


def _queue(steps: Sequence[Step], role: str, most: int, axis: _Axis) -> str:
    areas = []
    for place, step in enumerate(steps):
        level, points = 0.0, [(axis(place, 0.0), HEIGHT)]
        for time, waiting in step.queues:
            x = axis(place, time - step.began)
            points += [(x, HEIGHT - level)]
            level = HEIGHT * waiting[role] / max(most, 1)
            points += [(x, HEIGHT - level)]
        points += [(points[-1][0], HEIGHT)]
        areas.append(f'<polygon class="c{COLORS[role]}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    return "".join(areas)


def _shares(steps: Sequence[Step]) -> str:
    xs = [float(step.number) for step in steps]
    seconds = [step.busy_seconds() for step in steps]
    layers = [
        Series(kind, xs, [100 * by.get(kind, 0.0) / (step.num_processes * step.seconds or 1.0)
                          for step, by in zip(steps, seconds, strict=True)], COLORS[kind], "area")
        for kind in (*KINDS, "idle")
        if any(by.get(kind) for by in seconds)
    ]  # fmt: skip
    idle = math.fsum(layers[-1].ys) / len(xs)
    return stacked_chart(
        "Time of all processes", xs, layers, unit="%", summary=f"{number(idle)} % of the processes' time is idle."
    )


def _throughput(steps: Sequence[Step]) -> str:
    xs, curves = [float(step.number) for step in steps], []
    for kind in ("explore", "regenerate", "score"):
        rates = [step.num_done(kind) / _drawing_seconds(step) for step in steps]
        curves.append(Series(kind, xs, rates, COLORS[kind], "dots" if len(xs) < 40 else "line"))
    mean = math.fsum(curves[2].ys) / len(xs)
    return line_chart(
        "Throughput", [curve for curve in curves if any(curve.ys)], unit="jobs a second while jobs last, all processes",
        end=xs[-1], summary=f"{number(mean)} jobs a second are scored on average.",
    )  # fmt: skip


def _drawing_seconds(step: Step) -> float:
    jobs = [span for span in step.busy if span.facts["event"] == "job"]
    return max(span.ended for span in jobs) - step.began or 1.0


def _decisions(steps: Sequence[Step]) -> str:
    found = [(step, line) for step in steps for line in step.lines if _is_worth_a_row(line)]
    lines = []
    for step, line in found[-MOST_DECISIONS:]:
        plan = line.get("plan") or {}
        cells = [_weighed(line), *(_figure(plan.get(key)) for key in ("benefit", "penalty"))]
        lines.append(
            f"<tr><td class=n>{step.number}</td><td class=n>{line['time'] - step.began:.2f}</td>"
            f'<th scope="row">{html.escape(_happened(line, plan))}</th>'
            + "".join(f"<td class=n>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = (
        "<th class=n>step</th><th class=n>after, s</th><th>what was decided, or happened</th>"
        "<th class=n>candidates</th><th class=n>benefit</th><th class=n>penalty</th>"
    )
    count = f"the last {len(lines)} of {len(found)}" if len(found) > len(lines) else len(lines)
    return (
        f"<details><summary>Decisions of these steps ({count})</summary>"
        "<p class=note>Benefit and penalty are in jobs: what the plan is expected to finish more within the planner's "
        f"horizon, and what the processes lose while they shift.</p>{table('', head, lines)}</details>"
    )


def _is_worth_a_row(line: Line) -> bool:
    """Not: that there was nothing to weigh."""
    if line["event"] == "decision":
        return bool(line["plan"] or line["candidates"])
    return line["event"] in ("raised", "quarantine", "auto") or (line["event"] == "shift" and line["error"] is not None)


def _happened(line: Line, plan: dict[str, Any]) -> str:
    if line["event"] == "shift":
        return f"process {line['rank']}: {line['error']}"
    if line["event"] in ("raised", "quarantine"):
        verb = f"raised in {line['role']}" if line["event"] == "raised" else "gets no jobs any more"
        return f"process {line['rank']} {verb}: {line['error']}"
    if line["event"] == "auto":
        return str(line["advice"])
    if not plan:
        return f"stay: {line['reason']}"
    if plan["role"] == "train":
        return f"all processes to train: {line['reason']}"
    by_role: dict[str, list[int]] = {}
    for rank, role in line["orders"]:
        by_role.setdefault(role, []).append(rank)
    who = (
        f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))} to {role}" for role, ranks in by_role.items()
    )
    return f"process {', '.join(who)}: {line['reason']}"


def _weighed(line: Line) -> str:
    return str(len(line["candidates"])) if line.get("candidates") else ""


def _figure(value: float | None) -> str:
    return "" if not value else number(value)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return "under 1 ms"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
