"""What a run folder from elsewhere may not do unasked: run its code here, or send this machine's tokens away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solrl.config import Config
from solrl.errors import UsageError

CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""A dotted path `package.module:Class`, as every setting that names code takes it."""


def require_trust(run_dir: Path, config: Config) -> None:
    """UsageError where a setting of a run folder names code of its own, or a server; prompts name neither."""
    for key, text in _texts(config.model_dump(mode="json", exclude_none=True, exclude={"prompts"})):
        if CODE.fullmatch(text):
            raise UsageError(f"{run_dir} runs code of its own ({key} = {text}); pass --trust-code if you trust it")
        if "://" in text or key.rpartition(".")[2] == "url":
            raise UsageError(
                f"{run_dir} sends images and this machine's reward tokens to {text}; pass --trust-code if you trust it"
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts, names of keys included: the parts of a sum are keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield key, str(name)
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
