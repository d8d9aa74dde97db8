"""Tables and curves of a study, from the cells that there are; a cell that was not run is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.alignment.study import Cell, Point, Results, interpolate
from benchmarks.alignment.tables import TABLES, Equal, Table
from benchmarks.arms import step_evaluations
from benchmarks.common import pyplot, save_figure, table
from solrl.config import Config
from solrl.hardware import Gpu
from solrl.intervals import interval
from solrl.plan import make_plan
from solrl.shapes import Shapes

LEVEL = 0.95
SHARES = (0.25, 0.50, 0.75, 1.0)
CLOCKS = {
    "steps": "after as many steps",
    "compute": "after as many velocity evaluations (a backward pass counts as two)",
    "gpu": "after as much time of one {gpu}, MODELLED by solrl plan, not measured",
}

DRAWN = ("nft", "sol_rl", "awm", "flow_grpo", "dance_grpo", "naive", "naive_quantized", "explore_nvfp4")
COLORS = {arm: f"C{number}" for number, arm in enumerate(DRAWN)}


class Report:
    """What the tables are made of: results, and a GPU to model."""

    def __init__(self, results: Results, gpu: Gpu, command: str) -> None:
        self.results, self.study, self.gpu, self.command = results, results.study, gpu, command

    def text(self) -> str:
        """All tables as Markdown, each beside the command that fills its empty cells."""
        study = self.study
        known = sorted({cell.hardware for cell in self.results.cells.values()})
        done = sum(self.results.has(run) for run in study.runs())
        parts = [
            f"{study.base.model.path}, {len(study.runs())} runs, {done} of them finished",
            *known,
            f"in brackets: {LEVEL:.0%} interval over seeds, of differences seed by seed; *: without zero",
        ]
        sections = [_indented("\n".join(parts))]
        for key, reward in study.parts():
            made = TABLES[key]
            named = f"{made.title} ({reward})" if reward != study.rewards[0] else made.title
            body = self.objectives(made) if key == "objectives" else self.compared(made, reward)
            if key in ("4", "4gpu"):
                body += "\n\n" + self.speed_up(made, reward)
            lines = [f"{self.command} --tables {key}", "", *body.splitlines()]
            if made.note:
                lines += ["", made.note]
            sections += [f"### {named}", _indented("\n".join(lines))]
        sections += ["### What a velocity evaluation took", _indented(self.prices())]
        return "\n\n".join(sections) + "\n"

    def compared(self, made: Table, reward: str) -> str:
        """A row an arm: held-out rewards where all arms have spent the same, and the paired difference to one arm."""
        header = ["", "seeds", "steps", "before", "after", "gain", f"minus {_label(made)}", *made.paper]
        base = self.values(made, made.against, reward)
        rows = []
        for row in made.rows:
            mine, cells = self.values(made, row.arm, reward), self.results.seeds(reward, row.arm)
            if not mine:
                rows.append([row.label, *[""] * 6, *row.paper])
                continue
            before, after = fmean(cell.curves[reward][0][1] for cell in cells.values()), fmean(mine.values())
            rows.append([row.label, str(len(mine)), self.read_at(made, row.arm, reward), f"{before:.3f}",
                         f"{after:.3f}", f"{after - before:+.3f}",
                         "" if row.arm == made.against else paired(mine, base), *row.paper])  # fmt: skip
        return f"held-out {reward} {CLOCKS[made.equal].format(gpu=self.gpu.name)}\n" + table(header, rows)

    def objectives(self, made: Table) -> str:
        """Each objective alone: the gain, and how many standard errors of a held-out evaluation it is."""
        reward, rows = self.study.rewards[0], []
        for row in made.rows:
            cells = self.results.seeds(reward, row.arm)
            config = self.study.arms[reward, row.arm]
            if not cells:
                rows.append([row.label, *[""] * 6])
                continue
            first, last = ([cell.curves[reward][at] for cell in cells.values()] for at in (0, -1))
            before, after = (fmean(point[1] for point in points) for points in (first, last))
            error = math.hypot(*(fmean(point[2] for point in points) for points in (first, last)))
            spread, half = interval([b[1] - a[1] for a, b in zip(first, last, strict=True)], LEVEL)
            gain = (
                f"{spread:+.3f}" if math.isnan(half) else f"{spread:+.3f} [{spread - half:+.3f}, {spread + half:+.3f}]"
            )
            rows.append(
                [
                    row.label,
                    str(len(cells)),
                    str(config.train.num_steps),
                    f"{before:.3f}",
                    f"{after:.3f}",
                    gain,
                    f"{(after - before) / error:.1f}",
                ]
            )
        heading = ["", "seeds", "steps", "before", "after", "gain", "in errors"]
        return (
            f"held-out {reward} of the averaged weights before and after training; in errors: the gain over that of\n"
            "both means over prompts, as if they shared neither prompts nor noise\n" + table(heading, rows)
        )

    def speed_up(self, made: Table, reward: str) -> str:
        """How much sooner the second arm is where the first one is after 25, 50, 75 and 100 % of its progress.

        Of the mean curves, and seed by seed: then without an interval where not every seed gets there, since those that
        do are the better ones.
        """
        slow, fast = (self.results.seeds(reward, row.arm) for row in made.rows[:2])
        both = sorted(set(slow) & set(fast))
        costs = [self.cost(made.equal, reward, row.arm) for row in made.rows[:2]] if both else []
        curves = {seed: (_line(slow[seed]), _line(fast[seed])) for seed in both}
        means = (_mean_line([slow[seed] for seed in both]), _mean_line([fast[seed] for seed in both])) if both else None
        rows = []
        for share in SHARES:
            ratios = [found for pair in curves.values() if (found := _ratio(*pair, costs, share)) is not None]
            whole = _ratio(*means, costs, share) if means else None
            line = [f"{share:.0%}", "" if whole is None else f"{whole:.2f}", "", ""]
            if ratios:
                mean, half = interval(ratios, LEVEL)
                line[2:] = [
                    f"{len(ratios)} of {len(both)}",
                    f"{mean:.2f}{_within(mean, half) if len(ratios) == len(both) else ''}",
                ]
            rows.append(line)
        lines = [table([f"share of {made.rows[0].label}'s gain", "times as fast", "seeds there", "each alone"], rows)]
        if means:
            steps = (", ".join(str(step) for step, _ in line) for line in means)
            lines += [
                "times as fast: of the mean curves, straight between evaluations (steps {} and {})".format(*steps)
            ]
        if made.equal == "compute":
            lines += ["the paper, whole progress, wall-clock: 1.91 to 4.64 times as fast"]
        return "\n".join(lines)

    def cost(self, equal: Equal, reward: str, arm: str) -> float:
        """Of a step: 1, velocity evaluations, or modelled seconds on the GPU."""
        config = self.study.arms[reward, arm]
        if equal == "steps":
            return 1.0
        return step_evaluations(config) if equal == "compute" else modelled(config, self.gpu)

    def at(self, made: Table, arm: str, reward: str) -> float:
        """Where ``due`` is, at most the arm's own last step."""
        return min(self.due(made, arm, reward), self.study.arms[reward, arm].train.num_steps)

    def due(self, made: Table, arm: str, reward: str) -> float:
        """The step at which ``arm`` has spent what the table's last arm has at its end."""
        spent = float(self.study.base.train.num_steps)
        if made.equal != "steps":
            last = made.rows[-1].arm
            spent = self.study.arms[reward, last].train.num_steps * self.cost(made.equal, reward, last)
        return spent / self.cost(made.equal, reward, arm)

    def read_at(self, made: Table, arm: str, reward: str) -> str:
        """That step in words; where the arm ended before it, both."""
        step, due = self.at(made, arm, reward), self.due(made, arm, reward)
        return f"{step:.4g}" if step == due else f"{step:.4g} (of {due:.4g})"

    def values(self, made: Table, arm: str, reward: str) -> dict[int, float]:
        """Seed -> held-out reward there."""
        cells = self.results.seeds(reward, arm)
        step = self.at(made, arm, reward) if cells else 0.0
        return {seed: cell.value(step) for seed, cell in cells.items()}

    def prices(self) -> str:
        """What a velocity evaluation took in each arm: whether equal counts are equal time."""
        rows = []
        for (reward, arm), config in self.study.arms.items():
            cells = self.results.seeds(reward, arm)
            if cells and self.study.twin(reward, arm) == arm:
                fastest = min(sum(s for p, s in cell.fastest_s.items() if p != "total") for cell in cells.values())
                spent = median(cell.wall_s[-1] / cell.last_step for cell in cells.values())
                evaluations = step_evaluations(config)
                rows.append(
                    [
                        arm,
                        reward,
                        f"{evaluations:.0f}",
                        f"{fastest:.1f}",
                        f"{1e3 * fastest / evaluations:.2f}",
                        f"{spent:.1f}",
                    ]
                )
        return table(
            ["arm", "reward", "evaluations a step", "fastest step s", "ms an evaluation", "median wall s"], rows
        )

    def draw(self, path: Path) -> None:
        """Held-out reward over compute, recorded wall-clock, modelled GPU time, and steps."""
        reward = self.study.rewards[0]
        figure, axes = pyplot().subplots(2, 2, figsize=(11, 7.5), layout="constrained")
        panels: list[tuple[Equal, str, tuple[str, ...]]] = [
            ("compute", "velocity evaluations", DRAWN[:5]),
            ("gpu", f"seconds of one {self.gpu.name}, MODELLED", ("nft", "explore_nvfp4")),
            ("steps", "optimizer steps", (*DRAWN[5:], "sol_rl")),
        ]
        for axis, (equal, label, arms) in zip(axes.flat, panels, strict=False):
            for arm in arms:
                if (reward, arm) in self.study.arms and (cells := self.results.seeds(reward, arm)):
                    curves = [cell.curves[reward] for cell in cells.values()]
                    curve(axis, arm, COLORS[arm], curves, self.cost(equal, reward, arm))
            axis.set_xlabel(label)
        for arm in ("nft", "sol_rl"):
            if (reward, arm) in self.study.arms:
                for cell in self.results.seeds(reward, arm).values():
                    axes[1, 1].plot(cell.wall_s, [mean for _, mean, _ in cell.curves[reward]], alpha=0.6,
                                    color=COLORS[arm])  # fmt: skip
        axes[1, 1].set_xlabel("seconds as recorded, every seed (nft blue, sol_rl orange)")
        for axis in axes.flat:
            axis.set_ylabel(f"held-out {reward}")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False)
        save_figure(figure, path)


