"""One self-contained page about a run: did it learn, was the selection sound, where did the time go.

Everything is embedded (charts as SVG, images as data), nothing is loaded from a network: the page forbids it itself.
It works at any moment of a run, from no step at all to a finished one.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from solrl.charts import WORK_COLORS, Series, line_chart, number, smoothed, stacked_chart, table
from solrl.config import Config
from solrl.files import write_atomic
from solrl.images import PIXEL_ART, Grid, data_url, load_grid
from solrl.panels import (
    column,
    fidelity_section,
    health_section,
    last_step,
    split,
    statistics_section,
    summary_of,
    verdict_section,
)
from solrl.report_roles import roles_section
from solrl.settings import load_config
from solrl.tracking import FILE, Row, read_metrics
from solrl.types import SolrlError

SMOOTH_FROM = 20
"""Steps from which reward curves get a running mean."""

FILES = {
    "config.toml": "every setting, resolved",
    "environment.json": "versions, hardware, explorer precision",
    FILE: "one line a step, all that is plotted here",
    "decisions.jsonl": "every decision, shift and job; <code>solrl trace</code> makes a Perfetto trace of it",
    "ledger": "every candidate: prompt, seed, scores; <code>solrl replay</code> redraws any of them",
    "heldout": "every score of each evaluation, prompt by prompt",
    "samples": "image grids on fixed seeds",
    "checkpoints": "for <code>--resume</code>: the last three and the best",
    "lora": "the averaged adapter, for <code>pipe.load_lora_weights</code>",
    "lora_raw": "the adapter without averaging",
    "transformer": "the averaged transformer (full fine-tuning), for <code>from_pretrained</code>",
}


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder and return its path."""
    config, rows = recorded(run_dir)
    environment = _environment(run_dir)
    body = [
        _header(run_dir, config, environment, rows),
        verdict_section(config, rows),
        _rewards(config, rows),
        _images(run_dir),
        statistics_section(rows),
        fidelity_section(config, rows),
        _time(rows),
        roles_section(run_dir),
        health_section(rows),
        _details(run_dir, environment),
    ]
    path = run_dir / "report.html"
    write_atomic(path, _page(f"{run_dir.resolve().name}: {config.reward.name}", "\n".join(body)).encode())
    return path


def recorded(run_dir: Path) -> tuple[Config, list[Row]]:
    """The settings of a run and the rows of its metrics, of which there may be none yet."""
    if not (run_dir / "config.toml").is_file():
        raise SolrlError(f"{run_dir} is not a run folder: it holds no config.toml")
    metrics = run_dir / FILE
    return load_config(run_dir / "config.toml"), read_metrics(metrics) if metrics.exists() else []


def _page(title: str, body: str) -> str:
    assets = files("solrl") / "assets" / "report"
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{(assets / 'page.css').read_text()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>\n{(assets / 'page.js').read_text()}</script>\n</body>\n</html>\n"
    )


