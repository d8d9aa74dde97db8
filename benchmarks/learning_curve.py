"""Held-out rewards of finished runs: before, after, and the curve between.

for seed in 0 1 2; do solrl train tiny_flux --seed $seed --output.dir runs/seed_$seed; done
python -m benchmarks learning_curve runs/seed_0 runs/seed_1 runs/seed_2 --png benchmarks/learning_curve.png
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import hardware, parser, pyplot, save_figure, table, whole_number, write_json
from solrl.errors import UsageError
from solrl.settings import load_config
from solrl.tracking import Row, read_metrics


def main(words: Sequence[str]) -> int:
    """Print a row a run; returns the exit code."""
    options = parser("learning_curve", "Held-out rewards of finished runs, before and after, and the curve between.")
    options.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    options.add_argument("--at", type=whole_number, metavar="STEP", help="count the runs as ended at this step")
    options.add_argument("--png", type=Path, metavar="FILE", help="draw the curves into FILE")
    chosen = options.parse_args(list(words))
    results = [measure(run, chosen.at) for run in chosen.runs]
    first = results[0]
    print(hardware(first["environment"]))
    print(f"held-out {first['reward']} of the averaged weights, mean +- standard error over prompts\n")
    rows = []
    for result in results:
        before, after = result["curve"][0], result["curve"][-1]
        watched = ", ".join(f"{name} {a:.3f} -> {b:.3f}" for name, (a, b) in result["watched"].items())
        rows.append(
            [
                result["run"],
                str(result["seed"]),
                str(after["step"]),
                f"{before['mean']:.3f}+-{before['stderr']:.3f}",
                f"{after['mean']:.3f}+-{after['stderr']:.3f}",
                f"{after['mean'] / before['mean'] - 1:+.1%}",
                watched,
            ]
        )
    print(table(["run", "seed", "steps", "before", "after", "gain", "watched"], rows))
    write_json(chosen.json, {"benchmark": "learning_curve", "runs": results})
    if chosen.png:
        draw(results, chosen.png)
    return 0


def measure(run: Path, at: int | None) -> dict[str, Any]:
    """The evaluations of a run up to step ``at``."""
    config = load_config(run)
    evaluated = [row for row in read_metrics(run / "metrics.jsonl") if f"eval/{config.reward.name}/mean" in row]
    evaluated = [row for row in evaluated if at is None or row["step"] <= at]
    if len(evaluated) < 2:
        raise UsageError(f"{run} has {len(evaluated)} evaluations; at least two are needed: let it run longer")
    return {
        "run": run.name,
        "seed": config.seed,
        "reward": config.reward.name,
        "environment": json.loads((run / "environment.json").read_text()),
        "curve": [_point(row, config.reward.name) for row in evaluated],
        "watched": {
            name: (evaluated[0][f"eval/{name}/mean"], evaluated[-1][f"eval/{name}/mean"])
            for name in config.evaluate.rewards
        },
    }


def _point(row: Row, reward: str) -> dict[str, float]:
    return {"step": row["step"], "mean": row[f"eval/{reward}/mean"], "stderr": row[f"eval/{reward}/stderr"]}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Curves with error bars, one a run."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for result in results:
        curve = result["curve"]
        steps, means, errors = ([point[key] for point in curve] for key in ("step", "mean", "stderr"))
        axes.errorbar(steps, means, errors, marker="o", capsize=2, label=f"{result['run']} (seed {result['seed']})")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"held-out {results[0]['reward']}")
    axes.legend(frameon=False)
    save_figure(figure, path)
