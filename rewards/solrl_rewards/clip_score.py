"""CLIPScore: the cosine between the embeddings that a CLIP model gives an image and its prompt.

Any folder or hub id of a transformers CLIPModel will do, for example openai/clip-vit-large-patch14, with which scores
lie around 0.2 to 0.35. Without one it is the tiny model that solrl carries, which knows the shapes world alone. Images
are prepared as the model's preprocessor_config.json says, on the device they are on.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel
from transformers.utils import cached_file

from solrl_rewards.inputs import check_inputs

RESAMPLING = {2: "bilinear", 3: "bicubic"}  # PIL's numbers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def embedded_model() -> str:
    """The folder of the tiny CLIP that the solrl package carries."""
    package = importlib.util.find_spec("solrl")
    if package is None or not package.submodule_search_locations:
        raise ValueError("clip_score needs the option `model`: solrl, which carries the default one, is not installed")
    return str(Path(package.submodule_search_locations[0]) / "assets" / "tiny_clip")


class Preprocessing:
    """Resize of the shorter side, centre crop and normalization, as a preprocessor_config.json states them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.shorter_side = _side(config["size"])
        self.crop = _side(config["crop_size"])
        self.mode = RESAMPLING[config.get("resample", 3)]
        self.mean = torch.tensor(config["image_mean"])[:, None, None]
        self.deviation = torch.tensor(config["image_std"])[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] -> [B, 3, crop, crop], normalized."""
        height, width = images.shape[-2:]
        shorter = min(height, width)
        if shorter != self.shorter_side:
            size = (height * self.shorter_side // shorter, width * self.shorter_side // shorter)
            # bicubic overshoots where 8-bit images cannot
            images = F.interpolate(images, size=size, mode=self.mode, antialias=True).clamp(0, 1)
            height, width = size
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        images = images[..., top : top + self.crop, left : left + self.crop]
        return (images - self.mean.to(images.device)) / self.deviation.to(images.device)


def _side(size: int | dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    return size["shortest_edge"] if "shortest_edge" in size else min(size["height"], size["width"])


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


class ClipScore:
    """The cosine of CLIP's image and text embeddings."""

    name = "clip_score"
    range = (-1.0, 1.0)
    description = (
        "cosine of image and prompt under CLIP (CLIPScore over 100); compare only scores of the same CLIP model"
    )

    def __init__(
        self,
        model: str | None = None,
        batch_size: int = 64,
        *,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """Scores `batch_size` images at a time on `device`, or where they are, by a CLIPModel folder or hub id."""
        if batch_size < 1:
            raise ValueError(f"clip_score: batch_size must be at least 1, got {batch_size}")
        if dtype not in DTYPES:
            raise ValueError(f"clip_score: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        source = model or embedded_model()
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = None if device is None else torch.device(device)
        self.model = (
            CLIPModel.from_pretrained(source, dtype=self.dtype, use_safetensors=True).eval().requires_grad_(False)
        )
        for parameter in self.model.parameters():
            parameter.data = (
                parameter.data.clone()
            )  # weights mapped from a file are aligned differently, which changes last bits
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.preprocess = Preprocessing(json.loads(Path(cached_file(source, "preprocessor_config.json")).read_text()))

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] float32 cosines."""
        check_inputs(self.name, images, prompts)
        device = self.device or images.device
        self.model.to(device)
        if not prompts:
            return torch.empty(0, device=device)
        distinct = list(dict.fromkeys(prompts))
        texts = torch.cat(
            [self._embed_texts(distinct[part], device) for part in _parts(len(distinct), self.batch_size)]
        )
        rows = [distinct.index(prompt) for prompt in prompts]
        pictures = torch.cat(
            [self._embed_images(images[part].to(device)) for part in _parts(len(rows), self.batch_size)]
        )
        return F.cosine_similarity(pictures, texts[rows], dim=-1)

    def _embed_images(self, images: Tensor) -> Tensor:
        pixels = self.preprocess(images.float()).to(self.dtype)
        return self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output).float()

    def _embed_texts(self, prompts: list[str], device: torch.device) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
        return self.model.text_projection(
            self.model.text_model(input_ids=ids, attention_mask=mask).pooler_output
        ).float()
