"""A training run under random faults beside the same run left alone: ledger and weights have to be equal, bit for bit.

Real processes under ``accelerate launch --max_restarts``: exceptions in roles, slow and frozen processes, roles that do
not come up, a full mailbox, kill -9 of workers and of process 0, damaged checkpoints (faulty_train.py). The model is
the embedded one with few steps and candidates: what is tested is the runtime.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import solrl
from benchmarks.arms import launcher
from benchmarks.common import facts, hardware, parser, table, whole_number, write_json
from benchmarks.faulty_train import DEADLY, KINDS, suffered, write_faults
from benchmarks.likeness import Likeness, likeness
from solrl.config import Config
from solrl.decisions import read_decisions
from solrl.errors import SolrlError
from solrl.settings import load_config, save_config

SMALL: dict[str, Any] = {
    "lora.rank": 4, "prompts.per_step": 4, "batch.rollout": 2, "batch.train": 2,
    "explore.group_size": 6, "explore.num_steps": 2, "explore.precision": "full", "regenerate.group_size": 2,
    "regenerate.num_steps": 2, "train.timestep_fraction": 0.5, "evaluate.every_steps": 0, "evaluate.num_prompts": 1,
    "evaluate.images_per_prompt": 2, "evaluate.num_steps": 2, "evaluate.rewards": [],
    "output.checkpoint_every_steps": 1, "output.audit_every_steps": 0, "runtime.mode": "shiftable",
    "runtime.lost_after_s": 30.0,
}  # fmt: skip
"""Of every run here; the reward is what the config has."""
LEAST_STEPS = 6
"""So that there is a checkpoint to go back to when the newest is damaged."""


@dataclass(frozen=True)
class Verdict(Likeness):
    """What two run folders have in common, and what the disturbed one went through."""

    jobs: int
    struck: dict[str, int]
    restarts: int
    damaged: int
    rolled_back: int
    quarantined: int


def main(argv: Sequence[str]) -> int:
    """Run both, compare, print; 1 where they differ or a kind of fault never struck."""
    args = options().parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        known, seconds = facts(), dict[str, float]()
        base = load_config("tiny_flux", SMALL | {"seed": args.seed})
        steps = max(math.ceil(args.jobs / jobs_of_a_step(base)), LEAST_STEPS)
        config = load_config("tiny_flux", SMALL | {"seed": args.seed, "train.num_steps": steps})
        kinds = list(KINDS) * max(round(args.jobs / 250), 1)
        runs = {name: Path(folder) / name for name in ("undisturbed", "disturbed")}
        write_faults(Path(folder) / "faults", kinds, steps, args.seed)
        for name, run in runs.items():
            began = time.monotonic()
            print(f"{name} ...", file=sys.stderr, flush=True)
            faults = Path(folder) / "faults" if name == "disturbed" else None
            launch(config, run, args.processes, faults, args.seed)
            seconds[name] = time.monotonic() - began
        found = compare(runs["undisturbed"], runs["disturbed"], steps, Path(folder) / "faults")
        jobs = steps * jobs_of_a_step(base)
    print(report(found, jobs, steps, args.processes, args.seed, seconds))
    print(hardware(known))
    write_json(args.json, {
        "benchmark": "faults", "arguments": list(argv), "environment": known, "jobs": jobs, "steps": steps,
        "seconds": seconds, "verdict": vars(found) | {"is_equal": found.is_equal},
    })  # fmt: skip
    return 0 if found.is_equal and set(found.struck) == set(KINDS) else 1


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    made = parser("faults", __doc__.split("\n")[0])
    made.add_argument("--jobs", type=whole_number, default=1000, help="at least so many in all (1000)")
    made.add_argument("--processes", type=whole_number, default=3, help="of the disturbed run (3)")
    made.add_argument("--seed", type=int, default=0, help="of the run and of the faults (0)")
    made.add_argument("--folder", type=Path, help="where the runs lie meanwhile (a temporary folder)")
    return made


def jobs_of_a_step(config: Config) -> int:
    """Micro-batches drawn and scored in both stages."""
    groups, size = config.prompts.per_step, config.batch.rollout
    return 2 * sum(math.ceil(groups * stage.group_size / size) for stage in (config.explore, config.regenerate))


def launch(config: Config, run: Path, processes: int, faults: Path | None, seed: int) -> None:
    """The run is done in the folder ``run``; undisturbed without ``faults``, as one colocated process."""
    changes: dict[str, Any] = {"output": {"dir": run}} | ({} if faults else {"runtime": {"mode": "colocated"}})
    values = config.model_dump(exclude_none=True)
    path, log = run.with_suffix(".toml"), run.with_suffix(".log")
    save_config(Config.model_validate(values | {name: values[name] | more for name, more in changes.items()}), path)
    root = Path(solrl.__file__).resolve().parent.parent
    found = os.environ | {
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "rewards"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "solrl", "train", str(path)]
    if faults is not None:
        found |= {"FAULTS": str(faults), "FAULTS_SEED": str(seed), "FAULTS_RUN": str(run)}
        command = [
            *launcher(processes), "--max_restarts", str(len(list(faults.iterdir()))), "--monitor_interval", "0.2",
            "--module", "benchmarks.faulty_train", str(path),
        ]  # fmt: skip
    with log.open("w") as out:
        code = subprocess.run(command, env=found, stdout=out, stderr=out, check=False).returncode
    if code:
        raise SolrlError(f"the run in {run} ended with {code}: {log.read_text()[-3000:]}")


def compare(undisturbed: Path, disturbed: Path, steps: int, faults: Path) -> Verdict:
    """Candidate by candidate and tensor by tensor."""
    lines, struck = read_decisions(disturbed), suffered(faults)
    return Verdict(
        **vars(likeness(disturbed, undisturbed, steps)),
        jobs=sum(line["event"] == "job" and line["ended"] == "result" for line in lines),
        struck=dict(Counter(fault["kind"] for fault in struck)),
        restarts=len({fault["restart"] for fault in struck if fault["kind"] in DEADLY}),
        damaged=len(list((disturbed / "checkpoints").glob("*.damaged*"))),
        rolled_back=sum(line["event"] == "shift" and line["error"] is not None for line in lines),
        quarantined=sum(line["event"] == "quarantine" for line in lines),
    )


def report(found: Verdict, jobs: int, steps: int, processes: int, seed: int, seconds: dict[str, float]) -> str:
    """Everything as text."""
    rows = [[KINDS[kind], str(found.struck.get(kind, 0))] for kind in KINDS]
    return "\n".join([
        f"faults: {jobs:,} jobs in {steps} steps on {processes} processes, seed {seed}", "",
        table(["fault", "struck"], rows), "",
        f"restarts of all processes {found.restarts}, checkpoints set aside {found.damaged}, "
        f"shifts rolled back {found.rolled_back}, processes without jobs {found.quarantined}",
        f"equal to the undisturbed run: {found.line} of the last checkpoint",
        f"verdict: {'EQUAL' if found.is_equal else 'DIFFERENT'}; {seconds['undisturbed']:.0f} s undisturbed in one "
        f"process, {seconds['disturbed']:.0f} s disturbed, starting processes included",
    ])  # fmt: skip
