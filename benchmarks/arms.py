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
from statistics import median
from time import monotonic
from typing import Any

from solrl.config import Config
from solrl.errors import SolrlError, UsageError
from solrl.objectives.base import open_objective
from solrl.settings import load_config, save_config
from solrl.tracking import Row, read_metrics

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
"""What a launcher starts."""


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


def step_evaluations(config: Config) -> float:
    """What a step takes, in velocity evaluations of a sample; a backward pass counts as two. Decode is left out.

    One of an image ``explore.downscale`` times smaller counts by its number of pixels.
    """
    explore, keep, train = config.explore, config.regenerate, config.train
    explored = explore.group_size * explore.num_steps * explore.enabled / explore.downscale**2
    drawn = explored + keep.group_size * keep.num_steps * keep.enabled
    with_reference = train.kl_weight > 0 or open_objective(config).needs_reference
    passes = 3 + (not train.is_on_policy) + with_reference + config.model.gradient_checkpointing
    return config.prompts.per_step * (drawn + keep.group_size * config.num_train_timesteps * passes)


def run_evaluations(config: Config) -> float:
    """The same of a whole run, held-out evaluations included and audits not."""
    held, steps = config.evaluate, config.train.num_steps
    times = 1 + (-(-steps // held.every_steps) if held.every_steps else 1)
    return steps * step_evaluations(config) + times * held.num_prompts * held.images_per_prompt * held.num_steps


def seconds_an_evaluation(recorded: Sequence[Run]) -> float | None:
    """Recorded seconds of a velocity evaluation, the median over runs that have at least a step; None without any."""
    prices = []
    for run in recorded:
        rows = run.rows
        if rows and rows[-1]["step"] > 0:
            held, times = run.config.evaluate, sum("time/evaluate_s" in row for row in rows)
            done = rows[-1]["step"] * step_evaluations(run.config)
            done += times * held.num_prompts * held.images_per_prompt * held.num_steps
            spent = sum(row.get("time/total_s", 0.0) + row.get("time/evaluate_s", 0.0) for row in rows)
            prices.append(spent / done)
    return median(prices) if prices else None


def carry_out(
    todo: Sequence[Run],
    workers: int,
    say: Callable[[str], None] = print,
    *,
    launch: Sequence[str] = (),
    hours: float | None = None,
    price: float = 0.0,
    recorded: Callable[[Run], None] | None = None,
    keep_going: bool = False,
) -> None:
    """Finish the runs that are not; raises SolrlError at the first failure, once those under way have ended.

    With ``keep_going`` only the failed arm is left out, and the error comes at the end. An existing folder must hold
    the same settings. ``launch`` stands before a script in place of Python, as in `accelerate launch`. No run begins
    that would not end within ``hours`` as far as is known: ``price`` is the seconds of a velocity evaluation until runs
    have recorded their own. Each run goes to ``recorded`` as soon as it is finished, one at a time.
    """
    open_runs = [run for run in todo if not run.is_finished]
    for run in todo:
        _require_same_settings(run)
    say(f"{len(todo) - len(open_runs)} of {len(todo)} runs are finished")
    began, lock = monotonic(), threading.Lock()
    failed: dict[str, SolrlError] = {}  # by arm

    def work(number: int, run: Run) -> bool:
        now = seconds_an_evaluation(todo) or price
        ends = monotonic() - began + now * run_evaluations(run.config)
        if run.arm in failed or (failed and not keep_going):
            return True
        if hours is not None and ends > 3600 * hours:
            return False
        try:
            train_run(run, launch)
        except SolrlError as error:
            failed[run.arm] = error
            say(f"error: {error}")
            return True
        with lock:
            if recorded:
                recorded(run)
            left = now * sum(run_evaluations(later.config) for later in open_runs[number + 1 :]) / workers
            say(f"{run.arm} seed {run.seed}: {run.heldout()[-1][1]:.3f}; about {left / 60:.0f} minutes left")
        return True

    with ThreadPoolExecutor(workers) as pool:
        begun = [future.result() for future in [pool.submit(work, n, run) for n, run in enumerate(open_runs)]]
    if not all(begun):
        say(f"{begun.count(False)} runs were not begun: they would not have ended within {hours:g} hours")
    if failed:
        raise next(iter(failed.values()))


def launcher(processes: int) -> list[str]:
    """What stands before a script to have it run in so many processes of this machine."""
    flags = {"num_processes": processes, "num_machines": 1, "main_process_port": 0, "mixed_precision": "no",
             "dynamo_backend": "no"}  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *words]


def train_run(run: Run, launch: Sequence[str] = ()) -> None:
    """One ``solrl train`` in a process of its own, its output in ``seed_N.log`` beside the run's folder."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = run.folder.with_suffix(".log")
    config_file = run.folder.with_suffix(".toml")
    save_config(run.config, config_file)
    script = [*launch, str(SCRIPT)] if launch else [sys.executable, "-m", "solrl", "train"]
    command = [*script, str(config_file), *(["--resume"] if (run.folder / "config.toml").is_file() else [])]
    same_imports = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": same_imports}
    with log.open("a") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "no output")
        raise SolrlError(f"{run.arm} seed {run.seed} ended with exit code {code}: {last} (all of it: {log})")


def as_asked(found: Config, asked: Config) -> Config:
    """The settings ``found`` in a run folder; ``batch.decode`` = 0 where that was asked and the run measured it."""
    return (
        found
        if asked.batch.decode
        else found.model_copy(update={"batch": found.batch.model_copy(update={"decode": 0})})
    )


def _require_same_settings(run: Run) -> None:
    if not (run.folder / "config.toml").is_file():
        return
    if as_asked(load_config(run.folder), run.config) != run.config:
        raise UsageError(f"{run.folder} was made with other settings; choose another folder or remove it")
