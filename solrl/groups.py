"""Groups of candidates: their seeds and noise, which of them are kept, and their advantages.

A seed is 128 bits of SHA-256 over everything that names a draw; noise comes from numpy's counter-based Philox keyed by
all of it. So a sample depends on its name alone, never on batch position, rank, restart or what was drawn before.
(torch's CPU generator keeps 32 bits of a seed and is not used.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from solrl.types import Scores, Seeds


def candidate_seed(run_seed: int, step: int, prompt: int, candidate: int, purpose: str = "latents") -> int:
    """The 128-bit seed of one draw: candidate ``candidate`` of the step's prompt number ``prompt``."""
    return _hash(f"{run_seed}/{step}/{prompt}/{candidate}/{purpose}")


def derive_seed(seed: int, purpose: str) -> int:
    """The seed of another draw for the same candidate, e.g. its training noise."""
    return _hash(f"{seed:032x}/{purpose}")


def group_seeds(run_seed: int, step: int, num_groups: int, group_size: int, purpose: str = "latents") -> Seeds:
    """Seeds of a step: ``[num_groups][group_size]``, all different."""
    return [
        [candidate_seed(run_seed, step, prompt, candidate, purpose) for candidate in range(group_size)]
        for prompt in range(num_groups)
    ]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")


def generator(seed: int) -> np.random.Generator:
    """The generator a seed names."""
    return np.random.Generator(np.random.Philox(key=seed))


def noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal [len(seeds), *shape], float32 on the CPU; each row depends on its seed alone."""
    rows = np.empty((len(seeds), *shape), dtype=np.float32)
    for row, seed in zip(rows, seeds, strict=True):
        generator(seed).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(rows)


@dataclass(frozen=True)
class Selection:
    """Which candidates stay."""

    groups: list[int]  # numbers of the groups that are trained on
    indices: Tensor  # [len(groups), K] int64: the K/2 best (best first), then the K/2 worst (worst last)
    skipped: dict[int, str]  # group number -> why it was left out
    num_without_spread: int = 0  # how many of those because all their scores were equal

    def pick(self, seeds: Seeds) -> Seeds:
        """The kept seeds, ``[len(groups)][K]``."""
        rows = self.indices.tolist()
        return [[seeds[group][i] for i in row] for group, row in zip(self.groups, rows, strict=True)]


def select_contrastive(scores: Tensor, keep: int, present: Tensor | None = None, rule: str = "best_worst") -> Selection:
    """[G, N] scores -> the keep/2 best and keep/2 worst candidates of each group (Sol-RL section 3.3).

    Both halves come from one stable descending order, so they are disjoint and ties go to the lower index. A candidate
    that is not ``present`` [G, N] is no candidate; a group with fewer than ``keep`` candidates, or without any spread
    of scores, is skipped. Raises ValueError for an odd ``keep`` and for scores that are not finite.

    Other rules, for comparison: "extremes" keeps those furthest from the group's mean, "middle" those of middle rank,
    "random" the first ``keep``, in their own order (seeds are hashes, so any are as good); the others are in descending
    order.
    """
    if keep % 2 or not 0 < keep <= scores.shape[1]:
        raise ValueError(f"keep must be even and at most {scores.shape[1]}, got {keep}")
    present = torch.ones_like(scores, dtype=torch.bool) if present is None else present
    if not bool(torch.isfinite(scores[present]).all()):
        raise ValueError("scores must be finite; a missing score is marked in `present`, not by NaN")
    groups, rows, skipped, without_spread = [], [], {}, 0
    for group in range(scores.shape[0]):
        candidates = present[group].nonzero().flatten()
        values = scores[group][candidates]
        if len(candidates) < keep:
            skipped[group] = f"{len(candidates)} of {scores.shape[1]} candidates have a score, {keep} are needed"
        elif values.min() == values.max():
            without_spread += 1
            skipped[group] = f"all scores equal {values[0].item():.6g}"
        else:
            order = torch.argsort(values, descending=True, stable=True)
            groups.append(group)
            rows.append(candidates[order[_kept_places(order, values[order], keep, rule)]])
    indices = torch.stack(rows) if rows else torch.empty(0, keep, dtype=torch.int64)
    return Selection(groups, indices, skipped, without_spread)


def _kept_places(order: Tensor, ranked: Tensor, keep: int, rule: str) -> Tensor:
    """Of ``order``, candidates from best to worst, and their scores ``ranked``: [keep] places."""
    places, half = torch.arange(len(order)), keep // 2
    if rule == "best_worst":
        return torch.cat([places[:half], places[len(order) - half :]])
    if rule == "middle":
        first = (len(order) - keep) // 2
        return places[first : first + keep]
    if rule == "extremes":
        ranked = ranked.double()
        return torch.argsort((ranked - ranked.mean()).abs(), descending=True, stable=True)[:keep].sort().values
    if rule == "random":
        return torch.argsort(order)[:keep]
    raise ValueError(f"the rule must be best_worst, extremes, middle or random, got {rule}")


def group_advantages(rewards: Tensor, present: Tensor | None = None, std: str = "global") -> Tensor:
    """[G, K] rewards -> float32 [G, K] advantages (R - mean of the group) / (std + 1e-4), population std, in float64.

    ``std`` is "global": of all rewards of the step, as the reference code divides, or "group" (Sol-RL Eq. 3), or
    "sample" (DanceGRPO): of the group with n - 1 for n, plus 1e-8. A missing reward (``present`` false) counts nowhere
    and gets advantage 0; equal rewards give zeros.
    """
    if std not in ("global", "group", "sample"):
        raise ValueError(f"std must be global, group or sample, got {std}")
    weight = torch.ones_like(rewards, dtype=torch.float64) if present is None else present.double()
    rewards = rewards.double()
    count = weight.sum(1, keepdim=True).clamp(min=1)
    mean = (rewards * weight).sum(1, keepdim=True) / count
    if std == "group":
        spread = (((rewards - mean) ** 2 * weight).sum(1, keepdim=True) / count).sqrt()
    elif std == "sample":
        spread = (((rewards - mean) ** 2 * weight).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    else:
        overall = (rewards * weight).sum() / weight.sum().clamp(min=1)
        spread = (((rewards - overall) ** 2 * weight).sum() / weight.sum().clamp(min=1)).sqrt()
    return ((rewards - mean) / (spread + (1e-8 if std == "sample" else 1e-4)) * weight).float()


def standardized_sum(parts: Tensor, weights: Sequence[float], present: Tensor) -> Tensor:
    """[G, N, R] rewards -> [G, N] float64, the weighted sum of (r - mean) / (std + 1e-4), each within its group (GDPO).

    A missing candidate (``present`` [G, N] false) counts nowhere and gets 0. arXiv 2601.05242.
    """
    counts = present.double().unsqueeze(-1)
    number = counts.sum(1, keepdim=True).clamp(min=1)
    offset = (parts.double() - (parts.double() * counts).sum(1, keepdim=True) / number) * counts
    spread = (offset.square().sum(1, keepdim=True) / number).sqrt()
    return (offset / (spread + 1e-4)) @ torch.tensor(weights, dtype=torch.float64)


def restrict(scores: Scores, selection: Selection) -> Scores:
    """The kept candidates' scores and latents, renumbered to [len(groups), K]."""
    pool = scores.values.shape[1]
    rows = torch.tensor(selection.groups, dtype=torch.int64).unsqueeze(1)
    flat = (rows * pool + selection.indices).flatten().tolist()
    return Scores(
        values=scores.values[rows, selection.indices],
        present=scores.present[rows, selection.indices],
        clean={new: scores.clean[old] for new, old in enumerate(flat) if old in scores.clean},
        standardized=None if scores.standardized is None else scores.standardized[rows, selection.indices],
    )
