"""The update: what it equals, what it must not depend on, and its averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from solrl.distributed import OrderFreeSum
from solrl.groups import group_seeds, noise
from solrl.learner import Learner, TrainingSet
from solrl.models import adapter, load_policy, lora_state
from solrl.objectives.base import train_sigmas
from solrl.objectives.nft import nft_loss
from solrl.types import Policy, SolrlError
from tests.parts import ALONE, CPU, never, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above a cyan triangle"]


def learner(**sections: Any) -> Learner:
    config = tiny_config(**sections)
    return Learner(load_policy(config, CPU), config)


def training_set(policy: Policy, weights: list[float] | None = None, groups: int = 2) -> TrainingSet:
    seeds = [seed for row in group_seeds(0, 1, groups, 3) for seed in row]
    clean = noise([seed ^ 1 for seed in seeds], policy.latent_shape) * 0.5
    return TrainingSet(
        seeds=seeds,
        groups=[g for g in range(groups) for _ in range(3)],
        advantages=torch.linspace(-2, 2, len(seeds)),
        weights=torch.tensor(weights or [1.0] * len(seeds)),
        clean=dict(enumerate(clean)),
        conditioning=policy.encode(PROMPTS),
    )


def weights_of(some: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in some.parameters]


def test_the_first_gradient_equals_one_plain_backward_over_all_pairs() -> None:
    some = learner(train={"kl_weight": 0.1, "max_grad_norm": 1e9})
    data, policy, config = training_set(some.policy), some.policy, some.config
    some.optimizer.step = lambda: grads.extend(p.grad.clone() for p in some.parameters)  # type: ignore[method-assign, union-attr]
    grads: list[torch.Tensor] = []
    some.update(data, ALONE, never)

    sigmas = train_sigmas(data.seeds, policy.sigmas(3), config.num_train_timesteps)
    total = torch.zeros(())
    conditioning = data.conditioning.rows(data.groups)
    clean = torch.stack([data.clean[i] for i in range(6)])
    from solrl.groups import derive_seed

    for t in range(config.num_train_timesteps):
        fresh = noise([derive_seed(seed, f"train/{t}") for seed in data.seeds], policy.latent_shape)
        s = sigmas[:, t].view(-1, 1, 1)
        noised = (1 - s) * clean + s * fresh
        with torch.no_grad(), adapter(policy.transformer, None):
            reference = policy.velocity(noised, sigmas[:, t], conditioning)
        velocity = policy.velocity(noised, sigmas[:, t], conditioning)
        loss, kl = nft_loss(
            velocity, reference, noised, clean, sigmas[:, t], data.advantages, reference_velocity=reference
        )
        total = total + (loss + 0.1 * kl).sum()
    for parameter in some.parameters:
        parameter.grad = None
    (total / (6 * config.num_train_timesteps)).backward()
    for parameter, ours in zip(some.parameters, grads, strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-4)


def test_each_sample_trains_different_sigmas_of_the_grid_and_never_zero() -> None:
    some = learner(regenerate={"num_steps": 5}, train={"timestep_fraction": 0.8})
    seeds = [seed for row in group_seeds(0, 1, 4, 16) for seed in row]
    sigmas = train_sigmas(seeds, some.policy.sigmas(5), some.config.num_train_timesteps)
    grid = some.policy.sigmas(5).float()
    assert sigmas.shape == (64, 4)
    assert all(len(set(row)) == 4 and set(row) <= set(grid[:-1].tolist()) for row in sigmas.tolist())
    assert 1.0 in sigmas[:, 0].tolist() and len({tuple(row) for row in sigmas.tolist()}) > 10


def test_a_sample_of_weight_zero_changes_nothing() -> None:
    first, second = learner(), learner()
    data = training_set(first.policy, weights=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    other = copy.copy(data)
    object.__setattr__(other, "clean", data.clean | {2: torch.full_like(data.clean[2], 3.0)})
    first.update(data, ALONE, never)
    second.update(other, ALONE, never)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(first), weights_of(second), strict=True))


def test_old_policy_and_average_follow_their_schedules() -> None:
    some = learner()
    start = weights_of(some)
    some.update(training_set(some.policy), ALONE, never)
    after = weights_of(some)
    for before, now, old, ema in zip(start, after, some.old_parameters, some.ema_parameters, strict=True):
        torch.testing.assert_close(old.detach(), 0.001 * before + 0.999 * now)
        torch.testing.assert_close(ema, (2 / 11) * before + (9 / 11) * now)
    some.step = 799
    old_before = [p.detach().clone() for p in some.old_parameters]
    some.update(training_set(some.policy), ALONE, never)
    for before, now, old in zip(old_before, some.parameters, some.old_parameters, strict=True):
        torch.testing.assert_close(old.detach(), 0.5 * before + 0.5 * now.detach())


def test_state_round_trips_bit_for_bit_and_a_wrong_one_is_refused() -> None:
    first, second = learner(), learner()
    data = training_set(first.policy)
    first.update(data, ALONE, never)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    metrics = [some.update(data, ALONE, never) for some in (first, second)]
    assert metrics[0] == metrics[1] and first.step == second.step == 2
    mine, theirs = first.state_dict(), second.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    broken = dict(mine)
    broken.popitem()
    with pytest.raises(SolrlError, match="does not fit"):
        first.load_state_dict(broken)


def test_without_kl_the_reference_is_not_evaluated() -> None:
    calls = {}
    for weight in (0.0, 1e-4):
        some = learner(train={"kl_weight": weight})
        count = 0
        forward = some.policy.transformer.forward

        def counting(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return _forward(*args, **kwargs)

        some.policy.transformer.forward = counting  # type: ignore[method-assign]
        metrics = some.update(training_set(some.policy), ALONE, never)
        calls[weight] = count
        assert metrics["loss/kl"] == 0
    assert calls[1e-4] == calls[0.0] * 3 / 2


def test_order_free_sums_have_the_same_bits_in_any_order_and_split() -> None:
    generator = torch.Generator().manual_seed(0)
    addends = [torch.randn(50, generator=generator) * 10.0 ** -(i % 9) for i in range(12)]
    results = []
    for order in (range(12), reversed(range(12)), [3, 1, 2, 0, *range(4, 12)]):
        total = OrderFreeSum(50, 12, CPU)
        for i in order:
            total.add([addends[i][:20], addends[i][20:].view(6, 5)])
        results.append(total.result(ALONE))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    exact = torch.stack(addends).double().sum(0)
    torch.testing.assert_close(results[0], exact, atol=12 * 2.0**-48, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_a_gradient_that_cannot_be_summed_stops_the_run(value: float) -> None:
    total = OrderFreeSum(2, 4, CPU)
    with pytest.raises(SolrlError, match="diverged"):
        total.add([torch.tensor([0.0, value])])


def test_the_adapter_that_trains_is_the_default_one() -> None:
    some = learner()
    base = lora_state(some.policy.transformer, "default")
    some.update(training_set(some.policy), ALONE, never)
    assert all(pair.b.any() for pair in base.values())


def test_a_bfloat16_base_trains_float32_adapters() -> None:
    some = learner(model={"dtype": "bfloat16"})
    metrics = some.update(training_set(some.policy), ALONE, never)
    assert metrics["health/policy_change"] > 0 and all(p.dtype == torch.float32 for p in some.parameters)


def test_old_policy_from_merged_weights_takes_the_same_step_up_to_rounding_and_says_its_error() -> None:
    from solrl.session import open_session

    steps = []
    for from_rollout in (False, True):
        session = open_session(tiny_config(train={"old_from_rollout": from_rollout}), ALONE, never)
        some = session.learner
        with torch.no_grad():
            for number, matrix in enumerate(some.old_parameters[1::2]):  # B: old_policy is no longer the base
                matrix.copy_(noise([number], matrix.shape)[0] * 0.05)
        session.sync()
        steps.append((some.update(training_set(some.policy), ALONE, never), weights_of(some)))
    (plain, expected), (merged, weights) = steps
    assert "health/old_rollout_error" not in plain
    assert 0 < merged["health/old_rollout_error"] < 1e-9 < merged["health/velocity_old_distance"]
    assert merged["loss/policy"] == pytest.approx(plain["loss/policy"], rel=1e-4)
    # Adam's first step is the gradient's sign: 2 learning rates apart where a gradient is nothing but rounding
    apart = torch.cat([(a - b).abs().flatten() for a, b in zip(weights, expected, strict=True)])
    assert float((apart > 1e-5).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_fine_tuning_starts_on_policy_and_at_its_reference_and_moves_what_is_drawn(dtype: str) -> None:
    """The rollout tree's rounded weights and the float32 ones that train give the same velocity, bit for bit."""
    from solrl.session import open_session

    train = {"learning_rate": 1e-4, "kl_weight": 0.1}
    session = open_session(tiny_config(model={"dtype": dtype}, lora={"enabled": False}, train=train), ALONE, never)
    some, rollout = session.learner, session.trees.rollout
    before = [p.detach().clone() for p in rollout.parameters()]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in some.parameters)
    metrics = some.update(training_set(some.policy), ALONE, never)
    assert metrics["health/velocity_old_distance"] == metrics["loss/kl"] == 0 < metrics["grad_norm"]
    assert session.sync().num_layers == len(before)
    after = zip(rollout.parameters(), before, some.old_parameters, strict=True)
    assert all(torch.equal(now, old.to(now.dtype)) for now, _, old in after)
    moved = [not torch.equal(now, then) for now, then in zip(rollout.parameters(), before, strict=True)]
    assert sum(moved) > 0.8 * len(moved) and session.learner.reference is not None
    again = some.update(training_set(some.policy), ALONE, never)
    assert again["loss/kl"] > 0 and again["health/velocity_old_distance"] > 0


def test_old_policy_from_merged_weights_needs_them() -> None:
    config = tiny_config(train={"old_from_rollout": True})
    with pytest.raises(SolrlError, match="old_from_rollout needs the rollout policy"):
        Learner(load_policy(config, CPU), config)
