"""The update: gradients of the objective over fixed micro-batches, one optimizer step, then the two averages.

The loss is a sum over (sample, timestep) pairs divided by their global number. Each micro-batch's gradient goes into a
64-bit fixed-point sum, so the total has the same bits however micro-batches are spread over processes, and a rank
without any still joins the one reduction of the step. There is no DDP wrapper. Adapter weights are float32 masters;
compute runs in the policy's dtype inside ``compute.updating``.

old_policy is always the policy that drew the samples at hand. With ``runtime.staleness`` that is an earlier version, so
its average runs ahead of it, in ``newer_old``, and each version becomes old_policy when its samples' turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from solrl.compute import drawing, updating
from solrl.config import Config
from solrl.distributed import OrderFreeSum, World
from solrl.models.base import adapter, lora_parameters, lora_state
from solrl.objectives.base import Batch, Point, open_objective
from solrl.types import Conditioning, LoraPair, Policy, SolrlError, Trajectory


@dataclass(frozen=True)
class TrainingSet:
    """The samples of one update, numbered 0 .. len(seeds) - 1 in the same order on every rank."""

    seeds: list[int]  # each sample's latent seed
    groups: list[int]  # each sample's row of ``conditioning``
    advantages: Tensor  # [samples] float32
    weights: Tensor  # [samples] float32: 1, or 0 for a sample whose reward is missing
    clean: dict[int, Tensor]  # sample number -> clean latents; at least those of this rank's micro-batches
    conditioning: Conditioning
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # as ``clean``, for an objective with a sampler


NUM_SUMS = 4
"""Numbers that are summed beside the gradient: policy loss, KL, velocity distance, error of the merged old_policy; then
the objective's own metrics."""


