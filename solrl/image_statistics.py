"""Four numbers of an image that a reward which is being exploited tends to move: cheap, and blind to the prompt.

They are compared between images of one size only: sharpness and edges depend on the resolution. Everything is pure:
images [B, 3, H, W] in [0, 1] in, float64 [B] out, on the images' device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""

EDGE = 0.1
"""Change of brightness over one pixel from which a pixel lies on an edge: black to white takes ten of them."""

LEVELS = 4
"""Colours are counted in LEVELS steps a channel: 64 colours, at most 6 bits."""


def brightness(images: Tensor) -> Tensor:
    """Mean luma, from 0 (black) to 1 (white)."""
    return _luma(images).mean((1, 2))


def sharpness(images: Tensor) -> Tensor:
    """Variance of the luma's Laplacian over the inner pixels: 0 for a flat image, 0.75 for uniform noise."""
    luma = _luma(images)
    inner = luma[:, 1:-1, 1:-1]
    around = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    return (around - 4 * inner).var((1, 2), correction=0)


def edge_density(images: Tensor) -> Tensor:
    """Share of inner pixels at which the luma changes by more than EDGE a pixel (central differences)."""
    luma = _luma(images)
    across = (luma[:, 1:-1, 2:] - luma[:, 1:-1, :-2]) / 2
    down = (luma[:, 2:, 1:-1] - luma[:, :-2, 1:-1]) / 2
    return ((across.square() + down.square()).sqrt() > EDGE).double().mean((1, 2))


def colour_entropy(images: Tensor) -> Tensor:
    """Shannon entropy of an image's colours in bits, LEVELS to a channel: 0 for one colour, at most 6."""
    levels = (images.double() * LEVELS).long().clamp(0, LEVELS - 1)
    colours = (levels[:, 0] * LEVELS + levels[:, 1]) * LEVELS + levels[:, 2]
    counts = torch.stack([torch.bincount(pixels, minlength=LEVELS**3) for pixels in colours.flatten(1)]).double()
    shares = counts / counts.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1) / torch.log(shares.new_tensor(2.0))


STATISTICS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sharpness": sharpness,
    "edge_density": edge_density,
    "colour_entropy": colour_entropy,
    "brightness": brightness,
}

MEANINGS = {
    "sharpness": "variance of the brightness's Laplacian: high for noise, 0 for a flat image",
    "edge_density": "share of pixels at which the brightness jumps",
    "colour_entropy": "how many colours there are, in bits (at most 6)",
    "brightness": "from 0 (black) to 1 (white)",
}
"""What each says, for people."""


def _luma(images: Tensor) -> Tensor:
    """[B, 3, H, W] -> float64 [B, H, W]."""
    return torch.einsum("bchw,c->bhw", images.double(), images.new_tensor(LUMA, dtype=torch.float64))
