"""The throughput model and its fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl.errors import SolrlError, UsageError
from solrl.runtime.throughput import BUSY_OR_NOT, Coefficients, Round, fit, refit

TRUE = Coefficients(1.8e-8, 4.8e-3, 1.7e-4, 3e-3)


def rounds(model: Coefficients, noise: float = 0.0, seed: int = 0) -> list[Round]:
    generator = np.random.Generator(np.random.Philox(key=seed))
    found = []
    for n in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for length in (200, 1000, 4000, 8000):
            seconds = model.latency(n, n * length) * (1 + noise * float(generator.standard_normal()))
            found.append(Round(n, float(n * length), seconds))
    return found


def test_a_noiseless_profile_predicts_every_load() -> None:
    found = fit(rounds(TRUE))
    assert found.error < 1e-3
    for n in (1, 3, 28, 29, 100, 300):
        for tokens in (n * 100.0, n * 6000.0):
            assert found.coefficients.throughput(n, tokens) == pytest.approx(TRUE.throughput(n, tokens), rel=0.02)


def test_a_noisy_profile_predicts_within_its_noise() -> None:
    found = fit(rounds(TRUE, noise=0.02)).coefficients
    assert found.a == pytest.approx(TRUE.a, rel=0.1)
    assert found.b + found.d == pytest.approx(TRUE.b + TRUE.d, rel=0.05)
    assert found.throughput(50, 1e5) == pytest.approx(TRUE.throughput(50, 1e5), rel=0.03)


def test_rounds_with_prefill_do_not_count() -> None:
    spoiled = [Round(r.num_jobs, r.tokens, 10 * r.seconds, prefilled=True) for r in rounds(TRUE)]
    assert fit([*rounds(TRUE), *spoiled]) == fit(rounds(TRUE))


def test_too_few_rounds_are_refused_in_one_line() -> None:
    with pytest.raises(SolrlError, match="profile a grid of loads") as error:
        fit([Round(1, 100.0, 0.01)] * 10)
    assert "\n" not in str(error.value)
    with pytest.raises(SolrlError, match="clock"):
        fit([Round(n, 10.0 * n, 0.0) for n in range(1, 9)])


def test_running_rounds_move_a_and_d_and_leave_b_and_c() -> None:
    slower = Coefficients(2 * TRUE.a, TRUE.b, TRUE.c, 3 * TRUE.d)
    found = refit(TRUE, rounds(slower))
    assert (found.b, found.c) == (TRUE.b, TRUE.c)
    assert found.a == pytest.approx(slower.a, rel=1e-6)
    assert found.d == pytest.approx(slower.d, rel=1e-6)
    assert refit(TRUE, []) is TRUE


def test_recent_rounds_weigh_more() -> None:
    slower = Coefficients(TRUE.a, TRUE.b, TRUE.c, 3 * TRUE.d)
    old_first = refit(TRUE, rounds(TRUE) * 4 + rounds(slower), half_life=12)
    assert old_first.d == pytest.approx(slower.d, rel=0.2)


@pytest.mark.parametrize("values", [(-1, 1, 1, 1), (0, 0, 0, 0), (0, float("nan"), 1, 1), (0, float("inf"), 1, 1)])
def test_coefficients_that_mean_nothing_are_refused(values: tuple[float, float, float, float]) -> None:
    with pytest.raises(UsageError):
        Coefficients(*values)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300), st.floats(0, 1e6), st.floats(0, 1e-6), st.floats(0, 0.1), st.floats(1e-6, 0.1), st.floats(0, 1)
)
def test_throughput_grows_by_ever_less_with_jobs(n: int, tokens: float, a: float, b: float, c: float, d: float) -> None:
    model = Coefficients(a, b, c, d)
    first, second, third = (model.throughput(k, tokens) for k in (n - 1, n, n + 1))
    assert first <= second * (1 + 1e-9)
    assert third - second <= second - first + 1e-9 * third


def test_without_a_model_a_replica_counts_when_it_has_a_job_and_the_emptier_one_is_filled() -> None:
    assert BUSY_OR_NOT.throughput(0, 0) == 0
    for n in (1, 5, 200):
        assert BUSY_OR_NOT.throughput(n, 1e6) == pytest.approx(1, abs=2e-3)
    gains = [BUSY_OR_NOT.throughput(n + 1, 0) - BUSY_OR_NOT.throughput(n, 0) for n in range(5)]
    assert gains == sorted(gains, reverse=True)
