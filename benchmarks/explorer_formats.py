"""Does it matter for learning in which number format candidates are explored?

Trains the same config with explorers of different formats, several seeds each, and compares held-out rewards seed by
seed: arms of one seed share prompts, noise and initial adapter. Two formats count as equivalent when the 90 % interval
of the paired difference lies within a margin of the first arm's mean.

python -m benchmarks explorer_formats runs/formats --seeds 6 --workers 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.arms import Arm, Run, carry_out, runs
from benchmarks.common import facts, hardware, name_list, parse, parser, table, whole_number, write_json
from solrl.intervals import interval
from solrl.tracking import Row

LEVEL = 0.90
MARGIN = 0.03
FIDELITY = ("spearman", "kendall", "top_rank", "bottom_rank")


def main(words: Sequence[str]) -> int:
    """Train what is missing, print the comparison; returns the exit code."""
    options = parser("explorer_formats", "Held-out reward after training with explorers of several number formats.")
    options.add_argument("folder", type=Path, metavar="FOLDER", help="where the runs are, or will be")
    options.add_argument("--config", default="tiny_flux", help="what is trained (%(default)s)")
    options.add_argument(
        "--formats", type=name_list, default=["full", "emulated_nvfp4", "fp8"],
        help="explore.precision of each arm; the first is the baseline (full,emulated_nvfp4,fp8)",
    )  # fmt: skip
    options.add_argument("--seeds", type=whole_number, default=6, metavar="N", help="seeds 0 .. N-1 (%(default)s)")
    options.add_argument("--workers", type=whole_number, default=1, metavar="N", help="runs at a time (%(default)s)")
    options.add_argument("--no-train", action="store_true", help="only print what is finished")
    chosen = parse(options, words)
    arms = [Arm(name, {"explore.precision": name}) for name in chosen.formats]
    every = runs(chosen.folder, chosen.config, arms, range(chosen.seeds), chosen.overrides)
    if not chosen.no_train:
        carry_out(every, chosen.workers)
    finished = [run for run in every if run.is_finished]
    known = facts()
    print(f"\nexplorer_formats: {chosen.config}, {every[0].config.train.num_steps} steps\n{hardware(known)}\n")
    print(report(finished, chosen.formats))
    payload = {"benchmark": "explorer_formats", "environment": known, "runs": [_plain(run) for run in finished]}
    write_json(chosen.json, payload)
    return 0


def report(finished: Sequence[Run], formats: Sequence[str]) -> str:
    """The table of held-out rewards, their paired differences to the first format, and the explorers' fidelity."""
    final = {(run.arm, run.seed): run.heldout()[-1][1] for run in finished}
    start = {run.heldout()[0][1] for run in finished}
    rows = []
    for name in formats:
        seeds = sorted(seed for arm, seed in final if arm == name)
        if not seeds:
            rows.append([name, "0", *[""] * 5])
            continue
        mine = [final[name, seed] for seed in seeds]
        both = [seed for seed in seeds if (formats[0], seed) in final]
        paired, verdict = "", ""
        if name != formats[0] and both:
            base = fmean(final[formats[0], seed] for seed in both)
            mean, half = interval([(final[name, s] - final[formats[0], s]) / base for s in both], LEVEL)
            paired = f"{mean:+.1%}" if math.isnan(half) else f"{mean:+.1%} [{mean - half:+.1%}, {mean + half:+.1%}]"
            verdict = "yes" if abs(mean) + half <= MARGIN else "not shown"
        whole = [row for run in finished if run.arm == name for row in run.rows if "fidelity/full_spearman" in row]
        rows.append([name, str(len(seeds)), _listed(mine), f"{fmean(mine):.3f}", paired, verdict, _fidelity(whole)])
    before = ", ".join(f"{value:.3f}" for value in sorted(start))
    return "\n".join(
        [
            f"held-out reward before training: {before}; after:",
            table(["explorer", "seeds", "each seed", "mean", f"against {formats[0]}, {LEVEL:.0%} interval",
                   f"within {MARGIN:.0%}", "full Spearman, Kendall"], rows),
        ]
    )  # fmt: skip


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _fidelity(rows: Sequence[Row]) -> str:
    """Mean over the audited groups of all seeds."""
    if not rows:
        return ""
    return ", ".join(f"{fmean(row[f'fidelity/full_{name}'] for row in rows):.3f}" for name in FIDELITY[:2])


def _plain(run: Run) -> dict[str, Any]:
    audits = [{k: v for k, v in row.items() if k == "step" or k.startswith("fidelity/full_")}
              for row in run.rows if "fidelity/full_spearman" in row]  # fmt: skip
    return {"arm": run.arm, "seed": run.seed, "heldout": run.heldout(), "audits": audits}
