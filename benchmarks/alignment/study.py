"""Which runs the tables need, and what is known of each: a cell, read from a run folder or from a file of results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.alignment.tables import METHODS, TABLES, TINY, Method
from benchmarks.arms import Run, as_asked, step_evaluations
from benchmarks.common import hardware, read_json
from solrl.config import Config
from solrl.errors import UsageError
from solrl.settings import load_config

NAME = "alignment"
Point = tuple[int, float, float]
"""Step, held-out mean, its standard error over prompts."""


@dataclass(frozen=True)
class Cell:
    """What is kept of a finished run."""

    reward: str
    arm: str
    seed: int
    settings: str
    """Digest of everything that decides the result, ``settings_digest``."""
    curves: dict[str, list[Point]]
    """Reward -> held-out evaluations."""
    fastest_s: dict[str, float]
    """Phase -> seconds of the fastest step: on a shared machine closer to what it takes than a mean."""
    wall_s: list[float]
    """Recorded seconds of training up to each evaluation, evaluations left out."""
    hardware: str

    @classmethod
    def of(cls, run: Run) -> Cell:
        """A finished run's."""
        rows, names = run.rows, (run.config.reward.name, *run.config.evaluate.rewards)
        marks = [at for at, row in enumerate(rows) if f"eval/{names[0]}/mean" in row]
        curves = {
            name: [(int(rows[at]["step"]), rows[at][f"eval/{name}/mean"], rows[at][f"eval/{name}/stderr"])
                   for at in marks]
            for name in names
        }  # fmt: skip
        timed = [row for row in rows if "time/total_s" in row]
        phases = {key for row in timed for key in row if key.startswith("time/") and key != "time/evaluate_s"}
        fastest = {
            key.removeprefix("time/").removesuffix("_s"): min(row[key] for row in timed if key in row) for key in phases
        }
        spent = [sum(row.get("time/total_s", 0.0) for row in rows[: at + 1]) for at in marks]
        known = json.loads((run.folder / "environment.json").read_text())
        return cls(run.config.reward.name, run.arm, run.seed, settings_digest(run.config), curves,
                   dict(sorted(fastest.items())), spent, hardware(known))  # fmt: skip

    @classmethod
    def parse(cls, entry: dict[str, Any], file: Path) -> Cell:
        """One of those that ``file`` holds."""
        try:
            curves = {name: [(int(s), m, e) for s, m, e in points] for name, points in entry["curves"].items()}
            return cls(**{**entry, "curves": curves})
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{file} holds a cell that is none: {error}") from None

    def value(self, step: float, reward: str = "") -> float:
        """The held-out reward after ``step`` steps, straight between evaluations; at most the last one's."""
        return interpolate([(at, mean) for at, mean, _ in self.curves[reward or self.reward]], step)

    @property
    def last_step(self) -> int:
        """How long it was trained."""
        return self.curves[self.reward][-1][0]


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """The broken line through ``points`` (ascending) at ``x``; level beyond its ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


def settings_digest(config: Config) -> str:
    """Of all settings unlike solrl's defaults, but seed, output, when it is evaluated and on what further rewards."""
    told: dict[str, Any] = {"seed": True, "output": True, "evaluate": {"every_steps", "rewards"}}
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude=told)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """One config, the tables asked for, and where runs are."""

    folder: Path
    config: str
    tables: tuple[str, ...]
    rewards: tuple[str, ...]
    seeds: int
    """At most so many of an arm."""
    overrides: Mapping[str, Any]

    @cached_property
    def base(self) -> Config:
        """The two-stage arm of the first reward; what all others differ from."""
        plain = load_config(self.config, self.overrides)
        short = TINY if is_embedded(plain) else {}
        return load_config(self.config, {**short, **self.overrides})

    def settings(self, arm: str, reward: str) -> dict[str, Any]:
        """Everything over the config's file for an arm, seed and folder left out."""
        base, method = self.base, METHODS[arm]
        tiny, watched = is_embedded(base), dict.fromkeys([*self.rewards, base.reward.name, *base.evaluate.rewards])
        steps = {"explore.num_steps": base.regenerate.num_steps, "explore.solver": base.regenerate.solver}
        given = {
            **(TINY if tiny else {}),
            **(method.tiny if tiny else {}),
            **self.overrides,
            **(steps if method.explores_in_full else {}),
            **method.settings,
            **({"explore.precision": "emulated_nvfp4"} if tiny and method.is_emulated else {}),
            "reward.name": reward,
            "evaluate.rewards": [name for name in watched if name != reward],
        }
        if reward != base.reward.name:
            given["reward.options"] = {}
        return {**given, "train.num_steps": self._num_steps(method, given)}

    def _num_steps(self, method: Method, given: Mapping[str, Any]) -> int:
        """Where compute is to be equal, enough to reach the two-stage arm's, so that the curve has a value there."""
        steps = self.base.train.num_steps
        if method.steps:
            return method.steps
        if method.equal == "steps":
            return steps
        return math.ceil(steps * step_evaluations(self.base) / step_evaluations(load_config(self.config, given)))

    @cached_property
    def arms(self) -> dict[tuple[str, str], Config]:
        """(reward, arm) -> its settings, of all arms in the tables."""
        wanted = {(reward, row.arm): None for key, reward in self.parts() for row in TABLES[key].rows}
        return {(reward, arm): load_config(self.config, self.settings(arm, reward)) for reward, arm in wanted}

    def twin(self, reward: str, arm: str) -> str:
        """The first arm with the same settings: it is trained once for all of them."""
        mine = self.arms[reward, arm]
        return next(other for (name, other), config in self.arms.items() if name == reward and config == mine)

    def parts(self) -> Iterator[tuple[str, str]]:
        """(table, reward), in the order in which runs are wanted."""
        for number, reward in enumerate(self.rewards):
            for key in TABLES:
                if key in self.tables and (number == 0 or TABLES[key].rewards == "all"):
                    yield key, reward

    def runs(self) -> list[Run]:
        """Every run once; of a table all arms of a seed before the next seed, so that comparisons begin early."""
        made: dict[tuple[str, str, int], Run] = {}
        for key, reward in self.parts():
            for seed in range(self.seeds):
                for row in TABLES[key].rows:
                    arm = self.twin(reward, row.arm)
                    if seed < row.seeds and (reward, arm, seed) not in made:
                        made[reward, arm, seed] = self._run(reward, arm, seed)
        return list(made.values())

    def _run(self, reward: str, arm: str, seed: int) -> Run:
        place = {"seed": seed, "output.dir": str(self.folder / reward / arm / f"seed_{seed}")}
        return Run(arm, seed, load_config(self.config, {**self.settings(arm, reward), **place}))


