"""Seconds of a plan for 16 to 1,024 GPUs, beside PivotRL's Table 2. Measured: the planner is the real one.

The load file holds 24 jobs for every replica: a quarter of the GPUs is idle training, the rest is half explore (1 GPU a
replica) and half score (4). Every candidate is estimated; the best and its neighbours are replayed job by job.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import facts, hardware, number_list, parser, table, whole_number, write_json
from benchmarks.simulated import FOLDER, setting_of
from solrl.errors import UsageError
from solrl.runtime.migration import Item, Limits, Load
from solrl.runtime.planner import (
    Decision,
    PlannerSettings,
    State,
    build_candidates,
    growing_role,
    make_plan,
    shift_pairs,
)
from solrl.runtime.roles import EXPLORE, SCORE, Cluster, RoleSpec
from solrl.runtime.scheduler import RoleLoad

LOADS = FOLDER / "planner_load.json"
PAPER = {16: "0.31", 32: "0.74 0.55", 64: "1.71 1.16", 128: "2.95 2.81"}
TARGETS = {128: 0.05, 1024: 0.5}
NOTES = """\
  wall, cpu     median seconds of a whole plan; on a shared machine the wall counts what others do
  pairs         of it: throughputs and shift pairs. candidates: the dynamic programme. simulate: the
                rest, migration estimated for every candidate and replayed for the leading ones
  every         cpu seconds when every candidate is replayed, as the paper does; same: whether the
                best candidate is the same
  paper         Table 2, Qwen2.5-1.5B & GLM-Z1-9B, then Qwen2.5-7B & Qwen3-30B-A3B; other hardware"""


@dataclass(frozen=True)
class Timing:
    """Medians, in seconds."""

    gpus: int
    candidates: int
    replayed: int
    wall: float
    cpu: float
    pairs: float
    construction: float
    every: float | None
    same: bool | None


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for; 1 when a target is missed."""
    options_of = parser("planner_time", __doc__.split("\n")[0])
    options_of.add_argument("--gpus", type=number_list, help="of the load file's sizes (all)")
    options_of.add_argument("--repeats", type=whole_number, default=9, help="medians of so many (9)")
    options_of.add_argument(
        "--every-up-to", type=int, default=128, help="replay all candidates up to so many GPUs (128)"
    )
    options = options_of.parse_args(argv)
    loads = read_loads(LOADS)
    unknown = [size for size in options.gpus or [] if size not in loads]
    if unknown:
        raise UsageError(f"the load file has no {unknown[0]} GPUs; it has {', '.join(map(str, loads))}")
    found = [measure(size, loads[size], options) for size in options.gpus or loads]
    known = facts()
    print(report(found))
    print(hardware(known))
    write_json(options.json, {
        "benchmark": "planner_time", "arguments": list(argv), "environment": known, "timings": [vars(t) for t in found],
    })  # fmt: skip
    return int(any(timing.cpu > TARGETS.get(timing.gpus, float("inf")) for timing in found))


def read_loads(path: Path) -> dict[int, dict[str, list[list[int]]]]:
    """GPUs -> role -> lengths of each replica's jobs."""
    return {int(size): roles for size, roles in json.loads(path.read_text()).items()}


def state_of(gpus: int, lengths: dict[str, list[list[int]]]) -> State:
    """As the monitor would report it."""
    setting = setting_of(FOLDER / "g2_qwen2.5-7b_qwen3-30b-a3b.toml")
    home, job = gpus // 4, 0
    specs: dict[str, RoleSpec] = {EXPLORE: setting.explore.spec(EXPLORE), SCORE: setting.score.spec(SCORE)}
    first = {EXPLORE: home, SCORE: (home + len(lengths["explore"])) // setting.score.gpus}
    roles = {}
    for name, spec in specs.items():
        replicas = []
        for place, row in enumerate(lengths[name]):
            replicas.append(
                Load.of(first[name] + place, [Item(float(job + k), job + k, float(n)) for k, n in enumerate(row)])
            )
            job += len(row)
        limits = Limits(spec.coefficients, spec.capacity_tokens, spec.capacity_jobs)
        roles[name] = RoleLoad(spec, limits, replicas)
    return State(Cluster(gpus, 8, home), roles[EXPLORE], roles[SCORE], "held")


def measure(gpus: int, lengths: dict[str, list[list[int]]], options: Any) -> Timing:
    """Every repeat plans from a fresh state, so nothing is remembered."""
    settings = PlannerSettings()
    rows = []
    for _ in range(options.repeats):
        state = state_of(gpus, lengths)
        begin, cpu = time.perf_counter(), time.process_time()
        decision = make_plan(state, settings)
        rows.append([time.perf_counter() - begin, time.process_time() - cpu])
        state = state_of(gpus, lengths)
        cpu = time.process_time()
        role, _, _ = growing_role(state)
        assert role is not None
        pairs = shift_pairs(state, role, settings.shift_s)
        rows[-1].append(time.process_time() - cpu)
        cpu = time.process_time()
        build_candidates(pairs)
        rows[-1].append(time.process_time() - cpu)
    every = same = None
    if gpus <= options.every_up_to:
        state, cpu = state_of(gpus, lengths), time.process_time()
        full = make_plan(state, replace(settings, num_replayed=10**6))
        every, same = time.process_time() - cpu, _best(full) == _best(decision)
    wall, cpu, prepared, construction = (statistics.median(column) for column in zip(*rows, strict=True))
    replayed = sum(candidate.throughput is not None for candidate in decision.candidates)
    return Timing(gpus, len(decision.candidates), replayed, wall, cpu, prepared, construction, every, same)


def _best(decision: Decision) -> int:
    """Replicas gained by the candidate of the highest benefit."""
    return max((c for c in decision.candidates if c.benefit is not None), key=lambda c: c.benefit or 0.0).num_up


def report(found: Sequence[Timing]) -> str:
    """Everything as text."""
    rows = [
        [str(t.gpus), str(t.candidates), str(t.replayed), *(f"{value:.4f}" for value in (
            t.wall, t.cpu, t.pairs, t.construction, max(t.cpu - t.pairs - t.construction, 0.0))),
         "-" if t.every is None else f"{t.every:.3f}", {True: "yes", False: "no", None: "-"}[t.same],
         PAPER.get(t.gpus, "-")]
        for t in found
    ]  # fmt: skip
    header = [
        "GPUs",
        "candidates",
        "replayed",
        "wall",
        "cpu",
        "pairs",
        "candidates",
        "simulate",
        "every",
        "same",
        "paper",
    ]
    targets = [
        f"{t.gpus} GPUs: {t.cpu:.3f} s, target {TARGETS[t.gpus]} s: {'kept' if t.cpu <= TARGETS[t.gpus] else 'MISSED'}"
        for t in found
        if t.gpus in TARGETS
    ]
    return "\n".join([
        "planner_time: 24 jobs a replica, benchmarks/workloads/planner_load.json, one core",
        "", table(header, rows), "", *targets, "", NOTES,
    ])  # fmt: skip
