"""RL post-training for flow-matching text-to-image models.

``import solrl`` is light: a public name loads its module, and with it torch, when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solrl.config import Config as Config
    from solrl.errors import Interrupted as Interrupted
    from solrl.errors import SolrlError as SolrlError
    from solrl.errors import UsageError as UsageError
    from solrl.models.base import load_policy as load_policy
    from solrl.rollout import rollout as rollout
    from solrl.settings import load_config as load_config
    from solrl.settings import save_config as save_config
    from solrl.train import train as train

__version__ = "0.1.0"

_HOME = {
    "Config": "solrl.config",
    "Interrupted": "solrl.errors",
    "SolrlError": "solrl.errors",
    "UsageError": "solrl.errors",
    "load_config": "solrl.settings",
    "load_policy": "solrl.models.base",
    "rollout": "solrl.rollout",
    "save_config": "solrl.settings",
    "train": "solrl.train",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'solrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps ``solrl.train`` and ``solrl.rollout`` the functions: importing a submodule would put the module there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