class Learner:
    """Owns the adapters' optimizer and averages. ``step`` counts optimizer steps done.

    ``rollout_policy`` draws with old_policy's merged weights; it gives v_old with train.old_from_rollout.
    """

    def __init__(self, policy: Policy, config: Config, rollout_policy: Policy | None = None) -> None:
        if config.train.old_from_rollout and rollout_policy is None:
            raise SolrlError("train.old_from_rollout needs the rollout policy: Learner(policy, config, rollout_policy)")
        self.policy, self.config, self.objective = policy, config, open_objective(config)
        self.merged_old = rollout_policy if config.train.old_from_rollout else None
        self.layers = list(lora_state(policy.transformer, "default"))
        self.parameters = lora_parameters(policy.transformer, "default")
        self.old_parameters = lora_parameters(policy.transformer, "old")
        self.newer_old = [[p.detach().clone() for p in self.old_parameters] for _ in range(config.runtime.staleness)]
        """old_policy's later versions, which drew or draw the samples of later steps; oldest first."""
        self.old_versions = [0] * (1 + len(self.newer_old))
        """Optimizer steps done when old_policy and each of ``newer_old`` was the newest."""
        self.ema_parameters = [p.detach().clone() for p in self.parameters]
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.parameters, train.learning_rate, train.adam_betas, train.adam_eps, train.weight_decay
        )
        for parameter in self.parameters:  # so that a checkpoint has the same tensors from step 0 on
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.step = 0

    @property
    def ema(self) -> dict[str, LoraPair]:
        """The averaged adapter, for evaluation and export; never for rollouts."""
        return self._pairs(self.ema_parameters)

    def update(self, data: TrainingSet, world: World, stop: Callable[[], None]) -> dict[str, float]:
        """Take one optimizer step on ``data`` and advance old_policy and EMA; the metrics are equal on all ranks."""
        total = self.begin(data)
        for number in range(self.num_batches(data)):
            if (number * self.config.batch.train) // self.config.batch.rollout % world.size == world.rank:
                stop()
                self.add(total, data, number)
        return self.finish(total, world)

    def num_batches(self, data: TrainingSet) -> int:
        """Training micro-batches of ``data``."""
        return -(-len(data.seeds) // self.config.batch.train)

    def begin(self, data: TrainingSet) -> OrderFreeSum:
        """Where this rank sums up the gradients of its share of ``data``."""
        numel = sum(p.numel() for p in self.parameters) + NUM_SUMS + len(self.objective.metrics)
        return OrderFreeSum(numel, self.num_batches(data), self.policy.device)

    def add(self, total: OrderFreeSum, data: TrainingSet, number: int) -> None:
        """``total`` holds micro-batch ``number`` too; as it was if that fails."""
        first = number * self.config.batch.train
        try:
            losses = self._accumulate(data, range(first, min(first + self.config.batch.train, len(data.seeds))))
            total.add([*(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters), losses])
        finally:
            self.optimizer.zero_grad()

    def finish(self, total: OrderFreeSum, world: World) -> dict[str, float]:
        """The optimizer step on the sum over all ranks; the metrics, equal on all of them."""
        num_sums = NUM_SUMS + len(self.objective.metrics)
        summed = total.result(world)
        gradient = summed[:-num_sums].float()
        policy_loss, kl, old_distance, old_error, *own = summed[-num_sums:].tolist()
        for parameter, part in zip(self.parameters, gradient.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.train.max_grad_norm, error_if_nonfinite=True)
        before = [p.detach().clone() for p in self.parameters]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._average()
        return {
            "loss/policy": policy_loss,
            "loss/kl": kl,
            "grad_norm": float(norm),
            "health/velocity_old_distance": old_distance,
            "health/old_distance": _distance(self.parameters, self.old_parameters),
            "health/policy_change": max(
                float((p.detach() - q).abs().max()) for p, q in zip(self.parameters, before, strict=True)
            ),
            **{f"health/{name}": value for name, value in zip(self.objective.metrics, own, strict=True)},
        } | ({"health/old_rollout_error": old_error} if self.merged_old else {})

    def _accumulate(self, data: TrainingSet, samples: range) -> Tensor:
        """Add one micro-batch's gradient to ``.grad``; return its share of the sums beside it."""
        train, train_batch, device = self.config.train, self.config.batch.train, self.policy.device
        numbers = [*samples] + [samples[-1]] * (train_batch - len(samples))
        weight = data.weights[numbers].to(device)
        weight[len(samples) :] = 0
        weight /= float(data.weights.sum()) * self.config.num_train_timesteps
        conditioning = data.conditioning.rows([data.groups[i] for i in numbers])
        batch = Batch(
            seeds=[data.seeds[i] for i in numbers],
            advantages=data.advantages[numbers].to(device),
            clean=torch.stack([data.clean[i] for i in numbers]),
            trajectory=Trajectory.stack([data.trajectories[i] for i in numbers]) if data.trajectories else None,
            sigmas=self.policy.sigmas(self.config.train_stage.num_steps),
        )
        points = list(self.objective.points(batch, self.config))
        frozen = self._frozen_velocities(points, conditioning)
        sums = torch.zeros(NUM_SUMS + len(self.objective.metrics), device=device)
        if frozen[0][0] is not None and self.merged_old and samples.start == 0:
            sums[3] = self._merged_error(frozen[0][0], points[0], conditioning)
        for point, (old, reference) in zip(points, frozen, strict=True):
            with updating(self.policy, gradient=True):
                velocity = self.policy.velocity(point.latents, point.sigma, conditioning)
            old = velocity.detach() if old is None else old
            policy, kl, *own = point.loss(velocity, old, reference_velocity=reference)
            ((policy + train.kl_weight * kl) * weight).sum().backward()
            distance = (velocity.detach() - old).square().flatten(1).mean(1)
            sums[:3] += torch.stack([(policy.detach() * weight).sum(), (kl.detach() * weight).sum(), distance @ weight])
            for i, values in enumerate(own, NUM_SUMS):
                sums[i] += values @ weight
        return sums

    def _frozen_velocities(
        self, points: list[Point], conditioning: Conditioning
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """Per point (old_policy's velocity or None where it is the policy's, the reference's or None if not needed).

        All points of a micro-batch at once: switching adapters costs the host a tenth of a small model's forward.
        """
        transformer, policy = self.policy.transformer, self.policy

        def velocities(policy: Policy) -> list[Tensor]:
            return [policy.velocity(point.latents, point.sigma, conditioning) for point in points]

        old: list[Tensor] | list[None] = [None] * len(points)
        references: list[Tensor] | list[None] = [None] * len(points)
        if self.merged_old:
            with drawing(self.merged_old):
                old = velocities(self.merged_old)
        with updating(policy, gradient=False):
            if not (self.merged_old or self.config.is_on_policy):
                with adapter(transformer, "old"):
                    old = velocities(policy)
            if self.config.train.kl_weight > 0 or self.objective.needs_reference:
                with adapter(transformer, None):
                    references = velocities(policy)
        return list(zip(old, references, strict=True))

    def _merged_error(self, merged: Tensor, point: Point, conditioning: Conditioning) -> Tensor:
        """Mean squared distance of old_policy's velocity from merged weights and from its adapter."""
        with updating(self.policy, gradient=False), adapter(self.policy.transformer, "old"):
            return (merged - self.policy.velocity(point.latents, point.sigma, conditioning)).square().mean()

    @torch.no_grad()
    def _average(self) -> None:
        train = self.config.train
        decay = min(train.old_decay_rate * self.step, train.old_decay_cap)
        newest = self.age_old_()
        torch._foreach_lerp_(newest, self.parameters, 1 - decay)
        self.old_versions[-1] = self.step
        decay = min((1 + self.step) / (10 + self.step), train.ema_decay)
        torch._foreach_lerp_(self.ema_parameters, self.parameters, 1 - decay)

    @torch.no_grad()
    def age_old_(self) -> list[Tensor]:
        """With staleness: old_policy is the next of its versions, the newest stands twice. Returns the newest one."""
        if not self.newer_old:
            return self.old_parameters
        torch._foreach_copy_(self.old_parameters, self.newer_old[0])
        for to, source in zip(self.newer_old, self.newer_old[1:], strict=False):
            torch._foreach_copy_(to, source)
        self.old_versions = [*self.old_versions[1:], self.old_versions[-1]]
        return self.newer_old[-1]

    def old_adapters(self, ahead: int) -> dict[str, LoraPair]:
        """What draws the samples of the step ``ahead`` steps after the next update's; 0: of that one (old_policy)."""
        if ahead == 0:
            return lora_state(self.policy.transformer, "old")
        return self._pairs(self.newer_old[ahead - 1])

    def _pairs(self, parameters: list[Tensor]) -> dict[str, LoraPair]:
        scale = self.config.lora.alpha / self.config.lora.rank
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return {name: LoraPair(a, b, scale) for name, (a, b) in zip(self.layers, pairs, strict=True)}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything an exact resume needs, by flat name: policy, old, ema, Adam moments, the step."""
        state = {"step": torch.tensor(self.step)}
        for i, parameter in enumerate(self.parameters):
            name = f"{self.layers[i // 2]}.{'AB'[i % 2]}"
            moments = self.optimizer.state[parameter]
            state |= {
                f"policy/{name}": parameter.detach(),
                f"old/{name}": self.old_parameters[i].detach(),
                f"ema/{name}": self.ema_parameters[i],
                f"adam_mean/{name}": moments["exp_avg"],
                f"adam_square/{name}": moments["exp_avg_sq"],
            }
            state |= {f"newer_old/{age}/{name}": version[i] for age, version in enumerate(self.newer_old)}
        return state | ({"old_versions": torch.tensor(self.old_versions)} if self.newer_old else {})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a ``state_dict`` back in place; raises SolrlError where names or shapes differ."""
        mine = self.state_dict()
        different = sorted(set(mine) ^ set(state)) or [k for k in mine if mine[k].shape != state[k].shape]
        if different:
            raise SolrlError(f"the checkpoint does not fit this model: {different[0]} (and {len(different) - 1} more)")
        self.step = int(state["step"])
        self.old_versions = state["old_versions"].tolist() if self.newer_old else [self.step]
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(self.step)


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Euclidean distance of two lists of tensors."""
    with torch.no_grad():
        squares = [(a - b).square().sum() for a, b in zip(some, others, strict=True)]
        return float(torch.stack(squares).sum().sqrt())
