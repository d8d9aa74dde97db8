"""Loads, states and settings for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Sequence

from solrl.runtime.migration import Item, Limits, Load
from solrl.runtime.planner import State
from solrl.runtime.roles import EXPLORE, SCORE, Cluster, RoleSpec, Working
from solrl.runtime.scheduler import RoleLoad
from solrl.runtime.throughput import Coefficients
from solrl.runtime.workload import Setting

FAST = Coefficients(1.8e-8, 4.8e-3, 1.7e-4, 17e-3)
SLOW = Coefficients(7.7e-9, 4.8e-3, 3e-5, 53e-3)


def load(slot: int, lengths: Sequence[float], first_job: int) -> Load:
    return Load.of(slot, [Item(float(first_job + k), first_job + k, length) for k, length in enumerate(lengths)])


def role_load(
    role: Working,
    model: Coefficients,
    gpus: int,
    replicas: dict[int, Sequence[float]],
    waiting: Sequence[float] = (),
    first_job: int = 0,
) -> RoleLoad:
    """Replicas by slot, with the lengths of their jobs."""
    spec = RoleSpec(role, model, gpus)
    loads, job = [], first_job
    for slot, lengths in sorted(replicas.items()):
        loads.append(load(slot, lengths, job))
        job += len(lengths)
    queue = [Item(float(job + k), job + k, length) for k, length in enumerate(waiting)]
    return RoleLoad(spec, Limits(model, spec.capacity_tokens, spec.capacity_jobs), loads, queue)


def figure_8() -> State:
    """32 GPUs: training holds 0-7 idle, reward (4 GPUs each) 8-23, rollout (1 GPU each) 24-31; N and T as printed."""
    score_model = Coefficients(7.7e-9, 5e-3, 2.8e-5, 0.0760099 - 5e-3)
    length = 0.0200418 / 7.7e-9 / 385
    counts = [97, 96, 96, 96]
    score = role_load(SCORE, score_model, 4, {2 + i: [length] * n for i, n in enumerate(counts)})
    rollout_model = Coefficients(1e-10, 1e-3, 1e-6, 0.027400)
    counts = [4, 4, 4, 4, 11, 11, 11, 10]
    explore = role_load(
        EXPLORE, rollout_model, 1, {24 + i: [3000.0] * n for i, n in enumerate(counts)}, first_job=1000
    )  # fmt: skip
    return State(Cluster(32, 8, 8), explore, score, "held")


def tiny_setting(**values: object) -> Setting:
    """An LLM's run small enough for a test: 8 GPUs, 3 batches of 24 trajectories."""
    base = {
        "name": "tiny",
        "cluster": {"gpus": 8},
        "explore": {"a_s": 1.8e-8, "b_s": 4.8e-3, "c_s": 1.7e-4, "d_s": 3e-3, "prefill_tokens_per_s": 6000,
                    "up_s": 1.0, "down_s": 0.5},
        "score": {"gpus": 2, "a_s": 7.7e-9, "b_s": 4.8e-3, "c_s": 3e-5, "d_s": 9e-3, "prefill_tokens_per_s": 30000,
                  "up_s": 1.0, "down_s": 0.5},
        "train": {"gpus": 4, "gpu_s_per_token": 8e-4, "fixed_s": 1.0, "up_s": 1.0, "down_s": 1.0, "sync_s": 0.5},
        "batch": {"num_batches": 3, "num_groups": 6, "staleness": 1, "difficulty_sigma": 0.3},
        "passes": [{"num_jobs": 4, "explore": {"median": 300, "sigma": 0.6, "high": 2000}, "prompt_tokens": 50,
                    "score": {"median": 500, "sigma": 0.6, "high": 3000}, "score_reads_answer": True}],
        "deployments": {"disaggregated": [2, 2, 4], "shared_train": 4},
    }  # fmt: skip
    return Setting.model_validate(base).with_values(values)
