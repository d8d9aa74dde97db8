"""What a simulated run is made of: stated assumptions in a TOML file, and one sample of lengths drawn from them.

A batch has groups; a group goes through passes. In a pass each of its jobs explores for some rounds and is then
scored for some rounds (or costs nothing to score); the next pass starts when all are scored. An LLM's step is one
pass (rollout, generative reward); Sol-RL's is two: many cheap candidates, then the kept ones again.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from solrl.config import Section
from solrl.errors import UsageError
from solrl.runtime.planner import PlannerSettings
from solrl.runtime.roles import Cluster, RoleSpec, Working
from solrl.runtime.throughput import Coefficients


class ClusterSettings(Section):
    """The machines."""

    gpus: int = Field(8, gt=0)
    """GPUs in all."""
    gpus_per_node: int = Field(8, gt=0)
    """GPUs of one machine; no replica lies across two, unless it fills them."""


class ReplicaSettings(Section):
    """One working role: size, speed, room, and what a shift of it costs."""

    gpus: int = Field(1, gt=0)
    """GPUs of a replica."""
    a_s: float = Field(0.0, ge=0)
    """Seconds of a round for each token held."""
    b_s: float = Field(0.0, ge=0)
    """Least seconds of a round for loading the weights."""
    c_s: float = Field(0.0, ge=0)
    """Seconds of a round for each job."""
    d_s: float = Field(0.0, ge=0)
    """Seconds of a round for everything else."""
    capacity_tokens: float = Field(1e12, gt=0)
    """Tokens of KV cache a replica has room for."""
    capacity_jobs: int = Field(256, gt=0)
    """Jobs that run at once on a replica."""
    prefill_tokens_per_s: float = Field(1e12, gt=0)
    """Speed of computing the state of a job that arrives."""
    up_s: float = Field(0.0, ge=0)
    """Seconds until a GPU works in this role."""
    down_s: float = Field(0.0, ge=0)
    """Seconds until its GPUs are free."""

    @property
    def coefficients(self) -> Coefficients:
        """The throughput model."""
        return Coefficients(self.a_s, self.b_s, self.c_s, self.d_s)

    def spec(self, role: Working) -> RoleSpec:
        """As the scheduler takes it."""
        return RoleSpec(
            role, self.coefficients, self.gpus, self.capacity_tokens, self.capacity_jobs, self.prefill_tokens_per_s
        )


class TrainSettings(Section):
    """The update, which takes its home GPUs as a whole."""

    gpus: int = Field(8, gt=0)
    """Home GPUs, unless a deployment says otherwise."""
    gpu_s_per_token: float = Field(0.0, ge=0)
    """GPU-seconds for each token of prompt and answer."""
    gpu_s_per_job: float = Field(0.0, ge=0)
    """GPU-seconds for each trained job."""
    fixed_s: float = Field(0.0, ge=0)
    """Seconds on top."""
    up_s: float = Field(0.0, ge=0)
    """Seconds until the GPUs train."""
    down_s: float = Field(0.0, ge=0)
    """Seconds until they are free."""
    sync_s: float = Field(0.0, ge=0)
    """Seconds that explorers stand still for new weights."""


class BatchSettings(Section):
    """Batches, and how far exploration may run ahead."""

    num_batches: int = Field(4, gt=0)
    """Training steps simulated."""
    num_groups: int = Field(8, gt=0)
    """Groups (prompts) of a batch."""
    staleness: int = Field(0, ge=0)
    """Batch b may start when the policy has been trained b - staleness times."""
    membership: Literal["id", "first"] = "id"
    """Whether a batch is trained when its own groups are done, or when as many jobs of any batch are."""
    difficulty_sigma: float = Field(0.0, ge=0)
    """Log-normal spread of a factor on the exploration lengths that a group's jobs share."""


