"""Notice when a run cannot learn for a mechanical reason, and stop it with that reason.

Rewards fall and losses rise in healthy runs (the DiffusionNFT loss grows while the reward improves), so neither is
looked at here. Every check asks for something noise cannot produce: bits that should have moved and did not, numbers
that are not numbers, nothing at all to train on for a long time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from solrl.types import SolrlError

IDLE_STEPS, IDLE_GROUPS = 3, 64
"""A run stops after this many steps in a row, and groups in them, without one group to train on. Both: rewards that
rarely differ leave single small steps empty, and even where nine groups in ten have no spread, 64 in a row have a
chance of one in a thousand."""

FROZEN_SYNCS = 10
"""A run stops when as many updates in a row changed the policy but not one byte of what draws the samples."""

CLEAN_NORM_FACTOR = 10.0
"""Clean latents may grow to this multiple of their size at the run's first step. Learning changes it by percents."""


MEANINGS = {
    "loss/policy": "the objective's loss; it often rises while the reward improves, so it is no sign of health",
    "loss/kl": "squared velocity distance to the adapter-free model (of the sampler's means where it has noise)",
    "grad_norm": "length of the gradient before clipping",
    "health/trained_groups": "groups with different rewards that were trained on",
    "health/skipped_groups": "groups left out for want of spread or scores",
    "health/zero_std_groups": "groups whose scores were all equal",
    "health/missing_share": "share of scores the reward could not give",
    "health/nonfinite": "trained samples with NaN or infinite latents",
    "health/clean_norm": "root mean square of the trained latents",
    "health/old_distance": "distance of policy and old_policy weights",
    "health/velocity_old_distance": "squared velocity distance of policy and old_policy",
    "health/old_rollout_error": "squared velocity distance of old_policy's merged weights and its adapter: rounding",
    "health/ratio_error": "mean distance from 1 of the likelihood ratio of policy and old_policy",
    "health/clip_fraction": "share of trained timesteps whose ratio is clipped",
    "health/rollout_log_ratio": "log-likelihood of a step under old_policy and under the merged weights: rounding",
    "health/preference": "share of trained timesteps at which the policy prefers the better of a pair",
    "health/policy_lag": "optimizer steps between the old_policy that drew the samples and the update on them",
    "health/policy_change": "largest change of an adapter weight in the step",
    "health/synced_bytes": "bytes of explorer and rollout weights changed by the sync",
    "health/clipped_blocks": "share of the explorer's input blocks above their static scale (audit steps)",
    "health/subnormal_scales": "share of the explorer's input blocks whose own scale lost precision (audit steps)",
}
"""What the metrics of update and health say, for people."""


@dataclass(frozen=True)
class StepFacts:
    """What a step counted and measured, equal on every rank. None: it did not happen in this step."""

    step: int
    num_groups: int
    trained_groups: int
    """Groups with different rewards that reached the update; all others count as skipped."""
    zero_std_groups: int
    """Groups whose scores were all equal, in either stage."""
    num_scores: int
    """Scores asked for in all stages."""
    num_missing: int = 0
    num_nonfinite: int = 0
    """Trained samples whose latents hold NaN or infinity."""
    clean_norm: float | None = None
    """Mean root mean square of the clean latents that were trained on."""
    grad_norm: float | None = None
    policy_change: float | None = None
    """Largest absolute change of an adapter weight by the optimizer step; 0 means bit-equal weights."""
    synced_bytes: int | None = None
    """Bytes that this step's requantize_ changed in explorer and rollout tree together."""

    def metrics(self) -> dict[str, float]:
        """``health/*`` as written to metrics.jsonl."""
        values = {
            "groups": self.num_groups,
            "trained_groups": self.trained_groups,
            "skipped_groups": self.num_groups - self.trained_groups,
            "zero_std_groups": self.zero_std_groups,
            "missing_share": self.num_missing / max(self.num_scores, 1),
            "nonfinite": self.num_nonfinite,
            "clean_norm": self.clean_norm,
            "policy_change": self.policy_change,
            "synced_bytes": self.synced_bytes,
        }
        return {f"health/{name}": value for name, value in values.items() if value is not None}


def check(
    facts: StepFacts, history: Sequence[Mapping[str, float]], *, max_missing_share: float = 1.0
) -> dict[str, float]:
    """The step's ``health/*`` metrics, or SolrlError with the reason why the run cannot go on learning.

    ``history`` holds the metrics of the steps before, oldest first; after a resume, those read back from the file.
    """
    _check_numbers(facts)
    _check_missing(facts, max_missing_share)
    _check_update(facts)
    metrics = facts.metrics()
    steps = [row for row in history if "health/groups" in row]
    _check_clean_norm(facts, steps)
    _check_idle(facts, [*steps, metrics])
    _check_sync(facts, [*steps, metrics])
    return metrics


