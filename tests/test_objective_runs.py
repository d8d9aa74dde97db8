"""Objectives in the loop: what they draw and train on, what they refuse, and that all of them are one loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl.config import Config
from solrl.groups import group_advantages, group_seeds, noise
from solrl.learner import Learner, TrainingSet
from solrl.models import load_policy
from solrl.objectives.base import Batch, Objective, Point, noisings, open_objective
from solrl.objectives.dance_grpo import DanceGRPO
from solrl.objectives.dpo import DPO
from solrl.objectives.flow_grpo import FlowGRPO
from solrl.session import open_session
from solrl.settings import load_config, read_flags
from solrl.train import run_step
from solrl.types import Policy, Trajectory, UsageError
from tests.parts import ALONE, CPU, never, stopwatch, tiny_config

RED = {"name": "tests.parts:Redness"}


def config_of(objective: str, folder: Path | str = "runs/test", **sections: dict[str, Any]) -> Config:
    """tiny_config for an objective, with its own default share of timesteps."""
    train = {"objective": objective, "timestep_fraction": 0.67} | sections.pop("train", {})
    keep = {"group_size": 2} if objective == "dpo" else {}
    return tiny_config(folder, reward=RED, train=train, regenerate=keep | sections.pop("regenerate", {}), **sections)


class Doubling(Objective):
    """Somebody else's objective: all samples pull, twice as hard as ``factor`` says."""

    factor: float = 1.0

    def points(self, batch: Batch, config: Config):  # type: ignore[no-untyped-def]
        for latents, sigma, fresh in noisings(batch, config.num_train_timesteps):
            yield Point(latents, sigma, self.loss_to(fresh - batch.clean))

    def loss_to(self, target: Tensor):  # type: ignore[no-untyped-def]
        def loss(velocity: Tensor, old: Tensor, reference_velocity: Tensor | None) -> tuple[Tensor, Tensor]:
            error = (velocity - target).square().flatten(1).mean(1)
            return 2 * self.factor * error, torch.zeros_like(error)

        return loss


# What is refused


@pytest.mark.parametrize(
    ("objective", "sections", "says"),
    [
        ("flow_grpo", {"regenerate": {"enabled": False}}, r"would be biased\. Set regenerate.enabled = true"),
        (
            "dance_grpo",
            {"regenerate": {"enabled": False}, "explore": {"precision": "emulated_nvfp4"}},
            r"explored ones \(precision emulated_nvfp4, no noise\)",
        ),
        ("flow_grpo", {"regenerate": {"solver": "dpm2"}}, "set regenerate.solver = euler"),
        ("flow_grpo", {"train": {"old_from_rollout": True}}, "set train.old_from_rollout = false"),
        ("flow_grpo", {"train": {"timestep_fraction": 1.0}}, "at most 2 of regenerate.num_steps = 3"),
        ("flow_grpo", {"train": {"objective_options": {"window": True}}}, "do not fit into the first half"),
        (
            "flow_grpo",
            {"train": {"objective_options": {"sde_type": "cps", "noise_level": 1.0}}},
            "noise_level must be below 1",
        ),
        ("dpo", {"regenerate": {"group_size": 4}}, r"set regenerate.group_size = 2 \(it is 4\)"),
        ("dpo", {"batch": {"train": 1}}, "batch.train must be even"),
        ("awm", {"train": {"beta": 0.1}}, "train.beta is DiffusionNFT's"),
        ("awm", {"train": {"objective_options": {"wieghting": "t"}}}, "the settings of awm are weighting, power"),
        ("flow_grpo", {"train": {"objective_options": {"noise_level": 0}}}, "objective_options.noise_level"),
        ("nft", {"train": {"objective_options": {"x": 1}}}, "the settings of nft are none"),
        ("ntf", {}, "'ntf' is unknown; known: nft, awm, flow_grpo, dance_grpo, dpo"),
        ("tests.nowhere:Objective", {}, "cannot be imported"),
        ("tests.parts:Redness", {}, "no subclass of solrl.objectives.base.Objective"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_the_model_loads(
    objective: str, sections: dict[str, dict[str, Any]], says: str
) -> None:
    config = config_of(objective, model={"path": "no/such/model"}, **sections)
    with pytest.raises(UsageError, match=says):
        open_session(config, ALONE, never)


def test_an_objective_brings_its_sources_defaults_and_a_set_value_wins() -> None:
    def train(**settings: Any) -> Any:
        return Config.model_validate({"train": settings}).train

    assert train() == train(objective="nft").model_copy(update={"objective": "nft"})
    flow = train(objective="flow_grpo")
    assert (flow.old_decay_rate, flow.kl_weight, flow.timestep_fraction, flow.is_on_policy) == (0, 0.01, 0.99, True)
    assert train(objective="flow_grpo", kl_weight=0.04).kl_weight == 0.04
    dance = train(objective="dance_grpo")
    assert (dance.advantage_std, dance.kl_weight, dance.is_on_policy) == ("sample", 0, True)
    assert train(objective="awm").old_decay_cap == 0.3 and not train(objective="awm").is_on_policy


def test_an_objectives_own_settings_are_flags() -> None:
    words = "--train.objective flow_grpo --train.objective_options.window true --train.timestep_fraction 0.3"
    flags = read_flags([*words.split(), "--train.objective_options.sde_type=cps"])
    assert open_objective(load_config("tiny_flux", flags)) == FlowGRPO(window=True, sde_type="cps")


def test_dance_grpos_advantages_divide_by_the_samples_spread() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 3.0, 9.0]])
    present = torch.tensor([[True] * 4, [True, True, True, False]])
    found = group_advantages(rewards, present, "sample").tolist()
    std = (14 / 3) ** 0.5  # of 1, 2, 3, 6 around 3
    assert found[0] == pytest.approx([-2 / std, -1 / std, 0, 3 / std], abs=1e-6)
    assert found[1] == pytest.approx([-1, 0, 1, 0], abs=1e-6)


