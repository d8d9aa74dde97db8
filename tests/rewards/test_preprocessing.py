"""Preprocessing on tensors is PIL's; crops and pads lie where the libraries put them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from solrl_rewards.preprocessing import Preprocessing
from solrl_rewards.resizing import FILTERS, resize, resize_levels, shorter_side
from torch import Tensor

SIZES = [
    ((64, 64), (32, 32)),
    ((97, 50), (33, 71)),
    ((512, 512), (224, 224)),
    ((17, 40), (224, 224)),
    ((30, 30), (30, 9)),
]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_tensor(levels: np.ndarray) -> Tensor:
    return torch.from_numpy(levels.copy()).permute(2, 0, 1)[None].float()


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize(("size", "new_size"), SIZES)
def test_resized_levels_are_pils_own(filter: str, size: tuple[int, int], new_size: tuple[int, int]) -> None:
    """Noise is the hardest image there is: every rounding matters, and bicubic and lanczos overshoot."""
    levels = noise(*size) // 2 + 64 if size == (97, 50) else noise(*size)
    method = Image.Resampling[filter.upper()]
    theirs = as_tensor(np.array(Image.fromarray(levels).resize((new_size[1], new_size[0]), method)))
    ours = resize_levels(as_tensor(levels), new_size, filter)
    assert ours.shape == (1, 3, *new_size)
    if size == (97, 50):  # shrunk and enlarged: Pillow goes down first here
        assert (ours - theirs).abs().max() <= 1
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "new_size"), SIZES)
def test_without_rounding_it_is_torchs_antialiased_interpolation(
    filter: str, size: tuple[int, int], new_size: tuple[int, int]
) -> None:
    images = as_tensor(noise(*size)) / 255
    theirs = F.interpolate(images, size=new_size, mode=filter, antialias=True)
    torch.testing.assert_close(resize(images, new_size, filter), theirs, atol=2e-5, rtol=0)


def test_a_resize_to_the_same_size_changes_nothing() -> None:
    levels = as_tensor(noise(20, 30))
    assert torch.equal(resize_levels(levels, (20, 30), "bicubic"), levels)


def test_each_image_is_resized_by_itself() -> None:
    levels = torch.cat([as_tensor(noise(40, 40, seed)) for seed in range(3)])
    alone = torch.cat([resize_levels(image[None], (24, 24), "lanczos") for image in levels])
    assert torch.equal(resize_levels(levels, (24, 24), "lanczos"), alone)


def test_the_longer_side_is_rounded_down() -> None:
    assert shorter_side(100, 33, 32) == (96, 32)
    assert shorter_side(33, 100, 32) == (32, 96)


def test_8bit_preprocessing_starts_from_the_nearest_levels() -> None:
    """0.4 levels over a level is that level; without 8 bits it stays."""
    images = torch.full((1, 3, 8, 8), 100.4 / 255)
    for is_8bit, level in ((True, 100.0), (False, 100.4)):
        prepare = Preprocessing(8, is_8bit=is_8bit, mean=(0.0,) * 3, std=(1.0,) * 3)
        assert torch.allclose(prepare(images), torch.tensor(level / 255), atol=1e-6)


@pytest.mark.parametrize(("rounds_half_to_even", "first"), [(False, 1), (True, 2)])
def test_the_middle_is_cut_where_each_library_cuts_it(rounds_half_to_even: bool, first: int) -> None:
    """3 pixels too many: transformers drops one before, torchvision two."""
    rows = torch.arange(11.0)[:, None].expand(11, 8) / 16
    prepare = Preprocessing(8, is_8bit=False, rounds_half_to_even=rounds_half_to_even, mean=(0.0,) * 3, std=(1.0,) * 3)
    cut = prepare(rows.expand(1, 3, 11, 8))
    assert cut.shape == (1, 3, 8, 8) and cut[0, 0, 0, 0] * 16 == first


def test_padding_centres_the_image_on_black() -> None:
    prepare = Preprocessing(9, shape="pad", is_8bit=False, mean=(0.5,) * 3, std=(0.5,) * 3)
    padded = prepare(torch.ones(2, 3, 9, 4))
    assert padded.shape == (2, 3, 9, 9)
    assert (padded[..., 2:6] == 1).all() and (padded[..., :2] == -1).all() and (padded[..., 6:] == -1).all()


def test_a_processors_config_is_followed() -> None:
    config = {
        "size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 2,
        "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6],
    }  # fmt: skip
    levels = noise(50, 81)
    small = Image.fromarray(levels).resize((81 * 36 // 50, 36), Image.Resampling.BILINEAR)
    left, top = (small.width - 32) // 2, 2
    theirs = as_tensor(np.array(small.crop((left, top, left + 32, top + 32)))) / 255
    theirs = (theirs - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[:, None, None]
    ours = Preprocessing.from_config(config)(as_tensor(levels) / 255)
    assert ours.shape == (1, 3, 32, 32) and (ours - theirs).abs().max() < 1e-6
