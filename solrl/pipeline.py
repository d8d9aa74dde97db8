"""The same stages as jobs: explore, score and regenerate are placed on processes whose role shifts (PivotRL).

A step is the step of train.py, with its drawing done another way: micro-batches of candidates are jobs of role explore,
their images jobs of role score, and a group is selected and redrawn as soon as all of its candidates have a score. A
job can be given back between two denoising steps and goes on elsewhere. Micro-batches have the same members and the
same shape as in train.py, so every mode gives the same samples, the same kept seeds and the same weights, bit for bit.

No collective runs while jobs do. The update is lockstep over all processes, as in train.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from solrl.checkpoint import check_folder
from solrl.clock import Stopwatch
from solrl.compute import drawing
from solrl.config import Config, StageConfig
from solrl.decisions import DecisionLog, LoggedStopwatch
from solrl.distributed import start
from solrl.groups import restrict, select_contrastive
from solrl.hub import check_push, push_run
from solrl.launch import check_launcher
from solrl.modes import advise_mode
from solrl.objectives.base import open_objective
from solrl.recorder import Recorder
from solrl.restart import goes_on
from solrl.rollout import (
    ScoreBoard,
    call_parts,
    decode,
    padded,
    part_weights,
    require_finite,
    start_noise,
    velocity_of,
)
from solrl.runtime.blobs import BlobRef, Blobs
from solrl.runtime.context import Context, Residency
from solrl.runtime.controller import AHEAD, Job
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import connect
from solrl.runtime.plans import fixed, planned
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN
from solrl.samplers import SamplerState, advance
from solrl.session import Session, open_session
from solrl.signals import SignalStop
from solrl.tracking import check_trackers
from solrl.train import Drawn, DrawStages, run_step, select
from solrl.types import Conditioning, Policy, Rollouts, Scores, Seeds, UsageError

Stage = Literal["explore", "regenerate"]
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
    check_mode(config)
    with SignalStop() as stop, start(config.cpu_threads, config.deterministic) as world:
        session = open_session(config, world, stop)
        with Recorder(session, resume) as recorder, open_crew(session, recorder.step) as crew:
            for step in recorder.steps():
                crew.log.step, clock = step, LoggedStopwatch(world.device, crew.log)
                with recorder.saving_on_interrupt(step), crew.gang.naming_the_lost(lambda: stop.received is not None):
                    metrics = recorder.record(step, run_step(session, step, clock, crew.draw), clock)
                crew.choose_mode(clock, recorder.tracking.plan)
                if on_step:
                    on_step(metrics)
    push_run(config)
    return config.output.dir


class StepJobs:
    """The jobs of one step and what follows from each; kept by rank 0."""

    def __init__(self, crew: Crew, size: tuple[int, int]) -> None:
        config = crew.session.config
        self.config, self.size = config, size
        self.boards = crew.boards
        self.owners: dict[Stage, dict[int, int]] = {"explore": {}, "regenerate": {}}  # micro-batch -> who drew it
        self._number = 0
        self._scored = [0] * size[0]  # candidates of each group that have come back
        self._selected = 0  # groups that have been looked at, in order
        self._kept: list[list[int]] = []  # (group, candidate) to regenerate, in order
        self._drawn = 0  # how many of those are in jobs

    def first(self) -> list[Job]:
        """All candidates."""
        groups, candidates = self.size
        pool = [[group, candidate] for group in range(groups) for candidate in range(candidates)]
        return self._draw("explore" if self.config.explore.enabled else "regenerate", pool, 0)

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        """Images are scored next; a group whose scores are complete is selected, and redrawn."""
        payload = job.payload
        stage: Stage = payload["stage"]
        if job.role == EXPLORE:
            self.owners[stage][payload["first"] // self.config.batch.rollout] = rank
            return [self._job(SCORE, payload | {"images": value["images"]}, 1, "score")]
        members = payload["members"]
        index = torch.arange(payload["first"], payload["first"] + len(members))
        values = torch.tensor([unpack(each) for each in value["values"]], dtype=torch.float64)
        self.boards[stage].enter(index, values, torch.tensor(value["present"]))
        if stage == "regenerate" or not self.config.regenerate.enabled:
            return []
        for group, _ in members:
            self._scored[group] += 1
        return self._regenerate()

    def outcome(self) -> dict[str, Any]:
        """Who drew which micro-batch."""
        return {stage: [ranks[number] for number in sorted(ranks)] for stage, ranks in self.owners.items()}

    def _regenerate(self) -> list[Job]:
        """Full micro-batches of kept candidates as far as groups are complete in order; at the end also the last."""
        proxy, keep = self.boards["explore"].scores(), self.config.regenerate
        while self._selected < self.size[0] and self._scored[self._selected] == self.size[1]:
            group = slice(self._selected, self._selected + 1)
            kept = select_contrastive(proxy.signal[group], keep.group_size, proxy.present[group], keep.selection)
            self._kept += [[self._selected, candidate] for row in kept.indices.tolist() for candidate in row]
            self._selected += 1
        size = self.config.batch.rollout
        whole = len(self._kept) if self._selected == self.size[0] else len(self._kept) // size * size
        fresh, first = self._kept[self._drawn : whole], self._drawn
        self._drawn = whole
        return self._draw("regenerate", fresh, first)

    def _draw(self, stage: Stage, members: list[list[int]], first: int) -> list[Job]:
        size, rounds = self.config.batch.rollout, stage_of(self.config, stage).num_steps + 1
        return [
            self._job(EXPLORE, {"stage": stage, "first": first + at, "members": members[at : at + size]}, rounds, stage)
            for at in range(0, len(members), size)
        ]

    def _job(self, role: Literal["explore", "score"], payload: dict[str, Any], rounds: int, kind: str) -> Job:
        self._number += 1
        return Job(self._number, role, payload, rounds, kind)


class Crew:
    """This process among those of the run: the gang, the blobs between them, and the step at hand."""

    def __init__(self, session: Session, gang: Gang, blobs: Blobs, log: DecisionLog) -> None:
        self.session, self.gang, self.blobs, self.log = session, gang, blobs, log
        self.mode, self.num_score = session.config.runtime.mode, session.config.runtime.score_processes
        self._is_warm = session.compile_mode == "off"

    @property
    def draw(self) -> DrawStages | None:
        """How a step draws; None: as in train.py."""
        return self.draw_stages if self.mode in ("async_score", "shiftable") else None

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
        self, session: Session, prompts: list[str], conditioning: Conditioning, seeds: Seeds, clock: Stopwatch
    ) -> Drawn:
        """Explore, select, regenerate as jobs; equal on every rank, latents where they were drawn."""
        config, world = session.config, session.world
        self.prompts, self.conditioning, self.seeds, self.clock = prompts, conditioning, seeds, clock
        weights, groups = part_weights(session.reward), len(prompts)
        self.boards: dict[Stage, ScoreBoard] = {
            "explore": ScoreBoard((groups, config.pool_size), weights),
            "regenerate": ScoreBoard((groups, config.regenerate.group_size), weights),
        }
        self.clean: dict[Stage, dict[int, Tensor]] = {"explore": {}, "regenerate": {}}
        jobs = StepJobs(self, (groups, config.pool_size)) if world.is_main else None
        plan = fixed(self.num_score) if self.mode == "async_score" else planned
        owners = self.gang.work({"explore": self.begin_draw, "score": self.begin_score}, jobs, plan)
        proxy = self._gather("explore", owners) if config.explore.enabled else None
        with clock.phase("select"):
            selection = select(proxy, config)
        if not config.regenerate.enabled:
            assert proxy is not None
            return proxy, selection, restrict(proxy, selection)
        self.boards["regenerate"].keep(len(selection.groups))
        return proxy, selection, self._gather("regenerate", owners)

    def _gather(self, stage: Stage, owners: dict[str, list[int]]) -> Scores:
        """Scores of a stage on every rank; of each micro-batch one process keeps the latents."""
        size, board = self.session.config.batch.rollout, self.boards[stage]
        mine = {number for number, rank in enumerate(owners[stage]) if rank == self.session.world.rank}
        board.clean = {at: clean for at, clean in self.clean[stage].items() if at // size in mine}
        return board.gather(self.session.world)

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Leave ``tensors`` for another process; where they are, for a message."""
        return self.blobs.put(tensors).to_json()

    def take(self, reference: dict[str, Any]) -> dict[str, Tensor]:
        """What another process has left, on this one's device."""
        found = self.blobs.get(BlobRef.from_json(reference))
        return {name: tensor.to(self.session.world.device) for name, tensor in found.items()}

    def free(self, reference: dict[str, Any]) -> None:
        """Nobody will take it again."""
        self.blobs.acknowledge(BlobRef.from_json(reference))

    def begin_draw(self, payload: dict[str, Any], state: dict[str, Any] | None) -> Drawing:
        """A micro-batch, from noise or from where another process left it."""
        return Drawing(self, payload, state)

    def begin_score(self, payload: dict[str, Any], state: dict[str, Any] | None) -> Scoring:
        """A micro-batch's images."""
        return Scoring(self, payload)


