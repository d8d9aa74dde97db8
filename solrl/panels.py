"""Sections of the report that say whether its curves can be believed: verdict, fidelity, image statistics, health."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from solrl.charts import Series, line_chart, number, sparkline, table
from solrl.config import Config
from solrl.gate import FEWEST, rung_of, too_low
from solrl.health import MEANINGS
from solrl.image_statistics import MEANINGS as STATISTIC_MEANINGS
from solrl.tracking import Row
from solrl.verdict import MEANINGS as VERDICT_MEANINGS
from solrl.verdict import judge

TONES = {"healthy": "up", "suspicious": "down", "broken": "down"}
"""Verdict -> class of its colour."""


def verdict_section(config: Config, rows: Sequence[Row]) -> str:
    """Is this training normal? With the reasons, and what else was looked at."""
    verdict = judge(config, rows)
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict.reasons)
    items += "".join(f'<li class="further">{html.escape(text)}</li>' for text in verdict.further)
    return (
        f'<section class="verdict"><h2>Is this training normal? <b class="{TONES.get(verdict.kind, "")}">'
        f"{verdict.kind}</b></h2><p class=note>{VERDICT_MEANINGS[verdict.kind]}.</p><ul>{items}</ul></section>"
    )


def fidelity_section(config: Config, rows: Sequence[Row]) -> str:
    title = "<section><h2>Selection fidelity</h2>"
    if not (config.explore.enabled and config.regenerate.enabled):
        return f"{title}<p class=note>Not measured: only one of the two stages draws samples.</p></section>"
    columns = {
        kind: {name: column(rows, f"fidelity/{kind}_{name}") for name in STATISTICS} for kind in ("kept", "full")
    }
    if not any(columns["kept"].values()) and not any(columns["full"].values()):
        return f"{title}<p class=note>Not measured yet.</p></section>"
    kept, full = columns["kept"], columns["full"]
    pool, keep = config.explore.group_size, config.regenerate.group_size
    whole = f"whole group of {pool} (audited steps)"
    correlations = [
        Series("Spearman, kept only (range-restricted)", *split(kept["spearman"]), 1),
        Series(f"Spearman, {whole}", *split(full["spearman"]), 2, "dots"),
        Series(f"Kendall tau-b, {whole}", *split(full["kendall"]), 4, "dots"),
    ]
    ranks = [
        Series(f"proxy's best {keep // 2}", *split(full["top_rank"]), 3, "dots"),
        Series(f"proxy's worst {keep // 2}", *split(full["bottom_rank"]), 6, "dots"),
    ]
    levels = [(_perfect("top_rank", pool, keep), "perfect"), ((pool + 1) / 2, "chance")]
    levels.append((_perfect("bottom_rank", pool, keep), "perfect"))
    charts = line_chart(
        "Rank correlation of proxy reward and reward", correlations, end=last_step(rows),
        summary=summary_of("Spearman correlation over the kept candidates", kept["spearman"]),
    ) + line_chart(
        "Mean true rank, whole group", ranks, end=last_step(rows), unit=f"1 = best of {pool}", levels=levels,
        summary=summary_of(f"Mean true rank of the proxy's best {keep // 2}", full["top_rank"]),
    )  # fmt: skip
    return (
        f"{title}<p class=note>Do the explorer's cheap scores order candidates as full rollouts do? <em>Kept</em> "
        "values come free with every step but see only the two ends of each group, so their range is restricted: never "
        "compare them with published figures. <em>Whole-group</em> values come from audited steps, where one group is "
        f"drawn again entirely; those are the ones to compare.</p>{_climbs(config, rows)}"
        f'<div class="pair">{charts}</div>{_fidelity_table(columns, pool, keep)}</section>'
    )


STATISTICS = {
    "spearman": "Spearman's rho, ties averaged",
    "kendall": "Kendall's tau-b",
    "top_rank": "mean true rank of the candidates kept as best",
    "bottom_rank": "mean true rank of the candidates kept as worst",
    "overlap_k": "overlap: share of those kept as best and as worst that truly are",
}


def _climbs(config: Config, rows: Sequence[Row]) -> str:
    """What explore.min_fidelity did to the explorer, and what it found where there was nothing to be done."""
    if not config.explore.min_fidelity:
        return ""
    explored, texts = [row for row in rows if "explore/rung" in row], []
    limit = f"explore.min_fidelity = {config.explore.min_fidelity:g}"
    climbs = [
        f"from step {row['step']:.0f} on rung {rung_of(row)} of the ladder, {row['explore/num_steps']:.0f} steps"
        for before, row in pairwise(explored)
        if rung_of(row) > rung_of(before)
    ]
    if climbs:
        texts.append(f"The explorer climbed, as {limit} says: {'; '.join(climbs)}.")
    found = [(row, interval) for n, row in enumerate(explored, 1) if (interval := too_low(config, explored[:n]))]
    here = [(row, interval) for row, interval in found if rung_of(row) == rung_of(explored[-1])]
    if here:
        step, interval = here[-1][0]["step"], here[-1][1]
        so = "nothing was explored since" if here[0][0] is explored[-1] else "nothing higher runs here"
        texts.append(f"After step {step:.0f} the correlation was {interval}, below {limit}, and {so}.")
    number = len(column(explored, "fidelity/full_spearman"))
    if not texts and number:
        texts.append(
            f"The explorer did not climb: {number} audit{'s' * (number != 1)} did not show the correlation below "
            f"{limit}, with its whole 95 % interval and over at least {FEWEST} of them."
        )
    texts = texts or [f"No group was audited, so {limit} had nothing to go by."]
    return f"<p class=note>{' '.join(texts)} Precisions stand in environment.json and in the ledger.</p>"


def _perfect(name: str, size: int, keep: int) -> float:
    half = keep // 2
    return {"top_rank": (half + 1) / 2, "bottom_rank": size - (half - 1) / 2}.get(name, 1.0)


def _chance(name: str, size: int, keep: int) -> float:
    return {"top_rank": (size + 1) / 2, "bottom_rank": (size + 1) / 2, "overlap_k": keep / 2 / size}.get(name, 0.0)


def _fidelity_table(columns: Mapping[str, Mapping[str, list[tuple[float, float]]]], pool: int, keep: int) -> str:
    lines = []
    for name, meaning in STATISTICS.items():
        cells = ""
        for kind, size in (("kept", keep), ("full", pool)):
            values = [y for _, y in columns[kind][name]]
            mean = number(math.fsum(values) / len(values)) if values else "&ndash;"
            ends = f"{number(_perfect(name, size, keep))} / {number(_chance(name, size, keep))}" if values else ""
            cells += f"<td class=n>{mean}</td><td class=n>{ends}</td>"
        lines.append(f'<tr><th scope="row">{meaning}</th>{cells}</tr>')
    audits = len(columns["full"]["spearman"])
    head = (
        f"<th class=n>kept {keep} (range-restricted)</th><th class=n>perfect / chance</th>"
        f"<th class=n>whole group of {pool}, {audits} audit{'s' * (audits != 1)}</th><th class=n>perfect / chance</th>"
    )
    return table("Means over the run", f"<th>statistic</th>{head}", lines)


def statistics_section(rows: Sequence[Row]) -> str:
    """How the held-out images changed in numbers that no reward looks at."""
    lines = []
    for name, meaning in STATISTIC_MEANINGS.items():
        points = column(rows, f"images/{name}/mean")
        if not points:
            continue
        (xs, ys), spread = split(points), column(rows, f"images/{name}/std")[0][1]
        drift = f"{(ys[-1] - ys[0]) / spread:+.2f}" if spread else "&ndash;"
        lines.append(
            f'<tr><th scope="row">{name.replace("_", " ")}</th><td class=why>{meaning}</td>'
            f"<td class=n>{number(ys[0])} &plusmn; {number(spread)}</td><td class=n>{number(ys[-1])}</td>"
            f'<td class=n>{drift}</td><td class="curve c4">{sparkline(xs, ys)}</td></tr>'
        )
    if not lines:
        return ""
    head = (
        "<th>mean over held-out images</th><th></th><th class=n>before &plusmn; spread of images</th>"
        "<th class=n>now</th><th class=n>drift in spreads</th><th>over the run</th>"
    )
    return (
        "<section><h2>Images in numbers</h2><p class=note>A reward that is being exploited often moves one of these by "
        f"more than the spread between images before training.</p>{table('', head, lines)}</section>"
    )


def health_section(rows: Sequence[Row]) -> str:
    known = [key for key in MEANINGS if any(key in row for row in rows)]
    further = {key for row in rows for key in row if key.startswith("health/")} - set(MEANINGS) - {"health/groups"}
    lines = []
    for key in [*known, *sorted(further)]:
        xs, ys = split(column(rows, key))
        reach = f"{number(min(ys))} to {number(max(ys))}" if min(ys) < max(ys) else "constant"
        lines.append(
            f'<tr><th scope="row"><code>{html.escape(key)}</code></th><td class=why>{MEANINGS.get(key, "")}</td>'
            f"<td class=n>{number(ys[-1])}</td><td class=n>{reach}</td>"
            f'<td class="curve c1">{sparkline(xs, ys)}</td></tr>'
        )
    if not lines:
        return "<section><h2>Update and health</h2><p class=note>No step has ended yet.</p></section>"
    head = "<th>metric</th><th></th><th class=n>last step</th><th class=n>range</th><th>over the run</th>"
    return f"<section><h2>Update and health</h2>{table('', head, lines)}</section>"


def last_step(rows: Sequence[Row]) -> int:
    return int(rows[-1]["step"]) if rows else 0


def column(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of every row that has ``key``."""
    return [(row["step"], row[key]) for row in rows if key in row]


def split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def summary_of(name: str, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return f"{name}: no value yet."
    (first, start), (last, end) = points[0], points[-1]
    return f"{name}: {number(start)} at step {first:.0f}, {number(end)} at step {last:.0f}."
