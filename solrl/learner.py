"""The update: gradients of the objective over fixed micro-batches, one optimizer step, then the two averages.

The loss is a sum over (sample, timestep) pairs divided by their global number. Each micro-batch's gradient goes into a
64-bit fixed-point sum, so the total has the same bits however micro-batches are spread over processes, and a rank
without any still joins the one reduction of the step. There is no DDP wrapper. Adapter weights are float32 masters;
compute runs in the policy's dtype inside ``compute.updating``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from solrl.compute import drawing, updating
from solrl.config import Config
from solrl.distributed import OrderFreeSum, World
from solrl.flow import noised
from solrl.groups import derive_seed, generator, noise
from solrl.models.base import adapter, lora_parameters, lora_state
from solrl.objectives.nft import nft_loss
from solrl.types import Conditioning, LoraPair, Policy, SolrlError


@dataclass(frozen=True)
class TrainingSet:
    """The samples of one update, numbered 0 .. len(seeds) - 1 in the same order on every rank."""

    seeds: list[int]  # each sample's latent seed
    groups: list[int]  # each sample's row of ``conditioning``
    advantages: Tensor  # [samples] float32
    weights: Tensor  # [samples] float32: 1, or 0 for a sample whose reward is missing
    clean: dict[int, Tensor]  # sample number -> clean latents; at least those of this rank's micro-batches
    conditioning: Conditioning


NUM_SUMS = 4
"""Numbers that are summed beside the gradient: policy loss, KL, velocity distance, error of the merged old_policy."""


class Learner:
    """Owns the adapters' optimizer and averages. ``step`` counts optimizer steps done.

    ``rollout_policy`` draws with old_policy's merged weights; it gives v_old with train.old_from_rollout.
    """

    def __init__(self, policy: Policy, config: Config, rollout_policy: Policy | None = None) -> None:
        if config.train.old_from_rollout and rollout_policy is None:
            raise SolrlError("train.old_from_rollout needs the rollout policy: Learner(policy, config, rollout_policy)")
        self.policy, self.config = policy, config
        self.merged_old = rollout_policy if config.train.old_from_rollout else None
        self.layers = list(lora_state(policy.transformer, "default"))
        self.parameters = lora_parameters(policy.transformer, "default")
        self.old_parameters = lora_parameters(policy.transformer, "old")
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
        scale = self.config.lora.alpha / self.config.lora.rank
        pairs = zip(self.ema_parameters[::2], self.ema_parameters[1::2], strict=True)
        return {name: LoraPair(a, b, scale) for name, (a, b) in zip(self.layers, pairs, strict=True)}

    def update(self, data: TrainingSet, world: World, stop: Callable[[], None]) -> dict[str, float]:
        """Take one optimizer step on ``data`` and advance old_policy and EMA; the metrics are equal on all ranks."""
        size = self.config.batch.train
        num_batches = -(-len(data.seeds) // size)
        total = OrderFreeSum(sum(p.numel() for p in self.parameters) + NUM_SUMS, num_batches, world.device)
        for number in range(num_batches):
            if (number * size) // self.config.batch.rollout % world.size == world.rank:
                stop()
                losses = self._accumulate(data, range(number * size, min((number + 1) * size, len(data.seeds))))
                total.add([*(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters), losses])
                self.optimizer.zero_grad()
        summed = total.result(world)
        gradient = summed[:-NUM_SUMS].float()
        policy_loss, kl, old_distance, old_error = summed[-NUM_SUMS:].tolist()
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
        } | ({"health/old_rollout_error": old_error} if self.merged_old else {})

    def _accumulate(self, data: TrainingSet, samples: range) -> Tensor:
        """Add one micro-batch's gradient to ``.grad``; return its share of the NUM_SUMS sums."""
        train, train_batch, device = self.config.train, self.config.batch.train, self.policy.device
        numbers = [*samples] + [samples[-1]] * (train_batch - len(samples))
        weight = data.weights[numbers].to(device)
        weight[len(samples) :] = 0
        weight /= float(data.weights.sum()) * self.config.num_train_timesteps
        clean = torch.stack([data.clean[i] for i in numbers])
        conditioning = data.conditioning.rows([data.groups[i] for i in numbers])
        advantages = data.advantages[numbers].to(device)
        seeds = [data.seeds[i] for i in numbers]
        sigmas = self._train_sigmas(seeds).to(device)
        latents = []
        for t in range(self.config.num_train_timesteps):
            fresh = noise([derive_seed(seed, f"train/{t}") for seed in seeds], self.policy.latent_shape).to(device)
            latents.append(noised(clean, fresh, sigmas[:, t]))
        frozen = self._frozen_velocities(latents, sigmas, conditioning)
        sums = torch.zeros(NUM_SUMS, device=device)
        if self.merged_old and samples.start == 0:
            sums[3] = self._merged_error(frozen[0][0], latents[0], sigmas[:, 0], conditioning)
        for t, (old, reference) in enumerate(frozen):
            sigma = sigmas[:, t]
            with updating(self.policy, gradient=True):
                velocity = self.policy.velocity(latents[t], sigma, conditioning)
            policy, kl = nft_loss(
                velocity, old, latents[t], clean, sigma, advantages,
                reference_velocity=reference, beta=train.beta, advantage_clip=train.advantage_clip,
            )  # fmt: skip
            ((policy + train.kl_weight * kl) * weight).sum().backward()
            distance = (velocity.detach() - old).square().flatten(1).mean(1)
            sums[:3] += torch.stack([(policy.detach() * weight).sum(), (kl.detach() * weight).sum(), distance @ weight])
        return sums

    def _frozen_velocities(
        self, latents: list[Tensor], sigmas: Tensor, conditioning: Conditioning
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Per timestep (old_policy's velocity, the reference's or None without a KL term).

        All timesteps of a micro-batch at once: switching adapters costs the host a tenth of a small model's forward.
        """
        transformer, policy = self.policy.transformer, self.policy

        def velocities(policy: Policy) -> list[Tensor]:
            return [policy.velocity(x, sigmas[:, t], conditioning) for t, x in enumerate(latents)]

        references: list[Tensor] | list[None] = [None] * len(latents)
        if self.merged_old:
            with drawing(self.merged_old):
                old = velocities(self.merged_old)
        with updating(policy, gradient=False):
            if not self.merged_old:
                with adapter(transformer, "old"):
                    old = velocities(policy)
            if self.config.train.kl_weight > 0:
                with adapter(transformer, None):
                    references = velocities(policy)
        return list(zip(old, references, strict=True))

    def _merged_error(self, merged: Tensor, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Mean squared distance of old_policy's velocity from merged weights and from its adapter."""
        with updating(self.policy, gradient=False), adapter(self.policy.transformer, "old"):
            return (merged - self.policy.velocity(latents, sigma, conditioning)).square().mean()

    def _train_sigmas(self, seeds: list[int]) -> Tensor:
        """[B, T] float32: per sample T different sigmas of the rollout grid, 1 included and 0 not."""
        grid = self.policy.sigmas(self.config.train_stage.num_steps)[:-1].float()
        picks = [generator(derive_seed(seed, "sigmas")).permutation(len(grid)) for seed in seeds]
        return torch.stack([grid[torch.from_numpy(p[: self.config.num_train_timesteps])] for p in picks])

    @torch.no_grad()
    def _average(self) -> None:
        train = self.config.train
        decay = min(train.old_decay_rate * self.step, train.old_decay_cap)
        torch._foreach_lerp_(self.old_parameters, self.parameters, 1 - decay)
        decay = min((1 + self.step) / (10 + self.step), train.ema_decay)
        torch._foreach_lerp_(self.ema_parameters, self.parameters, 1 - decay)

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
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a ``state_dict`` back in place; raises SolrlError where names or shapes differ."""
        mine = self.state_dict()
        different = sorted(set(mine) ^ set(state)) or [k for k in mine if mine[k].shape != state[k].shape]
        if different:
            raise SolrlError(f"the checkpoint does not fit this model: {different[0]} (and {len(different) - 1} more)")
        self.step = int(state["step"])
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(self.step)


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Euclidean distance of two lists of tensors."""
    with torch.no_grad():
        squares = [(a - b).square().sum() for a, b in zip(some, others, strict=True)]
        return float(torch.stack(squares).sum().sqrt())
