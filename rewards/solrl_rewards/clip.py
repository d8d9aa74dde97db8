"""Embeddings of images and prompts by a transformers CLIPModel, for the rewards that are built on them."""

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPModel

from solrl_rewards.preprocessing import Preprocessing
from solrl_rewards.scoring import distinct, settle_
from solrl_rewards.weights import find_file, loading


class Clip(nn.Module):
    """A CLIPModel folder or hub id, loaded for the reward of this name; its processor may lie elsewhere."""

    def __init__(self, reward: str, model: str, processor: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        with loading(reward, model):
            self.model: Any = CLIPModel.from_pretrained(model, dtype=dtype, use_safetensors=True)
        settle_(self.model, dtype)
        processor = processor or model
        with loading(reward, processor):
            self.tokenizer = AutoTokenizer.from_pretrained(processor)
            config = find_file(processor, "preprocessor_config.json").read_text()
        self.preprocessing = Preprocessing.from_config(json.loads(config))

    @property
    def temperature(self) -> Tensor:
        """What cosines are multiplied by before the softmax of the training loss."""
        return self.model.logit_scale.float().exp()

    def images(self, pixels: Tensor) -> Tensor:
        """[B, 3, side, side] preprocessed images -> [B, D] float32 of length 1."""
        pooled = self.model.vision_model(pixel_values=pixels.to(self.model.dtype)).pooler_output
        return F.normalize(self.model.visual_projection(pooled).float(), dim=-1)

    def texts(self, prompts: list[str]) -> Tensor:
        """B prompts, cut where the context ends -> [B, D] float32 of length 1."""
        unique, rows = distinct(prompts)
        tokens = self.tokenizer(
            unique, padding="max_length", truncation=True, return_tensors="pt",
            max_length=self.model.config.text_config.max_position_embeddings,
        ).to(self.model.device)  # fmt: skip
        pooled = self.model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).pooler_output
        return F.normalize(self.model.text_projection(pooled).float(), dim=-1)[rows]
