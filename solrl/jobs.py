"""The jobs of a step: candidates are drawn, their images scored, groups selected, and the kept ones drawn again.

A job draws or scores one micro-batch, with the same members as in train.py. Payloads and values are plain JSON; images
and latents go by reference (runtime/blobs.py).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from solrl.config import Config, StageConfig
from solrl.groups import select_contrastive
from solrl.rollout import ScoreBoard, part_weights
from solrl.runtime.controller import Job
from solrl.runtime.roles import EXPLORE, SCORE
from solrl.scorer import unpack
from solrl.types import Conditioning, Reward, Seeds

Stage = Literal["explore", "regenerate"]
NUMBERS = 1 << 20
"""Room for the numbers of a step's jobs. Lower ones go first, so those of an earlier step do."""


class StepDraw:
    """A step being drawn, as one process sees it: the scores that have come in, and the latents that it drew."""

    def __init__(
        self, config: Config, reward: Reward, step: int, prompts: list[str], conditioning: Conditioning, seeds: Seeds
    ) -> None:
        self.step, self.prompts, self.conditioning, self.seeds = step, prompts, conditioning, seeds
        weights, groups = part_weights(reward), len(prompts)
        self.boards: dict[Stage, ScoreBoard] = {
            "explore": ScoreBoard((groups, config.pool_size), weights),
            "regenerate": ScoreBoard((groups, config.regenerate.group_size), weights),
        }
        self.clean: dict[Stage, dict[int, Tensor]] = {"explore": {}, "regenerate": {}}


class StepJobs:
    """The jobs of one step and what follows from each; kept by rank 0."""

    def __init__(self, config: Config, draw: StepDraw) -> None:
        self.config, self.step, self.boards = config, draw.step, draw.boards
        self.size = size = (len(draw.prompts), config.pool_size)
        self.owners: dict[Stage, dict[int, int]] = {"explore": {}, "regenerate": {}}  # micro-batch -> who drew it
        self.open: dict[int, Job] = {}
        """Jobs that are not done, by number."""
        self._number = self.step * NUMBERS
        self._scored = [0] * size[0]  # candidates of each group that have come back
        self._selected = 0  # groups that have been looked at, in order
        self._kept: list[list[int]] = []  # (group, candidate) to regenerate, in order
        self._drawn = 0  # how many of those are in jobs

    def pending(self) -> list[Job]:
        """What is not done of a step that has begun; where it has not, what it begins with."""
        return [*self.open.values()] if self._number > self.step * NUMBERS else self.first()

    def first(self) -> list[Job]:
        """All candidates."""
        groups, candidates = self.size
        pool = [[group, candidate] for group in range(groups) for candidate in range(candidates)]
        return self._draw("explore" if self.config.explore.enabled else "regenerate", pool, 0)

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        """Images are scored next; a group whose scores are complete is selected, and redrawn."""
        payload = job.payload
        del self.open[job.number]
        stage: Stage = payload["stage"]
        if job.role == EXPLORE:
            self.owners[stage][payload["first"] // self.config.batch.rollout] = rank
            return [self._job(SCORE, payload | {"images": value["images"]}, 1, "score")]
        members = payload["members"]
        index = torch.arange(payload["first"], payload["first"] + len(members))
        values = torch.tensor([unpack(each) for each in value["values"]], dtype=torch.float64)
        self.boards[stage].enter(index, values, torch.tensor(value["present"]))
        if stage == "regenerate" or not self.config.regenerate.enabled:
            return []
        for group, _ in members:
            self._scored[group] += 1
        return self._regenerate()

    def outcome(self) -> dict[str, Any]:
        """Who drew which micro-batch."""
        return {stage: [ranks[number] for number in sorted(ranks)] for stage, ranks in self.owners.items()}

    def _regenerate(self) -> list[Job]:
        """Full micro-batches of kept candidates as far as groups are complete in order; at the end also the last."""
        proxy, keep = self.boards["explore"].scores(), self.config.regenerate
        while self._selected < self.size[0] and self._scored[self._selected] == self.size[1]:
            group = slice(self._selected, self._selected + 1)
            kept = select_contrastive(proxy.signal[group], keep.group_size, proxy.present[group], keep.selection)
            self._kept += [[self._selected, candidate] for row in kept.indices.tolist() for candidate in row]
            self._selected += 1
        size = self.config.batch.rollout
        whole = len(self._kept) if self._selected == self.size[0] else len(self._kept) // size * size
        fresh, first = self._kept[self._drawn : whole], self._drawn
        self._drawn = whole
        return self._draw("regenerate", fresh, first)

    def _draw(self, stage: Stage, members: list[list[int]], first: int) -> list[Job]:
        size, rounds = self.config.batch.rollout, stage_of(self.config, stage).num_steps + 1
        return [
            self._job(EXPLORE, {"stage": stage, "first": first + at, "members": members[at : at + size]}, rounds, stage)
            for at in range(0, len(members), size)
        ]

    def _job(self, role: Literal["explore", "score"], payload: dict[str, Any], rounds: int, kind: str) -> Job:
        self._number += 1
        self.open[self._number] = Job(self._number, role, {"step": self.step} | payload, rounds, kind)
        return self.open[self._number]


def stage_of(config: Config, stage: Stage) -> StageConfig:
    """The settings of a stage."""
    return config.explore if stage == "explore" else config.regenerate
