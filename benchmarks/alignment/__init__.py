"""Sol-RL and its baselines trained alike: the paper's Tables 1, 2, 3 and 6, its Figures 1, 3(b) and 4, and ablations.

Every run is a run folder, FOLDER/REWARD/ARM/seed_N. Finished ones are not repeated, nor are those whose results the
--json file holds; the file, the tables (alignment.md) and the curves (alignment.png) are written again after every run.

python -m benchmarks alignment runs/alignment --json benchmarks/results/alignment.json --hours 10
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks.alignment.report import Report
from benchmarks.alignment.study import NAME, Results, Study
from benchmarks.alignment.tables import PAIRED, TABLES
from benchmarks.arms import Run, carry_out, run_evaluations, seconds_an_evaluation, train_run
from benchmarks.common import name_list, parse, parser, positive_number, whole_number, write_json
from solrl.errors import UsageError
from solrl.files import saving, write_atomic
from solrl.hardware import find_gpu
from solrl.settings import load_config


def main(words: Sequence[str]) -> int:
    """Train what is missing, print all tables; returns the exit code."""
    options = parser(NAME, __doc__.split("\n")[0])
    options.add_argument("folder", type=Path, metavar="FOLDER", help="where the runs are, or will be")
    options.add_argument("--config", default="tiny_flux", help="what is trained (%(default)s)")
    options.add_argument("--tables", type=name_list, default=list(TABLES), help=f"some of {','.join(TABLES)} (all)")
    options.add_argument("--rewards", type=name_list, help="trained rewards; those after the first only in Table 1"
                         " (the config's; for an embedded model clip_score as well)")  # fmt: skip
    options.add_argument(
        "--seeds", type=whole_number, default=PAIRED, metavar="N", help="at most N an arm (%(default)s)"
    )
    options.add_argument("--workers", type=whole_number, default=1, metavar="N", help="runs at a time (%(default)s)")
    options.add_argument(
        "--hours", type=positive_number, metavar="H", help="begin no run that would not end within H hours"
    )
    options.add_argument("--launch", type=shlex.split, default=[], metavar="COMMAND", help="what starts"
                         " scripts/train.py, as 'accelerate launch --multi_gpu --num_processes 8'")  # fmt: skip
    options.add_argument("--gpu", default="b200", help="whose time is modelled (%(default)s)")
    options.add_argument("--from", dest="others", nargs="+", type=Path, default=[], metavar="RUN", help="run folders"
                         " made by other means: with an arm's settings they stand for its runs")  # fmt: skip
    options.add_argument("--no-train", action="store_true", help="only print what is finished")
    chosen = parse(options, words)
    unknown = [key for key in chosen.tables if key not in TABLES]
    if unknown:
        raise UsageError(f"--tables {unknown[0]}: there are {', '.join(TABLES)}")
    reward = load_config(chosen.config, chosen.overrides).reward.name
    rewards = chosen.rewards or list(dict.fromkeys([reward, *_more(chosen.config)]))
    study = Study(chosen.folder, chosen.config, tuple(chosen.tables), tuple(rewards), chosen.seeds, chosen.overrides)
    results = Results(study, chosen.json or chosen.folder / f"{NAME}.json")
    for folder in chosen.others:
        results.add_folder(folder)
    if chosen.others:
        write_json(results.file, results.payload())
    report = Report(results, find_gpu(chosen.gpu), _command(words))
    if not chosen.no_train:
        train(study, results, report, chosen.workers, chosen.hours, chosen.launch)
    write(results, report)
    print(report.text())
    return 0


def train(
    study: Study, results: Results, report: Report, workers: int, hours: float | None, launch: Sequence[str]
) -> None:
    """Carry out what is missing, after saying how much that is; everything is written again after each run."""
    runs = study.runs()
    todo = [run for run in runs if not results.has(run)]
    print(f"{len(runs) - len(todo)} of {len(runs)} runs have results, {len(todo)} are to be trained", flush=True)
    if not todo:
        return
    price = seconds_an_evaluation(runs) or results.price or _probed(study, todo[0], launch)
    total = price * sum(run_evaluations(run.config) for run in todo) / workers / 3600
    print(f"that takes about {total:.1f} hours at {workers} at a time, by the steps recorded so far", flush=True)

    def recorded(run: Run) -> None:
        results.add(run)
        write(results, report)

    carry_out(
        todo, workers, lambda line: print(line, flush=True), launch=launch, hours=hours, price=price,
        recorded=recorded, keep_going=True,
    )  # fmt: skip


def write(results: Results, report: Report) -> None:
    """Results, tables and curves are on disk: beside each other in the file's folder."""
    write_json(results.file, results.payload())
    with saving(results.file):
        write_atomic(results.file.with_suffix(".md"), report.text().encode())
    if results.cells:
        report.draw(results.file.with_suffix(".png"))


def _probed(study: Study, first: Run, launch: Sequence[str]) -> float:
    """Seconds of a velocity evaluation, from one step of the first run; the step is kept in FOLDER/probe."""
    output = first.config.output.model_copy(update={"dir": study.folder / "probe"})
    once = {
        "train": first.config.train.model_copy(update={"num_steps": 1}),
        "evaluate": first.config.evaluate.model_copy(update={"num_prompts": 1, "images_per_prompt": 1}),
        "output": output,
    }
    probe = Run("probe", first.seed, first.config.model_copy(update=once))
    if not probe.is_finished:
        print("timing one step", flush=True)
        train_run(probe, launch)
    price = seconds_an_evaluation([probe])
    assert price is not None  # it has a step
    return price


def _more(config: str) -> list[str]:
    return ["clip_score"] if config.startswith("tiny_") else []


def _command(words: Sequence[str]) -> str:
    """The command without what says how much of it to run, or where results come from."""
    kept, leave_out = list[str](), False
    for word in words:
        if word.startswith("--"):
            leave_out = word in ("--tables", "--hours", "--workers", "--no-train", "--from")
        if not leave_out:
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", NAME, *kept])
