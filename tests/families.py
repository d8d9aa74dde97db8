"""Tiny random pipelines of the three real diffusers classes, and the diffusers call that draws as our policies do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    T5Config,
    T5EncoderModel,
)

from scripts.tiny_tokenizers import clip_tokenizer, gemma_tokenizer, t5_tokenizer
from solrl.config import Config

FAMILIES = ("flux", "sd3", "sana")
CORPUS = ["a red circle left of a blue square", "a green triangle above a yellow cross"]
TOKENS = 12


def save_random_pipeline(family: str, folder: Path, **transformer: Any) -> Path:
    """``folder`` holds a pipeline of the family, random and the same every time; the rest changes its transformer."""
    torch.manual_seed(0)
    {"flux": _flux, "sd3": _sd3, "sana": _sana}[family](transformer).save_pretrained(folder)
    return folder


def family_config(family: str, path: Path | str, **sections: dict[str, Any]) -> Config:
    """A config for 32 x 32 images of a pipeline folder."""
    model = {"family": family, "path": str(path), "height": 32, "width": 32, "max_text_tokens": TOKENS}
    settings: dict[str, dict[str, Any]] = {
        "model": model | {"dtype": "float32", "guidance": 1.5} | sections.pop("model", {}),
        "lora": {"rank": 4, "alpha": 6},
        "evaluate": {"num_steps": 4},
    }
    return Config.model_validate(settings | sections)


def diffusers_call(config: Config, sigmas: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for the pipeline of the config's family; SD3's scheduler makes the sigmas itself."""
    model = config.model
    call: dict[str, Any] = {"height": model.height, "width": model.width, "max_sequence_length": model.max_text_tokens}
    call["num_inference_steps"] = len(sigmas) - 1
    if model.family == "flux":
        call |= {"guidance_scale": model.guidance, "true_cfg_scale": model.cfg_scale}
        call |= {"negative_prompt": [""] * 2} if model.cfg_scale > 1 else {}
    else:
        call["guidance_scale"] = model.cfg_scale
    if model.family == "sana":
        call |= {"complex_human_instruction": None, "use_resolution_binning": False, "sigmas": sigmas[:-1].tolist()}
    return call


def _flux(changes: dict[str, Any]) -> FluxPipeline:
    tokenizer, tokenizer_2 = clip_tokenizer(CORPUS, TOKENS), t5_tokenizer(CORPUS, TOKENS)
    settings: dict[str, Any] = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    settings |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    settings |= {"axes_dims_rope": [4, 4, 8], "guidance_embeds": True}
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_autoencoder(),
        text_encoder=CLIPTextModel(_clip(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=_t5(tokenizer_2, 32),
        tokenizer_2=tokenizer_2,
        transformer=FluxTransformer2DModel(**(settings | changes)),
    )


def _sd3(changes: dict[str, Any]) -> StableDiffusion3Pipeline:
    tokenizer, tokenizer_3 = clip_tokenizer(CORPUS, TOKENS), t5_tokenizer(CORPUS, TOKENS)
    settings: dict[str, Any] = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    settings |= {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 64}
    settings |= {"caption_projection_dim": 32, "pooled_projection_dim": 64, "pos_embed_max_size": 16}
    settings |= {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder(),
        text_encoder=CLIPTextModelWithProjection(_clip(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(_clip(tokenizer)),
        tokenizer_2=clip_tokenizer(CORPUS, TOKENS),
        text_encoder_3=_t5(tokenizer_3, 64),
        tokenizer_3=tokenizer_3,
        transformer=SD3Transformer2DModel(**(settings | changes)),
    )


def _sana(changes: dict[str, Any]) -> SanaPipeline:
    tokenizer = gemma_tokenizer(CORPUS, TOKENS)
    blocks = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8)}
    blocks |= {"layers_per_block": (1, 1), "qkv_multiscales": ((), (5,))}
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in blocks.items()}
    settings: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2}
    settings |= {"attention_head_dim": 16, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16}
    settings |= {"cross_attention_dim": 32, "caption_channels": 32, "sample_size": 16, "qk_norm": None}
    text = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(text),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            upsample_block_type="interpolate",
            downsample_block_type="conv",
            scaling_factor=0.41407,
            **halves,
        ),
        transformer=SanaTransformer2DModel(**(settings | changes)),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def _clip(tokenizer: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        projection_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(tokenizer: Any, width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
        )
    )
