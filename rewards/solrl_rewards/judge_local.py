"""A transformers image-text-to-text model as judge, in this process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from solrl_rewards.generative import Turn
from solrl_rewards.scoring import DTYPES, settle_
from solrl_rewards.weights import loading


class LocalJudge:
    """A folder or hub id with model, processor and chat template; code that a repository brings along is not run."""

    def __init__(self, model: str, device: torch.device | str | None, dtype: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"generative: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.device = None if device is None else torch.device(device)
        with loading("generative", model):
            self.model: Any = AutoModelForImageTextToText.from_pretrained(
                model, dtype=DTYPES[dtype], use_safetensors=True
            )
            self.processor: Any = AutoProcessor.from_pretrained(model)
        settle_(self.model, DTYPES[dtype])
        self.processor.tokenizer.padding_side = "left"  # so that every reply begins at the same place

    def reply(self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], max_new_tokens: int) -> list[str]:
        """Greedy replies of at most `max_new_tokens` tokens."""
        inputs = self._inputs(images, turns)
        tokens = self._generate(inputs, max_new_tokens).sequences[:, inputs["input_ids"].shape[1] :]
        return self.processor.batch_decode(tokens, skip_special_tokens=True)

    def probabilities(
        self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], choices: Sequence[str]
    ) -> list[list[float] | None]:
        """Softmax of the next token's logits over the choices, which must be one token each."""
        tokens = [self.processor.tokenizer.encode(choice, add_special_tokens=False) for choice in choices]
        if any(len(ids) != 1 for ids in tokens):
            raise ValueError(f"expected ratings need ratings of one token each, but of {choices} some are more")
        logits = self._generate(self._inputs(images, turns), 1).logits[0].float()
        return logits[:, [ids[0] for ids in tokens]].softmax(-1).tolist()

    def _inputs(self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]]) -> Any:
        texts = [
            self.processor.apply_chat_template(_messages(talk), add_generation_prompt=True, tokenize=False)
            for talk in turns
        ]
        device = self.device or images[0].device
        self.model.to(device)
        levels = [[(image.to(device).float() * 255).round().clamp(0, 255).to(torch.uint8)] for image in images]
        return self.processor(text=texts, images=levels, padding=True, return_tensors="pt").to(device, self.model.dtype)

    @torch.no_grad()
    def _generate(self, inputs: Any, max_new_tokens: int) -> Any:
        return self.model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, (role, text) in enumerate(turns):
        picture = [{"type": "image"}] if number == 0 else []
        messages.append({"role": role, "content": [*picture, {"type": "text", "text": text}]})
    return messages
