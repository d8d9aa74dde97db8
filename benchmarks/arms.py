"""Runs of the same config that differ in named settings (arms) and in seed, as many as a comparison needs.

Every run is ``solrl train`` in a process of its own. A run that is finished is not repeated and one that was cut off is
resumed, so that a command that trains for hours can be stopped and given again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from solrl.config import Config
from solrl.errors import SolrlError, UsageError
from solrl.settings import load_config, save_config
from solrl.tracking import Row, read_metrics


@dataclass(frozen=True)
class Arm:
    """A name and the settings that make it: ``{"section.key": value}``."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One arm with one seed, in ``folder``/arm/seed_N."""

    arm: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.output.dir

    @property
    def rows(self) -> list[Row]:
        """What the run has recorded so far."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else []

    @property
    def steps_done(self) -> int:
        rows = self.rows
        return int(rows[-1]["step"]) if rows else 0

    @property
    def is_finished(self) -> bool:
        """Whether the last step is recorded and the LoRA written."""
        return self.steps_done == self.config.train.num_steps and (self.folder / "lora").is_dir()

    def heldout(self, reward: str = "") -> list[tuple[int, float]]:
        """(step, held-out mean) of every evaluation; of the trained reward unless another is named."""
        key = f"eval/{reward or self.config.reward.name}/mean"
        return [(int(row["step"]), row[key]) for row in self.rows if key in row]


def runs(
    folder: Path, base: str | Path, arms: Sequence[Arm], seeds: Sequence[int], overrides: Mapping[str, Any]
) -> list[Run]:
    """All arms of a seed before the next seed, so that comparisons begin early. ``overrides`` go to every run."""
    made = []
    for seed in seeds:
        for arm in arms:
            place = {"seed": seed, "output.dir": str(folder / arm.name / f"seed_{seed}")}
            made.append(Run(arm.name, seed, load_config(base, {**overrides, **arm.settings, **place})))
    return made


def carry_out(todo: Sequence[Run], workers: int, say: Callable[[str], None] = print) -> None:
    """Finish the runs that are not; raises SolrlError at the first failure, once those under way have ended.

    An existing folder must hold the same settings.
    """
    open_runs = [run for run in todo if not run.is_finished]
    for run in todo:
        _require_same_settings(run)
    say(f"{len(todo) - len(open_runs)} of {len(todo)} runs are finished")
    began, failed = monotonic(), threading.Event()

    def work(number: int, run: Run) -> None:
        if failed.is_set():
            return
        try:
            _train(run)
        except SolrlError:
            failed.set()
            raise
        share = (monotonic() - began) / (number + 1)
        left = (len(open_runs) - number - 1) * share
        say(f"{run.arm} seed {run.seed}: {run.heldout()[-1][1]:.3f}; about {left / 60:.0f} minutes left")

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work, number, run) for number, run in enumerate(open_runs)]:
            future.result()


def _train(run: Run) -> None:
    """One ``solrl train`` in a process of its own, its output in ``train.log`` beside the run's folder."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = run.folder.with_suffix(".log")
    config_file = run.folder.with_suffix(".toml")
    save_config(run.config, config_file)
    command = [sys.executable, "-m", "solrl", "train", str(config_file), *(["--resume"] if run.steps_done else [])]
    same_imports = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": same_imports}
    with log.open("a") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "no output")
        raise SolrlError(f"{run.arm} seed {run.seed} ended with exit code {code}: {last} (all of it: {log})")


def _require_same_settings(run: Run) -> None:
    if not (run.folder / "config.toml").is_file():
        return
    before = load_config(run.folder)
    if before != run.config:
        raise UsageError(f"{run.folder} was made with other settings; choose another folder or remove it")