def _environment(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "environment.json"
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SolrlError(f"cannot read {path} ({error}); restore it, or remove it to leave it out") from error
    if not isinstance(facts, dict):
        raise SolrlError(f"{path} is not a JSON object; restore it, or remove it to leave it out")
    return facts


def _header(run_dir: Path, config: Config, environment: Mapping[str, Any], rows: Sequence[Row]) -> str:
    done = last_step(rows)
    seconds = math.fsum(_seconds(row) for row in rows)
    gpu, cpu = environment.get("device", "unknown"), environment.get("cpu", "unknown")
    hardware = f"{cpu}, {environment.get('num_cpus', '?')} CPUs" if gpu == "cpu" else gpu
    explore = config.explore
    trained = f"LoRA rank {config.lora.rank}" if config.lora.enabled else "full fine-tuning"
    without = f"off: plain {config.train.method}"
    explorer = str(environment.get("precision", "not recorded")) if explore.enabled else without
    facts = [
        ("Model", f"{config.model.path}, {config.model.width} x {config.model.height}, {trained}"),
        ("Trained reward", config.reward.name),
        ("Steps", f"{done} of {config.train.num_steps}"),
        ("Time", _duration(seconds) if rows else "none yet"),
        ("Candidates", _candidates(config)),
        ("Hardware", str(hardware)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts)
    cells += f'<div class="wide"><dt>Explorer</dt><dd>{html.escape(explorer)}</dd></div>'
    headline, detail = _headline(config, rows)
    return (
        f'<header><p class="kicker">solrl run {html.escape(run_dir.resolve().name)}</p><h1>{headline}</h1>'
        f'<p class="sub">{detail}</p><dl class="facts">{cells}</dl></header>'
    )


def _candidates(config: Config) -> str:
    groups, explore, regenerate = config.prompts.per_step, config.explore, config.regenerate
    if not explore.enabled:
        return f"{regenerate.group_size} for each of {groups} prompts a step"
    return f"{explore.group_size} explored, {regenerate.group_size} kept for each of {groups} prompts a step"


def _headline(config: Config, rows: Sequence[Row]) -> tuple[str, str]:
    """The headline, and the sentence under it."""
    name = html.escape(config.reward.name)
    heldout = column(rows, f"eval/{config.reward.name}/mean")
    errors = dict(column(rows, f"eval/{config.reward.name}/stderr"))
    if not heldout:
        return f"No held-out {name} reward yet", "The first evaluation comes before step 1."
    (_, before), (step, after) = heldout[0], heldout[-1]
    texts = [f"{number(value)} &plusmn; {number(errors.get(at, 0.0))}" for at, value in (heldout[0], heldout[-1])]
    what = f"Averaged weights (EMA) on prompts never trained on, {config.evaluate.num_steps} steps, fixed seeds"
    if len(heldout) == 1:
        return f"Held-out {name} reward is {number(before)} so far", f"{texts[0]} at step {step:.0f}. {what}."
    change = after - before
    noise = math.hypot(errors.get(heldout[0][0], 0.0), errors.get(step, 0.0))
    relative = f" ({change / before:+.0%})" if before > 0 else f" ({change:+.3g})"
    verb, tone = ("rose", "up") if change > 0 else ("fell", "down")
    if abs(change) <= 2 * noise:
        headline = f"Held-out {name} reward moved from {number(before)} to {number(after)}{relative}: within its error"
    else:
        headline = (
            f"Held-out {name} reward {verb} from {number(before)} to <b class={tone}>{number(after)}</b>{relative}"
        )
    return headline, f"{texts[0]} before, {texts[1]} at step {step:.0f} (standard error over prompts). {what}."


def _rewards(config: Config, rows: Sequence[Row]) -> str:
    names = sorted({key.split("/")[1] for row in rows for key in row if key.startswith("eval/")})
    names.sort(key=lambda name: name != config.reward.name)  # the trained one first
    charts, end = [], last_step(rows)
    for color, name in zip((3, 4, 7, 5, 6, 8) * len(names), names, strict=False):
        points, errors = column(rows, f"eval/{name}/mean"), dict(column(rows, f"eval/{name}/stderr"))
        bars = [errors.get(x, 0.0) for x, _ in points]
        role = "trained on" if name == config.reward.name else "watched only"
        series = Series(f"averaged weights, {role}", *split(points), color, "dots", bars)
        charts.append(line_chart(f"Held-out {name}", [series], summary=summary_of(f"Held-out {name}", points), end=end))
    training = []
    for color, key, name in ((1, "reward/mean", "reward"), (2, "proxy_reward/mean", "proxy reward")):
        curve = Series(name, *split(column(rows, key)), color)
        if len(curve.xs) >= SMOOTH_FROM:
            window = max(5, len(curve.xs) // 20)
            training += [Series(name, curve.xs, curve.ys, color, "faint"), smoothed(curve, window, color)]
        else:
            training.append(curve)
    summary = summary_of("Training reward", column(rows, "reward/mean"))
    charts.append(line_chart("Training rewards", training, summary=summary, end=end))
    if not any(charts):
        return "<section><h2>Rewards</h2><p class=note>No step has ended yet.</p></section>"
    return (
        "<section><h2>Rewards</h2><p class=note>Held-out values decide whether the run learned. Training curves are "
        "means over other prompts at every step: <em>proxy reward</em> over all explored candidates, <em>reward</em> "
        f'over the kept ones drawn again in full precision.</p><div class="pair">{"".join(charts)}</div></section>'
    )


def _time(rows: Sequence[Row]) -> str:
    steps = [row for row in rows if row["step"] > 0 and "time/total_s" in row]
    if not steps:
        return "<section><h2>Time</h2><p class=note>No step has ended yet.</p></section>"
    names = list(
        dict.fromkeys(key for row in steps for key in row if key.startswith("time/") and key != "time/total_s")
    )
    inside = [name for name in names if name != "time/evaluate_s"]  # an evaluation is no part of a step
    layers = []
    for name in inside:
        color = WORK_COLORS.get(_phase(name), 8)
        layers.append(_layer(_phase(name), steps, [row.get(name, 0.0) for row in steps], color))
    other = [max(row["time/total_s"] - math.fsum(row.get(name, 0.0) for name in inside), 0.0) for row in steps]
    layers.append(_layer("other", steps, other, 8))
    totals = [(layer.name, layer.color, math.fsum(layer.ys)) for layer in layers]
    evaluations = math.fsum(row.get("time/evaluate_s", 0.0) for row in rows)
    if evaluations:
        totals.append(("evaluate (outside of steps)", 8, evaluations))
    whole = math.fsum(seconds for *_, seconds in totals) or 1.0
    lines = [
        f'<tr class="c{color}"><th scope="row"><span class=key></span>{html.escape(name)}</th>'
        f"<td class=n>{number(seconds / len(steps))}</td><td class=n>{seconds / whole:.1%}</td>"
        f'<td class=shares><span class=share style="width:{seconds / whole:.2%}"></span></td></tr>'
        for name, color, seconds in totals
    ]
    pace = math.fsum(row["time/total_s"] for row in steps) / len(steps)
    chart = stacked_chart(
        "Seconds of each step",
        layers[0].xs,
        layers,
        unit="s",
        summary=f"A step takes {number(pace)} seconds on average.",
    )
    totals_table = table(
        "Where the run's time went", "<th>phase</th><th class=n>s a step</th><th class=n>share</th><th></th>", lines
    )
    return (
        f"<section><h2>Time</h2><p class=note>A step takes {number(pace)} s on average.</p>"
        f'<div class="pair">{chart}<div class="panel">{totals_table}</div></div></section>'
    )


def _layer(name: str, steps: Sequence[Row], seconds: list[float], color: int) -> Series:
    return Series(name, [row["step"] for row in steps], seconds, color, "area")


def _images(run_dir: Path) -> str:
    paths = sorted((run_dir / "samples").glob("step_*.png"))
    if not paths:
        return ""
    chosen = paths[:1] + paths[1:][-1:]
    grids = [(int(path.stem.removeprefix("step_")), load_grid(path)) for path in chosen]
    figures = []
    for row, prompt in enumerate(grids[-1][1].prompts):
        shots = [
            _shots(step, grid, row) for step, grid in grids if row < len(grid.prompts) and grid.prompts[row] == prompt
        ]
        figures.append(f"<figure><figcaption>{html.escape(prompt)}</figcaption>{''.join(shots)}</figure>")
    when = "before and after" if len(grids) > 1 else f"at step {grids[0][0]}"
    return (
        f"<section><h2>Images {when}</h2><p class=note>Held-out prompts; a column is one seed, the number under an "
        f'image is its reward.</p><div class="prompts">{"".join(figures)}</div></section>'
    )


def _shots(step: int, grid: Grid, row: int) -> str:
    cells = []
    for seed, (image, reward) in enumerate(zip(grid.images[row], grid.rewards[row], strict=True), start=1):
        value = "" if reward is None else f"{reward:.2f}"
        alt = html.escape(f"step {step}, seed {seed}: {grid.prompts[row]}" + (f", reward {value}" if value else ""))
        kind = ' class="pixels"' if image.width <= PIXEL_ART else ""
        cells.append(f'<div><img{kind} src="{data_url(image)}" alt="{alt}">{value}</div>')
    values = [reward for reward in grid.rewards[row] if reward is not None]
    mean = f"<span>mean {math.fsum(values) / len(values):.2f}</span>" if values else ""
    count = len(grid.images[row])
    shots = f'<div class="shots" style="--n:{count}">{"".join(cells)}</div>'
    return f'<div class="when"><span>step {step}</span>{mean}</div>{shots}'


def _details(run_dir: Path, environment: Mapping[str, Any]) -> str:
    settings = html.escape((run_dir / "config.toml").read_text())
    facts = html.escape(json.dumps(environment, indent=2)) if environment else "not recorded"
    links = [
        f'<li><a href="{name}{"/" * (run_dir / name).is_dir()}">{name}</a> <span>{meaning}</span></li>'
        for name, meaning in FILES.items()
        if (run_dir / name).exists()
    ]
    return (
        "<section><h2>How to repeat it</h2>"
        f"<details><summary>Settings</summary><pre>{settings}</pre></details>"
        f"<details><summary>Environment</summary><pre>{facts}</pre></details>"
        f'<h2>Files beside this page</h2><ul class="files">{"".join(links)}</ul></section>'
    )


def _phase(key: str) -> str:
    return key.removeprefix("time/").removesuffix("_s")


def _seconds(row: Row) -> float:
    return row.get("time/total_s", 0.0) + row.get("time/evaluate_s", 0.0)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{minutes} min"
        if minutes < 90
        else f"{minutes // 60} h {minutes % 60} min"
    )
