"""LAION's aesthetic predictor: how much people like an image, whatever the prompt, from CLIP ViT-L/14's embedding."""

import torch
from torch import Tensor, nn

from solrl_rewards.clip import Clip
from solrl_rewards.head import regression_head
from solrl_rewards.scoring import ModelReward, settle_
from solrl_rewards.weights import fill, find_file, load_state, loading


class Aesthetic(ModelReward):
    """The predicted rating from 1 to 10."""

    name = "aesthetic"
    range = (1.0, 10.0)
    description = "predicted rating of an image's looks, 1 to 10 and mostly 4 to 7; it does not read the prompt"

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        *,
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        batch_size: int = 64,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """`model`: a CLIPModel; `head`: the predictor's file, or a folder or hub id with aesthetic-model.pth.

        The authors' file sac+logos+ava1-l14-linearMSE.pth is one.
        """
        super().__init__(batch_size, device, dtype)
        self.clip = Clip(self.name, model, None, self.dtype)
        self.head = regression_head(self.clip.model.config.projection_dim)
        with loading(self.name, head):
            file = find_file(head, "aesthetic-model.pth")
        fill(self.head, {name.removeprefix("layers."): value for name, value in load_state(file).items()}, str(file))
        settle_(self.head, torch.float32)
        self.model = nn.ModuleList([self.clip, self.head])

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Ratings [b]."""
        return self.head(self.clip.images(self.clip.preprocessing(images))).squeeze(-1)
