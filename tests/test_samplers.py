"""The solvers: golden coefficients, exact solutions, and trajectories that can be moved."""

import math

import pytest
import torch
from torch import Tensor

from solrl.flow import flux_sigmas, sana_sigmas, sd3_sigmas, shifted_sigmas
from solrl.models import load_policy
from solrl.samplers import SamplerState, advance, check_grid, dpm2_coefficients, sample
from solrl.types import UsageError
from tests.parts import CPU, tiny_config

SD3_6 = [
    (0.923343, 0.076657, 0),
    (0.886912, 0.113088, 0),
    (0.816104, 0.259780, -0.075884),
    (0.646727, 0.565952, -0.212679),
    (0.020657, 3.211250, -2.231907),
    (0, 1, 0),
]
FLUX_6 = [
    (0.903736, 0.096264, 0),
    (0.873823, 0.126177, 0),
    (0.826245, 0.239476, -0.065720),
    (0.742109, 0.386836, -0.128945),
    (0.563802, 0.724509, -0.288311),
    (0, 1, 0),
]


def gaussian_velocity(mean: float, std: float):  # type: ignore[no-untyped-def]
    """Exact velocity for clean ~ N(mean, std^2); the flow maps noise z to mean + std z."""

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.double().view(-1, 1)
        variance = (1 - s) ** 2 * std**2 + s**2
        clean = mean + (1 - s) * std**2 / variance * (x.double() - (1 - s) * mean)
        noise = s / variance * (x.double() - (1 - s) * mean)
        return (noise - clean).float()

    return velocity


def test_dpm2_coefficients_equal_the_golden_ones() -> None:
    for sigmas, golden in ((sd3_sigmas(6), SD3_6), (flux_sigmas(6, 1024), FLUX_6)):
        torch.testing.assert_close(torch.tensor(dpm2_coefficients(sigmas)), torch.tensor(golden), atol=1e-5, rtol=0)
    ten = dpm2_coefficients(sd3_sigmas(10))
    torch.testing.assert_close(torch.tensor(ten[7]), torch.tensor([0.598114, 0.696312, -0.294426]), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(ten[8]), torch.tensor([0.032112, 3.202109, -2.234220]), atol=1e-5, rtol=0)
    eight = dpm2_coefficients(flux_sigmas(10, 1024))[8]
    torch.testing.assert_close(torch.tensor(eight), torch.tensor([0.540340, 0.805443, -0.345783]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_solvers_converge_to_the_exact_flow(solver: str) -> None:
    noise = torch.linspace(-2, 2, 9).view(-1, 1)
    exact = 0.7 + 0.5 * noise
    errors = [
        float((sample(gaussian_velocity(0.7, 0.5), noise, shifted_sigmas(n), solver) - exact).abs().max())
        for n in (80, 160)
    ]
    order = math.log2(errors[0] / errors[1])
    assert order > (1.6 if solver == "dpm2" else 0.9), (solver, errors)
    assert errors[1] < (0.001 if solver == "dpm2" else 0.01)


def test_the_last_dpm2_step_lands_on_the_clean_prediction_without_nan() -> None:
    out = sample(lambda x, s: torch.ones_like(x), torch.zeros(2, 3), sd3_sigmas(5), "dpm2")
    assert bool(torch.isfinite(out).all())
    rows = dpm2_coefficients(sd3_sigmas(5))
    assert rows[-1] == (0.0, 1.0, -0.0) and rows[0][2] == rows[1][2] == 0


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_trajectory_moved_at_any_step_ends_bit_equal(solver: str) -> None:
    velocity, sigmas = gaussian_velocity(0.3, 0.8), flux_sigmas(7, 300)
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    whole = sample(velocity, noise, sigmas, solver)
    for stop in range(1, 7):
        state = SamplerState(noise, None, 0)
        for _ in range(stop):
            state = advance(velocity, state, sigmas, solver)
        previous = None if state.previous_clean is None else state.previous_clean.clone()
        moved = SamplerState(state.latents.clone(), previous, state.step)
        for _ in range(7 - stop):
            moved = advance(velocity, moved, sigmas, solver)
        assert torch.equal(moved.latents, whole)


def test_dpm2_takes_no_grid_with_equal_neighbours_and_says_what_to_do() -> None:
    assert len(dpm2_coefficients(sana_sigmas(257))) == 257
    line = r"^explore.num_steps = 258 is too fine .*; lower it, or set explore.solver = euler$"
    with pytest.raises(UsageError, match=line):
        check_grid(sana_sigmas(258), "dpm2", "explore.")
    check_grid(sana_sigmas(258), "euler", "explore.")
    with pytest.raises(UsageError, match=r"^num_steps = 300 is too fine"):
        sample(lambda x, s: torch.ones_like(x), torch.zeros(1, 1), sana_sigmas(300), "dpm2")


@pytest.mark.parametrize("section", ["explore", "regenerate", "evaluate"])
def test_a_grid_that_a_stages_solver_cannot_take_is_refused_with_the_model(section: str) -> None:
    model = {"family": "sana", "path": "tiny_sana"}
    config = tiny_config(model=model, **{section: {"num_steps": 258, "solver": "dpm2"}})
    with pytest.raises(UsageError, match=f"^{section}.num_steps = 258 .* set {section}.solver = euler$"):
        load_policy(config, CPU)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(ValueError, match="euler, dpm2"):
        sample(lambda x, s: x, torch.zeros(1, 1), shifted_sigmas(2), "heun")
