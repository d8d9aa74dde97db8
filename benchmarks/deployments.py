"""Simulated throughput of four deployments and of a split tuned in the same simulator, beside PivotRL's Figures 9 and
10.

GPUs of the roles are those of its Table 4. Speeds, lengths and batch are assumptions (benchmarks/workloads); the paper
does not publish its own, so read the ratios, and first of all the one over the tuned split.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import facts, hardware, name_list, parser, pyplot, save_figure, table, whole_number, write_json
from benchmarks.simulated import GROUPS, LABEL, SHORT, add_set_option, four, setting_of, tuned_split, workload_file
from solrl.runtime.simulator import Result, simulate
from solrl.runtime.workload import Setting, draw, load_sample

NOTES = """\
  x coloc ...   throughput of shiftable over that deployment; paper: the same ratio in Figure 9
  tuned         the disaggregated split of the highest throughput in this simulator: the honest
                baseline. x tuned has no counterpart in the paper
  cpu           seconds of one core for the row, the search for the tuned split left out"""

SWEEPS: dict[str, dict[str, Any]] = {
    "as assumed": {},
    "rounds 3x faster (d)": {"explore.d_s": 6e-3, "score.d_s": 18e-3},
    "Figure 8's rounds (d)": {"explore.d_s": 23e-3, "score.d_s": 71e-3},
    "judge: 2K tokens": {"passes.0.score.median": 2000},
    "judge: 12K tokens": {"passes.0.score.median": 12000},
    "equal lengths": {"passes.0.explore.sigma": 0.1, "passes.0.score.sigma": 0.1, "batch.difficulty_sigma": 0.0},
    "batch 512": {"batch.num_groups": 64},
    "batch 4096": {"batch.num_groups": 512, "batch.num_batches": 4},
    "staleness 0": {"batch.staleness": 0},
    "staleness 1": {"batch.staleness": 1},
    "first finished": {"batch.membership": "first"},
    "shifts 3x slower": {"explore.up_s": 7.5, "score.up_s": 10.5, "explore.down_s": 3, "score.down_s": 3,
                         "train.up_s": 9, "train.down_s": 9, "planner.shift_s": 3.75},
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Simulate, print, and write what the options ask for."""
    options_of = parser("deployments", __doc__.split("\n")[0])
    options_of.add_argument(
        "--workloads", type=name_list, default=list(GROUPS), help="names or TOML files (the four groups)"
    )
    options_of.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    options_of.add_argument("--gpus", type=whole_number, help="scale cluster, splits and batch to so many GPUs")
    options_of.add_argument("--no-tuning", action="store_true", help="leave the tuned split out")
    options_of.add_argument("--sweep", action="store_true", help="one workload under other assumptions")
    options_of.add_argument("--lengths", type=Path, metavar="FILE", help="a trace of lengths in place of the laws")
    options_of.add_argument("--trace", type=Path, metavar="FILE", help="write the events of the last shiftable run")
    options_of.add_argument("--png", type=Path, metavar="FILE", help="draw the last workload's timelines (Figure 10)")
    add_set_option(options_of)
    options = options_of.parse_args(argv)
    if options.png:
        pyplot()
    rows = []
    for name in options.workloads:
        base = setting_of(workload_file(name), options.set)
        base = scaled(base, options.gpus) if options.gpus else base
        for change, values in (SWEEPS if options.sweep else {"": {}}).items():
            setting = base.with_values(values)
            rows.append(measure(setting, change, options))
    known = facts()
    print(report(rows, options))
    print(hardware(known))
    shown = [{key: value for key, value in row.items() if key != "results"} for row in rows]
    write_json(options.json, {
        "benchmark": "deployments", "arguments": list(argv), "environment": known, "label": LABEL, "rows": shown,
    })  # fmt: skip
    last: dict[str, Result] = rows[-1]["results"]
    if options.trace:
        options.trace.write_text("".join(json.dumps(event) + "\n" for event in last["shiftable"].events))
    if options.png:
        draw_png(rows[-1]["name"], last, options.png)
    return 0


