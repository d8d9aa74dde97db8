"""Rollouts and scoring: a sample is a function of its seed, and a score is never made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from solrl.groups import group_seeds
from solrl.models import load_policy
from solrl.rollout import ScoreBoard, call_reward, exchange_clean, rollout, score
from solrl.types import Policy, Rollouts, Scores, Seeds, SolrlError
from tests.parts import ALONE, CPU, Redness, never, stopwatch, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above a cyan triangle"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(tiny_config(), CPU)


def draw(policy: Policy, prompts: list[str], seeds: Seeds) -> dict[int, Rollouts]:
    config = tiny_config()
    parts = rollout(
        policy, policy.encode(PROMPTS).rows([PROMPTS.index(p) for p in prompts]), prompts, seeds, config.explore,
        batch=config.batch, world=ALONE, clock=stopwatch(), stop=never, phase="explore",
    )  # fmt: skip
    return {part.index[0].item(): part for part in parts}


def samples(parts: dict[int, Rollouts]) -> list[Tensor]:
    return [row for part in parts.values() for row in part.clean]


def test_a_seed_gives_the_same_sample_in_any_batch_position_and_company(policy: Policy) -> None:
    seeds = group_seeds(0, 1, 2, 3)
    together = samples(draw(policy, PROMPTS, seeds))
    swapped = samples(draw(policy, PROMPTS[::-1], seeds[::-1]))
    for n in range(3):
        assert torch.equal(together[n], swapped[3 + n]) and torch.equal(together[3 + n], swapped[n])


def test_padding_is_removed_and_leaves_no_trace(policy: Policy) -> None:
    seeds = group_seeds(0, 1, 2, 3)
    parts = draw(policy, PROMPTS, seeds)
    assert [len(part.images) for part in parts.values()] == [4, 2]
    assert torch.cat([part.index for part in parts.values()]).tolist() == list(range(6))
    alone = samples(draw(policy, PROMPTS[1:], [seeds[1][1:]]))
    assert torch.equal(alone[0], samples(parts)[4])


def test_images_are_in_range_and_belong_to_their_prompts(policy: Policy) -> None:
    part = draw(policy, PROMPTS, group_seeds(0, 1, 2, 2))[0]
    assert part.images.shape == (4, 3, 32, 32) and part.images.min() >= 0 and part.images.max() <= 1
    assert part.prompts == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2


def test_a_stop_is_asked_before_every_micro_batch(policy: Policy) -> None:
    config, calls = tiny_config(), []
    parts = rollout(
        policy, policy.encode(PROMPTS), PROMPTS, group_seeds(0, 1, 2, 5), config.explore, batch=config.batch,
        world=ALONE, clock=stopwatch(), stop=lambda: calls.append(1), phase="explore",
    )  # fmt: skip
    assert sum(1 for _ in parts) == len(calls) == 3


def fake_part() -> Rollouts:
    images = torch.linspace(0, 1, 3).view(3, 1, 1, 1).expand(3, 3, 4, 4)
    return Rollouts(torch.tensor([0, 1, 2]), ["a", "b", "c"], torch.zeros(3, 2), images)


def test_scores_land_at_their_flat_positions() -> None:
    scores = score(Redness(), [fake_part()], (1, 3), world=ALONE, clock=stopwatch())
    torch.testing.assert_close(scores.values, torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64))
    assert bool(scores.present.all()) and sorted(scores.clean) == [0, 1, 2]


def test_samples_that_are_not_finite_are_the_models_failure_not_the_rewards() -> None:
    part = fake_part()
    part.clean[1, 0] = float("nan")
    with pytest.raises(SolrlError, match="1 of 3 samples came out NaN or infinite, first for prompt 'b'"):
        score(Redness(), [part], (1, 3), world=ALONE, clock=stopwatch())


class Answering:
    """A reward that gives a fixed answer, or raises it."""

    name, range, description = "answering", (0.0, 1.0), "test"

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (torch.tensor([1.0, float("nan"), 1.0]), "returned nan for 1 of 3 images, first for prompt 'b'"),
        (torch.tensor([1.0, 2.0, float("inf")]), "returned inf"),
        (torch.zeros(2), r"shape \(3,\), got \(2,\)"),
        (torch.zeros(3, 1), r"got \(3, 1\)"),
        ([0.0, 0.0, 0.0], "got list"),
        (RuntimeError("no weights"), "'answering' failed: RuntimeError: no weights"),
    ],
)
def test_a_reward_that_fails_stops_with_its_name(answer: object, says: str) -> None:
    with pytest.raises(SolrlError, match=says):
        call_reward(Answering(answer), fake_part().images, fake_part().prompts)


def test_a_missing_value_is_marked_and_may_be_anything() -> None:
    answer = (torch.tensor([0.2, float("nan"), 0.4]), torch.tensor([True, False, True]))
    values, present = call_reward(Answering(answer), fake_part().images, fake_part().prompts)
    assert present.tolist() == [True, False, True] and values[1] == 0 and bool(torch.isfinite(values).all())


def test_a_stage_without_samples_has_no_scores() -> None:
    scores = ScoreBoard((0, 4)).gather(ALONE)
    assert scores.values.shape == (0, 4)
    assert exchange_clean(Scores(scores.values, scores.present, {}), (2,), ALONE) == {}