def paired(mine: dict[int, float], base: dict[int, float]) -> str:
    """Mean difference over the seeds that both have and its interval, starred where zero is outside; or ""."""
    both = sorted(set(mine) & set(base))
    if not both:
        return ""
    mean, half = interval([mine[seed] - base[seed] for seed in both], LEVEL)
    return f"{mean:+.4f}{_within(mean, half, '+.4f')}{' *' if abs(mean) > half else ''}"


@lru_cache(maxsize=64)
def _shapes(model: str) -> Shapes:
    return Shapes(Config.model_validate_json(model))


def modelled(config: Config, gpu: Gpu) -> float:
    """Seconds of a step on one ``gpu`` as `solrl plan` models them; an emulated format counts as the real one."""
    shapes = _shapes(Config(model=config.model, lora=config.lora, batch=config.batch).model_dump_json())
    return sum(make_plan(config, gpu, 1, shapes=shapes).seconds.values())


Line = Sequence[tuple[float, float]]
"""Steps, ascending, and rewards."""


def _line(cell: Cell) -> Line:
    return [(step, mean) for step, mean, _ in cell.curves[cell.reward]]


def _mean_line(cells: Sequence[Cell]) -> Line:
    steps = sorted({step for cell in cells for step, _ in _line(cell)})
    return [(step, fmean(cell.value(step) for cell in cells)) for step in steps]


