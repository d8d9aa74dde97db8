"""Seeds, noise, selection, advantages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl.groups import (
    candidate_seed,
    derive_seed,
    group_advantages,
    group_seeds,
    noise,
    restrict,
    select_contrastive,
)
from solrl.types import Scores


def test_every_part_of_a_name_changes_the_seed() -> None:
    names = [(0, 1, 2, 3, "latents"), (1, 1, 2, 3, "latents"), (0, 2, 2, 3, "latents"), (0, 1, 3, 3, "latents")]
    names += [(0, 1, 2, 4, "latents"), (0, 1, 2, 3, "lora"), (0, 1, 23, 3, "latents"), (0, 12, 3, 3, "latents")]
    seeds = {candidate_seed(*name) for name in names} | {derive_seed(candidate_seed(*names[0]), "train/0")}
    assert len(seeds) == len(names) + 1 and max(seeds) >> 64 > 0


def test_a_steps_seeds_are_all_different() -> None:
    seeds = [seed for step in (1, 2) for row in group_seeds(5, step, 7, 96) for seed in row]
    assert len(set(seeds)) == 2 * 7 * 96


def test_noise_of_a_seed_does_not_depend_on_its_neighbours() -> None:
    seeds = group_seeds(0, 1, 1, 5)[0]
    rows = noise(seeds, (4, 3))
    assert torch.equal(rows[3], noise([seeds[3]], (4, 3))[0]) and rows.dtype == torch.float32
    assert abs(float(noise(group_seeds(0, 1, 1, 64)[0], (32, 32)).std()) - 1) < 0.01


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=8, max_size=20), st.sampled_from([2, 4, 8]))
def test_the_best_and_worst_are_kept_disjointly_and_ties_go_to_the_lower_index(values: list[int], keep: int) -> None:
    scores = torch.tensor([values], dtype=torch.float64)
    selection = select_contrastive(scores, keep)
    if len(set(values)) == 1:
        assert selection.groups == [] and 0 in selection.skipped
        return
    row = selection.indices[0].tolist()
    assert len(set(row)) == keep
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert row == order[: keep // 2] + order[len(order) - keep // 2 :]


def test_a_missing_score_removes_the_candidate_not_the_group() -> None:
    scores = torch.tensor([[9.0, 1, 2, 3, 0], [9.0, 1, 2, 3, 0]])
    present = torch.ones(2, 5, dtype=torch.bool)
    present[0, 0] = False
    selection = select_contrastive(scores, 4, present)
    assert selection.groups == [0, 1] and 0 not in selection.indices[0] and 0 in selection.indices[1]
    present[0, 1] = False
    selection = select_contrastive(scores, 4, present)
    assert selection.groups == [1] and "3 of 5" in selection.skipped[0] and selection.num_without_spread == 0
    assert select_contrastive(torch.zeros(2, 5), 4, present).num_without_spread == 1


def test_nan_is_refused_unless_missing_and_odd_or_large_keeps_are_refused() -> None:
    scores = torch.tensor([[1.0, float("nan"), 3.0]])
    with pytest.raises(ValueError, match="finite"):
        select_contrastive(scores, 2)
    assert select_contrastive(scores, 2, torch.tensor([[True, False, True]])).indices.tolist() == [[2, 0]]
    for keep in (3, 6, 0):
        with pytest.raises(ValueError, match="keep"):
            select_contrastive(torch.zeros(1, 4), keep)


def test_global_and_group_spread_by_hand() -> None:
    rewards = torch.tensor([[0.0, 2.0], [10.0, 14.0]])
    spread = float(torch.tensor([0.0, 2.0, 10.0, 14.0]).std(correction=0))
    expected = torch.tensor([[-1.0, 1.0], [-2.0, 2.0]])
    torch.testing.assert_close(group_advantages(rewards), expected / (spread + 1e-4))
    per_group = expected / (torch.tensor([[1.0], [2.0]]) + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, std="group"), per_group)


def test_equal_rewards_give_zero_and_missing_ones_count_nowhere() -> None:
    assert group_advantages(torch.full((2, 4), 0.7)).abs().max() == 0
    rewards = torch.tensor([[1.0, 3.0, 100.0]])
    present = torch.tensor([[True, True, False]])
    masked = group_advantages(rewards, present)
    torch.testing.assert_close(masked[:, :2], group_advantages(rewards[:, :2]))
    assert masked[0, 2] == 0


def test_restricting_scores_renumbers_values_and_latents() -> None:
    values = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    latents = {i: torch.full((2,), float(i)) for i in (0, 3, 8, 11)}
    scores = Scores(values, torch.ones(3, 4, dtype=torch.bool), latents)
    selection = select_contrastive(values, 2)
    kept = restrict(scores, selection)
    assert kept.values.tolist() == [[3, 0], [7, 4], [11, 8]]
    assert {i: float(t[0]) for i, t in kept.clean.items()} == {0: 3, 1: 0, 4: 11, 5: 8}


def test_other_rules_keep_the_middle_the_furthest_from_the_mean_or_any() -> None:
    scores = torch.tensor([[0.5, 9.0, 0.4, 0.6, 0.3, 8.0, 0.0, 7.0]])  # mean 3.2: all of the high ones are furthest
    kept = {rule: select_contrastive(scores, 4, rule=rule).indices.tolist()[0]
            for rule in ("best_worst", "extremes", "middle", "random")}  # fmt: skip
    assert kept == {
        "best_worst": [1, 5, 4, 6],
        "extremes": [1, 5, 7, 6],
        "middle": [7, 3, 0, 2],
        "random": [0, 1, 2, 3],
    }
    present = torch.tensor([[False, True, True, True, True, True, True, True]])
    assert select_contrastive(scores, 4, present, "random").indices.tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="got worst"):
        select_contrastive(scores, 4, rule="worst")
