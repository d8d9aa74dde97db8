"""A class by its short name, or by a dotted path into somebody else's code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from solrl.errors import UsageError


def find_class(setting: str, name: str, known: Mapping[str, str]) -> Any:
    """What ``name`` stands for in ``known`` (name -> "package.module:Class"), or names itself in that form.

    Raises UsageError, with ``setting``, for an unknown name and for a path that cannot be imported.
    """
    module, _, attribute = known.get(name, name).partition(":")
    if not attribute:
        raise UsageError(f"{setting} {name!r} is unknown; known: {', '.join(known)}, or package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{setting} {name!r} cannot be imported: {error}") from error
