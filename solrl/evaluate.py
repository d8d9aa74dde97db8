"""Held-out evaluation: fixed prompts and seeds, whatever the number of processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from solrl.clock import Stopwatch
from solrl.config import Config, StageConfig
from solrl.distributed import World
from solrl.files import saving, write_atomic
from solrl.groups import group_seeds
from solrl.image_statistics import STATISTICS
from solrl.rollout import ScoreBoard, call_reward, rollout, scored, weighted
from solrl.types import Conditioning, Policy, Reward, RewardFailed, Scores, SolrlError

GRID_PROMPTS, GRID_SEEDS = 8, 4
ENCODED_AT_ONCE = 64
"""Prompts that the text encoders take together, so that any number of them fits."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation measured, equal on every rank. RewardFailed for a reward that could judge no image."""

    scores: dict[str, Scores]  # reward -> [prompts, images per prompt], the trained one first
    statistics: dict[str, Tensor]  # image statistic -> float64 [prompts, images per prompt]

    def __post_init__(self) -> None:
        for name, score in self.scores.items():
            if not score.present.any():
                raise RewardFailed(
                    f"reward {name} could judge none of the {score.present.numel()} held-out images: look at why "
                    "(what it asks may be out of reach), or take another in reward.name or evaluate.rewards"
                )

    def means(self) -> dict[str, Tensor]:
        """The prompt means of every reward."""
        return {name: prompt_means(score) for name, score in self.scores.items()}

    def metrics(self, before: Mapping[str, Tensor]) -> dict[str, float]:
        """``eval/<reward>/mean`` and ``stderr``, ``gain`` and ``gain_stderr``; ``images/<statistic>/mean`` and ``std``.

        Errors are over prompts, since images of one prompt are not independent. A gain is the mean over prompts of what
        was gained since the prompt means ``before``, those of the rewards that are there: prompts and noise are the
        same, so its error is smaller than that of two means. Where no prompt has a score in both there is no gain.
        ``std`` is the spread of single images.
        """
        metrics = {}
        for name, means in self.means().items():
            metrics[f"eval/{name}/mean"], metrics[f"eval/{name}/stderr"] = mean_and_error(means)
            if name in before and not (gains := means - before[name]).isnan().all():
                metrics[f"eval/{name}/gain"], metrics[f"eval/{name}/gain_stderr"] = mean_and_error(gains)
        for name, values in self.statistics.items():
            metrics[f"images/{name}/mean"] = float(values.mean())
            metrics[f"images/{name}/std"] = float(values.std(correction=0))
        return metrics

    def save(self, run_dir: Path, step: int, prompts: Sequence[str]) -> None:
        """Every score, a list for each prompt, is in the run folder; a missing score is null."""
        facts = {"prompts": list(prompts), "scores": {name: score.rows() for name, score in self.scores.items()}}
        path = _path(run_dir, step)
        with saving(path):
            path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(facts, allow_nan=False).encode())


def saved_means(run_dir: Path, step: int, prompts: Sequence[str]) -> dict[str, Tensor]:
    """The prompt means of a saved evaluation; none where there is none. SolrlError where its prompts were others."""
    path = _path(run_dir, step)
    if not path.exists():
        return {}
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise SolrlError(f"{path} is damaged ({error}): delete it, and gains go without their own errors") from error
    if saved["prompts"] != list(prompts):
        raise SolrlError(f"{path} has other prompts than the held-out ones now: restore prompts.heldout")
    means = {}
    for name, rows in saved["scores"].items():
        values = torch.tensor([[value or 0.0 for value in row] for row in rows], dtype=torch.float64)
        present = torch.tensor([[value is not None for value in row] for row in rows])
        means[name] = prompt_means(Scores(values, present, {}))
    return means


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "heldout" / f"step_{step:06d}.json"


@dataclass(frozen=True)
class HeldOut:
    """What is evaluated: encoded held-out prompts and the rewards, the trained one first."""

    prompts: list[str]
    conditioning: Conditioning
    rewards: Mapping[str, Reward]

    def evaluate(
        self, policy: Policy, config: Config, *, world: World, clock: Stopwatch, stop: Callable[[], None]
    ) -> Evaluation:
        """Draw every prompt on its fixed seeds; score the images and measure their statistics."""
        settings = config.evaluate
        shape = (len(self.prompts), settings.images_per_prompt)
        seeds = group_seeds(settings.seed, 0, *shape, "evaluate")
        boards = {name: ScoreBoard(shape) for name in self.rewards}
        statistics = {name: torch.zeros(shape[0] * shape[1], dtype=torch.float64) for name in STATISTICS}
        parts = rollout(
            policy, self.conditioning, self.prompts, seeds, evaluation_stage(config),
            batch=config.batch, world=world, clock=clock, stop=stop, phase="evaluate",
        )  # fmt: skip
        (first, trained), *others = self.rewards.items()
        for part, values, present in scored(trained, parts, clock, "evaluate"):
            boards[first].enter(part.index, weighted(trained, values), present)
            with clock.phase("evaluate"):
                for name, reward in others:
                    boards[name].enter(part.index, *call_reward(reward, part.images, part.prompts))
                for name, measure in STATISTICS.items():
                    statistics[name][part.index] = measure(part.images).cpu()
        return Evaluation(
            {name: board.gather(world) for name, board in boards.items()},
            {name: world.sum_(values).view(shape) for name, values in statistics.items()},
        )

    def grid(self, policy: Policy, config: Config, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Images [P, M, 3, H, W] of the first prompts on the first evaluation seeds, drawn again, and their rewards
        [P, M] in ``evaluation``.

        A missing reward is NaN here, where it is only shown.
        """
        prompts = self.prompts[:GRID_PROMPTS]
        columns = min(GRID_SEEDS, config.evaluate.images_per_prompt)
        seeds = group_seeds(config.evaluate.seed, 0, len(prompts), columns, "evaluate")
        alone = World(0, 1, policy.device)
        images = []
        for part in rollout(
            policy, self.conditioning, prompts, seeds, evaluation_stage(config),
            batch=config.batch, world=alone, clock=Stopwatch(alone.device), stop=lambda: None, phase="grid",
        ):  # fmt: skip
            images.append(part.images.cpu())
        shown = next(iter(evaluation.scores.values()))
        values = torch.where(shown.present, shown.values, torch.nan)[: len(prompts), :columns]
        return torch.cat(images).unflatten(0, (len(prompts), columns)), values


def evaluation_stage(config: Config) -> StageConfig:
    """How evaluation draws: its own steps and solver, whatever the rollouts use."""
    settings = config.evaluate
    return StageConfig(group_size=settings.images_per_prompt, num_steps=settings.num_steps, solver=settings.solver)


def encode_all(policy: Policy, prompts: list[str]) -> Conditioning:
    """The prompts encoded, ENCODED_AT_ONCE of them at a time."""
    parts = [policy.encode(prompts[i : i + ENCODED_AT_ONCE]) for i in range(0, len(prompts), ENCODED_AT_ONCE)]
    return Conditioning.stack(parts)


def prompt_means(score: Scores) -> Tensor:
    """[P] float64: the mean score of each prompt's images; NaN for a prompt whose images all have none."""
    return score.values.sum(1) / score.present.sum(1)


def mean_and_error(means: Tensor) -> tuple[float, float]:
    """(mean, its standard error) of the numbers that are not NaN."""
    means = means[~means.isnan()]
    return float(means.mean()), float(means.std()) / math.sqrt(len(means)) if len(means) > 1 else 0.0
