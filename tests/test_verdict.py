"""The verdict is right on runs that were made to fail, on runs that went well, and silent about noise."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl.config import Config
from solrl.image_statistics import STATISTICS
from solrl.verdict import Verdict, _alarm, judge, stops_early
from tests.parts import tiny_config

DATA = Path(__file__).parent / "data" / "verdict"

Rows = list[dict[str, float]]


def config(**sections: Any) -> Config:
    usual = {"train": {"num_steps": 40, "learning_rate": 3e-4}, "evaluate": {"num_prompts": 64, "every_steps": 8}}
    return tiny_config(**(usual | sections))


def run(
    heldout: list[float], *, error: float = 0.02, panel: list[float] | None = None, every: int = 8, **metrics: float
) -> Rows:
    """Rows of a run that is evaluated every few steps, with ``metrics`` in every step."""
    rows: Rows = []
    for step in range((len(heldout) - 1) * every + 1):
        row: dict[str, float] = {"step": step}
        if step:
            row |= {"reward/mean": 0.5, "reward/std": 0.3, "grad_norm": 0.4, "health/clean_norm": 1.0}
            row |= {"health/groups": 8, "health/zero_std_groups": 0, "health/policy_change": 1e-4}
            row |= {"health/synced_bytes": 1000} | metrics
        if step % every == 0:
            row |= {"eval/shapes/mean": heldout[step // every], "eval/shapes/stderr": error}
            if panel:
                row |= {"eval/clip_score/mean": panel[step // every], "eval/clip_score/stderr": error}
        rows.append(row)
    return rows


def with_images(rows: Rows, first: float, last: float, spread: float = 0.1) -> Rows:
    """Brightness goes straight from ``first`` to ``last``; other statistics stay."""
    for row in rows:
        if "eval/shapes/mean" in row:
            for name in STATISTICS:
                row |= {f"images/{name}/mean": first, f"images/{name}/std": spread}
            row["images/brightness/mean"] += row["step"] / rows[-1]["step"] * (last - first)
    return rows


def verdict(rows: Rows, **sections: Any) -> Verdict:
    return judge(config(**sections), rows)


def test_a_rise_beyond_its_error_with_a_panel_that_follows_is_healthy() -> None:
    found = verdict(run([0.38, 0.45, 0.56], panel=[0.58, 0.66, 0.7]))
    assert found.line == (
        "healthy: held-out shapes 0.380 -> 0.560 (+6.4 standard errors); "
        "clip_score 0.580 -> 0.700 (+4.2 standard errors), not trained on"
    )


def test_a_gain_known_prompt_by_prompt_counts_with_its_own_error() -> None:
    rows = run([0.376, 0.39, 0.409], error=0.017, panel=[0.58, 0.59, 0.56])
    assert verdict(rows).kind == "no progress"
    rows[-1] |= {"eval/shapes/gain": 0.033, "eval/shapes/gain_stderr": 0.010}
    assert verdict(rows).line.startswith("healthy: held-out shapes 0.376 -> 0.409 (+3.3 standard errors)")
    rows[-1] |= {"eval/clip_score/gain": -0.02, "eval/clip_score/gain_stderr": 0.005}
    found = verdict(rows)
    assert found.kind == "suspicious" and "clip_score 0.580 -> 0.560 (-4.0 standard errors)" in found.line


def test_without_a_panel_a_healthy_run_is_told_what_would_not_show() -> None:
    found = verdict(run([0.38, 0.56]))
    assert found.kind == "healthy" and "no second reward is watched (evaluate.rewards)" in found.line


def test_the_same_rise_with_a_larger_error_is_no_progress() -> None:
    found = verdict(run([0.38, 0.45, 0.42], error=0.03))
    assert found.kind == "no progress" and "0.380 -> 0.420 (+0.9 standard errors) after 16 steps" in found.line


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has been measured 0 times: it takes two"),
        (run([0.38]), "has been measured 1 times"),
        (run([0.38, 0.4], every=4), "after 4 steps: the weights are an average over 10"),
        (
            run([0.38, 0.45, 0.42], error=0.09),
            "a gain below 0.26 would not be seen (evaluate.num_prompts is too small)",
        ),
        (run([0.38, 0.9], error=0.0), "is measured on one prompt, which has no standard error"),
    ],
    ids=["nothing", "one evaluation", "few steps", "few prompts", "one prompt"],
)
def test_too_little_data_says_so(rows: Rows, words: str) -> None:
    found = verdict(rows)
    assert found.kind == "too early" and words in found.line


def test_a_watched_reward_that_falls_while_the_trained_one_rises_is_suspicious() -> None:
    found = verdict(run([0.38, 0.56, 0.7], panel=[0.58, 0.55, 0.4]))
    assert found.kind == "suspicious"
    assert "clip_score 0.580 -> 0.400 (-6.4 standard errors), which is not trained on: the reward may be" in found.line
    assert found.further[0].startswith("held-out shapes 0.380 -> 0.700 (+11.3")


def test_a_watched_reward_that_rose_and_fell_back_is_compared_with_its_best() -> None:
    found = verdict(run([0.38, 0.56, 0.7], panel=[0.58, 0.75, 0.6]))
    assert found.kind == "suspicious" and "clip_score 0.750 at step 8 -> 0.600" in found.line


def test_a_heldout_reward_below_its_start_is_broken_and_one_below_its_best_suspicious() -> None:
    assert verdict(run([0.38, 0.4, 0.2])).line.endswith("(-6.4 standard errors): worse than before training")
    fallen = verdict(run([0.38, 0.7, 0.5]))
    assert fallen.kind == "suspicious" and "shapes 0.700 at step 8 -> 0.500" in fallen.line


@pytest.mark.parametrize(
    ("last", "kind"), [(0.6, "healthy"), (0.25, "suspicious"), (0.75, "suspicious"), (1.1, "broken")]
)
def test_images_drift_in_units_of_their_own_spread(last: float, kind: str) -> None:
    found = verdict(with_images(run([0.38, 0.45, 0.56]), 0.5, last))
    assert found.kind == kind
    assert kind == "healthy" or f"brightness 0.5 -> {last} ({(last - 0.5) / 0.1:+.1f} times its spread" in found.line


def test_images_that_do_not_change_at_all_mean_that_updates_do_not_arrive() -> None:
    still = verdict(with_images(run([0.38, 0.4, 0.39]), 0.5, 0.5 + 1e-6))
    assert still.kind == "broken" and "after 16 updates the held-out images are those from before" in still.line
    assert verdict(with_images(run([0.38, 0.4, 0.39]), 0.5, 0.501)).kind == "no progress"
    without_updates = with_images(run([0.38, 0.4, 0.39], **{"health/policy_change": 0}), 0.5, 0.5)
    assert verdict(without_updates).kind == "no progress"


@pytest.mark.parametrize(
    ("metrics", "kind", "words"),
    [
        ({"health/synced_bytes": 0}, "broken", "the last 5 updates changed not one byte of the weights that draw"),
        ({"health/zero_std_groups": 8}, "no progress", "all scores are equal in 80 of the last 80 groups"),
        ({"health/clip_fraction": 0.95}, "no progress", "the ratio is clipped at 95% of trained timesteps"),
        ({"loss/kl": 1.0}, "suspicious", "training has changed the velocity by 71% of its size"),
    ],
)
def test_update_metrics_that_no_healthy_run_has(metrics: dict[str, float], kind: str, words: str) -> None:
    found = verdict(run([0.38, 0.4, 0.39], **metrics))
    assert found.kind == kind and words in found.line


def test_hints_are_read_only_where_something_is_wrong() -> None:
    rising, flat = run([0.38, 0.5, 0.6], grad_norm=5.0), run([0.38, 0.4, 0.39], grad_norm=5.0)
    assert "gradient" not in verdict(rising).line and "every gradient is clipped" in str(verdict(rising).further)
    assert "every gradient is clipped (norm 5, limit 1)" in verdict(flat).line


def test_the_distance_of_old_policy_is_read_as_that_of_one_update() -> None:
    """old_policy lags by d / (1 - d) updates, so the same distance says less and less as its decay grows."""
    rows = run([0.38, 0.5, 0.6])
    for number, row in enumerate(rows[1:]):
        decay = 0.001 * number
        row["health/velocity_old_distance"] = 2 * (0.1 * decay / (1 - decay)) ** 2
    assert verdict(rows).kind == "healthy"
    for row in rows[1:]:
        row["health/velocity_old_distance"] *= 4
    assert "an update changes the velocity by 18% of its size: train.learning_rate is too high" in verdict(rows).line
    assert verdict(rows, train={"old_decay_rate": 0.0}).kind == "healthy"  # then it is the policy itself


def test_rounding_in_bfloat16_is_not_read_as_a_change_by_updates() -> None:
    """Two nearly equal adapters differ by 0.5 % of the velocity there, at a lag of a thousandth of an update."""
    rows = run([0.38, 0.5, 0.6], every=20)
    for number, row in enumerate(rows[1:]):
        lag = 0.001 * number / (1 - 0.001 * number)
        row["health/velocity_old_distance"] = (
            2 * ((0.005 + 0.0014 * lag / 0.04) ** 2 + (0.03 * lag) ** 2) * (number > 0)
        )
    assert verdict(rows).kind == "healthy"


def test_a_single_image_has_no_spread_to_drift_by_and_is_not_called_unmoved() -> None:
    rows = with_images(run([0.38, 0.5, 0.6]), 0.4, 0.5, spread=0.0)
    assert verdict(rows).kind == "healthy"


def test_noise_of_few_numbers_raises_no_more_alarms_than_that_of_many() -> None:
    """Gains of two to 64 prompts that are noise: broken in a thousandth of the cases, whatever their number."""
    for prompts in (2, 4, 64):
        draws = torch.randn(20_000, prompts, generator=torch.Generator().manual_seed(prompts), dtype=torch.float64)
        z = draws.mean(1) / (draws.std(1) / prompts**0.5)
        assert 0.0004 < float((z <= -_alarm(1, prompts - 1)).double().mean()) < 0.0019


def test_latents_that_grow_or_shrink_by_half_are_suspicious() -> None:
    for factor, kind in ((1.3, "healthy"), (1.6, "suspicious"), (0.6, "suspicious")):
        rows = run([0.38, 0.5, 0.6])
        for row in rows[8:]:
            row["health/clean_norm"] *= factor
        assert verdict(rows).kind == kind


def test_noise_alone_is_an_alarm_in_at_most_two_runs_of_a_hundred() -> None:
    """300 runs that learn nothing: means scatter with exactly the error they state, training rewards with their own."""
    rng, alarms, missed = random.Random(0), 0, 0
    for _ in range(300):
        rows = run([0.4] * 6, panel=[0.6] * 6)
        for row in rows:
            for key in ("eval/shapes/mean", "eval/clip_score/mean", "reward/mean"):
                if key in row:
                    row[key] += rng.gauss(0, 0.02)
        found = verdict(rows)
        alarms += found.kind in ("suspicious", "broken")
        missed += found.kind == "healthy"
    assert alarms <= 6 and missed <= 300 * 0.06  # one-sided 2.3 % for the rise


def test_a_fall_of_four_and_a_half_errors_is_never_missed_by_looking_longer_than_needed() -> None:
    for looks in (2, 10, 40):
        rows = run([0.6] * looks + [0.6 - 0.02 * math.sqrt(2) * 4.5], every=2)
        assert verdict(rows).kind == "broken"


def test_early_stop_asks_only_at_evaluations_and_only_for_what_it_names() -> None:
    hacked, fallen = run([0.38, 0.56, 0.7], panel=[0.58, 0.55, 0.4]), run([0.38, 0.4, 0.2])
    for rows, stops in ((hacked, {"suspicious"}), (fallen, {"suspicious", "broken"})):
        for limit in ("off", "suspicious", "broken"):
            chosen = config(train={"early_stop": limit})
            assert stops_early(chosen, rows) == (limit in stops)
            assert not stops_early(chosen, rows[:-1])
    assert not stops_early(config(train={"early_stop": "suspicious"}), [])
