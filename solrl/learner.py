"""The update: gradients of the objective over fixed micro-batches, one optimizer step, then the two averages.

The loss is a sum over (sample, timestep) pairs divided by their global number. Each micro-batch's gradient goes into a
64-bit fixed-point sum, so the total has the same bits however micro-batches are spread over processes, and a rank
without any still joins the one reduction of the step. There is no DDP wrapper. Trained weights are float32 masters;
compute runs in the policy's dtype inside ``compute.updating``.

old_policy is always the policy that drew the samples at hand. With ``runtime.staleness`` that is an earlier version, so
its average runs ahead of it, in ``newer_old``, and each version becomes old_policy when its samples' turn comes.

In full fine-tuning old_policy's velocity is the rollout tree's, which holds old_policy's weights in that dtype. Where
the trained weights are sharded, ``fully_shard`` adds up their gradients instead, in float32 and in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from solrl.compute import drawing, updating
from solrl.config import Config
from solrl.distributed import OrderFreeSum, World
from solrl.models.adapters import adapter, lora_parameters, lora_state
from solrl.objectives.base import Batch, Point, open_objective
from solrl.sharding import fill_, is_sharded, local, whole
from solrl.types import Conditioning, LoraPair, Policy, SolrlError, Trajectory, Weights


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


BUFFER = "buffer/"
"""What names begin with, in the state of a full fine-tuning, of buffers: never trained, but part of the model."""

NUM_SUMS = 4
"""Numbers that are summed beside the gradient: policy loss, KL, velocity distance, error of the merged old_policy; then
the objective's own metrics."""


