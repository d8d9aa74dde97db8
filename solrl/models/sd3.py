"""Stable Diffusion 3.5: two CLIP encoders and T5 one after the other, pooled CLIP, timestep = 1000 sigma."""

from __future__ import annotations

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from solrl.config import ModelConfig
from solrl.flow import sd3_sigmas
from solrl.models.base import DiffusersPolicy
from solrl.types import Conditioning, SolrlError


class SD3Policy(DiffusersPolicy):
    """A StableDiffusion3Pipeline (3.5 Medium or Large) as a policy. Latents are [channels, rows, columns]."""

    pipeline_class = StableDiffusion3Pipeline
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__(model, device)
        if self.pipeline.scheduler.config.get("use_dynamic_shifting"):
            raise SolrlError(f"{model.path} shifts sigmas by the image size, which no SD3.5 model does: not supported")

    def sigmas(self, num_steps: int) -> Tensor:
        """The diffusers grid, shifted twice by the folder's scheduler."""
        return sd3_sigmas(num_steps, self.pipeline.scheduler.config.shift)

    def encode_alone(self, prompt: str) -> Conditioning:
        """See DiffusersPolicy. CLIP takes its own 77 tokens, ``model.max_text_tokens`` are T5's."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            [prompt], None, None, device=self.device, do_classifier_free_guidance=False,
            max_sequence_length=self.model.max_text_tokens,
        )  # fmt: skip
        return Conditioning(embeds, pooled)

    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See DiffusersPolicy."""
        return self.transformer(
            hidden_states=latents.to(conditioning.embeds.dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=conditioning.embeds,
            pooled_projections=conditioning.pooled,
            return_dict=False,
        )[0].float()
