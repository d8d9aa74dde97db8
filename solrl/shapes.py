"""A config's models on the meta device, and what one sample of each job takes; no weight is loaded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from solrl.compute import repeated_blocks
from solrl.config import Config
from solrl.errors import UsageError
from solrl.footprint import peak_bytes
from solrl.models.adapters import lora_parameters
from solrl.models.base import DiffusersPolicy, load_policy
from solrl.quant.backends import FULL
from solrl.quant.bounds import Work, measure_work
from solrl.quant.layers import default_rules, plan_layers
from solrl.quant.memory import TreeBytes, tree_bytes
from solrl.quant.trees import RolloutTrees
from solrl.types import Conditioning

META = torch.device("meta")
CLIP_TOKENS = 77


class Shapes:
    """The shapes of one config."""

    def __init__(self, config: Config) -> None:
        self.config = config
        model = config.model.model_copy(update={"cfg_scale": 1.0, "init_lora": None, "gradient_checkpointing": False})
        policy = load_policy(config.model_copy(update={"model": model}), META)
        if not isinstance(policy, DiffusersPolicy):
            raise UsageError(f"model.family {config.model.family} is your own: its shapes are not known to a plan")
        policy.to(META)  # peft leaves adapters on the CPU
        self.policy = policy
        self.is_full = not config.lora.enabled
        transformer = policy.transformer
        trained = list(transformer.parameters()) if self.is_full else lora_parameters(transformer, "default")
        self.num_trained = sum(p.numel() for p in trained)
        self.targets = config.lora.targets or policy.lora_targets
        self.plain = RolloutTrees(policy.transformer, FULL, has_adapters=not self.is_full).rollout
        dtype = next(p for p in policy.transformer.parameters() if not p.requires_grad).dtype
        nn.Module.to(policy.transformer, dtype)  # autocast computes adapters in it
        if self.is_full:
            transformer.requires_grad_()
        self.frozen = {name: _bytes(part) for name, part in policy.named_children() if name != "transformer"}
        self.text_bytes = sum(size for name, size in self.frozen.items() if name.startswith("text_encoder"))
        self.text_flops = sum(
            2.0 * sum(p.numel() for p in part.parameters())
            for name, part in policy.named_children()
            if name.startswith("text_encoder")
        )

    def conditioning(self, samples: int) -> Conditioning:
        """Encoded prompts, without having encoded any."""
        architecture: Any = self.policy.transformer.config
        tokens = self.config.model.max_text_tokens
        dtype = next(self.plain.parameters()).dtype
        width = architecture.get("joint_attention_dim") or architecture.caption_channels
        if "pooled_projection_dim" not in architecture:
            mask = torch.ones(samples, tokens, dtype=torch.int64, device=META)
            return Conditioning(torch.empty(samples, tokens, width, dtype=dtype, device=META), mask=mask)
        tokens += CLIP_TOKENS if "text_encoder_3" in self.frozen else 0  # SD3.5 appends T5's tokens to CLIP's
        pooled = torch.empty(samples, architecture.pooled_projection_dim, dtype=dtype, device=META)
        return Conditioning(torch.empty(samples, tokens, width, dtype=dtype, device=META), pooled)

    def latents(self, samples: int) -> Tensor:
        """Of ``samples``."""
        return torch.empty(samples, *self.policy.latent_shape, device=META)

    def velocity(self, samples: int = 1) -> Tensor:
        """One velocity call."""
        sigma = torch.ones(samples, device=META)
        return self.policy.velocity(self.latents(samples), sigma, self.conditioning(samples))

    def trees(self, precision: str) -> TreeBytes:
        """What base, rollout tree and explorer take."""
        return tree_bytes(self.plain, self.targets, precision, self.config.explore.quantize)

    @functools.cache  # noqa: B019
    def work(self, precision: str, downscale: int = 1) -> Work:
        """Floating-point operations of a sample, ``downscale`` times smaller; scoring is counted elsewhere."""
        drawing = self.policy.sibling(self.plain)
        if downscale > 1:
            drawing = drawing.smaller(downscale)
        latents = torch.empty(1, *drawing.latent_shape, device=META)
        sigma, prompt = torch.ones(1, device=META), self.conditioning(1)
        rules = self.config.explore.quantize or (() if precision == "full" else default_rules(self.plain))
        plan = [] if precision == "full" else plan_layers(self.plain, rules, number_format_of(precision))
        return measure_work(
            self.plain,
            plan,
            velocity=lambda: drawing.velocity(latents, sigma, prompt),
            decode=lambda: drawing.decode(latents),
            score=lambda: None,
        )

    @functools.cached_property
    def drawing_bytes(self) -> int:
        """Peak of a velocity call, a sample."""
        with torch.no_grad():
            return peak_bytes(self.velocity, self._held)

    @functools.cached_property
    def decoding_bytes(self) -> int:
        """Peak of a decode, a sample."""
        with torch.no_grad():
            return peak_bytes(lambda: self.policy.decode(self.latents(1)), self._held)

    @functools.cache  # noqa: B019
    def training_bytes(self, checkpointing: bool) -> int:
        """Peak of a forward and backward, a sample; of the gradients of all weights only those of one at a time."""
        transformer: Any = self.policy.transformer
        trained = transformer.parameters() if self.is_full else ()
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
        (transformer.enable_gradient_checkpointing if checkpointing else transformer.disable_gradient_checkpointing)()
        peak = peak_bytes(lambda: torch.autograd.backward(self.velocity().square().sum()), self._held)
        transformer.zero_grad()
        for hook in hooks:
            hook.remove()
        return peak

    @functools.cached_property
    def block(self) -> tuple[int, int]:
        """Parameters of the largest block, and those that are in none: what is gathered at once."""
        sizes = [sum(p.numel() for p in block.parameters()) for block in repeated_blocks(self.plain)]
        return max(sizes), sum(p.numel() for p in self.plain.parameters()) - sum(sizes)

    @property
    def weight_bytes(self) -> int:
        """Of one weight, as it is computed with."""
        return next(self.plain.parameters()).element_size()

    @property
    def _held(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self.policy.buffers()]


def number_format_of(precision: str) -> str:
    """The format of quantized layers; emulated or not."""
    return precision.removeprefix("emulated_")


def _bytes(part: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*part.parameters(), *part.buffers()))
