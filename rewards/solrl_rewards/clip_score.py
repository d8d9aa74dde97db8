"""CLIPScore: the cosine between the embeddings that a CLIP model gives an image and its prompt.

Any folder or hub id of a transformers CLIPModel will do, for example openai/clip-vit-large-patch14, with which scores
lie around 0.2 to 0.35. Without one it is the tiny model that solrl carries, which knows the shapes world alone.

Papers prepare images in two ways. Sol-RL and the code it builds on resize float images bilinearly; that is the default
here, so that numbers compare with theirs. `preprocessing = "model"` does what the model's own processor does: 8-bit
images and the filter that preprocessor_config.json names.
"""

import dataclasses
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from solrl_rewards.clip import Clip
from solrl_rewards.scoring import ModelReward


def embedded_model() -> str:
    """The folder of the tiny CLIP that the solrl package carries."""
    package = importlib.util.find_spec("solrl")
    if package is None or not package.submodule_search_locations:
        raise ValueError("clip_score needs the option `model`: solrl, which carries the default one, is not installed")
    return str(Path(package.submodule_search_locations[0]) / "assets" / "tiny_clip")


class ClipScore(ModelReward):
    """The cosine of CLIP's image and text embeddings."""

    name = "clip_score"
    range = (-1.0, 1.0)
    description = (
        "cosine of image and prompt under CLIP (CLIPScore over 100); compare only scores of the same CLIP model"
    )

    def __init__(
        self,
        model: str | None = None,
        *,
        preprocessing: str = "paper",
        batch_size: int = 64,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """`model`: a CLIPModel folder or hub id; `preprocessing`: paper or model."""
        super().__init__(batch_size, device, dtype)
        if preprocessing not in ("paper", "model"):
            raise ValueError(f"clip_score: preprocessing must be paper or model, got {preprocessing!r}")
        self.model: Clip = Clip(self.name, model or embedded_model(), None, self.dtype)
        self.preprocess = self.model.preprocessing
        if preprocessing == "paper":
            self.preprocess = dataclasses.replace(
                self.preprocess, filter="bilinear", is_8bit=False, rounds_half_to_even=True
            )

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Cosines [b]."""
        return (self.model.images(self.preprocess(images)) * self.model.texts(prompts)).sum(-1)
