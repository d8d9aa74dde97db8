"""Simulated seconds of a step of Sol-RL in each mode that a run can have, by model, judge and staleness.

The judge is none (CLIP-like scores, made where the image is decoded, 4 ms each), or generates 200 or 800 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import facts, hardware, name_list, parser, table, write_json
from benchmarks.simulated import LABEL, add_set_option, setting_of, workload_file
from solrl.runtime.advisor import search
from solrl.runtime.workload import Setting, draw

MODELS = ("diffusion_flux", "diffusion_sd35", "diffusion_sana")
CLIP_S = 0.004
JUDGES = ("none", "200 tokens", "800 tokens")
NOTES = """\
  async         scoring on GPUs of its own beside exploring, all GPUs train; the best split (explore/score)
  shift         the planner moves GPUs; x: time of colocated, and of async, over it
  bound         GPU-seconds of exploring, regenerating and training over the GPUs: no judge, nothing idle"""


def main(argv: Sequence[str]) -> int:
    """Simulate, print, and write what the options ask for."""
    options_of = parser("modes", __doc__.split("\n")[0])
    options_of.add_argument(
        "--workloads", type=name_list, default=list(MODELS), help="names or files (the three models)"
    )
    options_of.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    add_set_option(options_of)
    options = options_of.parse_args(argv)
    rows, found = [], list[dict[str, Any]]()
    for name in options.workloads:
        base = setting_of(workload_file(name), options.set)
        for judge in JUDGES:
            for staleness in (0, 1):
                setting = judged(base, judge).with_values({"batch.staleness": staleness})
                by_mode = {one.mode: one for one in search(setting, [draw(setting, options.seed)], [setting])}
                stay = by_mode["colocated"].seconds_per_batch
                other, shift = by_mode.get("async_score"), by_mode.get("shiftable")
                cells = ["-"] * 4
                if other is not None and shift is not None:
                    cells = [
                        f"{other.seconds_per_batch:.1f} {'/'.join(map(str, other.split))}",
                        f"{shift.seconds_per_batch:.1f}",
                        f"{stay / shift.seconds_per_batch:.2f}",
                        f"{other.seconds_per_batch / shift.seconds_per_batch:.2f}",
                    ]
                rows.append(
                    [base.name.split(",")[0], judge, str(staleness), f"{stay:.1f}", *cells, f"{bound(setting):.1f}"]
                )
                found.append({"workload": name, "judge": judge, "staleness": staleness,
                              "seconds": {mode: one.seconds_per_batch for mode, one in by_mode.items()}})  # fmt: skip
    known = facts()
    header = ["", "judge", "staleness", "coloc", "async", "shift", "x coloc", "x async", "bound"]
    print("\n".join(["modes: seconds a step", LABEL.split(" paper")[0], "", table(header, rows), "", NOTES]))
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "modes", "arguments": list(argv), "environment": known, "label": LABEL, "rows": found,
    })  # fmt: skip
    return 0


def judged(setting: Setting, judge: str) -> Setting:
    """The workload with another judge."""
    values: dict[str, Any] = {}
    for number, one in enumerate(setting.passes):
        if judge == "none":
            values[f"passes.{number}.score"] = None
            values[f"passes.{number}.explore.median"] = one.explore.median + CLIP_S / setting.explore.c_s
        else:
            tokens = int(judge.split()[0])
            wide = tokens > 400
            law = {"median": tokens, "sigma": 0.8 if wide else 0.5, "low": 8, "high": 8192 if wide else 1024}
            values[f"passes.{number}.score"] = law
    return setting.with_values(values)


def bound(setting: Setting) -> float:
    """Seconds a step if the GPUs did nothing but explore, regenerate and train."""
    explore = setting.explore
    per_round = explore.c_s + explore.d_s / explore.capacity_jobs
    jobs = sum(one.num_jobs * one.explore.median for one in setting.passes) * setting.batch.num_groups
    trained = setting.batch.num_groups * setting.passes[-1].num_jobs * setting.train.gpu_s_per_job
    return (jobs * per_round + trained) / setting.cluster.gpus
