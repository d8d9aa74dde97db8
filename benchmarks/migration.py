"""What moving a running job costs, beside PivotRL's Table 3: deciding is measured, recomputing its state is simulated.

Aborting and waiting for messages belong to real workers and are not in it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import facts, hardware, number_list, parser, table, whole_number, write_json
from benchmarks.simulated import GROUPS, LABEL, setting_of, workload_file
from solrl.runtime.roles import EXPLORE, SCORE
from solrl.runtime.scheduler import Scheduler
from solrl.runtime.workload import Setting

PAPER = {  # Table 3, Qwen2.5-7B & Qwen3-30B-A3B, seconds a sequence: dispatch with waiting, re-prefill, total
    32: (0.95, 0.09, 1.12), 64: (0.22, 0.13, 0.43), 128: (0.37, 0.19, 0.67),
}  # fmt: skip
NOTES = """\
  moved      running jobs that one shift moves: an eighth of the role's replicas comes up (or goes down)
  decide     measured: processor seconds of scheduler.shift_up or shift_down, over the jobs it placed
  re-prefill simulated: tokens of a moved job over the assumed prefill speed of its replica
  paper      Table 3: dispatch (which there includes the wait for room), re-prefill, total (with abort)"""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for."""
    options_of = parser("migration", __doc__.split("\n")[0])
    options_of.add_argument("--gpus", type=number_list, default=[32, 64, 128, 1024], help="clusters (32,64,128,1024)")
    options_of.add_argument("--jobs", type=whole_number, default=24, help="jobs a replica (24)")
    options_of.add_argument("--repeats", type=whole_number, default=5, help="medians of so many (5)")
    options = options_of.parse_args(argv)
    setting = setting_of(workload_file(GROUPS[1]))
    found = [
        measure(setting, gpus, role, way, options)
        for gpus in options.gpus for role in (EXPLORE, SCORE) for way in ("up", "down")
    ]  # fmt: skip
    rows = []
    for row in found:
        paper = PAPER.get(row["gpus"])
        theirs = " ".join(f"{value:.2f}" for value in paper) if paper else "-"
        rows.append([str(row["gpus"]), row["role"], row["way"], str(row["moved"]), f"{1e6 * row['decide_s']:.0f} us",
                     f"{row['prefill_s']:.3f} s", theirs])  # fmt: skip
    known = facts()
    header = ["GPUs", "role", "shift", "moved", "decide/job", "re-prefill/job", "paper, s"]
    print("\n".join([f"migration: {setting.name}, half of the GPUs a role, {options.jobs} jobs a replica", LABEL, "",
                     table(header, rows), "", NOTES]))  # fmt: skip
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "migration", "arguments": list(argv), "environment": known, "label": LABEL, "results": found,
    })  # fmt: skip
    return 0


def measure(setting: Setting, gpus: int, role: Any, way: str, options: Any) -> dict[str, Any]:
    """One shift of one role; lengths are those of jobs half done."""
    replica = setting.explore if role == EXPLORE else setting.score
    law = setting.passes[0].explore if role == EXPLORE else setting.passes[0].score
    assert law is not None
    replicas = gpus // 2 // replica.gpus
    moving = max(1, replicas // 8)
    seconds, moved, tokens = [], 0, 0.0
    for repeat in range(options.repeats):
        rng = random.Random(repeat)
        scheduler = Scheduler(replica.spec(role))
        scheduler.shift_up(range(replicas))
        for job in range(replicas * options.jobs):
            scheduler.submit(job, 300 + rng.random() * law.median)
        scheduler.dispatch()
        lengths = {job: each.length(job) for each in scheduler.replicas.values() for job in each.jobs}
        begin = time.process_time()
        if way == "up":
            moves = scheduler.shift_up(range(replicas, replicas + moving))
        else:
            moves = scheduler.shift_down(range(moving))
        seconds.append((time.process_time() - begin) / max(len(moves), 1))
        jobs = [move.job for move in moves if move.source is not None]
        moved, tokens = len(jobs), sum(lengths[job] for job in jobs)
    prefill_s = tokens / max(moved, 1) / replica.prefill_tokens_per_s
    return {"gpus": gpus, "role": role, "way": way, "moved": moved, "decide_s": statistics.median(seconds),
            "prefill_s": prefill_s}  # fmt: skip
