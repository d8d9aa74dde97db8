"""Simulated share of each stage's time at a throughput per GPU below 20 % of its peak, beside PivotRL's Figure 3.

Figure 3 prints no numbers, only shaded curves, so there is none to put beside; what it says in words is in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import facts, hardware, parser, table, write_json
from benchmarks.simulated import GROUPS, LABEL, SHORT, add_set_option, four, setting_of, workload_file
from solrl.runtime.roles import EXPLORE, SCORE
from solrl.runtime.simulator import Result, simulate
from solrl.runtime.workload import draw

LOW = 0.2
NOTES = """\
  explore, score  share of the time in which the role has GPUs and makes less than 20 % of its peak
                  tokens a second a GPU (an empty replica makes none)
  train           share of the time in which training has GPUs and does not train
  paper           in words: colocated and disaggregated leave much headroom in rollout, disaggregated
                  little in reward and much in training, shiftable the least in all three"""


def main(argv: Sequence[str]) -> int:
    """Simulate, print, and write what the options ask for."""
    options_of = parser("headroom", __doc__.split("\n")[0])
    options_of.add_argument("--workload", default=GROUPS[1], help="a name or TOML file (group 2)")
    options_of.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    add_set_option(options_of)
    options = options_of.parse_args(argv)
    setting = setting_of(workload_file(options.workload), options.set)
    sample = draw(setting, options.seed)
    found = {}
    for deployment in four(setting):
        found[deployment.name] = shares(simulate(setting, sample, deployment, watch_s=2.0))
    known = facts()
    rows = [[SHORT[name], *(f"{100 * value:.0f} %" for value in row.values())] for name, row in found.items()]
    print(
        "\n".join([f"headroom: {setting.name}", LABEL, "", table(["", "explore", "score", "train"], rows), "", NOTES])
    )
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "headroom", "arguments": list(argv), "environment": known, "label": LABEL, "results": found,
    })  # fmt: skip
    return 0


def shares(result: Result) -> dict[str, float]:
    """Role -> share of its GPU time with headroom."""
    found = dict[str, float]()
    for role in (EXPLORE, SCORE):
        held = [moment for moment in result.timeline if moment.gpus[role]]
        rates = [(moment.throughput[role] / moment.gpus[role], moment.gpus[role]) for moment in held]
        peak = max((rate for rate, _ in rates), default=0.0)
        low = sum(gpus for rate, gpus in rates if rate < LOW * peak)
        found[role] = low / max(sum(gpus for _, gpus in rates), 1)
    held = [moment for moment in result.timeline if moment.gpus["train"]]
    idle = sum(not moment.jobs["train"] for moment in held)
    found["train"] = idle / max(len(held), 1)
    return found
