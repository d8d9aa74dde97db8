"""PIL's resizing on any device: a separable filter is a matrix for each axis.

A pixel of the result is the weighted mean of the pixels that a filter, widened by the shrinking factor, covers around
its centre. PIL works on 8-bit levels, across first and down second, with weights in 22-bit fixed point and a rounding
to whole levels after each pass. `resize_levels` does just that: products and sums of such numbers are exact in float64,
so the levels are PIL's own. (Where height and width shrink by different factors, Pillow 13 may take the passes in the
other order, which moves some pixels by one level.) `resize` leaves the roundings out, which is what torchvision does
with float images.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

PRECISION = 1 << 22  # PIL's weights are multiples of one over this


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2  # Keys' kernel with a = -1/2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _windowed_sinc(x: Tensor) -> Tensor:
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


# Kernels of the distance to the centre, and how far each reaches.
FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (_windowed_sinc, 3.0),
}


@lru_cache(maxsize=64)
def _weights(size: int, new_size: int, filter: str, device: torch.device) -> Tensor:
    """[new_size, size] float64: how much each pixel of an axis counts in each new one."""
    kernel, reach = FILTERS[filter]
    shrinking = size / new_size
    width = max(shrinking, 1.0)
    centre = (torch.arange(new_size, dtype=torch.float64)[:, None] + 0.5) * shrinking
    first = (centre - reach * width + 0.5).floor().clamp(min=0)
    end = (centre + reach * width + 0.5).floor().clamp(max=size)
    pixel = torch.arange(size, dtype=torch.float64)
    weights = kernel(((pixel - centre + 0.5) / width).abs()) * ((pixel >= first) & (pixel < end))
    weights = weights / weights.sum(1, keepdim=True)
    return ((weights * PRECISION).round() / PRECISION).to(device)


def resize(images: Tensor, size: tuple[int, int], filter: str) -> Tensor:
    """[..., H, W] floats -> [..., *size] of the same dtype; bicubic and lanczos overshoot at edges."""
    height, width = images.shape[-2:]
    if width != size[1]:
        images = images @ _weights(width, size[1], filter, images.device).to(images.dtype).T
    if height != size[0]:
        images = _weights(height, size[0], filter, images.device).to(images.dtype) @ images
    return images


def resize_levels(levels: Tensor, size: tuple[int, int], filter: str) -> Tensor:
    """[..., H, W] float32 of whole levels 0 to 255 -> [..., *size] of the same, as PIL resizes 8-bit images."""
    across = whole_levels(resize(levels.double(), (levels.shape[-2], size[1]), filter))
    return whole_levels(resize(across, size, filter)).float()


def whole_levels(values: Tensor) -> Tensor:
    """The nearest levels 0 to 255, halves upwards."""
    return (values + 0.5).floor().clamp(0, 255)


def shorter_side(height: int, width: int, side: int) -> tuple[int, int]:
    """The size of an image whose shorter side becomes `side`, as PIL-based processors round the longer one."""
    shorter = min(height, width)
    return math.floor(height * side / shorter), math.floor(width * side / shorter)
