"""Construction of the tiny models, untrained: what they are made of, apart from how they are trained."""

import random

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
from solrl_rewards import scenes
from tiny_tokenizers import clip_tokenizer, gemma_tokenizer, t5_tokenizer
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
)

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


def build_deep_autoencoder() -> AutoencoderDC:
    """A deep-compression autoencoder of 32 x 32 images to 16 x 8 x 8 latents, with attention where it is smallest."""
    stages = {"block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"), "block_out_channels": (16, 32, 64)}
    stages |= {"layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), (5,))}
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in stages.items()}
    return AutoencoderDC(
        latent_channels=16,
        attention_head_dim=16,
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        scaling_factor=1.0,
        **halves,
    )


def clip_text_config(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextConfig:
    """A CLIP text encoder of width 64."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        projection_dim=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


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
        text_encoder=CLIPTextModel(clip_text_config(tokenizer, layers=1)),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def build_sd3(seed: int) -> StableDiffusion3Pipeline:
    """A StableDiffusion3Pipeline of 3.6 M random parameters, the same for the same seed."""
    torch.manual_seed(seed)
    corpus = caption_corpus()
    tokenizer, tokenizer_3 = clip_tokenizer(corpus, TEXT_LENGTH), t5_tokenizer(corpus, TEXT_LENGTH)
    clip = clip_text_config(tokenizer, layers=2)  # the pipeline reads the states before the last layer
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        vae=build_vae(),
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=clip_tokenizer(corpus, TEXT_LENGTH),
        text_encoder_3=build_t5(len(tokenizer_3)),
        tokenizer_3=tokenizer_3,
        transformer=transformer,
    )


def build_gemma(tokenizer: GemmaTokenizer) -> Gemma2Model:
    """A two-layer Gemma 2 of width 128."""
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=TEXT_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    return Gemma2Model(config)


def build_sana(seed: int) -> SanaPipeline:
    """A SanaPipeline of 2 M random parameters, the same for the same seed."""
    torch.manual_seed(seed)
    tokenizer = gemma_tokenizer(caption_corpus(), TEXT_LENGTH)
    transformer = SanaTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=5,
        num_cross_attention_heads=4,
        cross_attention_head_dim=32,
        cross_attention_dim=128,
        caption_channels=128,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=1,
        interpolation_scale=1.0,  # with positions, as SANA for 2048 pixels: who lies where is most of a caption
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma(tokenizer),
        vae=build_deep_autoencoder(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
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
