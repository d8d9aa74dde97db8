"""FLUX.1: packed 2x2 latents, CLIP pooled + T5 text, guidance embedding, timestep = sigma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from solrl.config import ModelConfig
from solrl.flow import flux_sigmas, shifted_sigmas
from solrl.models.base import decode_latents, load_pipeline
from solrl.types import Conditioning, Policy, SolrlError


class FluxPolicy(Policy):
    """A FluxPipeline's transformer, encoders and decoder as a policy. Latents are [tokens, 4 channels]."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        pipeline = load_pipeline(FluxPipeline, model, device)
        pixels = pipeline.vae_scale_factor * 2
        if model.height % pixels or model.width % pixels:
            raise SolrlError(f"model.height and model.width must be multiples of {pixels} for {model.path}")
        if not pipeline.transformer.config.guidance_embeds:
            raise SolrlError(f"{model.path} has no guidance embedding (step-distilled, as schnell): not trainable here")
        self.model = model
        self.pipeline: Any = pipeline
        self.transformer = pipeline.transformer
        self.vae, self.text_encoder, self.text_encoder_2 = pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2
        self.rows, self.columns = model.height // pixels, model.width // pixels
        self.latent_shape = (self.rows * self.columns, pipeline.transformer.config.in_channels)

    def sibling(self, transformer: nn.Module) -> Self:
        """See Policy."""
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        for name in ("model", "pipeline", "vae", "text_encoder", "text_encoder_2", "rows", "columns", "latent_shape"):
            setattr(twin, name, getattr(self, name))
        twin.transformer = transformer
        return twin

    def sigmas(self, num_steps: int) -> Tensor:
        """FLUX.1's dynamic shift by the number of tokens, or the static shift of the folder's scheduler."""
        scheduler = self.pipeline.scheduler.config
        if scheduler.use_dynamic_shifting:
            return flux_sigmas(num_steps, self.latent_shape[0])
        return shifted_sigmas(num_steps, scheduler.shift)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """See Policy."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), None, device=self.device, max_sequence_length=self.model.max_text_tokens
        )
        return Conditioning(embeds, pooled)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See Policy."""
        dtype = conditioning.embeds.dtype
        guidance = torch.full_like(sigma, self.model.guidance, dtype=torch.float32)
        assert conditioning.pooled is not None
        image_ids = FluxPipeline._prepare_latent_image_ids(1, self.rows, self.columns, latents.device, dtype)
        return self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma.to(dtype),
            guidance=guidance,
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.embeds,
            txt_ids=image_ids.new_zeros(conditioning.embeds.shape[1], 3),
            img_ids=image_ids,
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See Policy."""
        unpacked = FluxPipeline._unpack_latents(
            latents, self.model.height, self.model.width, self.pipeline.vae_scale_factor
        )
        return decode_latents(self.vae, unpacked)
