"""The decoder as a part of the rollout: its memory layout, a tiny stand-in for exploration, and slices that fit."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from solrl.compute import drawing
from solrl.models.loading import quiet_loading
from solrl.types import Policy, UsageError

MEMORY_SHARE = 0.7
"""Part of the free memory that a slice's decode may take; the rest is for fragments and for what rewards need."""


def use_fast_layout_(vae: nn.Module) -> None:
    """On a GPU, convolutions of ``vae`` compute with channels last, the layout of its fast kernels."""
    if next(vae.parameters()).device.type == "cuda":
        cast(Any, vae).to(memory_format=torch.channels_last)


def load_tiny_decoder(path: str, policy: Policy) -> nn.Module:
    """The AutoencoderTiny at ``path``, to take the place of ``policy.vae``: same latents, image size, device, dtype."""
    from diffusers import AutoencoderTiny

    quiet_loading()
    full = next(policy.vae.parameters())
    try:
        tiny: Any = AutoencoderTiny.from_pretrained(path, torch_dtype=full.dtype)
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"explore.tiny_decoder {path} cannot be loaded: {first}") from error
    wanted = policy.vae.config.latent_channels
    if tiny.config.latent_channels != wanted:
        raise UsageError(
            f"explore.tiny_decoder {path} decodes {tiny.config.latent_channels} latent channels, the model has {wanted}"
        )
    tiny.to(full.device).requires_grad_(False).eval()
    for parameter in tiny.parameters():
        parameter.data = parameter.data.clone()  # as in load_pipeline
    ours, theirs = (_decode_zeros(p, 1).shape[1:] for p in (with_decoder(policy, tiny), policy))
    if ours != theirs:
        raise UsageError(f"explore.tiny_decoder {path} makes images {tuple(ours)}, the model's are {tuple(theirs)}")
    return cast(nn.Module, tiny)


def with_decoder(policy: Policy, vae: nn.Module) -> Policy:
    """The same policy, decoding with ``vae``; nothing else is copied."""
    twin = policy.sibling(policy.transformer)
    twin.vae = vae
    return twin


def decode_slice(policy: Policy, batch: int) -> int:
    """How many of ``batch`` samples to decode at once: on a GPU what fits its free memory, on a CPU all."""
    if policy.device.type == "cpu":
        return batch
    free, _ = torch.cuda.mem_get_info(policy.device)
    cached = torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)
    return largest_slice(_decode_peak(policy, 1), _decode_peak(policy, 2), int((free + cached) * MEMORY_SHARE), batch)


def largest_slice(peak_one: int, peak_two: int, room: int, batch: int) -> int:
    """The largest divisor of ``batch`` whose decode fits in ``room`` bytes, at least 1.

    Memory grows by the same amount a sample, so the peaks of one and of two samples give every other one. Slices of one
    size: a shorter last one would be a new shape, which a compiled decoder compiles anew.
    """
    per_sample = max(peak_two - peak_one, 1)
    fixed = max(peak_one - per_sample, 0)
    fitting = [size for size in range(1, batch + 1) if batch % size == 0 and fixed + size * per_sample <= room]
    return max(fitting, default=1)


def _decode_peak(policy: Policy, samples: int) -> int:
    """Bytes that decoding ``samples`` at once takes above what is allocated already."""
    torch.cuda.synchronize(policy.device)
    torch.cuda.reset_peak_memory_stats(policy.device)
    before = torch.cuda.memory_allocated(policy.device)
    _decode_zeros(policy, samples)
    torch.cuda.synchronize(policy.device)
    return int(torch.cuda.max_memory_allocated(policy.device) - before)


def _decode_zeros(policy: Policy, samples: int) -> Tensor:
    with drawing(policy):
        return policy.decode(torch.zeros(samples, *policy.latent_shape, device=policy.device))
