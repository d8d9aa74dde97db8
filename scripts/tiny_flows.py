"""Flow matching for each family: how its pipeline turns images into latents, and captions and noise into velocities."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from diffusers.models.activations import GELU
from solrl_rewards import scenes
from tiny_models import TEXT_LENGTH
from tiny_steps import caption_ids
from torch import Tensor, nn


class Flow(nn.Module, ABC):
    """The flow-matching loss of a pipeline's transformer and text encoders."""

    reader: ClassVar[str]  # the text encoder that learns to read beforehand and then stays as it is

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        names = ["transformer", *(name for name in pipeline.components if name.startswith("text_encoder"))]
        self.trained = nn.ModuleDict({name: getattr(pipeline, name) for name in names})
        self.pipeline = (pipeline,)  # in a tuple: not a submodule, so that copies of it stay cheap
        for module in self.trained.modules():
            if isinstance(module, (nn.GELU, GELU)):
                module.approximate = "none"  # within 5e-4 of the tanh form that inference uses, and three times as fast

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Standardized latents of images in [0, 1], as the transformer takes them."""
        vae = self.pipeline[0].vae
        latents = vae.encode(images * 2 - 1).latent_dist.mean
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor

    @abstractmethod
    def velocity(self, noised: Tensor, sigma: Tensor, captions: Sequence[str]) -> Tensor:
        """What the transformer predicts, noise - clean."""

    def loss(self, captions: Sequence[str], clean: Tensor, generator: torch.Generator) -> Tensor:
        """Mean squared error of the velocity at logit-normal noise levels."""
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(len(captions), generator=generator) + 0.2)
        noised = clean.lerp(noise, sigma.reshape(-1, *(1,) * (clean.ndim - 1)))
        with torch.autocast("cpu", torch.bfloat16):
            velocity = self.velocity(noised, sigma, captions)
        return F.mse_loss(velocity.float(), noise - clean)


class FluxFlow(Flow):
    """FLUX: packed latents, a pooled CLIP embedding, T5's states."""

    reader = "text_encoder_2"

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        side = scenes.SIZE // 4
        self.image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)

    def encode(self, images: Tensor) -> Tensor:
        latents = super().encode(images)
        return FluxPipeline._pack_latents(latents, *latents.shape)  # [B, 64, 16]

    def velocity(self, noised: Tensor, sigma: Tensor, captions: Sequence[str]) -> Tensor:
        (pipeline,) = self.pipeline
        return self.trained["transformer"](
            hidden_states=noised,
            timestep=sigma,
            guidance=torch.ones(len(captions)),
            pooled_projections=self.trained["text_encoder"](caption_ids(pipeline.tokenizer, captions)).pooler_output,
            encoder_hidden_states=self.trained["text_encoder_2"](caption_ids(pipeline.tokenizer_2, captions))[0],
            txt_ids=torch.zeros(TEXT_LENGTH, 3),
            img_ids=self.image_ids,
            return_dict=False,
        )[0]


class SD3Flow(Flow):
    """SD3: both CLIP encoders' states side by side, T5's after them, both pooled embeddings."""

    reader = "text_encoder_3"

    def velocity(self, noised: Tensor, sigma: Tensor, captions: Sequence[str]) -> Tensor:
        (pipeline,) = self.pipeline
        ids = caption_ids(pipeline.tokenizer, captions)
        clips = [self.trained[name](ids, output_hidden_states=True) for name in ("text_encoder", "text_encoder_2")]
        states = torch.cat([clip.hidden_states[-2] for clip in clips], -1)
        t5 = self.trained["text_encoder_3"](caption_ids(pipeline.tokenizer_3, captions))[0]
        return self.trained["transformer"](
            hidden_states=noised,
            timestep=sigma * 1000,
            encoder_hidden_states=torch.cat([F.pad(states, (0, t5.shape[-1] - states.shape[-1])), t5], 1),
            pooled_projections=torch.cat([clip.text_embeds for clip in clips], -1),
            return_dict=False,
        )[0]


class SanaFlow(Flow):
    """SANA: a deterministic autoencoder, Gemma's states with a mask."""

    reader = "text_encoder"

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        vae = self.pipeline[0].vae
        return vae.encode(images * 2 - 1).latent * vae.config.scaling_factor

    def velocity(self, noised: Tensor, sigma: Tensor, captions: Sequence[str]) -> Tensor:
        (pipeline,) = self.pipeline
        ids = caption_ids(pipeline.tokenizer, captions)
        mask = (ids != pipeline.tokenizer.pad_token_id).long()
        return self.trained["transformer"](
            noised,
            encoder_hidden_states=self.trained["text_encoder"](ids, attention_mask=mask)[0],
            encoder_attention_mask=mask,
            timestep=sigma * 1000,
            return_dict=False,
        )[0]
