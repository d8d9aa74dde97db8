"""HPSv2 and v2.1: an open_clip ViT-H/14 fine-tuned on human choices (Wu et al., arXiv 2306.09341).

Images are fitted by their longer side, resized as floats, and stand on black. Needs the extra `rewards` (open_clip).
"""

from typing import Any

import torch
from torch import Tensor

from solrl_rewards.preprocessing import Preprocessing
from solrl_rewards.scoring import ModelReward, distinct, settle_
from solrl_rewards.weights import fill, find_file, load_state, loading

FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}


class HPSv2(ModelReward):
    """The cosine of HPSv2's image and text embeddings."""

    name = "hpsv2"
    range = (0.0, 1.0)
    description = "human preference (HPSv2, a cosine): good images lie around 0.25 to 0.35; versions do not compare"
    model: Any

    def __init__(
        self,
        version: str = "2.1",
        *,
        model: str = "xswu/HPSv2",
        architecture: str = "ViT-H-14",
        batch_size: int = 32,
        device: torch.device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        """`model`: the checkpoint, or a folder or hub id with it; `architecture`: open_clip's name for its shape."""
        super().__init__(batch_size, device, dtype)
        if version not in FILES:
            raise ValueError(f"hpsv2: version must be one of {', '.join(FILES)}, got {version!r}")
        try:
            import open_clip
        except ModuleNotFoundError as error:
            raise ValueError('hpsv2 needs open_clip: pip install "solrl[rewards]"') from error
        with loading(self.name, model):
            file = find_file(model, FILES[version])
        self.model = open_clip.create_model(architecture, load_weights=False)
        fill(self.model, load_state(file), str(file))
        settle_(self.model, self.dtype)
        self.tokenizer = open_clip.get_tokenizer(architecture)
        self.preprocess = Preprocessing(self.model.visual.image_size[0], shape="pad", is_8bit=False)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Cosines [b]."""
        unique, rows = distinct(prompts)
        pictures = self.model.encode_image(self.preprocess(images).to(self.dtype), normalize=True)
        texts = self.model.encode_text(self.tokenizer(unique).to(images.device), normalize=True)
        return (pictures.float() * texts.float()[rows]).sum(-1)
