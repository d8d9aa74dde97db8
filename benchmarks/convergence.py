"""Do processes that change roles, or samples a step or two old, change what is learned? PivotRL's Figure 15.

Real processes train the same config colocated, shiftable, and shiftable with samples one and two steps old, in several
seeds; arms of one seed share prompts, noise and initial adapter. Without staleness shiftable must be colocated bit for
bit, which is checked and makes one seed enough. Finished runs are not repeated, nor colocated ones that alignment did.

python -m benchmarks convergence runs/convergence --from benchmarks/results/alignment.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.alignment.report import LEVEL, curve, paired
from benchmarks.alignment.study import NAME as ALIGNMENT
from benchmarks.alignment.study import Cell, is_embedded, settings_digest
from benchmarks.alignment.tables import TINY
from benchmarks.arms import Arm, Run, carry_out, launcher, runs
from benchmarks.common import (
    facts,
    hardware,
    number_list,
    parse,
    parser,
    positive_number,
    pyplot,
    read_json,
    save_figure,
    table,
    whole_number,
    write_json,
)
from benchmarks.likeness import Likeness, likeness
from solrl.decisions import read_decisions
from solrl.errors import UsageError
from solrl.settings import load_config

EVALUATIONS = 4
"""In a run, besides the one before it."""
BASE = Arm("colocated", {"runtime.mode": "colocated"})
TWIN = Arm("shiftable", {"runtime.mode": "shiftable"})
PAPER = """\
paper (section 8.7, LLMs on H20 GPUs): the curves nearly overlap over steps; the same reward after about 30 hours where
colocated and disaggregated deployments need more than 50"""


@dataclass(frozen=True)
class Trained:
    """What is kept of a finished run."""

    cell: Cell
    seconds: list[float]
    """Of each step; of a run that is known by its results only: none."""
    lag: float
    """Steps that the policy which drew was older than the one that learned, mean over steps."""
    shifts: float
    """Changes of role in a step, over all processes."""

    @classmethod
    def of(cls, run: Run) -> Trained:
        """A finished run's."""
        rows = [row for row in run.rows if "time/total_s" in row]
        shifts = sum(line["event"] == "shift" for line in read_decisions(run.folder))
        lag = fmean(row.get("health/policy_lag", 0.0) for row in rows)
        return cls(Cell.of(run), [row["time/total_s"] for row in rows], lag, shifts / len(rows))

    @property
    def final(self) -> float:
        """Held-out reward at the end."""
        return self.cell.curves[self.cell.reward][-1][1]


def main(words: Sequence[str]) -> int:
    """Train what is missing, print the comparison; 1 where shiftable is not colocated bit for bit."""
    options = parser("convergence", __doc__.split("\n")[0])
    options.add_argument("folder", type=Path, metavar="FOLDER", help="where the runs are, or will be")
    options.add_argument("--config", default="tiny_flux", help="what is trained (%(default)s)")
    options.add_argument("--processes", type=whole_number, default=2, metavar="N", help="of a run (%(default)s)")
    options.add_argument("--steps", type=whole_number, default=8, metavar="N", help="of training (%(default)s)")
    options.add_argument("--seeds", type=whole_number, default=3, metavar="N", help="seeds 0 .. N-1 (%(default)s)")
    options.add_argument("--staleness", type=number_list, default=[1, 2], metavar="N,..", help="of further arms (1,2)")
    options.add_argument("--workers", type=whole_number, default=1, metavar="N", help="runs at a time (%(default)s)")
    options.add_argument(
        "--hours", type=positive_number, metavar="H", help="begin no run that would not end within H hours"
    )
    options.add_argument("--from", dest="results", type=Path, metavar="FILE", help="results of the benchmark alignment:"
                         " what it trained with the same settings stands for colocated runs")  # fmt: skip
    options.add_argument("--no-train", action="store_true", help="only print what is finished")
    options.add_argument("--png", type=Path, metavar="FILE", help="draw the curves into FILE")
    chosen = parse(options, words)
    if chosen.processes < 2:
        raise UsageError("--processes 1: roles change between processes, give at least 2")
    every = wanted(chosen.folder, chosen.config, chosen.steps, chosen.seeds, chosen.staleness, chosen.overrides)
    trained = recorded(chosen.results, every) if chosen.results else {}
    if not chosen.no_train:
        # a colocated run that is recorded is still needed for the check
        todo = [run for run in every if run.seed == 0 or (run.arm, run.seed) not in trained]
        todo.sort(key=lambda run: (run.arm, run.seed) in trained or run.arm == TWIN.name)
        carry_out(
            todo, chosen.workers, lambda line: print(line, flush=True), launch=launcher(chosen.processes),
            hours=chosen.hours,
        )  # fmt: skip
    finished = [run for run in every if run.is_finished]
    trained |= {(run.arm, run.seed): Trained.of(run) for run in finished}
    same, known = likenesses(finished, chosen.steps), facts()
    title = f"convergence: {chosen.config}, {chosen.steps} steps, {chosen.processes} processes of a CPU"
    print("\n".join(["", title, hardware(known), "", report(trained, same), "", PAPER]))
    write_json(chosen.json, {
        "benchmark": "convergence", "arguments": list(words), "environment": known,
        "runs": [asdict(one) for one in trained.values()], "equal": {seed: vars(one) for seed, one in same.items()},
    })  # fmt: skip
    if chosen.png and trained:
        draw(trained, chosen.png)
    return 0 if all(one.is_equal for one in same.values()) else 1


