"""Does a gate on fidelity mend an explorer that takes too few steps, and what does it cost?

Trains the same config with an explorer of ``--steps`` denoising steps, without and with explore.min_fidelity. Arms of
one seed share prompts, noise and initial adapter. Every step is audited, in both arms.

python -m benchmarks fidelity_gate runs/gate --seeds 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.arms import Arm, Run, carry_out, runs
from benchmarks.common import facts, hardware, parse, parser, table, whole_number, write_json
from solrl.intervals import interval

LEVEL = 0.95
UNGATED, GATED = "as set", "gated"


def main(words: Sequence[str]) -> int:
    """Train what is missing, print the comparison; returns the exit code."""
    options = parser(
        "fidelity_gate", "A run whose explorer takes too few steps, with and without explore.min_fidelity."
    )
    options.add_argument("folder", type=Path, metavar="FOLDER", help="where the runs are, or will be")
    options.add_argument("--config", default="tiny_flux", help="what is trained (%(default)s)")
    options.add_argument("--steps", type=whole_number, default=1, metavar="N", help="explore.num_steps (%(default)s)")
    options.add_argument("--min-fidelity", type=float, default=0.8, metavar="R", help="of the gated arm (%(default)s)")
    options.add_argument("--seeds", type=whole_number, default=2, metavar="N", help="seeds 0 .. N-1 (%(default)s)")
    options.add_argument("--workers", type=whole_number, default=1, metavar="N", help="runs at a time (%(default)s)")
    options.add_argument("--no-train", action="store_true", help="only print what is finished")
    chosen = parse(options, words)
    few = {"explore.num_steps": chosen.steps, "output.audit_every_steps": 1}
    arms = [Arm(UNGATED, few), Arm(GATED, few | {"explore.min_fidelity": chosen.min_fidelity})]
    every = runs(chosen.folder, chosen.config, arms, range(chosen.seeds), chosen.overrides)
    if not chosen.no_train:
        carry_out(every, chosen.workers)
    finished, known = [run for run in every if run.is_finished], facts()
    print(f"\nfidelity_gate: {chosen.config}, {every[0].config.train.num_steps} steps\n{hardware(known)}\n")
    print(report(finished))
    payload = {"benchmark": "fidelity_gate", "environment": known, "runs": [_plain(run) for run in finished]}
    write_json(chosen.json, payload)
    return 0


def report(finished: Sequence[Run]) -> str:
    """One row a run, and the paired difference of the last held-out rewards where there are pairs."""
    rows = []
    for run in sorted(finished, key=lambda run: (run.seed, run.arm)):
        facts_of = _plain(run)
        first, second = (f"{value:.3f}" for value in facts_of["fidelity_by_half"])
        climbs = ", ".join(f"{steps} from {step}" for step, steps in facts_of["climbs"]) or "none"
        heldout = f"{run.heldout()[0][1]:.3f} -> {run.heldout()[-1][1]:.3f}"
        rows.append([f"{run.arm}, seed {run.seed}", climbs, first, second, heldout, str(facts_of["image_steps"])])
    lines = [
        table(["run", "steps climbed to", "rho, 1st half", "2nd half", "held-out reward", "explored image-steps"], rows)
    ]
    final = {(run.arm, run.seed): run.heldout()[-1][1] for run in finished}
    pairs = [
        final[GATED, seed] - final[UNGATED, seed] for arm, seed in final if arm == GATED and (UNGATED, seed) in final
    ]
    if pairs:
        mean, half = interval(pairs, LEVEL)
        between = "" if math.isnan(half) else f" [{mean - half:+.3f}, {mean + half:+.3f}]"
        lines.append(
            f"held-out reward, gated minus as set: {mean:+.3f}{between} ({LEVEL:.0%} interval, {len(pairs)} seeds)"
        )
    return "\n".join(lines)


def _plain(run: Run) -> dict[str, Any]:
    """What a run shows: fidelity of whole groups before and after the middle, climbs, and what exploring took."""
    steps = [row for row in run.rows if row["step"] > 0]
    taken = [int(row.get("explore/num_steps", run.config.explore.num_steps)) for row in steps]
    audits = [(row["step"], row["fidelity/full_spearman"]) for row in steps if "fidelity/full_spearman" in row]
    halves = [[rho for step, rho in audits if (step > len(steps) / 2) == late] for late in (False, True)]
    climbs = [
        (int(row["step"]), now) for row, before, now in zip(steps[1:], taken, taken[1:], strict=False) if now != before
    ]
    return {
        "arm": run.arm,
        "seed": run.seed,
        "heldout": run.heldout(),
        "audits": audits,
        "fidelity_by_half": [fmean(half) if half else math.nan for half in halves],
        "climbs": climbs,
        "image_steps": sum(taken) * run.config.prompts.per_step * run.config.explore.group_size,
    }
