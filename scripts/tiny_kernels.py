"""Faster arithmetic for training small transformers on a CPU, swapped in for a while."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


class QuickRmsNorm(torch.autograd.Function):
    """Root mean square normalization over the last dimension, in float32; torch's backward takes thrice the time."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        normed = wide * scale
        context.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = context.saved_tensors
        wide = gradient.float()
        product = wide * normed
        along = product @ weight[:, None] / normed.shape[-1]
        towards = (wide * weight - normed * along) * scale
        return towards.to(gradient.dtype), product.flatten(0, -2).sum(0), None


@contextlib.contextmanager
def quick_arithmetic() -> Iterator[None]:
    """Within it, FLUX trains about a third faster on a CPU under autocast, by the same formulas."""
    attention = F.scaled_dot_product_attention

    def wide_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return attention(query.float(), key.float(), value.float(), *args, **kwargs)

    def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, epsilon: float) -> Tensor:
        return QuickRmsNorm.apply(x, weight, epsilon)

    def rotate(x: Tensor, angles: tuple[Tensor, Tensor], sequence_dim: int) -> Tensor:
        cosine, sine = (part[:, None, ::2] for part in angles)  # each is stored twice
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cosine, sine)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", wide_attention),
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch("diffusers.models.transformers.transformer_flux.apply_rotary_emb", rotate),
    ):
        yield
