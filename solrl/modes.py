"""``runtime.mode = auto``: what a measured step says about the modes, by simulation (runtime/advisor.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.runtime.advisor import Advice, advise
from solrl.runtime.controller import PAUSE
from solrl.runtime.workload import Sample, Setting

UNCERTAINTY = 0.2
"""How far scoring may turn out faster or slower against drawing than measured."""
LEAST_S = 1e-6
"""A stage that costs less than the clock shows still takes time in a simulation."""


def advise_mode(config: Config, clock: Stopwatch, num_processes: int) -> Advice:
    """The mode that is expected to be the fastest, from a colocated step as the first process has timed it."""
    setting, sample = measured(config, clock.laps, num_processes)
    return advise(setting, [sample], uncertainty=UNCERTAINTY)


def measured(config: Config, laps: Mapping[str, Sequence[float]], num_processes: int) -> tuple[Setting, Sample]:
    """A step for the simulator: a job is a micro-batch, a round a denoising step of it.

    ``laps`` are seconds of each micro-batch by phase, of one process. The lengths of jobs spread as they do: the
    process's micro-batches stand for all. Micro-batches that span two groups are spread over the groups, at the same
    total work.
    """
    groups, size = config.prompts.per_step, config.batch.rollout
    stages = [
        (name, stage)
        for name, stage in (("explore", config.explore), ("regenerate", config.regenerate))
        if stage.enabled
    ]
    batches = {name: -(-groups * stage.group_size // size) for name, stage in stages}
    mine = {name: -(-number // num_processes) for name, number in batches.items()}
    scored, drawn = list(laps.get("score", ())), {name: list(laps.get(name, ()))[: mine[name]] for name in batches}
    scored = scored[: sum(mine.values())]  # an audit's come after them
    per_batch = {name: max(fmean(drawn[name] or [0.0]), LEAST_S) for name in batches}
    first, stage = stages[0]
    round_s = per_batch[first] / stage.num_steps
    jobs = {name: -(-stage.group_size // size) for name, stage in stages}
    passes = [
        {
            "num_jobs": jobs[name],
            "explore": {"median": per_batch[name] * batches[name] / (groups * jobs[name]) / round_s, "low": LEAST_S},
            "score": {"median": batches[name] / (groups * jobs[name]), "low": LEAST_S},
        }
        for name, _ in stages
    ]
    score_s = max(fmean(scored or [0.0]), LEAST_S)
    shift_s = (round_s + score_s) / 4  # weights stay where they are: a shift waits for half a round
    last = jobs[stages[-1][0]]
    setting = Setting.model_validate(
        {
            "name": "measured",
            "cluster": {"gpus": num_processes, "gpus_per_node": num_processes},
            "explore": {"c_s": round_s, "d_s": LEAST_S, "capacity_jobs": 1, "down_s": round_s / 2},
            "score": {"c_s": score_s, "d_s": LEAST_S, "capacity_jobs": 1, "down_s": score_s / 2},
            "train": {
                "gpus": num_processes,
                "gpu_s_per_job": sum(laps.get("update", ())) * num_processes / (groups * last),
            },
            "batch": {
                "num_batches": 4 if config.runtime.staleness else 1,  # only several can overlap
                "num_groups": groups,
                "staleness": config.runtime.staleness,
            },
            "passes": passes,
            "planner": {"shift_s": shift_s, "pause_s": PAUSE * shift_s, "unit": "job", "period_s": 10 * shift_s},
        }
    )
    return setting, _sample(setting, drawn, scored)


def _sample(setting: Setting, drawn: Mapping[str, Sequence[float]], scored: Sequence[float]) -> Sample:
    """Lengths for every job, as the measured seconds of the passes' micro-batches spread."""
    explore, score, place = [], [], 0
    for one, seconds in zip(setting.passes, drawn.values(), strict=True):
        assert one.score is not None
        theirs, place = scored[place : place + len(seconds)], place + len(seconds)
        shape = (setting.batch.num_batches * setting.batch.num_groups, one.num_jobs)
        explore.append(_spread(seconds, one.explore.median, shape))
        score.append(_spread(theirs, one.score.median, shape))
    return Sample.of_passes(explore, score)


def _spread(seconds: Sequence[float], mean: float, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """``seconds`` over and over, in an order that means nothing, scaled to a ``mean``."""
    found = np.maximum(np.resize(seconds or [1.0], shape), LEAST_S)
    return np.random.Generator(np.random.Philox(key=0)).permuted(found * (mean / found.mean()))
