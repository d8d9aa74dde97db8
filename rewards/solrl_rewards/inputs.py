"""What every reward checks before it scores."""

from collections.abc import Sequence

from torch import Tensor


def check_inputs(name: str, images: Tensor, prompts: Sequence[str]) -> None:
    """`images` is [B, 3, H, W] of floats and `prompts` are B strings, else ValueError."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"{name} needs a list of prompts, got {prompts!r:.80}")
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(f"{name} needs float images of shape [B, 3, H, W], got {images.dtype} {list(images.shape)}")
    if len(prompts) != len(images):
        raise ValueError(f"{name} needs one prompt an image, got {len(prompts)} prompts for {len(images)} images")
