"""Scores outside of a step's jobs, where a judge takes the GPUs of several processes: of evaluations and audits.

Nobody can score beside the model then. So what is drawn waits in host memory, all processes give up their models, the
judges come up and score it as jobs, and everybody gets the model back.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from solrl.config import Config
from solrl.rollout import call_parts, part_weights
from solrl.runtime.controller import Job
from solrl.runtime.plans import scoring
from solrl.runtime.roles import SCORE

if TYPE_CHECKING:
    from solrl.pipeline import Crew


class Judging:
    """``ChildReward.together`` of a crew; and the parts at hand, of all processes."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self._parts: list[dict[str, Any]] = []
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}  # of the parts that this process scored

    def __call__(self, parts: list[tuple[Tensor, list[str]]]) -> list[tuple[Tensor, Tensor]]:
        """(values, present) of this process's (images, prompts), as ``call_parts`` gives them; all ranks at once."""
        world, reward = self.crew.session.world, self.crew.session.reward
        mine = [{"images": self.crew.put({"images": images}), "prompts": prompts} for images, prompts in parts]
        everyone = [json.loads(said) for said in world.texts(json.dumps(mine))]
        self._parts, self._answers = [part for some in everyone for part in some], {}
        jobs = PartJobs(len(self._parts)) if world.is_main else None
        owners: list[int] = self.crew.work_as({"score": self.begin}, jobs, scoring)["owners"]
        most = max((len(part["prompts"]) for part in self._parts), default=0)
        table = torch.zeros(len(owners), most, 1 + width(reward), dtype=torch.float64)  # values, and 1 where present
        for number, (values, present) in self._answers.items():
            if owners[number] == world.rank:
                table[number, : len(values)] = torch.cat([values.view(len(values), -1), present[:, None]], 1)
        world.sum_(table)
        first = sum(len(some) for some in everyone[: world.rank])
        answers = [row[: len(prompts)] for row, (_, prompts) in zip(table[first:], parts, strict=False)]
        weights = part_weights(reward)
        return [(row[:, 0] if weights is None else row[:, :-1], row[:, -1] == 1) for row in answers]

    def begin(self, payload: dict[str, Any], state: dict[str, Any] | None) -> Part:
        """A part."""
        return Part(self, payload["number"])

    def score(self, number: int) -> None:
        """Part ``number`` has its scores, here; its images are given free."""
        crew, part = self.crew, self._parts[number]
        images = crew.fetch(part["images"])["images"]
        self._answers[number] = call_parts(crew.session.reward, images, part["prompts"])
        crew.free(part["images"])


class Part:
    """A part being scored: one round."""

    def __init__(self, judging: Judging, number: int) -> None:
        self.judging, self.number = judging, number

    def advance(self) -> dict[str, Any]:
        """Its scores stay where they are."""
        self.judging.score(self.number)
        return {}

    def give_back(self) -> None:
        """Nothing is kept."""


class PartJobs:
    """A job for each part; kept by rank 0."""

    def __init__(self, number: int) -> None:
        self._owners = [-1] * number

    def first(self) -> list[Job]:
        """All of them."""
        return [Job(number, SCORE, {"number": number}, 1) for number in range(len(self._owners))]

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        """``rank`` has the scores."""
        self._owners[job.payload["number"]] = rank
        return []

    def outcome(self) -> dict[str, Any]:
        """Who has which part's scores."""
        return {"owners": self._owners}


def width(reward: Any) -> int:
    """Numbers that the reward gives an image."""
    weights = part_weights(reward)
    return 1 if weights is None else len(weights)


def most_parts(config: Config, num_heldout: int, num_processes: int) -> int:
    """Micro-batches of one process that wait to be scored, at most: of an evaluation, or of an audit."""
    samples = max(min(config.evaluate.num_prompts, num_heldout) * config.evaluate.images_per_prompt, config.pool_size)
    return math.ceil(math.ceil(samples / config.batch.rollout) / num_processes)
