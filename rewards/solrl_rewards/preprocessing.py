"""From images in [0, 1] to what a vision model was trained on, on the device the images are on."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_rewards.resizing import resize, resize_levels, shorter_side

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PIL_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers, as processors' configs name them


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop or pad to a square of `side` pixels, and normalize."""

    side: int
    filter: str = "bicubic"
    is_8bit: bool = True
    """Whether images pass through 8-bit levels, as they do where PIL prepares them."""
    shape: str = "crop"
    """crop: the shorter side becomes `resized` and the middle is cut out; pad: the longer one, black around it."""
    resized: int | None = None
    """Length of the resized side; None: `side`."""
    rounds_half_to_even: bool = False
    """Where the middle begins if it is half a pixel off: torchvision rounds to even, transformers down."""
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """What a preprocessor_config.json of a CLIP-like model asks for."""
        return cls(
            side=_side(config["crop_size"]),
            filter=PIL_FILTERS[config.get("resample", 3)],
            resized=_side(config["size"]),
            mean=tuple(config["image_mean"]),
            std=tuple(config["image_std"]),
        )

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] float32 in [0, 1] -> [B, 3, side, side], normalized."""
        pixels = (images * 255).round().clamp(0, 255) if self.is_8bit else images
        scale = resize_levels if self.is_8bit else resize
        pixels = scale(pixels, self._size(*images.shape[-2:]), self.filter)
        pixels = self._crop(pixels) if self.shape == "crop" else self._pad(pixels)
        if self.is_8bit:
            pixels = pixels / 255
        mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (self.mean, self.std))
        return (pixels - mean) / std

    def _size(self, height: int, width: int) -> tuple[int, int]:
        side = self.resized or self.side
        if self.shape == "crop":
            return shorter_side(height, width, side)
        return round(height * (side / max(height, width))), round(width * (side / max(height, width)))

    def _crop(self, images: Tensor) -> Tensor:
        spare = [length - self.side for length in images.shape[-2:]]
        top, left = (round(pixels / 2) if self.rounds_half_to_even else pixels // 2 for pixels in spare)
        return images[..., top : top + self.side, left : left + self.side]

    def _pad(self, images: Tensor) -> Tensor:
        below, right = (self.side - length for length in images.shape[-2:])
        return F.pad(images, (right // 2, right - right // 2, below // 2, below - below // 2))


def _side(size: int | dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    return size["shortest_edge"] if "shortest_edge" in size else min(size["height"], size["width"])
