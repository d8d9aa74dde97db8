"""The published architectures as numbers, so that a plan needs neither weights nor a network.

Hub id -> part of the pipeline -> (class, settings); parts come from diffusers or transformers. Settings are those of
the published config files where they differ from the class's own defaults in anything that costs memory or time.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Part: TypeAlias = tuple[str, dict[str, Any]]
"""(class, settings)."""

T5_XXL: Part = (
    "T5EncoderModel",
    {
        "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "use_cache": False,
    },
)  # fmt: skip
CLIP_L: dict[str, Any] = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "projection_dim": 768,
}  # fmt: skip
CLIP_BIG_G: dict[str, Any] = {
    "vocab_size": 49408, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
GEMMA_2_2B: Part = (
    "Gemma2Model",
    {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    },
)  # fmt: skip
KL_16: Part = (
    "AutoencoderKL",
    {
        "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
        "use_quant_conv": False, "use_post_quant_conv": False, "sample_size": 1024,
    },
)  # fmt: skip
DC_AE_32: Part = (
    "AutoencoderDC",
    {
        "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        "upsample_block_type": "interpolate", "downsample_block_type": "conv", "scaling_factor": 0.41407,
    },
)  # fmt: skip
SCHEDULER: Part = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
FLUX_SCHEDULER: Part = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True})

FLUX_1_DEV: Part = (
    "FluxTransformer2DModel",
    {
        "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    },
)  # fmt: skip
SD35: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
SD35_LARGE: Part = (
    "SD3Transformer2DModel",
    SD35 | {
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
    },
)  # fmt: skip
SD35_MEDIUM: Part = (
    "SD3Transformer2DModel",
    SD35 | {
        "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
    },
)  # fmt: skip
SANA_1600M: Part = (
    "SanaTransformer2DModel",
    {
        "in_channels": 32, "out_channels": 32, "num_attention_heads": 70, "attention_head_dim": 32, "num_layers": 20,
        "num_cross_attention_heads": 20, "cross_attention_head_dim": 112, "cross_attention_dim": 2240,
        "caption_channels": 2304, "mlp_ratio": 2.5, "sample_size": 32, "patch_size": 1,
    },
)  # fmt: skip

_SD3_TEXT: dict[str, Part] = {
    "text_encoder": ("CLIPTextModelWithProjection", CLIP_L),
    "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_BIG_G),
    "text_encoder_3": T5_XXL,
}
_SANA: dict[str, Part] = {
    "transformer": SANA_1600M,
    "vae": DC_AE_32,
    "text_encoder": GEMMA_2_2B,
    "scheduler": SCHEDULER,
}

PUBLISHED: dict[str, dict[str, Part]] = {
    "black-forest-labs/FLUX.1-dev": {
        "transformer": FLUX_1_DEV,
        "vae": KL_16,
        "text_encoder": ("CLIPTextModel", CLIP_L),
        "text_encoder_2": T5_XXL,
        "scheduler": FLUX_SCHEDULER,
    },
    "stabilityai/stable-diffusion-3.5-large": {
        "transformer": SD35_LARGE,
        "vae": KL_16,
        **_SD3_TEXT,
        "scheduler": SCHEDULER,
    },
    "stabilityai/stable-diffusion-3.5-medium": {
        "transformer": SD35_MEDIUM,
        "vae": KL_16,
        **_SD3_TEXT,
        "scheduler": SCHEDULER,
    },
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": _SANA,
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": _SANA,
}