def scaled(setting: Setting, gpus: int) -> Setting:
    """The same run on ``gpus``: splits and batch grow with the cluster."""
    factor = gpus / setting.cluster.gpus
    split, shared = setting.deployments.disaggregated, setting.deployments.shared_train
    grain = max(setting.explore.gpus, setting.score.gpus)
    values: dict[str, Any] = {
        "cluster.gpus": gpus, "train.gpus": max(grain, round(setting.train.gpus * factor)),
        "batch.num_groups": max(1, round(setting.batch.num_groups * factor)),
    }  # fmt: skip
    if split is not None and shared is not None:
        train, score = (max(grain, round(part * factor / grain) * grain) for part in (split[2], split[1]))
        values["deployments.disaggregated"] = (gpus - score - train, score, train)
        values["deployments.shared_train"] = max(grain, round(shared * factor / grain) * grain)
    return setting.with_values(values)


def measure(setting: Setting, change: str, options: Any) -> dict[str, Any]:
    """One row: throughputs by deployment, the tuned split, and what it cost to know."""
    sample = load_sample(options.lengths, setting) if options.lengths else draw(setting, options.seed)
    begin = time.process_time()
    watch = 5.0 if options.png else float("inf")
    results = {one.name: simulate(setting, sample, one, watch_s=watch) for one in four(setting)}
    cpu = time.process_time() - begin
    row: dict[str, Any] = {
        "name": change or setting.name, "gpus": setting.cluster.gpus, "cpu_s": cpu, "results": results,
        "throughput": {name: result.throughput for name, result in results.items()},
        "shifts_per_step": results["shiftable"].num_shifts / setting.batch.num_batches,
        "paper": {} if change or options.gpus or options.set else setting.paper.get("throughput", {}),
    }  # fmt: skip
    if not options.no_tuning:
        tuned = tuned_split(setting, sample, max(setting.explore.gpus, setting.score.gpus))
        row["tuned"] = {"throughput": tuned.result.throughput, "split": tuned.result.split}
    return row


def report(rows: Sequence[dict[str, Any]], options: Any) -> str:
    """Everything as text, at most 100 columns."""
    baselines = [name for name in SHORT if name != "shiftable"]
    rates, ratios = [], []
    for row in rows:
        found, paper = row["throughput"], row["paper"]
        tuned = row.get("tuned")
        best = [f"{tuned['throughput']:.0f}", "/".join(map(str, tuned["split"]))] if tuned else ["-", "-"]
        rates.append([row["name"], *(f"{found[name]:.0f}" for name in SHORT), *best, f"{row['shifts_per_step']:.1f}",
                      f"{row['cpu_s']:.1f}"])  # fmt: skip
        if paper:
            rates.append(["  paper", *(f"{paper[name]:.0f}" for name in SHORT), "", "", "", ""])
        mine = [f"{found['shiftable'] / found[name]:.2f}" for name in baselines]
        theirs = [f"{paper['shiftable'] / paper[name]:.2f}" if paper else "-" for name in baselines]
        ratios.append([row["name"], *(cell for pair in zip(mine, theirs, strict=True) for cell in pair),
                       f"{found['shiftable'] / tuned['throughput']:.2f}" if tuned else "-"])  # fmt: skip
    header = ["", *(cell for name in baselines for cell in (f"x {SHORT[name]}", "paper")), "x tuned"]
    return "\n".join([
        "deployments: " + ("under other assumptions" if options.sweep else "end-to-end throughput, tokens a second"),
        LABEL, "",
        table(["", *SHORT.values(), "tuned", "split", "shifts/step", "cpu"], rates), "",
        table(header, ratios), "", NOTES,
    ])  # fmt: skip


def draw_png(name: str, results: dict[str, Result], path: Path) -> None:
    """GPUs of each role over time, and the roles' throughputs: shiftable beside disaggregated."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 5), sharex="col", layout="constrained")
    colours = {"explore": "#3b6fb6", "score": "#c8553d", "train": "#6a9955"}
    for column, which in enumerate(("disaggregated", "shiftable")):
        timeline = results[which].timeline
        times = [moment.t for moment in timeline]
        layers = [[moment.gpus[role] for moment in timeline] for role in colours]
        axes[0][column].stackplot(times, layers, colors=colours.values(), labels=list(colours), step="post")
        for role in ("explore", "score"):
            rates = [moment.throughput[role] for moment in timeline]
            axes[1][column].plot(times, rates, color=colours[role], linewidth=0.9, label=role)
        axes[0][column].set_title(f"{which}: {results[which].throughput:.0f} tok/s (simulated)", fontsize=10)
        axes[1][column].set_xlabel("simulated seconds")
    axes[0][0].set_ylabel("GPUs")
    axes[1][0].set_ylabel("tokens a second")
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.suptitle(name, fontsize=10)
    save_figure(figure, path)
    plt.close(figure)
