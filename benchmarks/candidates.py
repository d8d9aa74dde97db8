"""The same candidates drawn by the full rollout and by cheaper explorers, and scored: what two benchmarks look at.

Everything is drawn by the library: a session a setting, and held-out evaluation with the setting's steps and solver,
whose fixed seeds are the candidates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import facts, name_list, number_list, read_json, whole_number
from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.distributed import World, start
from solrl.errors import SolrlError, UsageError
from solrl.evaluate import HeldOut
from solrl.scorer import open_reward
from solrl.session import Session, open_session
from solrl.settings import load_config
from solrl.types import Policy

PRECISIONS = ("full", "fp8", "nvfp4", "emulated_nvfp4")
MADE_BY = "ranking_fidelity"
"""The benchmark whose JSON file holds candidates."""


@dataclass(frozen=True)
class Setting:
    """How an explorer draws."""

    num_steps: int
    precision: str
    downscale: int = 1

    def __str__(self) -> str:
        smaller = f", 1/{self.downscale} size" if self.downscale > 1 else ""
        return f"{self.num_steps} steps, {self.precision}{smaller}"


@dataclass(frozen=True)
class Candidates:
    """Scores of P x N candidates; a candidate has one seed everywhere."""

    prompts: list[str]  # P
    rewards: dict[str, Tensor]  # reward -> [P, N] float64, full rollout
    proxies: dict[str, dict[str, Tensor]]  # reward -> setting -> [P, N] float64
    about: dict[str, Any]  # config, seed, full rollout, hardware, seconds a setting

    def dump(self) -> dict[str, Any]:
        """For a JSON file."""
        return {"about": self.about, "prompts": self.prompts, "rewards": self.rewards, "proxies": self.proxies}

    @classmethod
    def load(cls, path: Path) -> Candidates:
        """The candidates in a JSON file of ranking_fidelity."""
        payload = read_json(path, MADE_BY)["candidates"]
        rewards = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in payload["rewards"].items()}
        proxies = {
            name: {setting: torch.tensor(rows, dtype=torch.float64) for setting, rows in settings.items()}
            for name, settings in payload["proxies"].items()
        }
        return cls(payload["prompts"], rewards, proxies, payload["about"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that name what is drawn; --from takes it from a file instead. Read them with ``parse``."""
    parser.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux);"
                        " its settings can be overridden as --section.key value")  # fmt: skip
    parser.add_argument("--prompts", type=whole_number, default=16, help="held-out prompts, from the top (16)")
    parser.add_argument("--candidates", type=whole_number, default=96, help="candidates a prompt, at least 8 (96)")
    parser.add_argument("--explore-steps", type=number_list, default=[2, 4, 6, 8], metavar="T,..",
                        help="explorer's denoising steps (2,4,6,8)")  # fmt: skip
    parser.add_argument("--precision", type=name_list, default=["full", "emulated_nvfp4"], metavar="P,..",
                        help="explorer's formats (full,emulated_nvfp4)")  # fmt: skip
    parser.add_argument("--settings", type=name_list, metavar="T:P[:D],..",
                        help="exactly these, as 6:full,6:emulated_nvfp4, instead of every combination; "
                        "6:full:2 draws images half as high and wide")  # fmt: skip
    parser.add_argument("--rewards", type=name_list, default=[], metavar="R,..", help="further rewards to score with")
    parser.add_argument("--seed", type=int, default=0, help="seed of the candidates (0)")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE",
                        help="draw nothing; take the candidates of this JSON file of ranking_fidelity")  # fmt: skip


def obtain(options: argparse.Namespace) -> Candidates:
    """The candidates that ``add_options``' options ask for, drawn or read."""
    if options.source is not None:
        return Candidates.load(options.source)
    if options.candidates < 8:
        raise UsageError(f"--candidates must be at least 8, got {options.candidates}")
    overrides = options.overrides | {
        "evaluate.num_prompts": options.prompts,
        "evaluate.images_per_prompt": options.candidates,
        "evaluate.seed": options.seed,
    }
    return draw(load_config(options.config, overrides), _settings(options), options.rewards)


