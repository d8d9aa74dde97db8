"""What rewards that run a torch model share: batches, the device and the dtype."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from solrl_rewards.inputs import check_inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelReward(ABC):
    """A reward by a torch model; a subclass sets `model` and scores one batch."""

    name: str
    range: tuple[float, float]
    description: str
    model: nn.Module

    def __init__(self, batch_size: int, device: torch.device | str | None, dtype: str) -> None:
        """Checks the settings before anything is loaded; `device` None is wherever the images are."""
        if batch_size < 1:
            raise ValueError(f"{self.name}: batch_size must be at least 1, got {batch_size}")
        if dtype not in DTYPES:
            raise ValueError(f"{self.name}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = None if device is None else torch.device(device)

    @abstractmethod
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        """[b, 3, H, W] float32 images, where the model is, and b prompts -> [b]; b is at most `batch_size`, never 0."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] float32, on the model's device."""
        check_inputs(self.name, images, prompts)
        device = self.device or images.device
        self.model.to(device)
        scores = [torch.empty(0, device=device)]
        with torch.autocast(device.type, enabled=False):  # dtype is a setting here, whatever surrounds the call
            for part in parts(len(prompts), self.batch_size):
                scores.append(self.score(images[part].to(device).float(), list(prompts[part])).float())
        return torch.cat(scores)


def parts(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count` items in order."""
    for start in range(0, count, size):
        yield slice(start, start + size)


def distinct(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different prompts, and for each given one its row among them: what is equal is encoded once."""
    rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    return list(rows), [rows[prompt] for prompt in prompts]


def settle_(model: nn.Module, dtype: torch.dtype) -> None:
    """The model is in `dtype` and for inference only."""
    model.to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        # weights mapped from a file are aligned differently, which changes last bits
        parameter.data = parameter.data.clone()