class Learner:
    """Owns the trained weights' optimizer and averages. ``step`` counts optimizer steps done.

    ``rollout_policy`` draws with old_policy's merged weights; it gives v_old with train.old_from_rollout, and in full
    fine-tuning, which also needs a ``reference`` where the loss does.
    """

    def __init__(
        self, policy: Policy, config: Config, rollout_policy: Policy | None = None, reference: Policy | None = None
    ) -> None:
        train, transformer = config.train, policy.transformer
        self.policy, self.config, self.objective = policy, config, open_objective(config)
        self.is_full, self.reference = not config.lora.enabled, reference
        needs_rollout = train.old_from_rollout or (self.is_full and not config.is_on_policy)
        self.merged_old = rollout_policy if needs_rollout else None
        if needs_rollout and rollout_policy is None:
            raise SolrlError("train.old_from_rollout needs the rollout policy: Learner(policy, config, rollout_policy)")
        self.is_sharded = self.is_full and is_sharded(transformer)
        if self.is_full:
            self.names = [name for name, _ in transformer.named_parameters()]
            self.parameters = list(transformer.parameters())
            self.old_parameters = [p.detach().clone() for p in self.parameters]
        else:
            self.names = [f"{layer}.{half}" for layer in lora_state(transformer, "default") for half in "AB"]
            self.parameters = lora_parameters(transformer, "default")
            self.old_parameters = [p.detach() for p in lora_parameters(transformer, "old")]
        self.newer_old = [[p.detach().clone() for p in self.old_parameters] for _ in range(config.runtime.staleness)]
        """old_policy's later versions, which drew or draw the samples of later steps; oldest first."""
        self.old_versions = [0] * (1 + len(self.newer_old))
        """Optimizer steps done when old_policy and each of ``newer_old`` was the newest."""
        self.summed_here = [] if self.is_sharded else self.parameters
        self.ema_parameters = [p.detach().clone() for p in self.parameters]
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
    def ema(self) -> Weights:
        """The averaged weights, for evaluation and export; never for rollouts."""
        return self._weights(self.ema_parameters)

    def update(self, data: TrainingSet, world: World, stop: Callable[[], None]) -> dict[str, float]:
        """Take one optimizer step on ``data`` and advance old_policy and EMA; the metrics are equal on all ranks."""
        total, mine = self.begin(data), self._share(self.num_batches(data), world)
        for number in mine:
            stop()
            self.add(total, data, number, is_first=world.in_step and number == mine[0])
        return self.finish(total, world)

    def num_batches(self, data: TrainingSet) -> int:
        """Training micro-batches of ``data``."""
        return -(-len(data.seeds) // self.config.batch.train)

    def begin(self, data: TrainingSet) -> OrderFreeSum:
        """Where this rank sums up the gradients of its share of ``data``."""
        numel = sum(p.numel() for p in self.summed_here) + NUM_SUMS + len(self.objective.metrics)
        return OrderFreeSum(numel, self.num_batches(data), self.policy.device)

    def add(self, total: OrderFreeSum, data: TrainingSet, number: int, *, is_first: bool = False) -> None:
        """``total`` holds micro-batch ``number`` too; as it was if that fails. After the last one there is nothing.

        ``is_first``: its calls are those of micro-batch 0.
        """
        first = number * self.config.batch.train
        samples = range(first, min(first + self.config.batch.train, len(data.seeds)))
        try:
            losses = self._accumulate(data, samples, is_first=is_first or number == 0)
            total.add([*(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.summed_here), losses])
        finally:
            if not self.is_sharded:
                self.optimizer.zero_grad()

    def finish(self, total: OrderFreeSum, world: World) -> dict[str, float]:
        """The optimizer step on the sum over all ranks; the metrics, equal on all of them."""
        num_sums = NUM_SUMS + len(self.objective.metrics)
        summed = total.result(world)
        gradient = summed[:-num_sums].float()
        policy_loss, kl, old_distance, old_error, *own = summed[-num_sums:].tolist()
        for parameter, part in zip(
            self.summed_here, gradient.split([p.numel() for p in self.summed_here]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        for parameter in self.parameters:  # AdamW decays also what no gradient reached
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.train.max_grad_norm, error_if_nonfinite=True)
        before = [p.detach().clone() for p in self.parameters]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._average()
        old_square = _square_distance(self.parameters, self.old_parameters)
        change = _largest_change(self.parameters, before)
        return {
            "loss/policy": policy_loss,
            "loss/kl": kl,
            "grad_norm": float(whole(norm)),
            "health/velocity_old_distance": old_distance,
            "health/old_distance": float(self._over(world.sum_, old_square).sqrt()),
            "health/policy_change": float(self._over(world.max_, change)),
            **{f"health/{name}": value for name, value in zip(self.objective.metrics, own, strict=True)},
        } | ({"health/old_rollout_error": old_error} if self.merged_old and not self.is_full else {})

    def _over(self, reduce_: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """A number of this process's shares made one of all weights."""
        return reduce_(value) if self.is_sharded else value

    def _share(self, num_batches: int, world: World) -> list[int]:
        """This rank's micro-batches: those of the samples it drew. In step all have as many; the others are empty."""
        per_draw = self.config.batch.rollout // self.config.batch.train
        shares = [number // per_draw % world.size for number in range(num_batches)]
        mine = [number for number, rank in enumerate(shares) if rank == world.rank]
        return mine + [num_batches] * (shares.count(0) - len(mine) if world.in_step else 0)  # no rank has more than 0

    def _accumulate(self, data: TrainingSet, samples: range, *, is_first: bool) -> Tensor:
        """Add one micro-batch's gradient to ``.grad``; return its share of the sums beside it.

        Without samples it makes the same calls for nothing. ``is_first``: it is the rank's first one of the step.
        """
        train, train_batch, device = self.config.train, self.config.batch.train, self.policy.device
        numbers = [*samples] or [0]
        numbers += numbers[-1:] * (train_batch - len(numbers))
        weight = data.weights[numbers].to(device)
        weight[len(samples) :] = 0
        weight /= float(data.weights.sum()) * self.config.num_train_timesteps
        conditioning = data.conditioning.rows([data.groups[i] for i in numbers])
        points = self._points(data, numbers) if samples else self._no_points()
        frozen = self._frozen_velocities(points, conditioning)
        sums = torch.zeros(NUM_SUMS + len(self.objective.metrics), device=device)
        if frozen[0][0] is not None and self.merged_old and is_first and not self.is_full:
            error = self._merged_error(frozen[0][0], points[0], conditioning)
            sums[3] = error if samples.start == 0 else 0
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

    def _points(self, data: TrainingSet, numbers: list[int]) -> list[Point]:
        """Where the objective asks for velocities of the samples ``numbers``."""
        batch = Batch(
            seeds=[data.seeds[i] for i in numbers],
            advantages=data.advantages[numbers].to(self.policy.device),
            clean=torch.stack([data.clean[i] for i in numbers]),
            trajectory=Trajectory.stack([data.trajectories[i] for i in numbers]) if data.trajectories else None,
            sigmas=self.policy.sigmas(self.config.train_stage.num_steps),
        )
        return list(self.objective.points(batch, self.config))

    def _no_points(self) -> list[Point]:
        """As many as a micro-batch has, of zeros, for a loss of weight 0."""
        size, device = self.config.batch.train, self.policy.device
        latents, sigma = torch.zeros(size, *self.policy.latent_shape, device=device), torch.ones(size, device=device)

        def loss(velocity: Tensor, *others: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
            total = velocity.flatten(1).sum(1)
            return total, torch.zeros_like(total)

        return [Point(latents, sigma, loss)] * self.config.num_train_timesteps

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
            # In full fine-tuning with the policy's own rounding: then v = v_old on-policy.
            with updating(self.merged_old, gradient=False) if self.is_full else drawing(self.merged_old):
                old = velocities(self.merged_old)
        with updating(policy, gradient=False):
            if not (self.merged_old or self.config.is_on_policy):
                with adapter(transformer, "old"):
                    old = velocities(policy)
            if self.config.train.kl_weight > 0 or self.objective.needs_reference:
                with adapter(transformer, None):  # which full fine-tuning has none of
                    references = velocities(self.reference or policy)
        return list(zip(old, references, strict=True))

    def _merged_error(self, merged: Tensor, point: Point, conditioning: Conditioning) -> Tensor:
        """Mean squared distance of old_policy's velocity from merged weights and from its adapter."""
        with updating(self.policy, gradient=False), adapter(self.policy.transformer, "old"):
            return (merged - self.policy.velocity(point.latents, point.sigma, conditioning)).square().mean()

    @torch.no_grad()
    def _average(self) -> None:
        train = self.config.train
        decay = min(train.old_decay_rate * self.step, train.old_decay_cap)
        weights = (self.parameters, self.age_old_(), self.ema_parameters)
        policy, old, ema = ([local(tensor) for tensor in some] for some in weights)
        torch._foreach_lerp_(old, policy, 1 - decay)
        self.old_versions[-1] = self.step
        decay = min((1 + self.step) / (10 + self.step), train.ema_decay)
        torch._foreach_lerp_(ema, policy, 1 - decay)

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

    def old_weights(self, ahead: int = 0) -> Weights:
        """What draws the samples of the step ``ahead`` steps after the next update's; 0: of that one (old_policy)."""
        return self._weights([self.old_parameters, *self.newer_old][ahead])

    def _weights(self, tensors: Iterable[Tensor]) -> Weights:
        return trained_weights(dict(zip(self.names, tensors, strict=True)), self.config)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything an exact resume needs, by flat name: policy, old, ema, Adam moments, the step."""
        state = {"step": torch.tensor(self.step)}
        if self.is_full:  # an export needs them
            known = self.policy.transformer.state_dict()
            state |= {f"{BUFFER}{name}": known[name] for name in sorted(known.keys() - set(self.names))}
        for i, parameter in enumerate(self.parameters):
            name = self.names[i]
            moments = self.optimizer.state[parameter]
            state |= {
                f"policy/{name}": parameter.detach(),
                f"old/{name}": self.old_parameters[i],
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
        require_fit(state, mine)
        self.step = int(state["step"])
        self.old_versions = state["old_versions"].tolist() if self.newer_old else [self.step]
        for name, tensor in mine.items():
            fill_(tensor, state[name])
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(self.step)


def require_fit(state: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """SolrlError unless ``state`` has the names and shapes of ``mine``."""
    different = sorted(set(mine) ^ set(state)) or [k for k in mine if mine[k].shape != state[k].shape]
    if different:
        raise SolrlError(f"the checkpoint does not fit this model: {different[0]} (and {len(different) - 1} more)")


def trained_weights(tensors: Mapping[str, Tensor], config: Config) -> Weights:
    """The weights of ``tensors`` that are named as in a checkpoint: LAYER.A and LAYER.B, or parameters."""
    if not config.lora.enabled:
        return tensors
    scale = config.lora.alpha / config.lora.rank
    layers = [name.removesuffix(".A") for name in tensors if name.endswith(".A")]
    return {layer: LoraPair(tensors[f"{layer}.A"], tensors[f"{layer}.B"], scale) for layer in layers}


@torch.no_grad()
def _square_distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> Tensor:
    """Squared Euclidean distance of two lists of tensors, or of what this process holds of them."""
    return torch.stack([(local(a) - local(b)).square().sum() for a, b in zip(some, others, strict=True)]).sum()


@torch.no_grad()
def _largest_change(some: Iterable[Tensor], others: Iterable[Tensor]) -> Tensor:
    """Largest difference of an element."""
    changes = [(local(a) - local(b)).abs() for a, b in zip(some, others, strict=True)]
    return torch.stack([change.max() for change in changes if change.numel()]).max()  # a share may be empty
