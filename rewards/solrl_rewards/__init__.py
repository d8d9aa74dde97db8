"""Rewards of text-to-image models: objects that turn images in [0, 1] and their prompts into one score an image.

Importing this package loads no model library; each reward loads what it wraps when it is made.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REWARDS", "Reward", "load_reward"]

REWARDS = {
    "shapes": "solrl_rewards.shapes:Shapes",
    "clip_score": "solrl_rewards.clip_score:ClipScore",
    "pick_score": "solrl_rewards.pick_score:PickScore",
    "image_reward": "solrl_rewards.image_reward:ImageReward",
    "hpsv2": "solrl_rewards.hpsv2:HPSv2",
    "aesthetic": "solrl_rewards.aesthetic:Aesthetic",
    "ocr": "solrl_rewards.ocr:Ocr",
    "generative": "solrl_rewards.generative:Generative",
    "weighted_sum": "solrl_rewards.weighted_sum:WeightedSum",
    "normalized_sum": "solrl_rewards.normalized_sum:NormalizedSum",
    "remote": "solrl_rewards.remote:Remote",
}


class Reward(Protocol):
    """Scores images against prompts; raises where it cannot, and never makes a score up."""

    name: str
    range: tuple[float, float]
    description: str

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor | tuple[Tensor, Tensor]:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] float32, or that and [B] bool: which are not missing."""
        ...


def load_reward(name: str, **options: object) -> Reward:
    """The reward of this name in REWARDS or among installed packages' entry points, or `package.module:Class`."""
    module_name, colon, attribute = (REWARDS.get(name) or _entry_point(name) or name).partition(":")
    if not colon:
        raise ValueError(f"unknown reward {name!r}; {_suggestion(name)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # a wrong path is the user's mistake; a package that the module itself misses is not
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"unknown reward {name!r}: no module {error.name!r}") from error
    if attribute not in vars(module):
        raise ValueError(f"unknown reward {name!r}: {module_name} has no {attribute!r}")
    make = vars(module)[attribute]
    parameters = inspect.signature(make).parameters
    unknown = [option for option in options if option not in parameters]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ValueError(
            f"reward {name!r} has no option {unknown[0]!r}; its options are {', '.join(parameters) or 'none'}"
        )
    return make(**options)


def _entry_point(name: str) -> str | None:
    """What an installed package offers under this name in the group `solrl.rewards`, as module:Class."""
    found = {entry.value for entry in importlib.metadata.entry_points(group="solrl.rewards", name=name)}
    if len(found) > 1:
        raise ValueError(
            f"several packages offer a reward {name!r} ({', '.join(sorted(found))}): name one as it stands"
        )
    return found.pop() if found else None


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(REWARDS)}"
    return f"{hint} (your own is named package.module:Class)"
