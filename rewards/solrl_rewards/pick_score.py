"""PickScore: a CLIP ViT-H/14 fine-tuned on human choices between two images (Kirstain et al., arXiv 2305.01569).

The published score is exp(logit scale) * cosine, around 19 to 23; as in Sol-RL's tables it is divided by 26 here.
"""

import torch
from torch import Tensor

from solrl_rewards.clip import Clip
from solrl_rewards.scoring import ModelReward

DIVISOR = 26.0


class PickScore(ModelReward):
    """PickScore over 26."""

    name = "pick_score"
    range = (0.0, 1.0)
    description = "human preference (PickScore over 26); good images of FLUX or SD3.5 lie around 0.80 to 0.90"

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        *,
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        batch_size: int = 32,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """`model` and `processor`: folders or hub ids of a CLIPModel, and of its tokenizer and image processor."""
        super().__init__(batch_size, device, dtype)
        self.model: Clip = Clip(self.name, model, processor, self.dtype)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Scores [b]."""
        cosines = (self.model.images(self.model.preprocessing(images)) * self.model.texts(prompts)).sum(-1)
        return self.model.temperature * cosines / DIVISOR
