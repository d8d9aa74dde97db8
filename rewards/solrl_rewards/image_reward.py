"""ImageReward (Xu et al., arXiv 2304.05977) on transformers' BLIP, from the official checkpoint.

The prompt is read by a BERT that looks at the image through cross-attention; a head turns the first token's state into
a score, which is then standardized. The package image-reward no longer imports beside a current transformers, so the
checkpoint's names are translated here. Its image embedding is made once an image, and texts meet their own image only:
B pairs cost B passes, not B squared.
"""

import json
import re

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BlipTextConfig, BlipVisionConfig, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from solrl_rewards.head import regression_head
from solrl_rewards.preprocessing import Preprocessing
from solrl_rewards.scoring import ModelReward, settle_
from solrl_rewards.weights import fill, find_file, load_state, loading

MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072  # of the raw scores on the authors' test set
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of an attention head in every vision transformer of BLIP

UNUSED = re.compile(r"position_ids$|^blip\.(vision_proj|text_proj|temp|itm_head)|^blip\.text_encoder\.pooler\.")
TRANSLATIONS = (
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.", "head."),
)


def translate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The official checkpoint's weights under the names of `ImageRewardModel`, without those that no score uses."""
    translated = {}
    for name, value in state.items():
        if UNUSED.search(name):
            continue
        for pattern, replacement in TRANSLATIONS:
            new_name, count = re.subn(pattern, replacement, name)
            if count:
                translated[new_name] = value
                break
        else:
            raise ValueError(f"{name} is no weight of ImageReward")
    return translated


class ImageRewardModel(nn.Module):
    """BLIP's two encoders and the head, in the sizes of `state` (official names) and of its med_config.json."""

    def __init__(self, state: dict[str, Tensor], text_config: dict[str, int]) -> None:
        super().__init__()
        first = "blip.visual_encoder."
        try:
            width, _, patch, _ = state[first + "patch_embed.proj.weight"].shape
            patches = state[first + "pos_embed"].shape[1] - 1
            hidden = state[first + "blocks.0.mlp.fc1.weight"].shape[0]
        except KeyError as error:
            raise ValueError(f"no checkpoint of ImageReward: it has no {error.args[0]}") from error
        self.image_size = patch * round(patches**0.5)
        vision = BlipVisionConfig(
            hidden_size=width, intermediate_size=hidden, num_attention_heads=width // HEAD_WIDTH,
            num_hidden_layers=sum(name.endswith("attn.qkv.weight") for name in state),
            image_size=self.image_size, patch_size=patch, hidden_act="gelu", layer_norm_eps=1e-6,
        )  # fmt: skip
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        text = BlipTextConfig(
            **{name: text_config[name] for name in (*sizes, "max_position_embeddings")},
            encoder_hidden_size=width, hidden_act="gelu", layer_norm_eps=1e-12, is_decoder=True,
        )  # fmt: skip
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        self.head = regression_head(text.hidden_size)

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Scores [b] of b images and the b prompts that go with them."""
        seen = self.vision(pixels.to(self.vision.dtype)).last_hidden_state
        read = self.text(
            input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device), is_decoder=False,
        ).last_hidden_state  # fmt: skip
        return ((self.head(read[:, 0].float()) - MEAN) / DEVIATION).squeeze(-1)


class ImageReward(ModelReward):
    """ImageReward-v1.0."""

    name = "image_reward"
    range = (-2.5, 2.5)
    description = "human preference (ImageReward): 0 is an average image for its prompt, 1 a good one; not bounded"
    model: ImageRewardModel

    def __init__(
        self,
        model: str = "THUDM/ImageReward",
        *,
        tokenizer: str = "google-bert/bert-base-uncased",
        batch_size: int = 32,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """`model`: a folder or hub id with ImageReward.pt and med_config.json; `tokenizer`: BERT's."""
        super().__init__(batch_size, device, dtype)
        with loading(self.name, model):
            file, config = (find_file(model, name) for name in ("ImageReward.pt", "med_config.json"))
        with loading(self.name, tokenizer):
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        state = load_state(file)
        self.model = ImageRewardModel(state, json.loads(config.read_text()))
        fill(self.model, translate(state), str(file))
        settle_(self.model, self.dtype)
        self.model.head.float()
        self.preprocess = Preprocessing(self.model.image_size, rounds_half_to_even=True)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Scores [b]."""
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(images.device)
        return self.model(self.preprocess(images), tokens["input_ids"], tokens["attention_mask"])