# Which steps are trained


def test_masks_of_trained_steps() -> None:
    seeds = [seed for row in group_seeds(0, 1, 8, 8) for seed in row]
    noisy, trained = FlowGRPO().schedule(seeds, 10, 7)
    assert noisy[0].tolist() == [True] * 9 + [False] and trained[0].tolist() == [True] * 7 + [False] * 3
    noisy, trained = FlowGRPO(window=True).schedule(seeds, 10, 3)
    assert torch.equal(noisy, trained)
    starts = set()
    for row in trained.tolist():
        first = row.index(True)
        assert row == [first <= i < first + 3 for i in range(10)]
        starts.add(first)
    assert starts == {0, 1, 2}  # all windows of three within the first half
    noisy, trained = DanceGRPO().schedule(seeds, 10, 6)
    assert bool((noisy[:, :9]).all()) and not noisy[:, 9].any() and not trained[:, 9].any()
    assert trained.sum(1).tolist() == [6] * 64 and len({tuple(row) for row in trained.tolist()}) > 20
    for objective in (FlowGRPO(window=True), DanceGRPO()):
        alone = objective.schedule(seeds[5:6], 10, 3)[1]
        assert torch.equal(alone, objective.schedule(seeds, 10, 3)[1][5:6])


# In the loop


def with_adapters(session: Any) -> None:
    """Both adapters are the same, and not the base."""
    with torch.no_grad():
        for number, (policy, old) in enumerate(
            zip(session.learner.parameters, session.learner.old_parameters, strict=True)
        ):
            if number % 2:
                policy.copy_(noise([number], policy.shape)[0] * 0.02)
                old.copy_(policy)
    session.sync()


def on_policy_step(dtype: str) -> dict[str, float]:
    # a decay rate so that old_policy's velocity comes from its own adapter
    train, output = {"old_decay_rate": 1e-3, "kl_weight": 0.0}, {"audit_every_steps": 1}
    config = config_of("flow_grpo", model={"dtype": dtype}, train=train, output=output)
    session = open_session(config, ALONE, never)
    with_adapters(session)
    record = run_step(session, 1, stopwatch())
    kept = record.rewards.trajectories
    assert sorted(kept) == list(range(12)) and record.proxy is not None and record.audits
    assert not any(scores.trajectories for scores in (record.proxy, *record.audits.values()))  # memory is for the kept
    assert all(torch.equal(way.latents[-1], record.rewards.clean[i]) for i, way in kept.items())
    return record.metrics


def test_on_policy_the_ratio_is_one_in_float32() -> None:
    metrics = on_policy_step("float32")
    assert metrics["health/ratio_error"] <= 1e-5 and metrics["health/clip_fraction"] == 0
    assert metrics["health/rollout_log_ratio"] < 1e-4 and metrics["health/policy_change"] > 0
    assert metrics["health/velocity_old_distance"] == 0


@pytest.mark.slow
def test_on_policy_the_ratio_is_one_in_bfloat16_whatever_the_rollout_tree_rounds() -> None:
    metrics = on_policy_step("bfloat16")
    assert metrics["health/ratio_error"] <= 1e-5 and metrics["health/clip_fraction"] == 0
    assert metrics["health/rollout_log_ratio"] > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["awm", "dance_grpo", "dpo", "tests.test_objective_runs:Doubling"])
