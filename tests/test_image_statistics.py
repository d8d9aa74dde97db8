"""What each statistic says of images whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from solrl.image_statistics import MEANINGS, STATISTICS, brightness, colour_entropy, edge_density, sharpness


def flat(*colour: float) -> Tensor:
    return torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 16, 16)


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(seed))


def halves(left: float, right: float) -> Tensor:
    image = torch.full((1, 3, 16, 16), left)
    image[..., 8:] = right
    return image


def test_a_flat_image_has_no_edge_no_sharpness_and_one_colour() -> None:
    for image in (flat(0, 0, 0), flat(1, 1, 1), flat(0.2, 0.7, 0.4)):
        assert sharpness(image).item() == pytest.approx(0, abs=1e-12)
        assert edge_density(image).item() == 0 and colour_entropy(image).item() == 0


def test_brightness_is_the_luma_of_video() -> None:
    assert brightness(flat(1, 1, 1)).item() == pytest.approx(1)
    assert brightness(flat(0, 1, 0)).item() == pytest.approx(0.587)
    assert brightness(halves(0, 1)).item() == pytest.approx(0.5)


def test_one_edge_takes_the_two_columns_beside_it() -> None:
    assert edge_density(halves(0, 1)).item() == pytest.approx(2 / 14)
    assert edge_density(halves(0.4, 0.5)).item() == 0  # a step of a twentieth a pixel is shading
    assert sharpness(halves(0, 1)).item() == pytest.approx(2 / 14)  # Laplacian +1 and -1 in 2 of 14 columns


def test_entropy_counts_colours_in_bits() -> None:
    assert colour_entropy(halves(0, 1)).item() == pytest.approx(1)
    assert colour_entropy(halves(0.01, 0.02)).item() == 0  # one level
    assert 5.9 < colour_entropy(noise(64)).item() <= 6


def test_noise_is_sharper_and_fuller_of_edges_than_anything_smooth() -> None:
    assert sharpness(noise(64)).item() == pytest.approx(20 * (0.299**2 + 0.587**2 + 0.114**2) / 12, rel=0.05)
    assert edge_density(noise(64)).item() > 0.7
    ramp = torch.linspace(0, 1, 64).expand(1, 3, 64, 64)
    assert edge_density(ramp).item() == 0 and sharpness(ramp).item() < 1e-9


def test_values_outside_the_range_are_the_nearest_colour() -> None:
    assert colour_entropy(torch.full((1, 3, 4, 4), 1.5)).item() == 0


def test_an_image_has_the_same_numbers_in_any_batch() -> None:
    images = torch.cat([noise(16, seed) for seed in range(3)])
    for name, measure in STATISTICS.items():
        together = measure(images)
        assert together.shape == (3,) and together.dtype == torch.float64
        assert torch.equal(together[1:2], measure(images[1:2])), name


def test_every_statistic_is_explained() -> None:
    assert MEANINGS.keys() == STATISTICS.keys() and math.isclose(sum((0.299, 0.587, 0.114)), 1)