class Lengths(Section):
    """Log-normal lengths in rounds, cut at both ends."""

    median: float = Field(gt=0)
    """Median."""
    sigma: float = Field(0.0, ge=0)
    """Spread of the logarithm; 0: all equal."""
    low: float = Field(1.0, gt=0)
    """Least."""
    high: float = Field(1e9, gt=0)
    """Most."""

    @property
    def mean(self) -> float:
        """Of the uncut law, and at most ``high``."""
        return min(self.median * math.exp(self.sigma**2 / 2), self.high)


class PassSettings(Section):
    """One pass of a group."""

    num_jobs: int = Field(8, gt=0)
    """Jobs of a group in this pass."""
    explore: Lengths
    """Rounds of exploring."""
    prompt_tokens: float = Field(0.0, ge=0)
    """Tokens that exploring starts from."""
    score: Lengths | None = None
    """Rounds of scoring; unset: scoring takes no role."""
    score_prompt_tokens: float = Field(0.0, ge=0)
    """Tokens that scoring starts from, besides what was explored."""
    score_reads_answer: bool = False
    """Whether scoring starts from the explored tokens too."""


class DeploymentSettings(Section):
    """Splits that were published or are to be compared."""

    disaggregated: tuple[int, int, int] | None = None
    """GPUs of explore, score, train."""
    shared_train: int | None = None
    """GPUs of train where explore and score take turns on the rest."""


class PlanSettings(Section):
    """Constants of the planner, and how often it looks."""

    horizon_s: float = Field(60.0, gt=0)
    """H."""
    shift_s: float = Field(1.25, ge=0)
    """tau_shift of the penalty."""
    minimum_gain: float = Field(0.02, ge=0)
    """Least relative gain."""
    pause_s: float = Field(1.0, ge=0)
    """Between shifts."""
    unit: Literal["round", "job"] = "round"
    """What throughputs of the two roles count: rounds (tokens, as the paper), or jobs, where rounds differ in kind."""
    period_s: float = Field(5.0, gt=0)
    """Between looks, besides events."""

    @property
    def planner(self) -> PlannerSettings:
        """As the planner takes them."""
        return PlannerSettings(self.horizon_s, self.shift_s, self.minimum_gain, self.pause_s)


class Setting(Section):
    """A run to simulate."""

    name: str = ""
    """What tables call it."""
    cluster: ClusterSettings = ClusterSettings()
    """Machines."""
    explore: ReplicaSettings
    """The exploring role (an LLM's rollout)."""
    score: ReplicaSettings
    """The scoring role."""
    train: TrainSettings
    """Training."""
    batch: BatchSettings = BatchSettings()
    """Batches."""
    passes: tuple[PassSettings, ...] = Field(min_length=1)
    """Passes of a group, in order."""
    deployments: DeploymentSettings = DeploymentSettings()
    """Fixed splits."""
    planner: PlanSettings = PlanSettings()
    """The planner."""
    paper: dict[str, Any] = Field(default_factory=dict)
    """Published numbers that a table shows beside the simulated ones."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for role, replica in (("explore", self.explore), ("score", self.score)):
            if replica.gpus > self.cluster.gpus:
                raise ValueError(f"{role}.gpus is {replica.gpus}, more than the cluster's {self.cluster.gpus}")
            if max(replica.b_s, replica.c_s) + replica.d_s <= 0:
                raise ValueError(f"{role}: a round must take time; give b_s, c_s or d_s")
        if self.train.gpus > self.cluster.gpus:
            raise ValueError(f"train.gpus is {self.train.gpus}, more than the {self.cluster.gpus} GPUs of the cluster")
        return self

    @property
    def jobs_per_group(self) -> int:
        """Of all passes."""
        return sum(one.num_jobs for one in self.passes)

    @property
    def num_jobs(self) -> int:
        """Of all batches."""
        return self.batch.num_batches * self.batch.num_groups * self.jobs_per_group

    def rounds_per_job(self, role: Working) -> float:
        """Mean rounds of a job of ``role``, by the laws; 1 where the planner counts rounds."""
        if self.planner.unit == "round":
            return 1.0
        laws = [(one.num_jobs, one.explore if role == "explore" else one.score) for one in self.passes]
        counted = [(num, law.mean) for num, law in laws if law is not None]
        return sum(num * mean for num, mean in counted) / sum(num for num, _ in counted) if counted else 1.0

    def of_cluster(self, num_train_gpus: int) -> Cluster:
        """The cluster with so many GPUs as the home of training."""
        return Cluster(self.cluster.gpus, self.cluster.gpus_per_node, num_train_gpus)

    def with_values(self, values: Mapping[str, Any]) -> Setting:
        """A checked copy with ``{"section.key": value}`` put over it; ``passes.0.score.median`` reaches into a pass."""
        tree = self.model_dump()
        for key, value in values.items():
            *path, last = key.split(".")
            inner: Any = tree
            try:
                for part in path:
                    inner = inner[int(part) if isinstance(inner, tuple | list) else part]
                inner[last] = value
            except (KeyError, IndexError, TypeError, ValueError):
                raise UsageError(f"a workload has no setting {key}") from None
        return _checked(tree, self.name or "workload")


def load_setting(path: Path) -> Setting:
    """The checked assumptions of a TOML file."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the workload {path}: {error}") from None
    return _checked({"name": path.stem, **tree}, str(path))


