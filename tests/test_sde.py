"""Steps with noise: Gaussians that reduce to Euler's step, and trajectories that are functions of their seeds."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from solrl.flow import flux_sigmas, sd3_sigmas
from solrl.groups import derive_seed, noise
from solrl.samplers import sample
from solrl.sde import StepFn, Transition, dance_sde, flow_cps, flow_sde, sample_trajectory

SIGMAS = flux_sigmas(6, 256)


def flow(noise_level: float) -> StepFn:
    return partial(flow_sde, noise_level=noise_level, second_sigma=float(SIGMAS[1]))


STEPS = {
    "flow_sde": flow,
    "flow_cps": lambda level: partial(flow_cps, noise_level=level),
    "dance_sde": lambda level: partial(dance_sde, noise_level=level),
}


def drift(latents: Tensor, sigma: Tensor) -> Tensor:
    """A velocity that is linear in both."""
    return 0.7 * latents - sigma.view(-1, 1) + 0.2


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", STEPS)
def test_without_noise_every_step_is_eulers(name: str) -> None:
    latents, velocity = pair()
    for grid in (SIGMAS, sd3_sigmas(6)):
        for i in range(5):
            sigma, following = (grid[j].repeat(5) for j in (i, i + 1))
            transition = STEPS[name](0.0)(latents, velocity, sigma, following)
            torch.testing.assert_close(transition.mean, latents + float(grid[i + 1] - grid[i]) * velocity)
            assert not transition.std.any()


def test_flow_sde_by_hand() -> None:
    # sigma .5 -> .4, a .7: s^2 = .49; mean = .8 (1 - .049) - .03 (1 + .49 * .5) = .72345; std = sqrt(.049)
    one = flow(0.7)(*(torch.tensor([[x]]) for x in (0.8, 0.3)), *(torch.tensor([s]).double() for s in (0.5, 0.4)))
    assert float(one.mean) == pytest.approx(0.72345, abs=1e-6)
    assert float(one.std) == pytest.approx(0.049**0.5, abs=1e-7) and float(one.kl_std) == pytest.approx(0.7, abs=1e-7)


def test_flow_sde_starts_with_the_second_sigma_in_place_of_one() -> None:
    start, second = torch.ones(1).double(), SIGMAS[1:2]
    one = flow(0.7)(torch.ones(1, 1), torch.zeros(1, 1), start, second)
    s = 0.7 / math.sqrt(1 - float(second))
    assert float(one.kl_std) == pytest.approx(s, rel=1e-6)
    assert float(one.mean) == pytest.approx(1 - s**2 / 2 * (1 - float(second)), rel=1e-6)


def test_flow_cps_by_hand_and_keeps_the_share_of_noise() -> None:
    # x0 = .65, e = .95; std = .4 sin(.35 pi); mean = .6 * .65 + sqrt(.16 - std^2) .95
    one = STEPS["flow_cps"](0.7)(
        *(torch.tensor([[x]]) for x in (0.8, 0.3)), *(torch.tensor([s]).double() for s in (0.5, 0.4))
    )
    std = 0.4 * math.sin(0.35 * math.pi)
    assert float(one.std) == pytest.approx(std, abs=1e-7)
    assert float(one.mean) == pytest.approx(0.39 + 0.95 * math.sqrt(0.16 - std**2), abs=1e-6)
    assert float(one.log_prob(torch.tensor([[0.5]]))) == pytest.approx(-((0.5 - float(one.mean)) ** 2), abs=1e-6)


def test_dance_sde_by_hand() -> None:
    # x0 = .65, score = -(.8 - .5 * .65) / .25 = -1.9; mean = .8 - .03 - .5 * .09 * 1.9 * .1 = .76145; std = .3 sqrt(.1)
    one = STEPS["dance_sde"](0.3)(
        *(torch.tensor([[x]]) for x in (0.8, 0.3)), *(torch.tensor([s]).double() for s in (0.5, 0.4))
    )
    assert float(one.mean) == pytest.approx(0.76145, abs=1e-6)
    assert float(one.std) == pytest.approx(0.3 * 0.1**0.5, abs=1e-7)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_log_prob_is_the_normals_averaged_over_dimensions(name: str) -> None:
    latents, velocity = pair()
    transition = STEPS[name](0.6)(latents, velocity, SIGMAS[1:6], SIGMAS[2:7].clamp(min=0.01))
    following = transition.mean + 0.3 * torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    normal = torch.distributions.Normal(transition.mean, transition.std.unsqueeze(1))
    torch.testing.assert_close(transition.log_prob(following), normal.log_prob(following).mean(1), atol=1e-6, rtol=1e-6)
    assert transition.log_prob(following).dtype == torch.float32


@pytest.mark.parametrize("name", STEPS)
def test_each_sample_has_the_step_of_its_own_sigma(name: str) -> None:
    latents, velocity = pair()
    together = STEPS[name](0.6)(latents, velocity, SIGMAS[:5], SIGMAS[1:6])
    for i in range(5):
        alone = STEPS[name](0.6)(latents[i : i + 1], velocity[i : i + 1], SIGMAS[i : i + 1], SIGMAS[i + 1 : i + 2])
        assert torch.equal(alone.mean, together.mean[i : i + 1]) and torch.equal(alone.std, together.std[i : i + 1])


def trajectory(seeds: list[int], noisy: Tensor, step: StepFn | None = None):  # type: ignore[no-untyped-def]
    start = noise(seeds, (8,))
    return sample_trajectory(drift, start, SIGMAS, seeds, step=step or flow(0.7), noisy=noisy, trained=noisy)


def test_where_nothing_is_noisy_a_trajectory_is_eulers_bit_for_bit() -> None:
    way = trajectory([1, 2, 3], torch.zeros(3, 6, dtype=torch.bool))
    assert torch.equal(way.latents[:, -1], sample(drift, noise([1, 2, 3], (8,)), SIGMAS))
    assert not way.log_probs.any() and way.latents.shape == (3, 7, 8)


def test_noise_comes_from_the_seed_and_only_where_it_is_wanted() -> None:
    noisy = torch.zeros(2, 6, dtype=torch.bool)
    noisy[0, 1:3], noisy[1, 4] = True, True
    way = trajectory([7, 8], noisy)
    for row, seed in enumerate((7, 8)):
        for i in range(6):
            here, there = way.latents[row, i : i + 1], way.latents[row, i + 1 : i + 2]
            velocity = drift(here, SIGMAS[i : i + 1].float())
            if noisy[row, i]:
                step = flow(0.7)(here, velocity, SIGMAS[i : i + 1], SIGMAS[i + 1 : i + 2])
                expected = step.mean + step.std * noise([derive_seed(seed, f"sde/{i}")], (8,))
                torch.testing.assert_close(way.log_probs[row, i : i + 1], step.log_prob(there), atol=1e-6, rtol=1e-6)
            else:
                expected = here + float(SIGMAS[i + 1] - SIGMAS[i]) * velocity
                assert way.log_probs[row, i] == 0
            torch.testing.assert_close(there, expected, atol=1e-6, rtol=1e-6)


def test_a_seed_gives_the_same_trajectory_in_any_company() -> None:
    noisy = (torch.arange(6) < 5).repeat(4, 1)
    together = trajectory([1, 2, 3, 4], noisy)
    swapped = trajectory([4, 3, 2, 1], noisy)
    assert torch.equal(together.latents, swapped.latents.flip(0))
    assert torch.equal(together.log_probs, swapped.log_probs.flip(0))


def test_the_same_normals_in_two_purposes_would_be_the_start_again() -> None:
    assert not torch.equal(noise([derive_seed(5, "sde/0")], (8,)), noise([5], (8,)))


def test_a_distance_of_means_is_measured_in_the_kl_std() -> None:
    one = Transition(torch.tensor([[1.0, 2.0]]), torch.tensor([9.0]), torch.tensor([0.5]))
    assert float(one.divergence(torch.tensor([[0.0, 2.0]]))) == pytest.approx(0.5 / (2 * 0.25))
