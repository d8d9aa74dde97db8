"""``runtime.mode = auto``: what a measured step says about the modes, by simulation (runtime/advisor.py)."""

from __future__ import annotations

from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.runtime.advisor import Advice, advise
from solrl.runtime.controller import PAUSE
from solrl.runtime.workload import Setting, draw

UNCERTAINTY = 0.2
"""How far scoring may turn out faster or slower against drawing than measured."""
LEAST_S = 1e-6
"""A stage that costs less than the clock shows still takes time in a simulation."""


def advise_mode(config: Config, clock: Stopwatch, num_processes: int) -> Advice:
    """The mode that is expected to be the fastest, from the phases of a colocated step of the first process."""
    return simulated(measured_setting(config, clock.seconds, num_processes))


def simulated(setting: Setting) -> Advice:
    """The modes' simulated times for ``setting``."""
    return advise(setting, [draw(setting, 0)], uncertainty=UNCERTAINTY)


def measured_setting(config: Config, seconds: dict[str, float], num_processes: int) -> Setting:
    """A step for the simulator: a job is a micro-batch, a round a denoising step of it.

    Micro-batches that span two groups are spread over the groups, at the same total work.
    """
    groups, size = config.prompts.per_step, config.batch.rollout
    stages = [
        (name, stage)
        for name, stage in (("explore", config.explore), ("regenerate", config.regenerate))
        if stage.enabled
    ]
    batches = {name: -(-groups * stage.group_size // size) for name, stage in stages}
    mine = {name: -(-number // num_processes) for name, number in batches.items()}
    per_batch = {name: max(seconds.get(name, 0.0), LEAST_S) / mine[name] for name in batches}
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
    score_s = max(seconds.get("score", 0.0), LEAST_S) / sum(mine.values())
    shift_s = (round_s + score_s) / 4  # weights stay where they are: a shift waits for half a round
    last = jobs[stages[-1][0]]
    return Setting.model_validate(
        {
            "name": "measured",
            "cluster": {"gpus": num_processes, "gpus_per_node": num_processes},
            "explore": {"c_s": round_s, "d_s": LEAST_S, "capacity_jobs": 1, "down_s": round_s / 2},
            "score": {"c_s": score_s, "d_s": LEAST_S, "capacity_jobs": 1, "down_s": score_s / 2},
            "train": {
                "gpus": num_processes,
                "gpu_s_per_job": seconds.get("update", 0.0) * num_processes / (groups * last),
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