def _checked(tree: dict[str, Any], source: str) -> Setting:
    try:
        return Setting.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{source}: {key}: {first['msg']}" if key else f"{source}: {first['msg']}") from None


@dataclass(frozen=True)
class Sample:
    """Rounds of every job: ``explore[job]`` and ``score[job]``. Ids go by batch, group, pass, place."""

    explore: list[float]
    score: list[float]

    @classmethod
    def of_passes(cls, explore: Sequence[Any], score: Sequence[Any]) -> Sample:
        """From an array [groups, jobs] of each pass."""
        return cls(*(np.concatenate(one, axis=1).ravel().tolist() for one in (explore, score)))


def draw(setting: Setting, seed: int) -> Sample:
    """Lengths from the setting's laws; a seed gives the same lengths on every machine."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    groups = setting.batch.num_batches * setting.batch.num_groups
    factor = np.exp(setting.batch.difficulty_sigma * generator.standard_normal((groups, 1)))
    explore, score = [], []
    for one in setting.passes:
        shape = (groups, one.num_jobs)
        explore.append(_drawn(generator, one.explore, shape, factor))
        score.append(_drawn(generator, one.score, shape, 1.0) if one.score else np.zeros(shape))
    return Sample.of_passes(explore, score)


def _drawn(generator: np.random.Generator, law: Lengths, shape: tuple[int, int], factor: Any) -> Any:
    if law.sigma == 0:
        return np.clip(np.full(shape, law.median) * factor, law.low, law.high)
    return np.clip(law.median * factor * np.exp(law.sigma * generator.standard_normal(shape)), law.low, law.high)


def save_sample(path: Path, sample: Sample) -> None:
    """One JSON line a job: explore, score."""
    rows = zip(sample.explore, sample.score, strict=True)
    path.write_text("".join(json.dumps({"explore": e, "score": s}) + "\n" for e, s in rows))


def load_sample(path: Path, setting: Setting) -> Sample:
    """Lengths of a real run, or of ``save_sample``; a shorter trace is repeated."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        explore, score = [float(row["explore"]) for row in rows], [float(row["score"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no trace, a JSON object with explore and score a line: {error}") from None
    if not rows or min(explore) <= 0 or min(score) < 0:
        raise UsageError(f"{path} is no trace of lengths: it must have lines, and explore must be above 0")
    return Sample(_repeated(explore, setting.num_jobs), _repeated(score, setting.num_jobs))


def _repeated(values: Sequence[float], count: int) -> list[float]:
    return [values[place % len(values)] for place in range(count)]
