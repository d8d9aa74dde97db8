"""Drawing samples from seeds, and scoring them.

Exploration, regeneration and evaluation are one function that differs in policy, seeds and stage settings. Work is
split by micro-batches of a fixed shape (short ones are padded), so a sample is the same whoever draws it; images live
only until they are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from solrl.clock import Stopwatch
from solrl.compute import drawing
from solrl.config import BatchConfig, StageConfig
from solrl.distributed import World
from solrl.groups import noise, standardized_sum
from solrl.samplers import sample
from solrl.scorer import ChildReward
from solrl.types import (
    Conditioning,
    PathSampler,
    Policy,
    Reward,
    RewardFailed,
    Rollouts,
    Scores,
    Seeds,
    SolrlError,
    Trajectory,
    VelocityFn,
)


def rollout(
    policy: Policy,
    conditioning: Conditioning,
    prompts: Sequence[str],
    seeds: Seeds,
    stage: StageConfig,
    *,
    batch: BatchConfig,
    world: World,
    clock: Stopwatch,
    stop: Callable[[], None],
    phase: str,
    sampler: PathSampler | None = None,
) -> Iterator[Rollouts]:
    """Draw ``seeds[g][n]`` for ``prompts[g]``: this rank's micro-batches, one at a time.

    ``conditioning`` has one row a prompt. ``stop`` is called before each micro-batch and may raise; the time goes to
    ``phase`` of ``clock``. ``sampler`` draws in place of the stage's solver. A process that only joins in draws some of
    the samples again.
    """
    flat = [(group, seed) for group, row in enumerate(seeds) for seed in row]
    sigmas = policy.sigmas(stage.num_steps)
    for number in world.shares(-(-len(flat) // batch.rollout)):
        stop()
        first = number * batch.rollout
        part = flat[first : first + batch.rollout]
        members = padded(part or flat[:1], batch.rollout)
        with clock.phase(phase), drawing(policy):
            start, velocity = start_noise(policy, members), velocity_of(policy, conditioning, members)
            if sampler is None:
                clean, trajectory = sample(velocity, start, sigmas, stage.solver), None
            else:
                trajectory = sampler(velocity, start, sigmas, [seed for _, seed in members])
                clean = trajectory.latents[:, -1]
            images = decode(policy, clean, batch.decode)
        if part:
            yield Rollouts(
                index=torch.arange(first, first + len(part)),
                prompts=[prompts[group] for group, _ in part],
                clean=clean[: len(part)],
                images=images[: len(part)],
                trajectory=trajectory.rows(slice(len(part))) if trajectory else None,
            )


Members: TypeAlias = list[tuple[int, int]]
"""(row of the conditioning, seed) of each sample of a micro-batch."""


def padded(members: Members, size: int) -> Members:
    """A micro-batch of the fixed shape: the last member repeated up to ``size``."""
    return members + [members[-1]] * (size - len(members))


def start_noise(policy: Policy, members: Members) -> Tensor:
    """The latents that ``members`` start from, on the policy's device."""
    return policy.start(noise([seed for _, seed in members], policy.noise_shape)).to(policy.device)


def velocity_of(policy: Policy, conditioning: Conditioning, members: Members) -> VelocityFn:
    """The policy's velocity for a micro-batch of ``members``."""
    return partial(policy.velocity, conditioning=conditioning.rows([group for group, _ in members]))


def decode(policy: Policy, clean: Tensor, at_once: int) -> Tensor:
    """Images of a micro-batch, ``at_once`` at a time; 0: all."""
    return torch.cat([policy.decode(piece) for piece in clean.split(at_once or len(clean))])


def score(
    reward: Reward, rollouts: Iterable[Rollouts], shape: tuple[int, int], *, world: World, clock: Stopwatch
) -> Scores:
    """Score every sample of a stage of ``shape`` (G, N); the result is equal on all ranks.

    Raises SolrlError when the reward fails or answers with NaN, inf or a wrong shape. A rank without samples joins in.
    """
    board = ScoreBoard(shape, part_weights(reward))
    for part, values, present in scored(reward, map(require_finite, rollouts), clock, "score"):
        board.add(part, values, present)
    return board.gather(world)


def scored(
    reward: Reward, rollouts: Iterable[Rollouts], clock: Stopwatch, phase: str
) -> Iterator[tuple[Rollouts, Tensor, Tensor]]:
    """Every part with its values and which are present, as ``call_parts`` gives them.

    Where several processes have one judge between them all parts are drawn first; images wait in host memory.
    """
    together = reward.together if isinstance(reward, ChildReward) else None
    if together is None:
        for part in rollouts:
            with clock.phase(phase):
                answer = call_parts(reward, part.images, part.prompts)
            yield part, *answer
        return
    parts = [replace(part, images=part.images.cpu()) for part in rollouts]
    with clock.phase(phase):
        answers = together([(part.images, part.prompts) for part in parts])
    for part, answer in zip(parts, answers, strict=True):
        yield replace(part, images=part.images.to(part.clean.device)), *answer


