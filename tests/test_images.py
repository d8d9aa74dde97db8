"""Grids hold the pixels that were drawn, and what belongs to them."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from solrl.images import LARGEST, data_url, load_grid, save_grid
from solrl.types import SolrlError


def images(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_a_grid_comes_back_with_its_own_pixels_captions_and_rewards(tmp_path):
    drawn = images(2, 3, 3, 32, 24)
    prompts = ["a red circle", "caf\u00e9 <&> \u732b " + "very long " * 60]
    rewards = torch.tensor([[0.5, float("nan"), -1.25], [0.0, 1.0, 0.25]])
    save_grid(tmp_path / "samples" / "step_000020.png", drawn, prompts, rewards=rewards, title="step 20")
    grid = load_grid(tmp_path / "samples" / "step_000020.png")
    assert grid.prompts == prompts and grid.rewards == [[0.5, None, -1.25], [0.0, 1.0, 0.25]]
    for row, pictures in zip(drawn, grid.images, strict=True):
        for image, picture in zip(row, pictures, strict=True):
            expected = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            assert np.array_equal(np.asarray(picture), expected)


def test_small_images_are_enlarged_to_be_seen_and_large_ones_shrunk(tmp_path):
    save_grid(tmp_path / "small.png", images(1, 2, 3, 32, 32), ["p"])
    with Image.open(tmp_path / "small.png") as picture:
        assert picture.height >= 96 + 20
    save_grid(tmp_path / "large.png", images(1, 1, 3, 300, 600), ["p"])
    assert load_grid(tmp_path / "large.png").images[0][0].size == (LARGEST, LARGEST // 2)


def test_values_outside_the_range_are_clipped_not_wrapped(tmp_path):
    save_grid(tmp_path / "g.png", torch.full((1, 1, 3, 4, 4), 1.2), ["p"])
    assert np.asarray(load_grid(tmp_path / "g.png").images[0][0]).min() == 255


def test_a_shape_that_is_no_grid_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a grid takes images"):
        save_grid(tmp_path / "g.png", images(2, 3, 8, 8), ["p", "q"])
    with pytest.raises(ValueError, match="a grid takes images"):
        save_grid(tmp_path / "g.png", images(2, 1, 3, 8, 8), ["p"])
    with pytest.raises(ValueError, match="a grid takes images"):
        save_grid(tmp_path / "g.png", images(1, 2, 3, 8, 8), ["p"], rewards=torch.zeros(1, 3))


def test_another_picture_is_an_error_that_names_it(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "other.png")
    with pytest.raises(SolrlError, match=r"other.png is not an image grid of solrl"):
        load_grid(tmp_path / "other.png")


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "samples").write_text("a file in the way")
    with pytest.raises(SolrlError, match=r"cannot write .*step_1.png"):
        save_grid(tmp_path / "samples" / "step_1.png", images(1, 1, 3, 8, 8), ["p"])


def test_pixel_art_is_embedded_without_loss_and_photographs_compressed():
    for width, kind in ((32, "PNG"), (256, "JPEG")):
        head, data = data_url(Image.new("RGB", (width, width))).split(",")
        assert head == f"data:image/{kind.lower()};base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            assert picture.format == kind and picture.size == (width, width)
