"""Everything a run needs, put together once: policy, rollout trees, learner, reward, prompts.

A session draws and learns but writes nothing, so that replay can run the same steps again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from solrl.clock import Stopwatch
from solrl.compute import compile_, compile_mode, drawing, eagerly, repeated_blocks, use_cache_folder
from solrl.config import Config, ExploreConfig, RegenerateConfig, StageConfig
from solrl.distributed import World
from solrl.encoding import EncodeAhead, Place
from solrl.gate import Rung, ladder
from solrl.groups import Selection, candidate_seed
from solrl.learner import Learner
from solrl.models.adapters import lora_parameters
from solrl.models.base import load_policy
from solrl.models.decoder import decode_slice, load_tiny_decoder, use_fast_layout_, with_decoder
from solrl.models.encoders import rests_on_host
from solrl.models.loading import quiet_loading
from solrl.objectives.base import open_objective
from solrl.prompts import load_prompt_lists
from solrl.quant.backends import Backend, Precision, choose_backend, describe, fp8_layer
from solrl.quant.bounds import Work, measure_work, speed_bounds
from solrl.quant.proof import check_products, profile
from solrl.quant.trees import RolloutTrees, SyncReport
from solrl.rollout import rollout, score
from solrl.runtime.context import module_tensors
from solrl.scorer import ChildReward, child_devices, open_once, open_reward
from solrl.sharding import is_sharded, shard_
from solrl.types import Conditioning, PathSampler, Policy, Reward, Rollouts, Scores, Seeds, Weights

RUNG = "explore/rung"
"""Name of the rung in a checkpoint of a run with explore.min_fidelity, and in its metrics."""


@dataclass(frozen=True)
class StepRecord:
    """What a step did, equal on every rank (but for latents, which stay where they were drawn)."""

    prompts: list[str]
    seeds: Seeds
    proxy: Scores | None  # [G, N]; None where nothing was explored
    selection: Selection
    rewards: Scores  # [kept groups, K]
    audits: dict[int, Scores]  # group -> [1, N] rewards of a group regenerated whole
    metrics: dict[str, float]  # of the update; empty where there was nothing to train on
    synced: SyncReport
    scales: dict[str, float]  # on audit steps, how well the static activation scales fit
    version: int  # optimizer steps done when what drew the samples was the newest
    lag: int  # and how many came between that and the update


@dataclass
class Session:
    """The parts of a run on this process. ``rollout_policy`` and ``explorer`` draw with old_policy's merged weights."""

    config: Config
    world: World
    stop: Callable[[], None]
    policy: Policy
    trees: RolloutTrees
    rollout_policy: Policy
    explorer: Policy
    learner: Learner
    reward: Reward
    watched: dict[str, Reward]  # evaluated beside it, by name
    train_prompts: list[str]
    heldout_prompts: list[str]
    precision: Precision
    precision_line: str
    proof: dict[str, Any]
    compile_mode: str
    ahead: EncodeAhead
    ladder: list[Rung]
    """What explore.min_fidelity may climb."""
    rung: int = 0

    def regions(self) -> list[nn.Module]:
        """What runs often enough to be compiled: the blocks of policy and trees that are not sharded, and decoders."""
        transformers = [self.policy.transformer, self.trees.rollout, self.trees.explorer]
        transformers += [self.learner.reference.transformer] if self.learner.reference else []
        decoders = [self.policy.vae.decoder, self.explorer.vae.decoder]
        whole_ones = [transformer for transformer in transformers if not is_sharded(transformer)]
        return [block for transformer in whole_ones for block in repeated_blocks(transformer)] + decoders

    def draw(
        self,
        policy: Policy,
        conditioning: Conditioning,
        prompts: list[str],
        seeds: Seeds,
        stage: StageConfig,
        *,
        phase: str,
        clock: Stopwatch,
        keeps_trajectories: bool = False,
    ) -> Scores:
        """Draw and score ``seeds[g][n]`` for ``prompts[g]``; equal on every rank, latents where they were drawn."""
        parts: Iterable[Rollouts] = rollout(
            policy, conditioning, prompts, seeds, stage, batch=self.config.batch, world=self.world, clock=clock,
            stop=self.stop, phase=phase, sampler=self.sampler(stage),
        )  # fmt: skip
        if not keeps_trajectories:
            parts = (replace(part, trajectory=None) for part in parts)
        shape = (len(seeds), len(seeds[0]) if seeds else 0)
        return score(self.reward, parts, shape, world=self.world, clock=clock)

    def sampler(self, stage: StageConfig) -> PathSampler | None:
        """What draws a stage: the objective's own sampler, if it has one, all that is regenerated; None: its solver."""
        return self.learner.objective.sampler(self.config) if isinstance(stage, RegenerateConfig) else None

    def sync(self, weights: Weights | None = None) -> SyncReport:
        """Put ``weights`` (by default old_policy's) into rollout tree and explorer, in place."""
        return self.trees.requantize_(weights or self.learner.old_weights())

    def calibrate(self) -> None:
        """Measure the explorer's static activation scales on fixed prompts and seeds, the same on every rank."""
        with self.trees.calibration(), eagerly():
            self._explore_batch()
        self.trees.set_activation_scales_(self.world.max_)

    def recalibrate(self, step: int) -> None:
        """At the end of a step: measure the static scales again, in place, where it is time."""
        every = self.config.explore.recalibrate_every_steps
        if every and step % every == 0 and self.trees.backend.number_format:
            self.calibrate()

    def audit_scales(self) -> dict[str, float]:
        """Shares of the explorer's input blocks that its static scales clip, or whose own scale loses precision."""
        with self.trees.audit() as counts, eagerly():
            self._explore_batch()
        blocks = sum(count.blocks for count in counts.values())
        if not blocks:
            return {}
        return {
            "health/clipped_blocks": sum(count.clipped for count in counts.values()) / blocks,
            "health/subnormal_scales": sum(count.subnormal for count in counts.values()) / blocks,
        }

    def prove(self) -> dict[str, Any]:
        """Prove what the explorer computes, for environment.json; on a GPU also by the kernels that ran."""
        proof = self.trees.prove(self.learner.old_weights())
        if proof is None:
            return {}
        found = proof.as_dict()
        if self.world.device.type == "cuda":
            self._explore_batch()  # compiles
            expected = self.trees.num_products(calls=self.config.explore.num_steps)
            found["gpu"] = check_products(profile(lambda: self._explore_batch()), expected)
        return found

    def describe(self) -> str:
        """One line: the explorer's format, kernel, and the most that it can gain."""
        backend, explore = self.trees.backend, self.config.explore
        if backend.number_format is None:
            return describe(backend, explore.num_steps)
        explored = self.work(explore.downscale)
        kept = explored if explore.downscale == 1 else self.work()
        bounds = speed_bounds(explored, kept, explore, self.config.regenerate)
        return describe(backend, explore.num_steps, explored.linear_share, bounds)

    def work(self, downscale: int = 1) -> Work:
        """Floating-point operations of one sample, ``downscale`` times smaller, by what they are for."""
        policy, prompts = self.rollout_policy, self.train_prompts[:1]
        policy = policy.smaller(downscale) if downscale > 1 else policy
        decoder = self.explorer if downscale == self.config.explore.downscale else policy
        conditioning = policy.encode(prompts)
        latents = torch.zeros(1, *policy.latent_shape, device=policy.device)
        with eagerly(), drawing(policy):  # one sample: not a shape to compile for
            images = policy.decode(latents)
            return measure_work(
                policy.transformer,
                self.trees.plan,
                velocity=lambda: policy.velocity(latents, torch.ones(1, device=policy.device), conditioning),
                decode=lambda: decoder.decode(latents),
                score=lambda: None if isinstance(self.reward, ChildReward) else self.reward(images, prompts),
            )

    @property
    def leads(self) -> bool:
        """Whether the reward's child, where it has one, is this process's."""
        return self.world.rank % max(self.config.replica_size, 1) == 0

    def tensors(self) -> dict[str, Tensor]:
        """All that draws and trains here, by name: what this process gives up where a judge takes its device.

        On a CPU not what lies in a file's pages, which are no memory that is held.
        """
        modules: dict[str, nn.Module] = {"policy": self.policy, "rollout": self.trees.rollout}
        modules |= {"explorer": self.trees.explorer, "decoder": self.explorer.vae}
        modules |= {"reference": self.learner.reference} if self.learner.reference else {}
        state = self.learner.state_dict()
        found = module_tensors(modules) | {name: state[name] for name in state if "/" in name}  # others are made anew
        kind = self.world.device.type
        on_device = {name: tensor for name, tensor in found.items() if tensor.device.type == kind}
        if kind != "cpu":
            return on_device
        return {name: tensor for name, tensor in on_device.items() if tensor.untyped_storage().resizable()}

    def wake(self) -> None:
        """The reward's child process, where it has one, is up."""
        if isinstance(self.reward, ChildReward) and self.leads:
            self.reward.start()

    def rest(self) -> None:
        """With reward.process = shifting the reward's child process is gone until it is needed again."""
        if isinstance(self.reward, ChildReward) and self.config.reward.process == "shifting":
            self.reward.stop()

    def close(self) -> None:
        """No child process is left."""
        if isinstance(self.reward, ChildReward):
            self.reward.close()

    def _explore_batch(self) -> None:
        """Draw one micro-batch of fixed prompts and seeds with the explorer; no signal stops it."""
        alone, settings = World(0, 1, self.world.device), self.config
        prompts = [self.train_prompts[i % len(self.train_prompts)] for i in range(settings.batch.rollout)]
        seeds = [[candidate_seed(settings.seed, 0, i, 0, "calibration")] for i in range(len(prompts))]
        for _ in rollout(
            self.explorer, self.policy.encode(prompts), prompts, seeds, settings.explore, batch=settings.batch,
            world=alone, clock=Stopwatch(alone.device), stop=lambda: None, phase="calibrate",
        ):  # fmt: skip
            pass

    def next_rung(self) -> int | None:
        """The next rung of the ladder that runs here; None at its top."""
        for number, rung in enumerate(self.ladder[self.rung + 1 :], self.rung + 1):
            if rung.precision in (self.precision, "full") or not isinstance(fp8_layer(self.world.device), str):
                return number
        return None

    def climb_to(self, rung: int) -> None:
        """Explore on another rung of the ladder from now on, calibrated and proved; on every rank at once."""
        if rung == self.rung:
            return
        self.rung, (num_steps, precision) = rung, self.ladder[rung]
        explore = self.config.explore.model_copy(update={"num_steps": num_steps})
        if precision != self.precision:
            explore = explore.model_copy(update={"precision": precision, "backend": "auto"})
            self.precision = precision
            self.explorer = self.rollout_policy  # so that two explorers are never in memory
            self.trees.replace_explorer_(choose_backend(explore, self.world.device))
            self.explorer = _explorer(self.policy, self.trees, explore)
            self.sync()
        self.config = self.config.model_copy(update={"explore": explore})
        self.prepare_explorer()

    def prepare_explorer(self) -> None:
        """Calibrate, compile, describe and prove the explorer."""
        if self.trees.backend.number_format:
            self.calibrate()
        if self.compile_mode != "off":
            compile_(self.regions(), self.compile_mode, deterministic=self.config.deterministic)
        self.precision_line = self.describe()
        self.proof = self.prove()

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        scales = {f"activation/{name}": scale for name, scale in self.trees.activation_scales().items()}
        rung = {RUNG: torch.tensor(self.rung)} if self.config.explore.min_fidelity else {}
        return self.learner.state_dict() | scales | rung

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a ``state_dict`` back; trees follow. One of another rung climbs there, which every rank has to do."""
        self.climb_to(int(state.get(RUNG, 0)))
        scales = {name.removeprefix("activation/"): t for name, t in state.items() if name.startswith("activation/")}
        ours = {name: t for name, t in state.items() if not name.startswith("activation/") and name != RUNG}
        self.learner.load_state_dict(ours)
        self.trees.load_activation_scales_(scales)
        self.sync()


def open_session(config: Config, world: World, stop: Callable[[], None]) -> Session:
    """A session at step 0, calibrated. Everything that can be wrong with settings or files is found here."""
    quiet_loading()
    open_objective(config)  # what is wrong with it is said before the model loads
    train_prompts, heldout_prompts = load_prompt_lists(config)
    backend = choose_backend(config.explore, world.device)
    reward = _open_trained_reward(config, world, stop)
    others = [name for name in config.evaluate.rewards if name != config.reward.name]
    watched = {name: open_reward("evaluate.rewards", name, {}) for name in others}
    policy = load_policy(config, world.device)
    use_fast_layout_(policy.vae)
    mode = compile_mode(config, world.device)
    gives_up = rests_on_host(config.model, world.device) or config.replica_size
    place: Place = "requantize" if gives_up else "draw"  # beside the draw the encoders may be away
    reference = None
    if not config.lora.enabled and (config.train.kl_weight > 0 or open_objective(config).needs_reference):
        reference = policy.sibling(copy.deepcopy(policy.transformer))
    trees, world = open_trees(policy, config, backend, world)
    if reference is not None:
        shard_(reference.transformer, world) if world.in_step else reference.transformer.to(world.device)
    rollout_policy = policy.sibling(trees.rollout)
    session = Session(
        config=_fix_decode_slice(config, policy, world),
        world=world,
        stop=world.stopping(stop),
        policy=policy,
        trees=trees,
        rollout_policy=rollout_policy,
        explorer=_explorer(policy, trees, config.explore),
        learner=Learner(policy, config, rollout_policy, reference),
        reward=reward,
        watched=watched,
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
        precision=backend.precision,
        precision_line="",
        proof={},
        compile_mode=mode,
        ahead=EncodeAhead(policy, place, compiles=mode != "off"),
        ladder=ladder(config, backend.precision),
    )
    session.sync()
    if session.compile_mode != "off":
        use_cache_folder(world.rank)
    session.prepare_explorer()
    return session


def _open_trained_reward(config: Config, world: World, stop: Callable[[], None]) -> Reward:
    """The reward that is trained, where reward.process wants it."""
    reward, shared = config.reward, config.replica_size > 0
    if reward.process == "off":
        return open_reward("reward.name", reward.name, reward.options)
    devices = child_devices(reward.process_gpus, world.device, shared=shared)

    def open_child(facts: dict[str, Any] | None = None) -> ChildReward:
        return ChildReward(
            reward.name, reward.options, devices=devices, threads=config.cpu_threads,
            timeout_s=config.runtime.job_timeout_s, stop=stop, facts=facts,
        )  # fmt: skip

    return open_once(open_child, world) if shared else open_child()


def _explorer(policy: Policy, trees: RolloutTrees, explore: ExploreConfig) -> Policy:
    """What draws with the explorer's weights, and its decoder."""
    explorer = policy.sibling(trees.explorer)
    if explore.tiny_decoder is not None:
        explorer = with_decoder(explorer, load_tiny_decoder(explore.tiny_decoder, explorer))
    return explorer.smaller(explore.downscale) if explore.downscale > 1 else explorer


