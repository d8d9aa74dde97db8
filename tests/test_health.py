"""A run that cannot learn stops with the reason; a healthy one never does, however noisy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from solrl import health
from solrl.health import StepFacts, check
from solrl.types import SolrlError

HEALTHY = StepFacts(
    step=7, num_groups=4, trained_groups=4, zero_std_groups=0, num_scores=480, clean_norm=0.9, grad_norm=0.02,
    policy_change=3e-4, synced_bytes=1000,
)  # fmt: skip
IDLE = replace(HEALTHY, trained_groups=0, zero_std_groups=4, grad_norm=None, policy_change=None, synced_bytes=None)


def run(steps: list[StepFacts], **limits: float) -> list[dict[str, float]]:
    """Check one step after the other, as training does."""
    history: list[dict[str, float]] = []
    for step, facts in enumerate(steps, start=1):
        history.append({"step": step} | check(replace(facts, step=step), history, **limits))
    return history


def test_metrics_hold_every_fact_and_leave_out_what_did_not_happen():
    row = check(replace(HEALTHY, num_missing=12, trained_groups=2, zero_std_groups=1), [])
    assert row == {
        "health/groups": 4, "health/trained_groups": 2, "health/skipped_groups": 2, "health/zero_std_groups": 1,
        "health/missing_share": 0.025, "health/nonfinite": 0, "health/clean_norm": 0.9, "health/policy_change": 3e-4,
        "health/synced_bytes": 1000,
    }  # fmt: skip
    assert "health/policy_change" not in check(IDLE, []) and "health/synced_bytes" not in check(IDLE, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nonfinite": 2}, "2 trained samples hold NaN"),
        ({"grad_norm": math.nan}, "grad_norm is nan"),
        ({"grad_norm": math.inf}, "grad_norm is inf"),
        ({"clean_norm": math.inf}, "norm is inf"),
        ({"grad_norm": 0.0}, "gradient is exactly 0; the loss does not reach the adapter"),
        ({"policy_change": 0.0}, "left every adapter weight bit-equal; raise train.learning_rate"),
        ({"num_missing": 49}, r"49 of 480 scores are missing \(10%, limit 10%\).*reward.max_missing_share"),
        ({"clean_norm": 9.1}, "grown from 0.9 at the first step to 9.1"),
    ],
)
def test_one_broken_step_stops_the_run_naming_step_reason_and_remedy(change, words):
    history = run([HEALTHY] * 6)
    with pytest.raises(SolrlError, match=f"^step 7: .*{words}") as caught:
        check(replace(HEALTHY, **change), history, max_missing_share=0.1)
    assert "; " in str(caught.value) and "\n" not in str(caught.value)


def test_a_step_whose_rewards_were_all_equal_may_have_no_gradient():
    check(replace(IDLE, grad_norm=0.0, policy_change=0.0), [])


def test_the_missing_limit_itself_is_allowed():
    check(replace(HEALTHY, num_missing=48), [], max_missing_share=0.1)


def test_clean_norm_is_compared_with_the_first_step_not_the_last():
    slow_growth = [replace(HEALTHY, clean_norm=0.9 * 1.5**i) for i in range(7)]
    with pytest.raises(SolrlError, match="step 7: clean latents"):
        run(slow_growth)


def test_a_constant_reward_stops_the_run_after_64_groups_in_3_steps():
    assert len(run([HEALTHY, *[IDLE] * 15])) == 16
    with pytest.raises(SolrlError, match=r"16 steps in a row .* in 64 of the last 64 groups all scores are equal"):
        run([HEALTHY, *[IDLE] * 16])
    large = replace(IDLE, num_groups=48, zero_std_groups=48)
    with pytest.raises(SolrlError, match="step 3: 3 steps in a row"):
        run([large] * 3)


def test_groups_skipped_for_missing_scores_are_told_apart_from_equal_ones():
    with pytest.raises(SolrlError, match="of the last 64 groups 64 lacked scores and 0 had only equal ones"):
        run([replace(IDLE, zero_std_groups=0)] * 16)


def test_one_trained_group_ends_an_idle_streak():
    run(([IDLE] * 15 + [replace(HEALTHY, trained_groups=1, zero_std_groups=3)]) * 3)


def test_samples_that_never_follow_the_policy_stop_the_run():
    frozen = replace(HEALTHY, synced_bytes=0)
    run([frozen] * 9)
    run([frozen] * 9 + [HEALTHY] + [frozen] * 9)
    with pytest.raises(SolrlError, match="step 12: 10 updates in a row changed the policy but not one byte"):
        run([HEALTHY, HEALTHY, *[frozen] * 10])


def test_idle_steps_neither_count_as_frozen_nor_hide_it():
    frozen = replace(HEALTHY, synced_bytes=0)
    run([frozen, IDLE] * 9)
    with pytest.raises(SolrlError, match="step 19: 10 updates in a row"):
        run([frozen, IDLE] * 10)


def test_history_read_back_after_a_resume_continues_the_streak():
    history = run([IDLE] * 15)
    with pytest.raises(SolrlError, match="16 steps in a row"):
        check(IDLE, [{"step": 0, "eval/shapes/mean": 0.4}, *history])


def test_healthy_noise_never_stops_a_run():
    rng = np.random.default_rng(0)
    for groups, share_without_spread in ((1, 0.5), (4, 0.6), (48, 0.9)):
        steps = []
        for _ in range(300):
            skipped = int(rng.binomial(groups, share_without_spread))
            facts = replace(
                HEALTHY,
                num_groups=groups,
                trained_groups=groups - skipped,
                zero_std_groups=skipped,
                num_missing=int(rng.binomial(480, 0.02)),
                clean_norm=0.9 * math.exp(rng.normal(0, 0.2)),
                grad_norm=math.exp(rng.normal(-4, 2)),
                policy_change=math.exp(rng.normal(-12, 3)),
                synced_bytes=int(rng.integers(0, 3)),
            )
            trained = facts.trained_groups > 0
            steps.append(facts if trained else replace(facts, grad_norm=None, policy_change=None, synced_bytes=None))
        run(steps, max_missing_share=0.1)


def test_clean_norms_sum_over_ranks_to_what_one_rank_measures():
    generator = torch.Generator().manual_seed(0)
    clean = {i: torch.randn(4, 8, generator=generator) for i in range(6)}
    alone = health.clean_norms(clean, 6)
    split = health.clean_norms({0: clean[0], 4: clean[4]}, 6) + health.clean_norms(
        {i: clean[i] for i in (1, 2, 3, 5)}, 6
    )
    assert torch.equal(alone, split)
    assert alone[2].item() == pytest.approx(clean[2].square().mean().sqrt().item(), rel=1e-6)


def test_largest_change_is_zero_only_for_equal_bits():
    before = [torch.zeros(3), torch.ones(2, 2)]
    assert health.largest_change(before, [t.clone() for t in before]) == 0
    after = [torch.zeros(3), torch.ones(2, 2)]
    after[1][1, 0] -= 1e-7
    assert 0 < health.largest_change(before, after) < 2e-7
