"""Sigma grids against the golden arrays of the reference implementations."""

import pytest
import torch

from solrl.flow import clean_from_velocity, flux_sigmas, noised, sana_sigmas, sd3_sigmas, shifted_sigmas

SD3 = {
    6: [1, 0.923343, 0.818923, 0.668327, 0.432225, 0.008929, 0],
    10: [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0],
}
FLUX = {
    6: [1, 0.903736, 0.789705, 0.652489, 0.484218, 0.273003, 0],
    10: [1, 0.944129, 0.882497, 0.814164, 0.737974, 0.652489, 0.555899, 0.445888, 0.319451, 0.172612, 0],
}
SANA = {
    6: [1, 0.83203125, 0.66796875, 0.5, 0.333984375, 0.1669921875, 0],
    10: [1, 0.8984375, 0.80078125, 0.69921875, 0.6015625, 0.5, 0.400390625, 0.30078125, 0.2001953125, 0.10009765625, 0],
}


@pytest.mark.parametrize("num_steps", [6, 10])
def test_grids_equal_the_golden_arrays(num_steps: int) -> None:
    for grid, golden in (
        (sd3_sigmas(num_steps), SD3),
        (flux_sigmas(num_steps, 1024), FLUX),
        (sana_sigmas(num_steps), SANA),
    ):
        torch.testing.assert_close(grid, torch.tensor(golden[num_steps], dtype=torch.float64), atol=1e-6, rtol=0)


def test_sd3_grid_equals_the_diffusers_scheduler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(28)
    torch.testing.assert_close(sd3_sigmas(28).float(), scheduler.sigmas, atol=1e-6, rtol=0)


def test_flux_grid_equals_the_diffusers_scheduler() -> None:
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 28, 28), mu=calculate_shift(4096, 256, 4096, 0.5, 1.15))
    torch.testing.assert_close(flux_sigmas(28, 4096).float(), scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("sigmas", [sd3_sigmas(7), flux_sigmas(7, 300), sana_sigmas(7), shifted_sigmas(7, 2.0)])
def test_grids_fall_from_one_to_zero(sigmas: torch.Tensor) -> None:
    assert len(sigmas) == 8 and sigmas[0] == 1 and sigmas[-1] == 0
    assert bool((sigmas.diff() < 0).all()) and sigmas.dtype == torch.float64


def test_the_true_velocity_leads_back_to_the_clean_latents() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 5, 3, 4, generator=generator)
    sigma = torch.linspace(0, 1, 5)
    latents = noised(clean, noise, sigma)
    torch.testing.assert_close(latents[0], clean[0])
    torch.testing.assert_close(latents[-1], noise[-1])
    torch.testing.assert_close(clean_from_velocity(latents, noise - clean, sigma), clean)