def open_trees(policy: Policy, config: Config, backend: Backend, world: World) -> tuple[RolloutTrees, World]:
    """The policy's rollout trees; its transformer and theirs are on the device, and sharded if ``model.shard`` says so.

    What is trained is float32 after. The world says whether its processes have to be in step from now on.
    """
    shards = config.model.shard and world.size > 1
    transformer, explore, is_full = policy.transformer, config.explore, not config.lora.enabled
    if not shards:
        transformer.to(world.device)
    trees = RolloutTrees(
        transformer,
        backend,
        explore.quantize,
        is_dynamic=explore.activation_scale == "dynamic",
        has_adapters=not is_full,
        device=world.device,
    )
    dtype = next(trees.rollout.parameters()).dtype
    if is_full:
        for parameter in transformer.parameters():
            parameter.data = parameter.data.float()
            parameter.requires_grad_()
    if shards:
        adapters = [] if is_full else [p for name in ("default", "old") for p in lora_parameters(transformer, name)]
        shard_(transformer, world, replicated=adapters, dtype=dtype if is_full else None)
        trees.shard_(world)
    return trees, replace(world, in_step=shards)


def _fix_decode_slice(config: Config, policy: Policy, world: World) -> Config:
    """``batch.decode`` = 0 replaced by what every rank has memory for."""
    if config.batch.decode:
        return config
    slices = torch.zeros(world.size, dtype=torch.int64)
    slices[world.rank] = decode_slice(policy, config.batch.rollout)
    batch = config.batch.model_copy(update={"decode": int(world.sum_(slices).min())})
    return config.model_copy(update={"batch": batch})