def _ratio(slow: Line, fast: Line, costs: Sequence[float], share: float) -> float | None:
    """Cost of ``slow`` up to a share of its gain over that of ``fast`` up to the same reward.

    None if that is never reached, or nothing was gained.
    """
    if slow[-1][1] <= slow[0][1]:
        return None
    goal = slow[0][1] + share * (slow[-1][1] - slow[0][1])
    first, second = _reaches(slow, goal), _reaches(fast, goal)
    return None if not first or not second else first * costs[0] / (second * costs[1])


def _reaches(curve: Line, goal: float) -> float | None:
    """Where the broken line first is at ``goal``."""
    for (left, low), (right, high) in pairwise(curve):
        if low < goal <= high:
            return left + (right - left) * (goal - low) / (high - low)
    return None


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _within(mean: float, half: float, form: str = ".2f") -> str:
    return "" if math.isnan(half) else f" [{mean - half:{form}}, {mean + half:{form}}]"


def _label(made: Table) -> str:
    return next((row.label for row in made.rows if row.arm == made.against), made.against)


def curve(axis: Any, name: str, color: str, curves: Sequence[Sequence[Point]], cost: float = 1.0) -> None:
    """The mean over seeds, with their range, over what the steps have cost."""
    steps = [step for step, _, _ in curves[0]]
    lines = [[(step, mean) for step, mean, _ in points] for points in curves]
    values = [[interpolate(line, step) for line in lines] for step in steps]
    xs = [step * cost for step in steps]
    axis.plot(xs, [fmean(v) for v in values], marker="o", color=color, label=f"{name} ({len(curves)} seeds)")
    axis.fill_between(xs, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15)
