"""The same stages as jobs: explore, score and regenerate are placed on processes whose role shifts (PivotRL).

A step is the step of train.py, with its drawing done another way: micro-batches of candidates are jobs of role explore,
their images jobs of role score, and a group is selected and redrawn as soon as all of its candidates have a score. A
job can be given back between two denoising steps and goes on elsewhere. Micro-batches have the same members and the
same shape as in train.py, so every mode gives the same samples, the same kept seeds and the same weights, bit for bit.

No collective runs while jobs do. The update is lockstep over all processes, as in train.py; with staleness its
micro-batches are jobs, too (overlap.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from solrl.checkpoint import check_folder
from solrl.clock import Stopwatch
from solrl.compute import drawing
from solrl.config import Config
from solrl.decisions import DecisionLog, LoggedStopwatch
from solrl.distributed import start
from solrl.groups import restrict
from solrl.hub import check_push, push_run
from solrl.jobs import Stage, StepDraw, StepJobs, stage_of
from solrl.judging import Judging, most_parts
from solrl.launch import check_launcher
from solrl.modes import advise_mode
from solrl.objectives.base import open_objective
from solrl.overlap import Overlap
from solrl.recorder import Recorder
from solrl.restart import as_begun, goes_on
from solrl.rollout import (
    call_parts,
    decode,
    padded,
    require_finite,
    start_noise,
    velocity_of,
)
from solrl.runtime.blobs import BlobRef, Blobs
from solrl.runtime.context import Context, Residency, ShiftFailed
from solrl.runtime.controller import AHEAD, Jobs, Plan
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import connect
from solrl.runtime.network import is_one_machine, machine, own_address
from solrl.runtime.plans import fixed, planned
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN
from solrl.runtime.worker import Begin, Work
from solrl.samplers import SamplerState, advance
from solrl.scorer import GRACE_S, LOOK_S, ChildReward, pack
from solrl.session import Session, StepRecord, open_session
from solrl.signals import SignalStop
from solrl.tracking import check_trackers
from solrl.train import Drawn, run_step, select
from solrl.types import Conditioning, Policy, Rollouts, Scores, Seeds, SolrlError, UsageError

MODES: tuple[Literal["colocated", "async_score", "shiftable"], ...] = ("colocated", "async_score", "shiftable")


def pipeline(
    config: Config, *, resume: bool = False, on_step: Callable[[dict[str, float]], None] | None = None
) -> Path:
    """``train`` in the mode that ``config.runtime`` names: same arguments, same results, same errors."""
    check_launcher(config)
    check_trackers(config.output.trackers)
    check_push(config.output.push_to)
    resume = goes_on(config.output.dir, resume)
    check_folder(config.output.dir, resume)
    config = as_begun(config) if resume else config
    check_mode(config)
    with SignalStop() as stop, start(config.cpu_threads, config.deterministic) as world:
        session = open_session(config, world, stop)
        with Recorder(session, resume) as recorder, open_crew(session, recorder.step) as crew:
            for step in recorder.steps():
                session.rest()
                crew.log.step, clock = step, LoggedStopwatch(world.device, crew.log)
                with recorder.saving_on_interrupt(step), crew.gang.naming_the_lost(lambda: stop.received is not None):
                    metrics = recorder.record(step, crew.run_step(step, clock), clock)
                crew.choose_mode(clock, recorder.tracking.plan)
                if on_step:
                    on_step(metrics)
    push_run(config)
    return config.output.dir


class Crew:
    """This process among those of the run: the gang, the blobs between them, and the step at hand."""

    def __init__(self, session: Session, gang: Gang, blobs: Blobs, log: DecisionLog) -> None:
        self.session, self.gang, self.blobs, self.log = session, gang, blobs, log
        self.mode, self.num_score = session.config.runtime.mode, session.config.runtime.score_processes
        self.draws: dict[int, StepDraw] = {}
        self.overlap = Overlap(self)
        self.clock = Stopwatch(session.world.device)
        self._is_warm = session.compile_mode == "off"

    def tensors(self) -> dict[str, Tensor]:
        """What this process gives up where a judge takes its device."""
        total = self.overlap.total
        return self.session.tensors() | ({} if total is None else {"gradient": total.total})

    def run_step(self, step: int, clock: Stopwatch) -> StepRecord:
        """One step in the mode at hand."""
        self.clock = clock
        if self.mode not in ("async_score", "shiftable"):
            return run_step(self.session, step, clock)
        if self.session.config.runtime.staleness:
            return self.overlap.run_step(step)
        return run_step(self.session, step, clock, partial(self.draw_stages, step))

    def choose_mode(self, clock: Stopwatch, say: Callable[[list[str]], None]) -> None:
        """With auto, take the mode that the step just measured by ``clock`` speaks for, and say why."""
        world = self.session.world
        if self.mode != "auto":
            return
        if world.size == 1:
            self.mode = "colocated"
            return say(["auto        colocated: one process has nobody to share with"])
        if not self._is_warm:  # that step was the compiler's
            self._is_warm = True
            return
        choice = torch.zeros(2, dtype=torch.int64)
        if world.is_main:
            advice = advise_mode(self.session.config, clock, world.size)
            say([f"auto        {advice}"])
            self.log({"event": "auto", "advice": str(advice)})
            choice[0] = MODES.index(advice.mode)
            choice[1] = advice.split[1] if advice.mode == "async_score" else 1
        mode, self.num_score = world.broadcast_(choice).tolist()
        self.mode = MODES[mode]

    def draw_stages(
        self,
        step: int,
        session: Session,
        prompts: list[str],
        conditioning: Conditioning,
        seeds: Seeds,
        clock: Stopwatch,
    ) -> Drawn:
        """Explore, select, regenerate as jobs; equal on every rank, latents where they were drawn."""
        return self.gather(step, self.work(self.begin_step(step, prompts, conditioning, seeds)))

    def begin_step(self, step: int, prompts: list[str], conditioning: Conditioning, seeds: Seeds) -> StepJobs | None:
        """``step`` may be drawn here; its jobs, on rank 0."""
        config = self.session.config
        self.draws[step] = StepDraw(config, self.session.reward, step, prompts, conditioning, seeds)
        return StepJobs(config, self.draws[step]) if self.session.world.is_main else None

    def work(self, jobs: Jobs | None, is_enough: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """The outcome of ``jobs``, which rank 0 has; with ``is_enough`` as soon as that is so."""
        plan = fixed(self.num_score) if self.mode == "async_score" else planned
        return self.work_as({"explore": self.begin_draw, "score": self.begin_score}, jobs, plan, is_enough)

    def work_as(
        self,
        roles: Mapping[str, Begin],
        jobs: Jobs | None,
        plan: Plan,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """``Gang.work``; also where that is ended early, this process has its tensors afterwards."""
        try:
            return self.gang.work(roles, jobs, plan, is_enough)
        except SolrlError:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Role train; a judge may need a moment to leave this process's device."""
        residency, until = self.gang.worker.residency, time.monotonic() + 2 * GRACE_S
        while True:
            try:
                return residency.shift_to(TRAIN)
            except ShiftFailed:
                if time.monotonic() > until:
                    raise
                time.sleep(LOOK_S)

    def gather(self, step: int, owners: dict[str, list[int]]) -> Drawn:
        """A step that is drawn, equal on every rank; of each micro-batch one process keeps the latents."""
        config, draw = self.session.config, self.draws.pop(step)
        proxy = self._gather(draw, "explore", owners) if config.explore.enabled else None
        with self.clock.phase("select"):
            selection = select(proxy, config)
        if not config.regenerate.enabled:
            assert proxy is not None
            return proxy, selection, restrict(proxy, selection)
        draw.boards["regenerate"].keep(len(selection.groups))
        return proxy, selection, self._gather(draw, "regenerate", owners)

    def _gather(self, draw: StepDraw, stage: Stage, owners: dict[str, list[int]]) -> Scores:
        size, board = self.session.config.batch.rollout, draw.boards[stage]
        mine = {number for number, rank in enumerate(owners[stage]) if rank == self.session.world.rank}
        board.clean = {at: clean for at, clean in draw.clean[stage].items() if at // size in mine}
        return board.gather(self.session.world)

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Leave ``tensors`` for another process; where they are, for a message."""
        return self.blobs.put(tensors).to_json()

    def take(self, reference: dict[str, Any]) -> dict[str, Tensor]:
        """What another process has left, on this one's device."""
        return {name: tensor.to(self.session.world.device) for name, tensor in self.fetch(reference).items()}

    def fetch(self, reference: dict[str, Any]) -> dict[str, Tensor]:
        """The same, in host memory."""
        return self.blobs.get(BlobRef.from_json(reference))

    def free(self, reference: dict[str, Any]) -> None:
        """Nobody will take it again."""
        self.blobs.acknowledge(BlobRef.from_json(reference))

    def begin_draw(self, payload: dict[str, Any], state: dict[str, Any] | None) -> Work:
        """A micro-batch, from noise or from where another process left it; or one of those that are trained on."""
        if payload["stage"] == "update":
            return self.overlap.begin(payload)
        return Drawing(self, payload, state)

    def begin_score(self, payload: dict[str, Any], state: dict[str, Any] | None) -> Scoring:
        """A micro-batch's images."""
        return Scoring(self, payload)


class Drawing:
    """A micro-batch on its way from noise to images: one denoising step a round, and a last one to decode."""

    def __init__(self, crew: Crew, payload: dict[str, Any], state: dict[str, Any] | None) -> None:
        session, self.crew, self.payload = crew.session, crew, payload
        self.stage: Stage = payload["stage"]
        self.draw = crew.draws[payload["step"]]
        crew.overlap.prepare(self.draw.step)
        self.settings = stage_of(session.config, self.stage)
        self.policy: Policy = session.explorer if self.stage == "explore" else session.rollout_policy
        seeds = [(group, self.draw.seeds[group][candidate]) for group, candidate in payload["members"]]
        members = padded(seeds, session.config.batch.rollout)
        self.sigmas = self.policy.sigmas(self.settings.num_steps)
        self.velocity = velocity_of(self.policy, self.draw.conditioning, members)
        if state is None:
            self.state = SamplerState(start_noise(self.policy, members), None, 0)
        else:
            try:
                found = crew.take(state["tensors"])
            finally:  # if that fails the micro-batch starts over
                crew.free(state["tensors"])
            self.state = SamplerState(found["latents"], found.get("previous"), state["step"])

    def advance(self) -> dict[str, Any] | None:
        """One denoising step; after the last, images."""
        crew, settings = self.crew, self.settings
        with crew.clock.phase(self.stage), drawing(self.policy):
            if self.state.step < settings.num_steps:
                self.state = advance(self.velocity, self.state, self.sigmas, settings.solver)
                return None
            clean = self.state.latents
            images = decode(self.policy, clean, crew.session.config.batch.decode)
        first, members = self.payload["first"], self.payload["members"]
        part = Rollouts(
            index=torch.arange(first, first + len(members)),
            prompts=[self.draw.prompts[group] for group, _ in members],
            clean=clean[: len(members)],
            images=images[: len(members)],
        )
        require_finite(part)
        self.draw.clean[self.stage].update(zip(part.index.tolist(), part.clean, strict=True))
        return {"images": crew.put({"images": part.images})}

    def give_back(self) -> dict[str, Any] | None:
        """The sampler's state; noise is not worth a transfer."""
        if self.state.step == 0:
            return None
        tensors = {"latents": self.state.latents}
        if self.state.previous_clean is not None:
            tensors["previous"] = self.state.previous_clean
        return {"step": self.state.step, "tensors": self.crew.put(tensors)}


class Scoring:
    """A micro-batch's images being scored: one round."""

    def __init__(self, crew: Crew, payload: dict[str, Any]) -> None:
        self.crew, self.payload = crew, payload

    def advance(self) -> dict[str, Any] | None:
        """The scores; the images are given free once there are some."""
        crew, session = self.crew, self.crew.session
        with crew.clock.phase("score"):
            get = crew.fetch if isinstance(session.reward, ChildReward) else crew.take  # a child's way is by the host
            images = get(self.payload["images"])["images"]
            prompts = [crew.draws[self.payload["step"]].prompts[group] for group, _ in self.payload["members"]]
            values, present = call_parts(session.reward, images, prompts)
        crew.free(self.payload["images"])
        return {"values": pack(values), "present": present.tolist()}

    def give_back(self) -> None:
        """Nothing is kept."""


@contextmanager
def open_crew(session: Session, step: int) -> Iterator[Crew]:
    """The crew of a run that has done ``step`` steps; its decisions go to decisions.jsonl in the run folder."""
    config, world = session.config, session.world
    image = 3 * config.model.height * config.model.width
    latents = 2 * math.prod(session.policy.latent_shape)
    size, num_heldout = config.replica_size, len(session.heldout_prompts)
    waiting = most_parts(config, num_heldout, world.size) if size else 0
    ring = 4 * config.batch.rollout * ((AHEAD * world.size + 2 + waiting) * image + 2 * latents) + 2**16
    host = "" if is_one_machine() else own_address()
    with (
        connect(world, config.runtime.lost_after_s) as post,
        Blobs(world.rank, ring, machine=machine(), host=host, token=post.token) as blobs,
        DecisionLog(config.output.dir if world.is_main else None, step) as log,
    ):
        # Every process has loaded all there is, so its roles are resident together and no tensor is released; unless a
        # judge takes its GPU: then all of them are, and wait in host memory.
        held = [
            Context(role, lambda: crew.tensors() if size else {}, [("*", "offloadable")]) for role in (EXPLORE, TRAIN)
        ]
        score = Context(SCORE, dict, (), start=session.wake, stop=session.rest)
        residency = Residency([*held, score], TRAIN, budget_bytes=0 if size else None)
        session.rest()
        gang = Gang(
            post, residency, log,
            stop=session.stop, job_timeout_s=config.runtime.job_timeout_s, replica_size=max(size, 1),
        )  # fmt: skip
        crew = Crew(session, gang, blobs, log)
        if size and isinstance(session.reward, ChildReward):
            session.reward.together = Judging(crew)
        yield crew


def check_mode(config: Config) -> None:
    """UsageError where the mode cannot work with the processes there are, or with the objective."""
    if open_objective(config).sampler(config) is not None:
        raise UsageError(
            f"train.objective = {config.train.objective} trains on trajectories, which stay where they are drawn: "
            "use runtime.mode = colocated"
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    here, replica = int(os.environ.get("LOCAL_WORLD_SIZE", size)), config.replica_size
    if replica and here % replica:
        raise UsageError(
            f"reward.process_gpus = {replica}: so many processes score together, and a machine has {here}: start a "
            f"multiple of {replica} on each, or change it"
        )
    if config.runtime.mode == "async_score" and config.runtime.score_processes >= size:
        raise UsageError(
            f"runtime.score_processes = {config.runtime.score_processes} of {size} processes leaves none to draw: "
            "lower it, start more processes, or use colocated"
        )
