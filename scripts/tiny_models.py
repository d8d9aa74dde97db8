"""Construction of the tiny models, untrained: what they are made of, apart from how they are trained."""

import random

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from solrl_rewards import scenes
from tiny_tokenizers import clip_tokenizer, t5_tokenizer
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

TEXT_LENGTH = 12  # tokens


def caption_corpus() -> list[str]:
    """The captions every tokenizer is built from."""
    rng = random.Random(0)
    return [str(scenes.sample_scene(rng).caption) for _ in range(4000)]


def build_vae() -> AutoencoderKL:
    """An autoencoder of 32 x 32 images to 4 x 16 x 16 latents."""
    return AutoencoderKL(
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=scenes.SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_clip_text(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """A one-layer CLIP text encoder of width 64."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        projection_dim=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def build_t5(vocabulary: int) -> T5EncoderModel:
    """A two-layer T5 encoder of width 128."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config)


def build_flux(seed: int) -> FluxPipeline:
    """A FluxPipeline of 3.5 M random parameters, the same for the same seed."""
    torch.manual_seed(seed)
    corpus = caption_corpus()
    tokenizer, tokenizer_2 = clip_tokenizer(corpus, TEXT_LENGTH), t5_tokenizer(corpus, TEXT_LENGTH)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=build_vae(),
        text_encoder=build_clip_text(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def build_clip(seed: int) -> tuple[CLIPModel, CLIPTokenizer]:
    """A CLIPModel of 0.6 M random parameters, the same for the same seed, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = clip_tokenizer(caption_corpus(), TEXT_LENGTH)
    tower = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 3, "hidden_act": "gelu"}
    text = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "max_position_embeddings": TEXT_LENGTH,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"num_hidden_layers": 4, "image_size": scenes.SIZE, "patch_size": 4}
    return CLIPModel(CLIPConfig(projection_dim=64, text_config=tower | text, vision_config=tower | vision)), tokenizer
