"""What all model families share: guidance, sizes, decoding, and opening the policy that a config names."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from solrl.config import Config, ModelConfig, PromptsConfig
from solrl.flow import block_means
from solrl.models.adapters import add_adapters, start_adapters_from
from solrl.models.encoders import TextEncoders, rests_on_host
from solrl.models.loading import load_pipeline
from solrl.plugins import find_class
from solrl.prompt_cache import PromptCache, cache_folder
from solrl.samplers import check_grid
from solrl.types import Conditioning, Policy, SolrlError, UsageError

FAMILIES = {
    "flux": "solrl.models.flux:FluxPolicy",
    "sd3": "solrl.models.sd3:SD3Policy",
    "sana": "solrl.models.sana:SanaPolicy",
}


class DiffusersPolicy(Policy):
    """A diffusers pipeline's transformer, encoders and decoder as a policy; a family adds its differences.

    With ``model.cfg_scale`` s > 1 there is classifier-free guidance wherever a velocity is asked for, in rollout, loss
    and evaluation alike: v(no prompt) + s (v(prompt) - v(no prompt)), from one call of twice the batch.

    Each prompt goes through the text encoders alone, so its encoding never depends on which others are asked for, or on
    what a cache holds. On a GPU 48 prompts of FLUX.1 take about half a second then (an estimate; a batch of them 0.3).
    """

    pipeline_class: Any
    """The diffusers class the folder must hold."""
    packing: int = 1
    """Latent pixels along a side that become one pixel of what the transformer takes."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.pipeline: Any = load_pipeline(self.pipeline_class, model, device)
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
        self._set_shape()
        self.full_size, self.full_shape = (model.height, model.width), self.latent_shape
        self.encoders = TextEncoders(self.pipeline.components, device, offload=rests_on_host(model, device))
        self.cache: PromptCache | None = None

    def _set_shape(self) -> None:
        """``latent_shape`` is that of the model's images."""
        architecture, factor, model = self.pipeline.transformer.config, self.pipeline.vae_scale_factor, self.model
        pixels = factor * self.packing * architecture.patch_size
        if model.height % pixels or model.width % pixels:
            raise SolrlError(f"model.height and model.width must be multiples of {pixels} for {model.path}")
        self.latent_shape = (architecture.in_channels, model.height // factor, model.width // factor)

    def smaller(self, factor: int) -> Self:
        """See Policy."""
        full, twin = self.model, self.sibling(self.transformer)
        twin.model = full.model_copy(update={"height": full.height // factor, "width": full.width // factor})
        try:
            twin._set_shape()
        except SolrlError as error:
            size = f"{twin.model.width} x {twin.model.height}"
            raise UsageError(f"explore.downscale = {factor} makes {size}: {error}") from error
        twin.full_size, twin.full_shape = (full.height, full.width), self.latent_shape
        return twin

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """See Policy."""
        return self.full_shape

    def start(self, noise: Tensor) -> Tensor:
        """See Policy."""
        factor = self.full_size[0] // self.model.height
        return noise if factor == 1 else self.pack(block_means(self.unpack(noise, self.full_size), factor))

    def pack(self, latents: Tensor) -> Tensor:
        """Latents [B, C, rows, columns] as the transformer takes them."""
        return latents

    def unpack(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """The reverse, for an image of ``size`` (height, width) pixels."""
        return latents

    @abstractmethod
    def encode_alone(self, prompt: str) -> Conditioning:
        """One row: a prompt through the text encoders, on ``self.device``. Called without gradient."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """See Policy. Encoders that rest in host memory come in only if ``cache`` lacks one of the prompts."""
        rows = {prompt: self.cache.read(prompt) if self.cache else None for prompt in prompts}
        fresh: dict[str, Conditioning] = {}
        lacking = [prompt for prompt, row in rows.items() if row is None]
        if lacking:
            with self.encoders.here(), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                fresh = {prompt: self._encode_alone(prompt) for prompt in lacking}
        if self.cache and fresh:
            self.cache.write(fresh)
        known = {prompt: row.to(self.device) for prompt, row in (rows | fresh).items() if row is not None}
        return Conditioning.stack([known[prompt] for prompt in prompts])

    def _encode_alone(self, prompt: str) -> Conditioning:
        try:
            return self.encode_alone(prompt)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SolrlError(f"{self.model.path} cannot encode the prompt {prompt!r}: {reason}") from error

    def prepare(self, prompts: PromptsConfig) -> None:
        """The cache that ``prompts`` asks for is in use, and the empty prompt encoded where every velocity needs it.

        For their hash a cache reads all weights of the encoders, which must not have encoded anything yet.
        """
        if prompts.cache_gb:
            recipe = f"{type(self).__qualname__}\n{inspect.getsource(type(self).encode_alone)}"
            identity = self.encoders.identity(recipe, self.model.max_text_tokens)
            self.cache = PromptCache(cache_folder(), int(prompts.cache_gb * 1e9), identity)
        if self.model.cfg_scale > 1:
            _ = self.without_prompt

    @functools.cached_property
    def without_prompt(self) -> Conditioning:
        """The empty prompt, encoded."""
        return self.encode([""])

    @property
    def device(self) -> torch.device:
        """See Policy; a transformer that is to be sharded still waits on the CPU."""
        return next(iter(self.vae.parameters())).device

    @abstractmethod
    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer's own velocity, float32, without classifier-free guidance."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See Policy."""
        if self.model.cfg_scale == 1:
            return self.predict(latents, sigma, conditioning)
        both = _repeated_before(self.without_prompt, conditioning)
        predicted = self.predict(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
        without_prompt, with_prompt = predicted.chunk(2)
        return without_prompt + self.model.cfg_scale * (with_prompt - without_prompt)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See Policy."""
        size = self.model.height, self.model.width
        images = decode_latents(self.vae, self.unpack(latents, size))
        return images if size == self.full_size else nn.functional.interpolate(images, self.full_size, mode="bilinear")

    def sibling(self, transformer: nn.Module) -> Self:
        """See Policy."""
        twin = copy.copy(self)
        twin._modules = self._modules | {"transformer": transformer}  # a plain copy would share the dict
        return twin

    def with_defaults(self) -> tuple[Self, int]:
        """(the same policy at its pipeline's default guidance, the pipeline's default number of steps)."""
        defaults = inspect.signature(self.pipeline_class.__call__).parameters
        scale = defaults["guidance_scale"].default
        is_embedded = bool(self.pipeline.transformer.config.get("guidance_embeds"))
        changes = {"guidance": scale, "cfg_scale": 1.0} if is_embedded else {"cfg_scale": scale}
        twin = self.sibling(self.transformer)
        twin.model = self.model.model_copy(update=changes)
        return twin, defaults["num_inference_steps"].default


def _repeated_before(one: Conditioning, many: Conditioning) -> Conditioning:
    """The single row ``one``, once for each row of ``many``, and then ``many``."""
    pairs = ((one.embeds, many.embeds), (one.pooled, many.pooled), (one.mask, many.mask))
    joined = [None if a is None or b is None else torch.cat([a.expand_as(b), b]) for a, b in pairs]
    return Conditioning(*joined)  # type: ignore[arg-type]


def load_policy(config: Config, device: torch.device) -> Policy:
    """The policy a config names, on ``device``: frozen weights, equal adapters "default" (active) and "old".

    A layer's initial adapter is A ~ N(0, 1/rank) and B = 0, drawn from the run seed, or what ``model.init_lora`` holds.
    Without ``lora.enabled`` there are none. UsageError for a stage whose solver cannot take the model's sigmas.
    """
    policy: Policy = find_class("model.family", config.model.family, FAMILIES)(config.model, device)
    policy.requires_grad_(False).eval()
    _check_grids(policy, config)
    if isinstance(policy, DiffusersPolicy):
        if device.type != "meta":
            policy.prepare(config.prompts)
    elif config.prompts.cache_gb:
        raise UsageError(
            f"prompts.cache_gb: model.family {config.model.family} encodes in its own way, with weights that solrl "
            "does not know: set it to 0, or derive from DiffusersPolicy"
        )
    lora = config.lora if config.lora.targets else config.lora.model_copy(update={"targets": policy.lora_targets})
    if lora.enabled:
        add_adapters(policy.transformer, lora, config.seed)
    if config.model.init_lora is not None:
        start_adapters_from(policy.transformer, config.model.init_lora, lora)
    if config.model.gradient_checkpointing:
        transformer: Any = policy.transformer
        transformer.enable_gradient_checkpointing()
    return policy


def _check_grids(policy: Policy, config: Config) -> None:
    """UsageError unless every stage's solver can take the policy's sigmas."""
    evaluate = config.evaluate
    check_grid(policy.sigmas(evaluate.num_steps), evaluate.solver, "evaluate.")
    for section, stage in (("explore.", config.explore), ("regenerate.", config.regenerate)):
        if stage.enabled:
            check_grid(policy.sigmas(stage.num_steps), stage.solver, section)


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scaled VAE latents [B, c, h, w] -> images [B, 3, H, W], float32 in [0, 1]."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
    image = vae.decode(scaled, return_dict=False)[0]
    return (image.float() / 2 + 0.5).clamp(0, 1)