def clean_norms(clean: Mapping[int, Tensor], total: int) -> Tensor:
    """Root mean square of each sample's latents at its flat position, float64 [total]; 0 for samples drawn elsewhere.

    Summed over ranks this is every sample's, with the same bits for any number of ranks.
    """
    norms = torch.zeros(total, dtype=torch.float64)
    for position, latents in clean.items():
        norms[position] = latents.double().square().mean().sqrt().cpu()
    return norms


def largest_change(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """Largest absolute difference between two lists of tensors."""
    changes = [(b.detach() - a.detach()).abs().max() for a, b in zip(before, after, strict=True)]
    return float(torch.stack(changes).max())


def _stop(facts: StepFacts, reason: str, remedy: str) -> SolrlError:
    return SolrlError(f"step {facts.step}: {reason}; {remedy}")


def _check_numbers(facts: StepFacts) -> None:
    if facts.num_nonfinite:
        raise _stop(
            facts,
            f"{facts.num_nonfinite} trained samples hold NaN or infinite latents",
            "resume from an earlier checkpoint with a lower train.learning_rate, or try explore.precision = full",
        )
    for name, value in (("grad_norm", facts.grad_norm), ("the clean latents' norm", facts.clean_norm)):
        if value is not None and not math.isfinite(value):
            raise _stop(
                facts, f"{name} is {value}", "resume from an earlier checkpoint with a lower train.learning_rate"
            )


def _check_missing(facts: StepFacts, limit: float) -> None:
    share = facts.num_missing / max(facts.num_scores, 1)
    if share > limit:
        raise _stop(
            facts,
            f"{facts.num_missing} of {facts.num_scores} scores are missing ({share:.0%}, limit {limit:.0%})",
            "look at why the reward cannot judge them, or raise reward.max_missing_share",
        )


def _check_update(facts: StepFacts) -> None:
    if not facts.trained_groups:
        return
    if facts.grad_norm == 0:
        raise _stop(
            facts,
            f"{facts.trained_groups} groups were trained on and the gradient is exactly 0",
            "the loss does not reach the adapter: check lora.targets and the objective",
        )
    if facts.policy_change == 0:
        raise _stop(
            facts,
            "the optimizer step left every adapter weight bit-equal",
            "raise train.learning_rate (or train.max_grad_norm)",
        )


def _check_clean_norm(facts: StepFacts, steps: Sequence[Mapping[str, float]]) -> None:
    first = next((row["health/clean_norm"] for row in steps if "health/clean_norm" in row), None)
    if first is not None and facts.clean_norm is not None and facts.clean_norm > CLEAN_NORM_FACTOR * first:
        raise _stop(
            facts,
            f"clean latents have grown from {first:.3g} at the first step to {facts.clean_norm:.3g}: samples diverge",
            "resume from an earlier checkpoint with a lower train.learning_rate",
        )


def _check_idle(facts: StepFacts, steps: Sequence[Mapping[str, float]]) -> None:
    idle = _streak(steps, lambda row: row["health/trained_groups"] == 0)
    groups = sum(int(row["health/groups"]) for row in idle)
    if len(idle) < IDLE_STEPS or groups < IDLE_GROUPS:
        return
    equal = sum(int(row["health/zero_std_groups"]) for row in idle)
    outcome = f"{len(idle)} steps in a row had nothing to learn from"
    if 2 * equal >= groups:
        raise _stop(
            facts,
            f"{outcome}: in {equal} of the last {groups} groups all scores are equal",
            "check that the reward tells images apart (solrl evaluate), or choose prompts it can rank",
        )
    raise _stop(
        facts,
        f"{outcome}: of the last {groups} groups {groups - equal} lacked scores and {equal} had only equal ones",
        "look at why the reward cannot judge its candidates, or lower regenerate.group_size",
    )


def _check_sync(facts: StepFacts, steps: Sequence[Mapping[str, float]]) -> None:
    updates = [row for row in steps if "health/synced_bytes" in row and row.get("health/policy_change", 0) > 0]
    frozen = _streak(updates, lambda row: row["health/synced_bytes"] == 0)
    if len(frozen) >= FROZEN_SYNCS:
        raise _stop(
            facts,
            f"{len(frozen)} updates in a row changed the policy but not one byte of explorer and rollout weights: "
            "samples still come from the weights before them",
            "check that requantize_ runs after every update and that train.learning_rate is not vanishingly small",
        )


def _streak(
    rows: Sequence[Mapping[str, float]], holds: Callable[[Mapping[str, float]], bool]
) -> list[Mapping[str, float]]:
    """The longest run of rows at the end for which ``holds``."""
    return list(takewhile(holds, reversed(rows)))
