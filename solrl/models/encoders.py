"""A pipeline's text encoders: where their weights rest, and a name for the bits that they give."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solrl.config import ModelConfig
from solrl.environment import device_name

PASSING = ("truncation", "padding", "is_local", "local_files_only")
"""What a tokenizer's files say about the last call or about where it was loaded from, not about what it does."""


def rests_on_host(model: ModelConfig, device: torch.device) -> bool:
    """Whether the text encoders of a policy on ``device`` wait in host memory: only a GPU has another one."""
    return model.offload_encoders and device.type == "cuda"


class TextEncoders:
    """The text encoders and tokenizers among the parts of a pipeline.

    With ``offload`` their weights rest in host memory (pinned, where there is a GPU) and are on ``device`` only inside
    ``here``. Buffers, which are small, are on ``device`` for good.
    """

    def __init__(self, parts: Mapping[str, Any], device: torch.device, *, offload: bool) -> None:
        named = sorted((name, part) for name, part in parts.items() if part is not None)
        self.device = device
        self.modules: dict[str, Any] = {name: part for name, part in named if name.startswith("text_encoder")}
        self.tokenizers: dict[str, Any] = {name: part for name, part in named if name.startswith("tokenizer")}
        self._resting: list[tuple[nn.Parameter, Tensor]] = []
        if not offload:
            return
        for module in self.modules.values():
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
            for parameter in module.parameters():
                home = parameter.data.pin_memory() if device.type == "cuda" else parameter.data
                parameter.data = home
                self._resting.append((parameter, home))

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the weights are on ``device``; after, their memory there is free again."""
        try:
            for parameter, home in self._resting:
                parameter.data = home.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            for parameter, home in self._resting:
                parameter.data = home

    def digest(self) -> str:
        """SHA-256 of every weight's name, shape, dtype and bytes, of the encoders' settings and of the tokenizers.

        Before the first call of a tokenizer, whose files then still say what was loaded. It reads all weights: about
        five seconds for FLUX.1's 9 GB (an estimate).
        """
        whole = hashlib.sha256()
        for name, module in self.modules.items():
            settings = {key: value for key, value in module.config.to_dict().items() if not key.startswith("_")}
            settings.pop("transformers_version", None)
            whole.update(f"{name} {type(module).__name__} {json.dumps(settings, sort_keys=True, default=str)}".encode())
            for key, tensor in sorted(module.state_dict().items()):
                whole.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
                # copied, as in solrl.environment.fingerprint
                flat = tensor.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
                whole.update(flat.numpy())
        for name, tokenizer in self.tokenizers.items():
            whole.update(f"{name} {type(tokenizer).__name__}".encode())
            for file, content in _files_of(tokenizer):
                whole.update(f"{file} {len(content)} ".encode() + content)
        return whole.hexdigest()

    def identity(self, recipe: str, max_text_tokens: int) -> str:
        """SHA-256 of all that decides the bits of an encoding, but the prompt.

        ``recipe`` is how a family calls its encoders, template included. The processor, the number of threads and the
        versions of the libraries belong to it: on others the same weights round differently.
        """
        versions = {name: version(name) for name in ("torch", "transformers", "diffusers", "tokenizers")}
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        facts = [self.digest(), recipe, max_text_tokens, device_name(self.device), threads, versions]
        facts.append(torch.are_deterministic_algorithms_enabled())
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _files_of(tokenizer: Any) -> list[tuple[str, bytes]]:
    """(name, content) of the files that a tokenizer is saved as, without what passes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if not path.is_file():
                continue
            content = path.read_bytes()
            if path.suffix == ".json":
                values = json.loads(content)
                kept = {key: value for key, value in values.items() if key not in PASSING}
                content = json.dumps(kept, sort_keys=True).encode()
            found.append((str(path.relative_to(folder)), content))
    return found


class SaidOnce(logging.Filter):
    """Lets one warning about a prompt that is cut through for each reason; there would be one for each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        reason, cut, _ = record.getMessage().partition(" tokens: ")
        if not cut:
            return True
        is_new = reason not in self._said
        self._said.add(reason)
        return is_new


def warn_once(pipeline_class: Any) -> None:
    """diffusers' ``pipeline_class`` says once in this process that prompts are cut, not for each of them."""
    logger = logging.getLogger(pipeline_class.__module__)
    if not any(isinstance(one, SaidOnce) for one in logger.filters):
        logger.addFilter(SaidOnce())
