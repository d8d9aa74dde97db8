"""`auto` plans from coefficients that are off and one sample of lengths; what does that cost against hindsight?

Every coefficient is wrong by 20 %, up or down by chance. The choice then runs on the true ones with fresh
lengths, beside every mode with the split that is best there. Regret is the time of the choice over the time of the
best, minus 1.
"""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import facts, hardware, parser, read_json, table, whole_number, write_json
from benchmarks.simulated import FOLDER, LABEL
from solrl.runtime.advisor import advise, modes, tune
from solrl.runtime.simulator import simulate
from solrl.runtime.workload import Setting, draw, load_setting

ERROR = 0.2
TARGETS = (0.01, 0.05)
NOTES = """\
  regret        time of the chosen mode and split over the best of all modes and splits in hindsight, - 1
  moves wrongly auto left colocated although nothing beats it by more than 1 % in hindsight
  stays wrongly auto stayed although another mode is more than 1 % faster in hindsight
  always X      the regret of a rule that always takes mode X (async_score with its best split)"""


@dataclass(frozen=True)
class Score:
    """One workload."""

    name: str
    chosen: str
    best: str
    regret: float
    gain: float
    """Of the best over colocated."""
    seconds: dict[str, float]
    """Mode -> seconds a batch in hindsight."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for; 1 when a target is missed."""
    options_of = parser("auto_regret", __doc__.split("\n")[0])
    options_of.add_argument("--every", type=whole_number, default=1, help="one workload in so many (1)")
    options_of.add_argument("--offset", type=int, default=0, help="which one of them (0)")
    options_of.add_argument("--fresh", type=whole_number, default=2, help="samples of lengths in hindsight (2)")
    options_of.add_argument("--seed", type=whole_number, default=1, help="of errors and lengths (1)")
    options_of.add_argument("--from", dest="parts", nargs="+", type=Path, metavar="FILE", help="JSON files of --every")
    options = options_of.parse_args(argv)
    if options.parts:
        parts = [read_json(path, "auto_regret") for path in options.parts]
        scores = [Score(**one) for part in parts for one in part["scores"]]
        return finish(scores, sum(part["cpu_s"] for part in parts), parts[0]["environment"])
    begin = time.process_time()
    picked = list(enumerate(grid()))[options.offset :: options.every]
    scores = [score(name, setting, 1000 * options.seed + number, options.fresh) for number, (name, setting) in picked]
    known, cpu_s = facts(), time.process_time() - begin
    write_json(options.json, {
        "benchmark": "auto_regret", "arguments": list(argv), "environment": known, "cpu_s": cpu_s,
        "scores": [asdict(s) for s in scores],
    })  # fmt: skip
    return finish(scores, cpu_s, known)


def finish(scores: Sequence[Score], cpu_s: float, known: dict[str, Any]) -> int:
    """Print; 1 when a target is missed."""
    print(report(scores, cpu_s))
    print(hardware(known))
    regrets = np.array([s.regret for s in scores])
    return int(np.median(regrets) > TARGETS[0] or np.quantile(regrets, 0.95) > TARGETS[1])


def grid() -> Iterator[tuple[str, Setting]]:
    """(name, workload) of every combination in auto_grid.toml."""
    for part in tomllib.loads((FOLDER / "auto_grid.toml").read_text())["grids"]:
        base = load_setting(FOLDER / f"{part['base']}.toml").with_values(part["values"])
        for combination in itertools.product(*(axis.items() for axis in part["axes"])):
            values: dict[str, Any] = {}
            for _, change in combination:
                values |= change
            yield f"{base.name}: " + ", ".join(name for name, _ in combination), base.with_values(values)


