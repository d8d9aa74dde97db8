"""SANA 1.0 and 1.5: Gemma's states with a mask and no instruction before the prompt, timestep = 1000 sigma."""

from __future__ import annotations

import torch
from diffusers import SanaPipeline
from torch import Tensor

from solrl.config import ModelConfig
from solrl.flow import sana_sigmas
from solrl.models.base import DiffusersPolicy
from solrl.types import Conditioning, SolrlError


class SanaPolicy(DiffusersPolicy):
    """A SanaPipeline as a policy. Latents are [channels, rows, columns]."""

    pipeline_class = SanaPipeline
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__(model, device)
        architecture = self.pipeline.transformer.config
        if architecture.guidance_embeds:
            raise SolrlError(f"{model.path} has a guidance embedding (step-distilled, as Sprint): not trainable here")
        self.timestep_scale = 1000 * architecture.timestep_scale

    def sigmas(self, num_steps: int) -> Tensor:
        """Equal steps without a shift, whatever the folder's scheduler (Sol-RL's reference code)."""
        return sana_sigmas(num_steps)

    def encode_alone(self, prompt: str) -> Conditioning:
        """See DiffusersPolicy."""
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            [prompt], do_classifier_free_guidance=False, device=self.device,
            max_sequence_length=self.model.max_text_tokens, complex_human_instruction=None,
        )  # fmt: skip
        return Conditioning(embeds, mask=mask)

    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See DiffusersPolicy."""
        return self.transformer(
            latents.to(conditioning.embeds.dtype),
            encoder_hidden_states=conditioning.embeds,
            encoder_attention_mask=conditioning.mask,
            timestep=sigma * self.timestep_scale,
            return_dict=False,
        )[0].float()