def draw(config: Config, settings: Sequence[Setting], rewards: Sequence[str]) -> Candidates:
    """Draw ``config.evaluate``'s prompts x images by the full rollout and by each of ``settings``, and score them."""
    with start(config.cpu_threads, config.deterministic) as world:
        base = _session(config, Setting(config.regenerate.num_steps, "full"), world)
        scorers = {config.reward.name: base.reward} | {name: open_reward("--rewards", name, {}) for name in rewards}
        heldout = HeldOut(base.heldout_prompts, base.policy.encode(base.heldout_prompts), scorers)
        scores, seconds = {}, {}
        scores["reward"], seconds["full rollout"] = _score(heldout, base.rollout_policy, _with(
            config, evaluate={"num_steps": config.regenerate.num_steps, "solver": config.regenerate.solver}
        ), world)  # fmt: skip
        for setting in settings:
            print(f"drawing {setting} ...", file=sys.stderr, flush=True)
            stage = _with(config, evaluate={"num_steps": setting.num_steps, "solver": config.explore.solver})
            explorer = _session(config, setting, world).explorer
            scores[str(setting)], seconds[str(setting)] = _score(heldout, explorer, stage, world)
        known = facts(world.device)
    full = scores.pop("reward")
    return Candidates(
        prompts=base.heldout_prompts,
        rewards=full,
        proxies={name: {setting: tables[name] for setting, tables in scores.items()} for name in scorers},
        about={
            "model": config.model.path,
            "full_rollout": {"num_steps": config.regenerate.num_steps, "solver": config.regenerate.solver},
            "explore_solver": config.explore.solver,
            "seed": config.evaluate.seed,
            "seconds": seconds,
            "environment": known,
        },
    )


def _settings(options: argparse.Namespace) -> list[Setting]:
    if options.settings is None:
        return [_setting(f"{steps}:{precision}") for precision in options.precision for steps in options.explore_steps]
    return [_setting(word) for word in options.settings]


def _setting(word: str) -> Setting:
    steps, _, rest = word.partition(":")
    precision, _, downscale = rest.partition(":")
    if precision not in PRECISIONS:
        raise UsageError(f"precision {precision!r} is unknown; there are {', '.join(PRECISIONS)}")
    if not steps.isdecimal() or int(steps) < 1:
        raise UsageError(f"explorer's steps must be a whole number of at least 1, got {steps!r}")
    if downscale not in ("", "1", "2", "4"):
        raise UsageError(f"an explorer's images are 1, 2 or 4 times smaller, got {downscale!r}")
    return Setting(int(steps), precision, int(downscale or "1"))


def _session(config: Config, setting: Setting, world: World) -> Session:
    """The base model with an explorer of ``setting``, calibrated for it."""
    explore = {"enabled": True, "num_steps": setting.num_steps, "precision": setting.precision}
    explore |= {"downscale": setting.downscale}
    return open_session(_with(config, explore=explore), world, _never)


def _score(heldout: HeldOut, policy: Policy, config: Config, world: World) -> tuple[dict[str, Tensor], float]:
    """Reward -> [P, N], and the seconds it took."""
    clock = Stopwatch(world.device)
    scores = heldout.evaluate(policy, config, world=world, clock=clock, stop=_never).scores
    for name, score in scores.items():
        if not bool(score.present.all()):
            raise SolrlError(f"reward {name} left {int((~score.present).sum())} candidates without a score")
    return {name: score.values for name, score in scores.items()}, clock.seconds["evaluate"]


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    tree = config.model_dump()
    for name, values in sections.items():
        tree[name] |= values
    return Config.model_validate(tree)


def _never() -> None:
    """A stop that never comes."""