def disturbed(setting: Setting, seed: int) -> Setting:
    """Every coefficient 20 % up or down."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    names = [f"{role}.{name}" for role in ("explore", "score") for name in ("a_s", "b_s", "c_s", "d_s")]
    names += ["train.gpu_s_per_token", "train.gpu_s_per_job"]
    tree = setting.model_dump()
    values = {}
    for name, sign in zip(names, generator.choice([1 - ERROR, 1 + ERROR], size=len(names)), strict=True):
        section, key = name.split(".")
        values[name] = tree[section][key] * float(sign)
    return setting.with_values(values)


def score(name: str, setting: Setting, seed: int, num_fresh: int) -> Score:
    """Plan with errors, run in truth."""
    guess = disturbed(setting, seed)
    advice = advise(guess, [draw(guess, seed)])
    fresh = [draw(setting, 10**6 + 100 * seed + number) for number in range(num_fresh)]
    seconds, chosen_s = dict[str, float](), float("inf")
    for mode, deployments in modes(setting).items():
        made = [make(setting) for make in deployments]

        def cost(place: int, made: Any = made) -> float:
            return sum(simulate(setting, sample, made[place]).seconds_per_batch for sample in fresh) / len(fresh)

        _, seconds[mode] = tune(deployments, cost)
        if mode == advice.mode:
            place = next(place for place, one in enumerate(made) if one.split == advice.split)
            chosen_s = cost(place)
            seconds[mode] = min(seconds[mode], chosen_s)
    best = min(seconds, key=lambda mode: seconds[mode])
    return Score(
        name, advice.mode, best, chosen_s / seconds[best] - 1, 1 - seconds[best] / seconds["colocated"], seconds
    )  # fmt: skip


def report(scores: Sequence[Score], cpu_s: float) -> str:
    """Everything as text."""
    names = list(dict.fromkeys(mode for s in scores for mode in s.seconds))
    rows = [_row("auto", [s.regret for s in scores])]
    rows += [_row(f"always {mode}", [_always(s, mode) for s in scores]) for mode in names]
    chosen = {mode: sum(s.chosen == mode for s in scores) for mode in names}
    best = {mode: sum(s.best == mode for s in scores) for mode in names}
    moves = [s for s in scores if s.chosen != "colocated" and s.gain < 0.01]
    shifts = [s for s in moves if s.chosen == "shiftable"]
    stays = [s for s in scores if s.chosen == "colocated" and s.gain > 0.01]
    worst = sorted(scores, key=lambda s: -s.regret)[:5]
    return "\n".join([
        f"auto_regret: {len(scores)} workloads, every coefficient off by {ERROR:.0%}, one sample of lengths",
        LABEL.split(";")[0],
        "",
        table(["regret", "median", "p95", "worst", "mean"], rows),
        "",
        table(["", *names], [["chosen", *(str(chosen[mode]) for mode in names)],
                             ["best in hindsight", *(str(best[mode]) for mode in names)]]),
        "",
        f"moves wrongly: {len(moves)} of {len(scores)} ({len(shifts)} of them to shiftable), mean regret "
        f"{_mean([s.regret for s in moves]):.2%}",
        f"stays wrongly: {len(stays)} of {len(scores)}, mean regret {_mean([s.regret for s in stays]):.2%}",
        f"the best mode in hindsight saves {_mean([s.gain for s in scores]):.1%} of colocated's time on average, "
        f"at most {max(s.gain for s in scores):.1%}",
        "worst choices:",
        *(f"  {s.regret:6.2%}  {s.chosen} for {s.best}: {s.name}" for s in worst),
        f"targets: median <= {TARGETS[0]:.0%}, p95 <= {TARGETS[1]:.0%}; {cpu_s:.0f} s of CPU",
        "",
        NOTES,
    ])  # fmt: skip


def _row(name: str, regrets: Sequence[float]) -> list[str]:
    values = np.array(regrets)
    cells = (np.median(values), np.quantile(values, 0.95), values.max(), values.mean())
    return [name, *(f"{float(value):.2%}" for value in cells)]


def _always(one: Score, mode: str) -> float:
    return one.seconds.get(mode, one.seconds["colocated"]) / one.seconds[one.best] - 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
