"""Two-stage reinforcement learning on one process group (Sol-RL, arXiv 2604.06916, section 3.4).

Per step: explore many candidates per prompt cheaply, keep the most contrastive seeds, draw only those again in full
precision, and take one optimizer step on them: DiffusionNFT's, or that of another of the objectives. Training without
exploration, naive scaling and naive quantized training are settings of this loop: a stage that is switched off hands
its job to the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from solrl.checkpoint import check_folder
from solrl.clock import Stopwatch
from solrl.config import Config
from solrl.distributed import start
from solrl.groups import Selection, group_advantages, group_seeds, restrict, select_contrastive
from solrl.hub import check_push, push_run
from solrl.launch import check_launcher
from solrl.learner import TrainingSet
from solrl.prompts import step_prompts
from solrl.recorder import Recorder
from solrl.restart import as_begun, goes_on
from solrl.rollout import exchange_clean
from solrl.session import Session, StepRecord, open_session
from solrl.signals import SignalStop
from solrl.tracking import check_trackers
from solrl.types import Conditioning, Scores, Seeds

Drawn: TypeAlias = tuple[Scores | None, Selection, Scores]
"""A step's proxy scores (None where nothing was explored), what was kept, and the scores trained on."""
DrawStages: TypeAlias = Callable[[Session, list[str], Conditioning, Seeds, Stopwatch], Drawn]


def train(config: Config, *, resume: bool = False, on_step: Callable[[dict[str, float]], None] | None = None) -> Path:
    """Run ``config`` to its last step and return the run folder. ``on_step`` sees each step's metrics.

    Raises UsageError or SolrlError with one line, Interrupted after a signal with everything saved.
    """
    if config.runtime.mode != "colocated":
        from solrl.pipeline import pipeline

        return pipeline(config, resume=resume, on_step=on_step)
    check_launcher(config)
    check_trackers(config.output.trackers)
    check_push(config.output.push_to)
    resume = goes_on(config.output.dir, resume)
    check_folder(config.output.dir, resume)
    config = as_begun(config) if resume else config
    with SignalStop() as stop, start(config.cpu_threads, config.deterministic) as world:
        session = open_session(config, world, stop)
        with Recorder(session, resume) as recorder:
            for step in recorder.steps():
                clock = Stopwatch(world.device)
                with recorder.saving_on_interrupt(step):
                    metrics = recorder.record(step, run_step(session, step, clock), clock)
                if on_step:
                    on_step(metrics)
    push_run(config)
    return config.output.dir


def run_step(session: Session, step: int, clock: Stopwatch, draw: DrawStages | None = None) -> StepRecord:
    """One round of explore, select, regenerate, update, requantize; ``draw`` does the first three in another way."""
    config = session.config
    prompts = step_prompts(session.train_prompts, config.seed, step, config.prompts.per_step)
    following = step_prompts(
        session.train_prompts, config.seed, step + 1, config.prompts.per_step if step < config.train.num_steps else 0
    )
    with clock.phase("encode"):
        conditioning = session.ahead.conditioning(prompts)
    seeds = group_seeds(config.seed, step, len(prompts), config.pool_size)

    with session.ahead.beside("draw", following, clock):
        proxy, selection, rewards = (draw or draw_stages)(session, prompts, conditioning, seeds, clock)
        audits = audit(session, step, selection, conditioning, prompts, seeds, clock)
    scales = session.audit_scales() if audits else {}

    version, lag = session.learner.old_versions[0], session.learner.step - session.learner.old_versions[0]
    with clock.phase("update"):
        data = training_set(session, selection, rewards, conditioning, seeds, lies_apart=draw is not None)
        metrics = session.learner.update(data, session.world, session.stop) if data else {}
        if not data:
            session.learner.age_old_()
    with session.ahead.beside("requantize", following, clock), clock.phase("requantize"):
        synced = session.sync()
    session.recalibrate(step)
    return StepRecord(prompts, seeds, proxy, selection, rewards, audits, metrics, synced, scales, version, lag)


def draw_stages(
    session: Session, prompts: list[str], conditioning: Conditioning, seeds: Seeds, clock: Stopwatch
) -> Drawn:
    """Explore, select, regenerate: every rank its share of each stage, one stage after the other."""
    explore, regenerate = session.config.explore, session.config.regenerate
    # Stage 1: explore. Only the order of the proxy rewards inside a group is used.
    proxy = None
    if explore.enabled:
        proxy = session.draw(session.explorer, conditioning, prompts, seeds, explore, phase="explore", clock=clock)
    with clock.phase("select"):
        selection = select(proxy, session.config)
        rows = conditioning.rows(selection.groups)
        kept_prompts, kept_seeds = [prompts[g] for g in selection.groups], selection.pick(seeds)

    # Stage 2: draw the kept seeds again in full precision. Nothing from stage 1 is trained on.
    if regenerate.enabled:
        rewards = session.draw(
            session.rollout_policy, rows, kept_prompts, kept_seeds, regenerate, phase="regenerate", clock=clock,
            keeps_trajectories=True,
        )  # fmt: skip
    else:
        assert proxy is not None
        rewards = restrict(proxy, selection)
    return proxy, selection, rewards


def select(proxy: Scores | None, config: Config) -> Selection:
    """The contrastive half of each explored group; everything where nothing was explored."""
    keep = config.regenerate.group_size
    if proxy is not None:
        return select_contrastive(proxy.signal, keep, proxy.present, config.regenerate.selection)
    groups = config.prompts.per_step
    return Selection(list(range(groups)), torch.arange(keep).repeat(groups, 1), {})


def training_set(
    session: Session,
    selection: Selection,
    rewards: Scores,
    conditioning: Conditioning,
    seeds: Seeds,
    *,
    lies_apart: bool,
) -> TrainingSet | None:
    """The kept samples of a step; None where none of them has a score, and so nothing can be learned.

    ``lies_apart``: a micro-batch may have been drawn by another rank than the one that trains on it.
    """
    if not rewards.present.any():
        return None
    config, kept = session.config, selection.pick(seeds)
    clean = rewards.clean
    if lies_apart or not config.regenerate.enabled:  # samples lie on other ranks than those that train on them
        clean = exchange_clean(rewards, session.policy.latent_shape, session.world)
    return TrainingSet(
        seeds=[seed for row in kept for seed in row],
        groups=[group for group, row in enumerate(kept) for _ in row],
        advantages=group_advantages(rewards.signal, rewards.present, config.train.advantage_std).flatten(),
        weights=rewards.present.flatten().float(),
        clean=clean,
        conditioning=conditioning.rows(selection.groups),
        trajectories=rewards.trajectories,
    )


def audit(
    session: Session,
    step: int,
    selection: Selection,
    conditioning: Conditioning,
    prompts: list[str],
    seeds: Seeds,
    clock: Stopwatch,
) -> dict[int, Scores]:
    """Every ``output.audit_every_steps`` one explored group is regenerated whole: the explorer's true fidelity."""
    config = session.config
    every = config.output.audit_every_steps
    if not (config.explore.enabled and config.regenerate.enabled and every and step % every == 0 and selection.groups):
        return {}
    group = selection.groups[step // every % len(selection.groups)]
    scores = session.draw(
        session.rollout_policy, conditioning.rows([group]), [prompts[group]], [seeds[group]], config.regenerate,
        phase="audit", clock=clock,
    )  # fmt: skip
    return {group: scores}