def is_embedded(config: Config) -> bool:
    """Whether the model ships with solrl."""
    return config.model.path.startswith("tiny_")


class Results:
    """The cells of a study: those of its finished runs, and those of a file that belong to its settings."""

    def __init__(self, study: Study, file: Path) -> None:
        self.study, self.file = study, file
        self._digests = {key: settings_digest(config) for key, config in study.arms.items()}
        self.others: list[dict[str, Any]] = []
        """Cells of the file that belong to other settings; they stay in it."""
        self.cells: dict[tuple[str, str, int], Cell] = {}
        if file.is_file():
            self._read()
        for run in study.runs():
            if run.is_finished:
                if settings_digest(as_asked(load_config(run.folder), run.config)) != settings_digest(run.config):
                    raise UsageError(f"{run.folder} was made with other settings; move it, or choose another folder")
                self.add(run)

    def add(self, run: Run) -> None:
        """Take in a finished run."""
        self.cells[run.config.reward.name, run.arm, run.seed] = Cell.of(run)

    def add_folder(self, folder: Path) -> None:
        """Take in a run made by other means; UsageError where it is not finished or no arm has its settings."""
        config = as_asked(load_config(folder), self.study.base)
        config = config.model_copy(update={"output": config.output.model_copy(update={"dir": folder})})
        arm = self._arm(config.reward.name, settings_digest(config))
        if arm is None:
            raise UsageError(f"{folder}: no arm of these tables has its settings")
        run = Run(arm, config.seed, config)
        if not run.is_finished:
            raise UsageError(f"{folder} is not finished: `solrl train {folder} --resume` goes on with it")
        self.add(run)

    def _arm(self, reward: str, digest: str) -> str | None:
        """The arm that is trained for these settings."""
        named = (arm for (name, arm), mine in self._digests.items() if (name, mine) == (reward, digest))
        arm = next(named, None)
        return None if arm is None else self.study.twin(reward, arm)

    def seeds(self, reward: str, arm: str) -> dict[int, Cell]:
        """Seed -> cell of an arm, or of its twin."""
        twin = self.study.twin(reward, arm)
        return {
            seed: cell for (name, other, seed), cell in sorted(self.cells.items()) if (name, other) == (reward, twin)
        }

    @property
    def price(self) -> float | None:
        """Seconds of a velocity evaluation in training, the median over cells; None without any."""
        arms = self.study.arms
        each = [cell.wall_s[-1] / cell.last_step / step_evaluations(arms[cell.reward, cell.arm])
                for cell in self.cells.values()]  # fmt: skip
        return median(each) if each else None

    def has(self, run: Run) -> bool:
        """Whether a run is known."""
        return (run.config.reward.name, run.arm, run.seed) in self.cells

    def payload(self) -> dict[str, Any]:
        """For the file."""
        cells = [asdict(cell) for _, cell in sorted(self.cells.items())]
        return {"benchmark": NAME, "config": self.study.config, "cells": cells + self.others}

    def _read(self) -> None:
        for entry in read_json(self.file, NAME)["cells"]:
            cell = Cell.parse(entry, self.file)
            arm = self._arm(cell.reward, cell.settings)
            if arm is None:
                self.others.append(entry)
            else:
                self.cells[cell.reward, arm, cell.seed] = replace(cell, arm=arm)