def require_finite(part: Rollouts) -> Rollouts:
    """``part``. Raises SolrlError for the model's own failure, before a reward is blamed for it."""
    bad = (~part.clean.isfinite().flatten(1).all(1)).nonzero().flatten()
    if len(bad):
        raise SolrlError(
            f"{len(bad)} of {len(part.clean)} samples came out NaN or infinite, first for prompt "
            f"{part.prompts[int(bad[0])]!r}: resume from an earlier checkpoint with a lower train.learning_rate, or "
            "try explore.precision = full"
        )
    return part


class ScoreBoard:
    """Scores of a stage as they come in, by flat position."""

    def __init__(self, shape: tuple[int, int], weights: tuple[float, ...] | None = None) -> None:
        self.shape, self.weights = shape, weights
        size = (shape[0] * shape[1],) if weights is None else (shape[0] * shape[1], len(weights))
        self.values = torch.zeros(size, dtype=torch.float64)
        self.present = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
        self.clean: dict[int, Tensor] = {}
        self.trajectories: dict[int, Trajectory] = {}

    def keep(self, groups: int) -> None:
        """Only the first ``groups`` groups were drawn."""
        self.shape = (groups, self.shape[1])
        self.values, self.present = (t[: groups * self.shape[1]] for t in (self.values, self.present))

    def add(self, part: Rollouts, values: Tensor, present: Tensor) -> None:
        """Enter one micro-batch's scores, [b] or with weights [b, R], and keep its latents."""
        self.enter(part.index, values, present)
        self.clean.update(zip(part.index.tolist(), part.clean, strict=True))
        if part.trajectory:
            self.trajectories.update({number: part.trajectory.rows(i) for i, number in enumerate(part.index.tolist())})

    def enter(self, index: Tensor, values: Tensor, present: Tensor) -> None:
        """Enter scores, [b] or with weights [b, R], at flat positions [b]."""
        self.values[index] = values
        self.present[index] = present.long()

    def gather(self, world: World) -> Scores:
        """All ranks' scores together; latents stay where they are."""
        world.sum_(self.values)
        world.sum_(self.present)
        return self.scores()

    def scores(self) -> Scores:
        """What has been entered here; a candidate that has not is not present."""
        present = self.present.view(self.shape) == 1
        if self.weights is None:
            return Scores(self.values.view(self.shape), present, self.clean, trajectories=self.trajectories)
        parts = self.values.view(*self.shape, len(self.weights))
        total = parts @ torch.tensor(self.weights, dtype=torch.float64)
        standardized = standardized_sum(parts, self.weights, present)
        return Scores(total, present, self.clean, standardized, self.trajectories)


def part_weights(reward: Reward) -> tuple[float, ...] | None:
    """The weights of a reward of several parts, None for one of a single score."""
    weights = getattr(reward, "part_weights", None)
    return None if weights is None else tuple(weights)


def call_reward(reward: Reward, images: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """(values [B] float64, present [B] bool) on the CPU, checked; a missing value is 0 and counts nowhere."""
    values, present = call_parts(reward, images, prompts)
    return weighted(reward, values), present


def weighted(reward: Reward, values: Tensor) -> Tensor:
    """[B] of what ``call_parts`` gives: the sum of the parts by their weights."""
    weights = part_weights(reward)
    return values if weights is None else values @ torch.tensor(weights, dtype=torch.float64)


def call_parts(reward: Reward, images: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """The same, but with values [B, R], unweighted, where the reward has R parts."""
    weights = part_weights(reward)
    wanted = (len(prompts),) if weights is None else (len(prompts), len(weights))
    try:
        answer = reward(images, prompts)
    except SolrlError:
        raise
    except Exception as error:  # somebody else's code: name it and stop
        raise RewardFailed(f"reward {reward.name!r} failed: {type(error).__name__}: {error}") from error
    values, present = answer if isinstance(answer, tuple) else (answer, torch.ones(len(prompts), dtype=torch.bool))
    if not (isinstance(values, Tensor) and values.shape == wanted and present.shape == wanted[:1]):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise RewardFailed(f"reward {reward.name!r} must return a float tensor of shape {wanted}, got {shape}")
    values, present = values.detach().double().cpu(), present.detach().bool().cpu()
    there = present if weights is None else present.unsqueeze(1)
    finite = torch.isfinite(values) if weights is None else torch.isfinite(values).all(1)
    bad = (present & ~finite).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise RewardFailed(
            f"reward {reward.name!r} returned {values[first].tolist()} for {len(bad)} of {len(prompts)} images, first "
            f"for prompt {prompts[first]!r}: fix the reward, or report such candidates as missing"
        )
    return torch.where(there, values, torch.zeros_like(values)), present


def exchange_clean(scores: Scores, latent_shape: Sequence[int], world: World) -> dict[int, Tensor]:
    """Clean latents of all samples of ``scores`` on every rank (for training on samples drawn elsewhere)."""
    if world.size == 1:
        return scores.clean
    everything = torch.zeros(scores.values.numel(), *latent_shape, device=world.device)
    for position, clean in scores.clean.items():
        everything[position] = clean
    return dict(enumerate(world.sum_(everything)))
