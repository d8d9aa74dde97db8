"""Transformer blocks of the three families as diffusers has them, at real widths, with LoRA adapters, and their inputs.

The stacks name their lists of blocks as the whole transformers do, so that the layer rules of `solrl.quant.layers` and
the compiler of `solrl.compute` treat them alike. Weights are diffusers' random initial ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_flux import (
    FluxPosEmbed,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from solrl.quant.layers import DEFAULT_RULES, Rules
from solrl.types import LoraPair

RULES: dict[str, Rules] = {
    "flux": DEFAULT_RULES["FluxTransformer2DModel"],
    "sd3": DEFAULT_RULES["SD3Transformer2DModel"],
    "sana": DEFAULT_RULES["SanaTransformer2DModel"],
}
ADAPTED = ["to_q", "to_k", "to_v", "to_out.0"]


class Shape(NamedTuple):
    """A family's geometry."""

    name: str
    heads: int
    head_size: int
    image_tokens: int  # a square number
    text_tokens: int


REAL = {
    "flux": Shape("FLUX.1-dev, 512 x 512, a double and a single block", 24, 128, 1024, 128),
    "sd3": Shape("SD3.5-Large, 1024 x 1024, a joint block", 38, 64, 4096, 333),
    "sana": Shape("SANA-1.6B, 1024 x 1024, a block", 70, 32, 1024, 300),
}
TINY = {
    "flux": Shape("FLUX, tiny", 2, 32, 16, 5),
    "sd3": Shape("SD3.5, tiny", 2, 32, 16, 5),
    "sana": Shape("SANA, tiny", 2, 32, 16, 5),
}


class Stack(nn.Module):
    """Blocks called one after another: (image tokens, text tokens, more) -> image tokens."""

    def __init__(self, blocks: list[nn.Module], single_blocks: list[nn.Module]) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(blocks)
        if single_blocks:
            self.single_transformer_blocks = nn.ModuleList(single_blocks)


class FluxStack(Stack):
    """A double and a single block."""

    def __init__(self, shape: Shape) -> None:
        width = shape.heads * shape.head_size
        sizes = (width, shape.heads, shape.head_size)
        super().__init__([FluxTransformerBlock(*sizes)], [FluxSingleTransformerBlock(*sizes)])

    def forward(self, image: Tensor, text: Tensor, embedding: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Image tokens after both blocks."""
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            text, image = block(image, text, embedding, (cosine, sine))
        return image


class Sd3Stack(Stack):
    """A joint block."""

    def __init__(self, shape: Shape) -> None:
        width = shape.heads * shape.head_size
        super().__init__([JointTransformerBlock(width, shape.heads, shape.head_size, qk_norm="rms_norm")], [])

    def forward(self, image: Tensor, text: Tensor, embedding: Tensor) -> Tensor:
        """Image tokens after the block."""
        for block in self.transformer_blocks:
            text, image = block(image, text, embedding)
        return image


class SanaStack(Stack):
    """A block of linear attention, cross attention and convolutions."""

    def __init__(self, shape: Shape) -> None:
        width = shape.heads * shape.head_size
        cross_heads = 20 if width == 2240 else 2
        block = SanaTransformerBlock(
            width, shape.heads, shape.head_size, num_cross_attention_heads=cross_heads,
            cross_attention_head_dim=width // cross_heads, cross_attention_dim=width, attention_bias=False,
        )  # fmt: skip
        super().__init__([block], [])
        self.side = round(shape.image_tokens**0.5)

    def forward(self, image: Tensor, text: Tensor, embedding: Tensor) -> Tensor:
        """Image tokens after the block."""
        for block in self.transformer_blocks:
            image = block(image, encoder_hidden_states=text, timestep=embedding, height=self.side, width=self.side)
        return image


def stack_of(family: str, shape: Shape, device: torch.device) -> nn.Module:
    """The family's blocks in bfloat16, with a LoRA of rank 32 on the attention's projections, B = 0."""
    torch.manual_seed(0)  # diffusers' and peft's initial weights know no generator
    with torch.device(device):
        stack = {"flux": FluxStack, "sd3": Sd3Stack, "sana": SanaStack}[family](shape)
        stack.requires_grad_(False).eval().to(torch.bfloat16)
        lora = LoraConfig(r=32, lora_alpha=32, target_modules=ADAPTED)
        adapted: nn.Module = inject_adapter_in_model(lora, stack)
    return adapted


def inputs_of(family: str, shape: Shape, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """What the stack's forward takes for ``batch`` samples."""
    generator = torch.Generator(device).manual_seed(1)
    width = shape.heads * shape.head_size

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16()

    image, text = normal(batch, shape.image_tokens, width), normal(batch, shape.text_tokens, width)
    if family == "sana":
        return image, text, normal(batch, 6 * width)
    if family == "sd3":
        return image, text, normal(batch, width)
    side = round(shape.image_tokens**0.5)
    places = torch.zeros(shape.text_tokens + shape.image_tokens, 3, device=device)
    places[shape.text_tokens :, 1] = torch.arange(side, device=device).repeat_interleave(side)
    places[shape.text_tokens :, 2] = torch.arange(side, device=device).repeat(side)
    axes = [shape.head_size // 8, shape.head_size * 7 // 16, shape.head_size * 7 // 16]
    cosine, sine = FluxPosEmbed(10000, axes)(places)
    return image, text, normal(batch, width), cosine, sine


def adapters_of(stack: nn.Module, seed: int) -> dict[str, LoraPair]:
    """An adapter for every adapted layer that moves its weight by half of its size."""
    pairs: dict[str, LoraPair] = {}
    for index, (name, module) in enumerate(sorted(stack.named_modules())):
        if isinstance(module, LoraLayer):
            base: Any = module.get_base_layer()
            generator = torch.Generator(base.weight.device).manual_seed(1000 * seed + index)
            like = {"generator": generator, "device": base.weight.device}
            a = torch.randn(32, base.in_features, **like)
            b = torch.randn(base.out_features, 32, **like)
            pairs[name] = LoraPair(a, b, float(0.5 * base.weight.float().std() / 32**0.5))
    return pairs