class Drawing:
    """A micro-batch on its way from noise to images: one denoising step a round, and a last one to decode."""

    def __init__(self, crew: Crew, payload: dict[str, Any], state: dict[str, Any] | None) -> None:
        session, self.crew, self.payload = crew.session, crew, payload
        self.stage: Stage = payload["stage"]
        self.settings = stage_of(session.config, self.stage)
        self.policy: Policy = session.explorer if self.stage == "explore" else session.rollout_policy
        seeds = [(group, crew.seeds[group][candidate]) for group, candidate in payload["members"]]
        members = padded(seeds, session.config.batch.rollout)
        self.sigmas = self.policy.sigmas(self.settings.num_steps)
        self.velocity = velocity_of(self.policy, crew.conditioning, members)
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
            prompts=[crew.prompts[group] for group, _ in members],
            clean=clean[: len(members)],
            images=images[: len(members)],
        )
        require_finite(part)
        crew.clean[self.stage].update(zip(part.index.tolist(), part.clean, strict=True))
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
            images = crew.take(self.payload["images"])["images"]
            prompts = [crew.prompts[group] for group, _ in self.payload["members"]]
            values, present = call_parts(session.reward, images, prompts)
        crew.free(self.payload["images"])
        return {"values": pack(values), "present": present.tolist()}

    def give_back(self) -> None:
        """Nothing is kept."""