def wanted(
    folder: Path, config: str, steps: int, seeds: int, staleness: Sequence[int], overrides: Mapping[str, Any]
) -> list[Run]:
    """Every run, all arms of a seed before the next seed; last of all the one that must be colocated bit for bit."""
    stale = [Arm(f"staleness {lag}", {**TWIN.settings, "runtime.staleness": lag}) for lag in staleness]
    short = TINY if is_embedded(load_config(config, overrides)) else {}
    given = {**short, "evaluate.every_steps": max(steps // EVALUATIONS, 1), **overrides, "train.num_steps": steps}
    return [*runs(folder, config, [*stale, BASE], range(seeds), given), *runs(folder, config, [TWIN], [0], given)]


def recorded(file: Path, every: Sequence[Run]) -> dict[tuple[str, int], Trained]:
    """The colocated runs among ``every`` whose results ``file`` holds."""
    digests = {settings_digest(run.config) for run in every if run.arm == BASE.name}
    cells = [Cell.parse(entry, file) for entry in read_json(file, ALIGNMENT)["cells"]]
    seeds = {run.seed for run in every}
    return {
        (BASE.name, cell.seed): Trained(replace(cell, arm=BASE.name), [], 0.0, 0.0)
        for cell in cells
        if cell.settings in digests and cell.seed in seeds
    }


def likenesses(finished: Sequence[Run], steps: int) -> dict[int, Likeness]:
    """Seed -> what colocated and shiftable have in common, where there are both."""
    folders = {(run.arm, run.seed): run.folder for run in finished}
    return {
        seed: likeness(folder, folders[BASE.name, seed], steps)
        for (arm, seed), folder in folders.items()
        if arm == TWIN.name and (BASE.name, seed) in folders
    }


def report(trained: Mapping[tuple[str, int], Trained], same: Mapping[int, Likeness]) -> str:
    """Held-out rewards by step, paired differences to colocated, and what a step took."""
    if not trained:
        return "no run is finished"
    by_arm = {arm: {seed: one for (name, seed), one in trained.items() if name == arm} for arm in ordered(trained)}
    base = {seed: one.final for seed, one in by_arm.get(BASE.name, {}).items()}
    points = [one.cell.curves[one.cell.reward] for one in trained.values()]
    steps = sorted({step for line in points for step, _, _ in line})
    rewards, times = [], []
    for arm, mine in by_arm.items():
        means = [
            [mean for one in mine.values() for at, mean, _ in one.cell.curves[one.cell.reward] if at == step]
            for step in steps
        ]
        minus = "" if arm == BASE.name else paired({seed: one.final for seed, one in mine.items()}, base)
        rewards.append([arm, str(len(mine)), *(f"{fmean(found):.4f}" if found else "" for found in means), minus])
        timed = [one for one in mine.values() if one.seconds]
        if timed:
            seconds = [value for one in timed for value in one.seconds]
            lag, shifts = fmean(one.lag for one in timed), fmean(one.shifts for one in timed)
            times.append([arm, f"{lag:.2f}", f"{shifts:.1f}", f"{median(seconds):.1f}", f"{min(seconds):.1f}"])
    error = fmean(line[-1][2] for line in points)
    checks = [
        f"seed {seed}: shiftable {'IS' if one.is_equal else 'IS NOT'} colocated bit for bit: {one.line}"
        for seed, one in same.items()
    ]
    reward = next(iter(trained.values())).cell.reward
    return "\n".join([
        f"held-out {reward} of the averaged weights, mean over seeds (standard error over prompts {error:.3f})",
        table(["", "seeds", *(f"step {step}" for step in steps), f"minus {BASE.name} [{LEVEL:.0%}]"], rewards), "",
        *([*checks, ""] if checks else []),
        table(["", "lag", "shifts/step", "median s/step", "fastest"], times),
        "  lag      steps that the policy which drew was older than the one that learned, mean over steps",
    ])  # fmt: skip


def ordered(trained: Mapping[tuple[str, int], Trained]) -> list[str]:
    """The arms that there are: the two that must be equal first."""
    arms = dict.fromkeys(arm for arm, _ in trained)
    return [arm for arm in (BASE.name, TWIN.name) if arm in arms] + [
        arm for arm in arms if arm not in (BASE.name, TWIN.name)
    ]


def draw(trained: Mapping[tuple[str, int], Trained], path: Path) -> None:
    """Held-out reward over steps, and over seconds as recorded."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for number, arm in enumerate(ordered(trained)):
        cells = [one.cell for (name, _), one in trained.items() if name == arm]
        curves = [cell.curves[cell.reward] for cell in cells]
        common = set.intersection(*({step for step, _, _ in points} for points in curves))
        curve(left, arm, f"C{number}", [[point for point in points if point[0] in common] for points in curves])
        for cell, points in zip(cells, curves, strict=True):
            right.plot(cell.wall_s, [mean for _, mean, _ in points], color=f"C{number}", alpha=0.6)
        left.set_ylabel(f"held-out {cells[0].reward}")
    left.set_xlabel("optimizer steps")
    right.set_xlabel("seconds of training as recorded, every seed")
    left.legend(frameon=False)
    save_figure(figure, path)
