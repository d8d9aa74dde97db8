"""Simulated throughput and shifts over the planner's horizon H, beside PivotRL's Figure 14, and over what else it
assumes.

The paper calls H its only hyper-parameter. The time a shift is taken to cost, the least gain, and how often the
planner looks are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import facts, hardware, parser, table, write_json
from benchmarks.simulated import GROUPS, LABEL, add_set_option, setting_of, workload_file
from solrl.runtime.simulator import simulate
from solrl.runtime.strategies import shiftable
from solrl.runtime.workload import draw

SWEEPS: dict[str, tuple[float, ...]] = {
    "planner.horizon_s": (0.01, 5, 30, 60, 90, 120, 600),
    "planner.shift_s": (0.0, 1.25, 5.0, 20.0),
    "planner.minimum_gain": (0.0, 0.02, 0.1),
    "planner.period_s": (1.0, 5.0, 30.0),
}
PAPER = """\
paper (section 8.6, in words): few shifts and less throughput at small H, stable from 60 to 120, frequent shifts
and less throughput at 600; the axes of Figure 14 span 21K to 23K tokens a second and 4 to 6 shifts a step"""


def main(argv: Sequence[str]) -> int:
    """Simulate, print, and write what the options ask for."""
    options_of = parser("horizon", __doc__.split("\n")[0])
    options_of.add_argument("--workload", default=GROUPS[1], help="a name or TOML file (group 2)")
    options_of.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    options_of.add_argument("--only-horizon", action="store_true", help="leave the other constants out")
    add_set_option(options_of)
    options = options_of.parse_args(argv)
    base = setting_of(workload_file(options.workload), options.set)
    sample = draw(base, options.seed)
    rows, found = [], list[dict[str, Any]]()
    for key, values in SWEEPS.items():
        if options.only_horizon and key != "planner.horizon_s":
            continue
        for value in values:
            setting = base.with_values({key: value})
            result = simulate(setting, sample, shiftable(setting))
            shifts = result.num_shifts / setting.batch.num_batches
            rows.append([key.removeprefix("planner."), f"{value:g}", f"{result.throughput:.0f}", f"{shifts:.1f}"])
            found.append({"key": key, "value": value, "throughput": result.throughput, "shifts_per_step": shifts})
    known = facts()
    shown = table(["constant", "value", "tokens/s", "shifts/step"], rows)
    print("\n".join([f"horizon: {base.name}", LABEL, "", shown, "", PAPER]))
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "horizon", "arguments": list(argv), "environment": known, "label": LABEL, "results": found,
    })  # fmt: skip
    return 0
