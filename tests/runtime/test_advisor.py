"""``auto``: what it picks, and that it can stay."""

from __future__ import annotations

import pytest

from solrl.runtime.advisor import advise, modes, perturbed, tune
from solrl.runtime.simulator import simulate
from solrl.runtime.workload import draw
from tests.runtime.parts import tiny_setting


def test_without_a_scoring_role_and_without_staleness_there_is_nothing_but_colocated() -> None:
    setting = tiny_setting(**{"passes.0.score": None, "batch.staleness": 0})
    advice = advise(setting, [draw(setting, 0)])
    assert (advice.mode, advice.gain, len(advice.options)) == ("colocated", 0.0, 1)
    assert str(advice).startswith("stay colocated")


def test_a_short_judge_is_not_worth_leaving_colocated() -> None:
    free = dict.fromkeys([f"{role}.{way}_s" for role in ("explore", "score", "train") for way in ("up", "down")], 0)
    setting = tiny_setting(**{"passes.0.score": {"median": 2}, "batch.staleness": 0, **free})
    assert advise(setting, [draw(setting, 0)], margin=0.05).mode == "colocated"


def test_the_advice_is_the_fastest_option_and_says_by_how_much() -> None:
    setting = tiny_setting(**{"passes.0.score.median": 1500, "batch.staleness": 1})
    sample = draw(setting, 0)
    advice = advise(setting, [sample])
    assert {option.mode for option in advice.options} == {"colocated", "async_score", "shiftable"}
    stay = advice.options[0]
    assert advice.seconds_per_batch == min(option.seconds_per_batch for option in advice.options)
    assert advice.gain == pytest.approx(1 - advice.seconds_per_batch / stay.seconds_per_batch)
    made = next(make(setting) for make in modes(setting)[advice.mode] if make(setting).split == advice.split)
    assert simulate(setting, sample, made).seconds_per_batch == advice.seconds_per_batch
    assert "simulated" in str(advice)


def test_with_uncertainty_the_expectation_is_the_mean_over_the_cases() -> None:
    setting = tiny_setting()
    sample = draw(setting, 0)
    advice = advise(setting, [sample], uncertainty=0.2)
    cases = [setting, *(perturbed(setting, {"score": factor}) for factor in (0.8, 1.2))]
    made = [simulate(case, sample, modes(case)["colocated"][0](case)).seconds_per_batch for case in cases]
    assert advice.options[0].seconds_per_batch == pytest.approx(sum(made) / 3)


@pytest.mark.parametrize("count", range(1, 30))
def test_the_search_over_splits_finds_the_least_of_a_unimodal_cost_with_few_runs(count: int) -> None:
    for least in range(count):
        asked: list[int] = []

        def seconds(place: int, least: int = least, asked: list[int] = asked) -> float:
            asked.append(place)
            return abs(place - least) * (2.0 if place < least else 1.0)

        assert tune([lambda s: s] * count, seconds)[0] == least  # type: ignore[list-item, return-value]
        assert len(asked) == len(set(asked)) <= 4 + 4 * count.bit_length()