def pack(values: Tensor) -> list[Any]:
    """Numbers as text that keeps every bit."""
    return [[x.hex() for x in row] if isinstance(row, list) else row.hex() for row in values.tolist()]


def unpack(value: Any) -> Any:
    """The numbers again."""
    return [float.fromhex(x) for x in value] if isinstance(value, list) else float.fromhex(value)


def stage_of(config: Config, stage: Stage) -> StageConfig:
    """The settings of a stage."""
    return config.explore if stage == "explore" else config.regenerate


@contextmanager
def open_crew(session: Session, step: int) -> Iterator[Crew]:
    """The crew of a run that has done ``step`` steps; its decisions go to decisions.jsonl in the run folder."""
    config, world = session.config, session.world
    image = 3 * config.model.height * config.model.width
    latents = 2 * math.prod(session.policy.latent_shape)
    ring = 4 * config.batch.rollout * ((AHEAD * world.size + 2) * image + 2 * latents) + 2**16
    with (
        connect(world, config.runtime.lost_after_s) as post,
        Blobs(world.rank, ring) as blobs,
        DecisionLog(config.output.dir if world.is_main else None, step) as log,
    ):
        # Every process has loaded all there is, so its roles are resident together: nothing to release.
        residency = Residency([Context(role, dict, ()) for role in (EXPLORE, SCORE, TRAIN)], TRAIN)
        gang = Gang(post, residency, log, stop=session.stop, job_timeout_s=config.runtime.job_timeout_s)
        yield Crew(session, gang, blobs, log)


def check_mode(config: Config) -> None:
    """UsageError where the mode cannot work with the processes there are, or with the objective."""
    if open_objective(config).sampler(config) is not None:
        raise UsageError(
            f"train.objective = {config.train.objective} trains on trajectories, which stay where they are drawn: "
            "use runtime.mode = colocated"
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if here != size:
        raise UsageError(
            f"runtime.mode = {config.runtime.mode} works on one machine so far and this run is on {size // here}: "
            "use colocated"
        )
    if config.runtime.mode == "async_score" and config.runtime.score_processes >= size:
        raise UsageError(
            f"runtime.score_processes = {config.runtime.score_processes} of {size} processes leaves none to draw: "
            "lower it, start more processes, or use colocated"
        )
