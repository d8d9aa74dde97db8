"""How much of the text that a prompt asks for stands in the image, as Flow-GRPO's OCR reward counts it.

The text is what the prompt has between its first pair of double quotes. Both texts are compared in lower case without
spaces; if one is contained in what was read the reward is 1, else it falls with the edits from one to the other:

    reward = 1 - min(edits, length) / length

Text is read by rapidocr, whose models come with its wheel, on the CPU. (Flow-GRPO reads with PaddleOCR: scores of real
images are close, not equal.) Needs the extra `rewards`.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solrl_rewards.inputs import check_inputs

QUOTED = re.compile('["\u201c](.+?)["\u201d]', re.DOTALL)


def wanted_text(prompt: str) -> str:
    """What the prompt's first pair of double quotes encloses; ValueError where there is none."""
    found = QUOTED.search(prompt)
    if not found or not _plain(found[1]):
        raise ValueError(f"ocr: the prompt {prompt!r:.80} names no text in double quotes")
    return found[1]


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()


def edit_distance(one: str, other: str) -> int:
    """Levenshtein's distance: insertions, deletions and replacements from one text to the other."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, candidate in enumerate(other, 1):
            best = min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != candidate))
            diagonal, row[column] = row[column], best
    return row[-1]


def text_score(wanted: str, read: str) -> float:
    """1 where the wanted text was read, down to 0 where nothing of it was."""
    target, text = _plain(wanted), _plain(read)
    if target in text:
        return 1.0
    return 1 - min(edit_distance(text, target), len(target)) / len(target)


class Ocr:
    """The share of the quoted text that can be read."""

    name = "ocr"
    range = (0.0, 1.0)
    description = "1 where the prompt's quoted text stands in the image, 0 where nothing like it does"

    def __init__(self, threads: int = 1) -> None:
        """`threads` read an image together."""
        if threads < 1:
            raise ValueError(f"ocr: threads must be at least 1, got {threads}")
        try:
            from rapidocr import RapidOCR
        except ModuleNotFoundError as error:
            raise ValueError('ocr needs rapidocr: pip install "solrl[rewards]"') from error
        self._reader: Any = RapidOCR(
            params={"Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": threads}
        )

    def read(self, image: Tensor) -> str:
        """All text of a [3, H, W] image in [0, 1], in the reader's order."""
        levels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        found = self._reader(np.ascontiguousarray(levels[..., ::-1]))  # blue first
        return "".join(found.txts or ())

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, H, W] images in [0, 1] and B prompts with a quoted text -> [B] float32."""
        check_inputs(self.name, images, prompts)
        wanted = [wanted_text(prompt) for prompt in prompts]
        scores = [text_score(text, self.read(image)) for text, image in zip(wanted, images, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)
