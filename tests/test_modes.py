"""What ``auto`` makes of a measured step: the same total work, spread over jobs as the measured micro-batches were."""

from __future__ import annotations

import time
from statistics import fmean

import pytest
import torch

from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.modes import advise_mode, measured
from tests.parts import CPU, tiny_config

PROCESSES = 4
DRAWN = {"explore": [0.6] * 8, "regenerate": [1.0] * 2, "update": [4.0]}
EVEN = [1.0] * 10
TAIL = [0.25] * 4 + [6.25] + [0.25] * 4 + [1.5]
"""As much in all, most of it in one micro-batch."""


def config(staleness: int = 0) -> Config:
    """32 micro-batches to explore on 4 processes, 8 to draw again."""
    return tiny_config(
        prompts={"per_step": 8}, batch={"rollout": 8}, explore={"group_size": 32}, regenerate={"group_size": 8},
        runtime={"staleness": staleness},
    )  # fmt: skip


def clock(scored: list[float]) -> Stopwatch:
    """That of a process whose micro-batches took so long."""
    found = Stopwatch(CPU)
    for name, laps in {**DRAWN, "score": scored}.items():
        found.laps[name] = laps
        found.seconds[name] = sum(laps)
    return found


def test_a_stopwatch_keeps_every_lap() -> None:
    found = Stopwatch(torch.device("cpu"), time.perf_counter)
    for _ in range(3):
        with found.phase("score"):
            pass
    assert len(found.laps["score"]) == 3 and sum(found.laps["score"]) == pytest.approx(found.seconds["score"])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("scored", [EVEN, TAIL])
def test_all_jobs_together_take_what_was_measured(scored: list[float], staleness: int) -> None:
    setting, sample = measured(config(staleness), clock(scored).laps, PROCESSES)
    steps = setting.batch.num_batches
    assert len(sample.explore) == len(sample.score) == setting.num_jobs == steps * 40
    assert sum(sample.explore) * setting.explore.c_s == pytest.approx(steps * PROCESSES * (8 * 0.6 + 2 * 1.0))
    assert setting.score.c_s == pytest.approx(fmean(scored))
    firsts = [length for place, length in enumerate(sample.score) if place % 5 < 4]
    assert fmean(firsts) == pytest.approx(1) and max(firsts) / min(firsts) == pytest.approx(max(scored) / min(scored))


def test_what_an_audit_scores_is_no_part_of_the_step() -> None:
    assert measured(config(), clock([*TAIL, 50.0, 50.0]).laps, PROCESSES) == measured(
        config(), clock(TAIL).laps, PROCESSES
    )


def test_a_heavy_tail_of_the_same_mean_is_a_reason_to_leave_colocated() -> None:
    """Nobody has to wait for the one judgement that takes long, when there is other work to do meanwhile."""
    even, tail = (advise_mode(config(1), clock(scored), PROCESSES) for scored in (EVEN, TAIL))
    assert even.mode == "colocated"
    assert tail.mode == "shiftable" and tail.gain > 0.05
    assert tail.options[0].seconds_per_batch > 1.1 * even.options[0].seconds_per_batch
    assert tail.seconds_per_batch < 1.03 * even.seconds_per_batch
