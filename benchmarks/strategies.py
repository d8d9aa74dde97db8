"""Simulated shift strategies and components, beside PivotRL's Figure 11: ratios over its disaggregated split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import facts, hardware, name_list, parser, table, write_json
from benchmarks.simulated import GROUPS, LABEL, add_set_option, setting_of, workload_file
from solrl.errors import UsageError
from solrl.runtime.simulator import Deployment, simulate
from solrl.runtime.strategies import disaggregated, rule_based, shiftable, static_strategy
from solrl.runtime.workload import Setting, draw

PAPER = {  # Figure 11, groups 1 and 2
    GROUPS[0]: {"static strategy": 1.27, "rule-based": 1.05, "vanilla": 1.43, "+ throughput model": 1.53,
                "+ migration": 1.61},
    GROUPS[1]: {"static strategy": 1.55, "rule-based": 1.31, "vanilla": 1.79, "+ throughput model": 1.87,
                "+ migration": 1.95},
}  # fmt: skip
NOTES = """\
  static strategy     idle training GPUs go half to each role, the rest never moves
  rule-based          a role grows when its room is more than 80 % used, from below 10 %
  vanilla             the planner without a model (a replica is busy or not) and without migration
  + migration         all of it: PivotRL
  moved               running jobs that went to another replica, a step"""


def variants(setting: Setting) -> dict[str, Callable[[], Deployment]]:
    """Name -> deployment, the baseline first."""
    split = setting.deployments.disaggregated
    if split is None:
        raise UsageError(f"{setting.name} gives no deployments.disaggregated")
    return {
        "disaggregated": lambda: disaggregated(setting, split),
        "static strategy": lambda: static_strategy(setting, split),
        "rule-based": lambda: rule_based(setting),
        "vanilla": lambda: shiftable(setting, use_model=False, migrate=False),
        "+ throughput model": lambda: shiftable(setting, migrate=False),
        "+ migration": lambda: shiftable(setting),
    }


def main(argv: Sequence[str]) -> int:
    """Simulate, print, and write what the options ask for."""
    options_of = parser("strategies", __doc__)
    options_of.add_argument(
        "--workloads", type=name_list, default=list(GROUPS[:2]), help="names or files (groups 1, 2)"
    )
    options_of.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    add_set_option(options_of)
    options = options_of.parse_args(argv)
    rows: list[list[str]] = []
    found: dict[str, Any] = {}
    for name in options.workloads:
        setting = setting_of(workload_file(name), options.set)
        sample, base = draw(setting, options.seed), 0.0
        rows.append([setting.name, "", "", "", "", ""])
        for variant, make in variants(setting).items():
            result = simulate(setting, sample, make())
            base = base or result.throughput
            steps = setting.batch.num_batches
            paper = PAPER.get(name, {}).get(variant)
            rows.append([f"  {variant}", f"{result.throughput:.0f}", f"{result.throughput / base:.2f}",
                         f"{paper:.2f}" if paper else "-", f"{result.num_shifts / steps:.1f}",
                         f"{result.num_moved / steps:.0f}"])  # fmt: skip
            found[f"{name}/{variant}"] = {
                "throughput": result.throughput, "ratio": result.throughput / base, "paper": paper,
                "shifts": result.num_shifts, "moved": result.num_moved,
            }  # fmt: skip
    known = facts()
    header = ["", "tokens/s", "x disagg", "paper", "shifts/step", "moved"]
    print("\n".join(["strategies", LABEL, "", table(header, rows), "", NOTES]))
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "strategies", "arguments": list(argv), "environment": known, "label": LABEL, "results": found,
    })  # fmt: skip
    return 0
