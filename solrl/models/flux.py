"""FLUX.1: packed 2x2 latents, CLIP pooled + T5 text, guidance embedding, timestep = sigma."""

from __future__ import annotations

import torch
from diffusers import FluxPipeline
from torch import Tensor

from solrl.config import ModelConfig
from solrl.flow import flux_sigmas, shifted_sigmas
from solrl.models.base import DiffusersPolicy
from solrl.types import Conditioning, SolrlError


class FluxPolicy(DiffusersPolicy):
    """A FluxPipeline as a policy. Latents are [tokens, 4 channels]."""

    pipeline_class = FluxPipeline
    packing = 2
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__(model, device)
        architecture = self.pipeline.transformer.config
        if not architecture.guidance_embeds:
            raise SolrlError(f"{model.path} has no guidance embedding (step-distilled, as schnell): not trainable here")

    def _set_shape(self) -> None:
        super()._set_shape()
        channels, *sides = self.latent_shape
        self.rows, self.columns = (side // self.packing for side in sides)
        self.latent_shape = (self.rows * self.columns, channels)

    def pack(self, latents: Tensor) -> Tensor:
        """See DiffusersPolicy."""
        return FluxPipeline._pack_latents(latents, *latents.shape)

    def unpack(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """See DiffusersPolicy."""
        return FluxPipeline._unpack_latents(latents, *size, self.pipeline.vae_scale_factor)

    def sigmas(self, num_steps: int) -> Tensor:
        """FLUX.1's dynamic shift by the number of tokens, or the static shift of the folder's scheduler."""
        scheduler = self.pipeline.scheduler.config
        if scheduler.use_dynamic_shifting:
            return flux_sigmas(num_steps, self.latent_shape[0])
        return shifted_sigmas(num_steps, scheduler.shift)

    def encode_alone(self, prompt: str) -> Conditioning:
        """See DiffusersPolicy."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            [prompt], None, device=self.device, max_sequence_length=self.model.max_text_tokens
        )
        return Conditioning(embeds, pooled)

    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See DiffusersPolicy."""
        dtype = conditioning.embeds.dtype
        image_ids = FluxPipeline._prepare_latent_image_ids(1, self.rows, self.columns, latents.device, dtype)
        return self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma.to(dtype),
            guidance=torch.full_like(sigma, self.model.guidance, dtype=torch.float32),
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.embeds,
            txt_ids=image_ids.new_zeros(conditioning.embeds.shape[1], 3),
            img_ids=image_ids,
            return_dict=False,
        )[0].float()
