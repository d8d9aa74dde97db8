"""Rank statistics against definitions written out one pair at a time."""

import itertools
import math

import pytest
import torch

from solrl import fidelity
from solrl.groups import select_contrastive
from solrl.types import SolrlError


def slow_rank(values: list[float], i: int) -> float:
    """Mean place of candidate i over every order of its ties, 1 = largest."""
    above = [v for v in values if v > values[i]]
    same = [v for v in values if v == values[i]]
    return sum(range(len(above) + 1, len(above) + len(same) + 1)) / len(same)


def slow_spearman(x: list[float], y: list[float]) -> float:
    a = [slow_rank(x, i) for i in range(len(x))]
    b = [slow_rank(y, i) for i in range(len(y))]
    mean = (len(x) + 1) / 2
    top = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    return top / math.sqrt(sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b))


def slow_kendall(x: list[float], y: list[float]) -> float:
    score = untied_x = untied_y = 0
    for i, j in itertools.combinations(range(len(x)), 2):
        a, b = (x[i] > x[j]) - (x[i] < x[j]), (y[i] > y[j]) - (y[i] < y[j])
        score, untied_x, untied_y = score + a * b, untied_x + abs(a), untied_y + abs(b)
    return score / math.sqrt(untied_x * untied_y)


def draw(*shape: int, seed: int, levels: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two correlated score tables; with `levels`, rounded so that many scores tie."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    proxy = rewards + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if levels is not None:
        rewards, proxy = (rewards * levels).round(), (proxy * levels).round()
    return proxy, rewards


@pytest.mark.parametrize("levels", [None, 1, 3])
def test_correlations_equal_their_pairwise_definitions_with_and_without_ties(levels):
    proxy, rewards = draw(6, 19, seed=3, levels=levels)
    rho, tau = fidelity.spearman(proxy, rewards), fidelity.kendall(proxy, rewards)
    for g in range(6):
        x, y = proxy[g].tolist(), rewards[g].tolist()
        assert rho[g].item() == pytest.approx(slow_spearman(x, y), abs=1e-12)
        assert tau[g].item() == pytest.approx(slow_kendall(x, y), abs=1e-12)


def test_correlations_of_a_hand_worked_example():
    x, y = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert fidelity.spearman(x, y).item() == pytest.approx(4.5 / math.sqrt(4.5 * 5), abs=1e-12)
    assert fidelity.kendall(x, y).item() == pytest.approx(5 / math.sqrt(5 * 6), abs=1e-12)
    assert fidelity.ranks(x).tolist() == [4.0, 2.5, 2.5, 1.0]


def test_mean_true_rank_is_6_5_and_90_5_when_perfect_and_48_5_by_chance():
    rewards = torch.arange(96.0, dtype=torch.float64)
    best, worst = fidelity.selected_rank(rewards, rewards, 12)
    assert (best.item(), worst.item()) == (6.5, 90.5)
    shuffled = torch.stack([torch.randperm(96, generator=torch.Generator().manual_seed(s)) for s in range(500)])
    best, worst = fidelity.selected_rank(shuffled, rewards.expand(500, 96), 12)
    assert best.mean().item() == pytest.approx(48.5, abs=1.2)
    assert worst.mean().item() == pytest.approx(48.5, abs=1.2)


def test_mean_true_rank_uses_the_candidates_that_selection_keeps():
    proxy, rewards = draw(5, 24, seed=1, levels=2)
    kept = select_contrastive(proxy, keep=8).indices
    best, worst = fidelity.selected_rank(proxy, rewards, 4)
    for g in range(5):
        row = rewards[g].tolist()
        assert best[g].item() == pytest.approx(sum(slow_rank(row, i) for i in kept[g, :4].tolist()) / 4)
        assert worst[g].item() == pytest.approx(sum(slow_rank(row, i) for i in kept[g, 4:].tolist()) / 4)


def test_overlap_counts_shared_members_and_chance_is_k_over_n():
    proxy, rewards = draw(7, 30, seed=5)
    for k in (1, 4, 12):
        top, bottom = fidelity.overlap(proxy, rewards, k)
        for g in range(7):
            order_p, order_r = (sorted(range(30), key=v[g].tolist().__getitem__) for v in (proxy, rewards))
            assert top[g].item() == pytest.approx(len(set(order_p[-k:]) & set(order_r[-k:])) / k)
            assert bottom[g].item() == pytest.approx(len(set(order_p[:k]) & set(order_r[:k])) / k)
    noise, unrelated = draw(1000, 24, seed=6)[0], draw(1000, 24, seed=7)[1]
    assert fidelity.overlap(noise, unrelated, 6)[0].mean().item() == pytest.approx(6 / 24, abs=0.02)


def test_overlap_with_tied_rewards_is_its_expectation_over_random_orders_of_the_ties():
    proxy = torch.arange(10.0).flip(0)
    rewards = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    top, bottom = fidelity.overlap(proxy, rewards, 2)
    assert (top.item(), bottom.item()) == (pytest.approx(2 / 5), pytest.approx(2 / 5))


def test_kept_keys_are_means_over_groups_and_named_as_range_restricted():
    proxy, rewards = draw(4, 12, seed=9)
    got = fidelity.kept_fidelity(proxy, rewards)
    assert set(got) == {f"fidelity/kept_{name}" for name in ("spearman", "kendall", "top_rank", "bottom_rank")}
    expected = sum(slow_spearman(proxy[g].tolist(), rewards[g].tolist()) for g in range(4)) / 4
    assert got["fidelity/kept_spearman"] == pytest.approx(expected)
    perfect = fidelity.kept_fidelity(rewards[:, :24], rewards[:, :24])
    assert perfect["fidelity/kept_top_rank"] == 3.5 and perfect["fidelity/kept_bottom_rank"] == 9.5


def test_full_keys_match_the_whole_group_and_perfect_is_perfect():
    proxy, rewards = draw(96, seed=11)
    got = fidelity.full_fidelity(proxy, rewards, keep=24)
    assert got["fidelity/full_kendall"] == pytest.approx(slow_kendall(proxy.tolist(), rewards.tolist()))
    ends = fidelity.overlap(proxy, rewards, 12)
    assert got["fidelity/full_overlap_k"] == pytest.approx((ends[0].item() + ends[1].item()) / 2)
    perfect = fidelity.full_fidelity(rewards, rewards, keep=24)
    assert list(perfect.values()) == pytest.approx([1, 1, 6.5, 90.5, 1])


def test_groups_without_spread_are_left_out_and_never_give_nan():
    proxy, rewards = draw(3, 8, seed=13)
    alone = fidelity.kept_fidelity(proxy[1:], rewards[1:])
    rewards[0] = 0.25
    assert fidelity.kept_fidelity(proxy, rewards) == pytest.approx(alone)
    assert fidelity.kept_fidelity(proxy, torch.ones_like(rewards)) == {}
    assert fidelity.full_fidelity(proxy[0], rewards[0], keep=4) == {}
    assert fidelity.kept_fidelity(torch.empty(0, 8), torch.empty(0, 8)) == {}


def test_a_missing_candidate_counts_as_if_it_had_never_been_there():
    proxy, rewards = draw(2, 8, seed=15)
    present = torch.ones(2, 8, dtype=torch.bool)
    present[0, 3] = present[1, 5] = False
    proxy[0, 3] = rewards[1, 5] = math.nan
    got = fidelity.kept_fidelity(proxy, rewards, present)
    rows = [slow_spearman(proxy[g][present[g]].tolist(), rewards[g][present[g]].tolist()) for g in range(2)]
    assert got["fidelity/kept_spearman"] == pytest.approx(sum(rows) / 2)
    whole = fidelity.full_fidelity(proxy[0], rewards[0], 4, present[0])
    assert whole["fidelity/full_spearman"] == pytest.approx(rows[0])
    assert fidelity.full_fidelity(proxy[0], rewards[0], 8, present[0]) == {}
    assert fidelity.kept_fidelity(proxy, rewards, torch.zeros_like(present)) == {}


def test_a_score_that_is_not_finite_is_an_error():
    proxy, rewards = draw(2, 8, seed=17)
    proxy[1, 2] = math.nan
    with pytest.raises(SolrlError, match="proxy reward is NaN"):
        fidelity.kept_fidelity(proxy, rewards)
    with pytest.raises(SolrlError, match="a reward is NaN"):
        fidelity.full_fidelity(rewards[0], proxy[1], keep=4)