def test_every_objective_takes_a_step_in_the_same_loop(objective: str) -> None:
    options = {"factor": 0.5} if ":" in objective else {}
    session = open_session(config_of(objective, train={"objective_options": options}), ALONE, never)
    metrics = run_step(session, 1, stopwatch()).metrics
    assert metrics["health/policy_change"] > 0 and metrics["grad_norm"] > 0
    assert {f"health/{name}" for name in session.learner.objective.metrics} <= metrics.keys()


def training_set(policy: Policy, advantages: list[float]) -> TrainingSet:
    seeds = group_seeds(0, 1, 1, len(advantages))[0]
    clean = noise([seed ^ 1 for seed in seeds], policy.latent_shape) * 0.5
    return TrainingSet(
        seeds=seeds,
        groups=[0] * len(seeds),
        advantages=torch.tensor(advantages),
        weights=torch.ones(len(seeds)),
        clean=dict(enumerate(clean)),
        conditioning=policy.encode(["a red circle left of a blue square"]),
    )


def test_both_of_a_pair_are_noised_alike() -> None:
    config, seeds = config_of("dpo"), group_seeds(0, 1, 2, 2)
    flat = [seed for row in seeds for seed in row]
    clean = noise(flat, (4, 2, 2))
    batch = Batch(flat, torch.tensor([1.0, -1.0, -1.0, 1.0]), clean, None, torch.linspace(1, 0, 4).double())
    for point in DPO().points(batch, config):
        s = point.sigma.view(-1, 1, 1, 1)
        fresh = (point.latents - (1 - s) * clean) / s
        torch.testing.assert_close(fresh[::2], fresh[1::2], atol=1e-5, rtol=1e-5)
        assert torch.equal(point.sigma[::2], point.sigma[1::2]) and not torch.equal(fresh[0], fresh[2])


@pytest.mark.slow
def test_preferences_are_learned_from_pairs() -> None:
    config = config_of("dpo", train={"learning_rate": 3e-3, "old_decay_rate": 0.0})
    some = Learner(load_policy(config, CPU), config)
    data = training_set(some.policy, [1.0, -1.0, -1.0, 1.0])
    metrics = [some.update(data, ALONE, never) for _ in range(6)]
    assert metrics[0]["loss/policy"] == pytest.approx(0.6931472, abs=1e-6)  # log 2: the policy is its reference
    assert metrics[-1]["loss/policy"] < 0.6 and metrics[-1]["health/preference"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["flow_grpo", "dance_grpo"])
def test_a_step_makes_good_trajectories_likelier_and_bad_ones_less(objective: str) -> None:
    config = config_of(objective, train={"learning_rate": 1e-4, "kl_weight": 0.0}, explore={"enabled": False})
    session = open_session(config, ALONE, never)
    record = run_step(session, 1, stopwatch())
    rewards, some = record.rewards, session.learner
    conditioning = some.policy.encode(record.prompts)
    advantages = group_advantages(rewards.signal, rewards.present, config.train.advantage_std).flatten()
    gains = []
    for number, way in rewards.trajectories.items():
        advantage, clean = advantages[number : number + 1], rewards.clean[number][None]
        batch = Batch([0], advantage, clean, Trajectory.stack([way]), some.policy.sigmas(3))
        for point in some.objective.points(batch, config):
            with torch.no_grad():
                velocity = some.policy.velocity(point.latents, point.sigma, conditioning.rows([number // 4]))
            terms = point.loss.keywords  # type: ignore[attr-defined]
            step = terms["step"](terms["latents"], velocity, terms["sigma"], terms["next_sigma"])
            gains.append(float((step.log_prob(terms["following"]) - terms["drawn_log_prob"]) * advantage))
    assert sum(gains) > 0


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_equal_one_with_trajectories(tmp_path: Path) -> None:
    from tests.test_processes import launch, same_bits

    sections = {"train": {"num_steps": 2, "objective": "flow_grpo"}, "reward": {"name": "picky:Picky"}}
    one, two = (launch(tmp_path, count, **sections) for count in (1, 2))
    same_bits(one, two)


@pytest.mark.slow
def test_a_regenerated_sample_is_replayed_with_its_noise(tmp_path: Path) -> None:
    from solrl import ledger
    from solrl.replay import replay
    from solrl.train import train

    folder = train(config_of("flow_grpo", tmp_path / "run", train={"num_steps": 1}))
    number = next(i for i, entry in enumerate(ledger.read(folder, 1)) if entry.kept)
    redrawn = replay(folder, 1, number, trust_code=True, report=lambda line: None)
    assert [one.stage for one in redrawn] == ["explore", "regenerate"]  # its score is checked against the ledger's
