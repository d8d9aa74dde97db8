"""Drawing ahead (``runtime.staleness``): the samples of the next steps are drawn while this one's are trained on.

Samples of step s come from old_policy as it was after step s - 1 - staleness (at the start: the first one). So when
step s is trained on, the versions that draw steps s + 1 .. s + staleness exist already, and their jobs stand in the
same queue as the micro-batches of the update: whoever has nothing to draw takes those. A window of work ends when the
gradient of step s and the samples of step s + 1 are complete; what is begun of step s + 2 is put aside and goes on in
the next window. Then comes what is left of the update: one sum over all processes, and the optimizer.

Which version draws a step depends on the step alone, so train.py, which draws each step when its turn comes, gives the
same bits. So does a resume: nothing in flight is saved, it is drawn again from the versions in the checkpoint.

What staleness changes: samples are older, by so many steps of old_policy's slow average. The objectives know: v_old and
likelihood ratios are those of the version that drew (learner.py), so DiffusionNFT improves on that version and not on
the newest one, and ratios start away from 1 (health/ratio_error). Which candidates are kept is decided by its samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from solrl.distributed import OrderFreeSum
from solrl.errors import SolrlError
from solrl.groups import group_seeds
from solrl.jobs import NUMBERS, StepJobs
from solrl.learner import TrainingSet
from solrl.prompts import step_prompts
from solrl.runtime.controller import Job
from solrl.runtime.roles import EXPLORE
from solrl.session import StepRecord
from solrl.train import Drawn, audit, training_set
from solrl.types import Conditioning, Seeds

if TYPE_CHECKING:
    from solrl.pipeline import Crew


class Window:
    """The jobs of a window, kept by rank 0: draws of several steps, and the micro-batches of an update."""

    def __init__(self, draws: dict[int, StepJobs], awaited: int | None, updates: list[Job]) -> None:
        self.draws, self.awaited, self.updates = draws, awaited, updates
        self.owners: dict[int, int] = {}  # micro-batch of the update -> who has its gradient

    def first(self) -> list[Job]:
        """What earlier windows left, what begins now, and the update."""
        return [job for draw in self.draws.values() for job in draw.pending()] + self.updates

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        """What follows within the job's step."""
        if job.payload["stage"] == "update":
            self.owners[job.payload["number"]] = rank
            return []
        return self.draws[job.payload["step"]].finished(job, value, rank)

    def is_enough(self) -> bool:
        """All gradients are there, and the awaited step's samples."""
        drawn = self.awaited is None or not self.draws[self.awaited].open
        return drawn and len(self.owners) == len(self.updates)

    def outcome(self) -> dict[str, Any]:
        """Who has what."""
        drawn = {} if self.awaited is None else self.draws[self.awaited].outcome()
        return {"drawn": drawn, "update": [self.owners[number] for number in sorted(self.owners)]}


class Overlap:
    """The steps under way on this process."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.staleness = crew.session.config.runtime.staleness
        self._step = 0  # trained on
        self._jobs: dict[int, StepJobs] = {}  # of steps being drawn; rank 0 has them
        self._ready: dict[int, Drawn] = {}
        self._said: dict[int, tuple[list[str], Conditioning, Seeds]] = {}
        self._in_trees: int | None = None  # the step whose version the rollout trees hold
        self._data: TrainingSet | None = None
        self.total: OrderFreeSum | None = None
        """Where this process sums up the gradient of the step at hand."""
        self._summed: list[int] = []  # micro-batches in it

    def run_step(self, step: int) -> StepRecord:
        """``train.run_step``, with later steps drawn beside the update."""
        session, crew, learner = self.crew.session, self.crew, self.crew.session.learner
        self._step, self._in_trees = step, None
        self._open_draws()
        if step not in self._ready:  # the first one
            self._ready[step] = crew.gather(step, self._work(step, [])["drawn"])
            self._jobs.pop(step, None)
        (proxy, selection, rewards), (prompts, conditioning, seeds) = self._ready.pop(step), self._said.pop(step)
        every = session.config.output.audit_every_steps
        if every and step % every == 0:
            self.prepare(step)
        audits = audit(session, step, selection, conditioning, prompts, seeds, crew.clock)
        scales = session.audit_scales() if audits else {}

        with crew.clock.phase("update"):
            self._data = training_set(session, selection, rewards, conditioning, seeds, lies_apart=True)
        version, lag = learner.old_versions[0], learner.step - learner.old_versions[0]
        following = step + 1 if step < session.config.train.num_steps else None
        fresh = self._prompts(step + 1 + self.staleness)
        with session.ahead.beside("draw", fresh, crew.clock):
            self._train_and_draw(following)
        with crew.clock.phase("update"):
            metrics = learner.finish(self.total, session.world) if self.total else {}
            if not self.total:
                learner.age_old_()
            self._data = self.total = None
        with session.ahead.beside("requantize", fresh, crew.clock), crew.clock.phase("requantize"):
            synced = session.sync()
        return StepRecord(prompts, seeds, proxy, selection, rewards, audits, metrics, synced, scales, version, lag)

    def prepare(self, step: int) -> None:
        """The rollout trees hold what draws ``step``."""
        if self.staleness and step != self._in_trees:
            with self.crew.clock.phase("change_version"):
                self.crew.session.sync(self.crew.session.learner.old_weights(step - self._step))
            self._in_trees = step

    def begin(self, payload: dict[str, Any]) -> Training:
        """A micro-batch of the update."""
        return Training(self, payload["number"])

    def add(self, number: int) -> None:
        """The gradient of micro-batch ``number`` is in this process's sum."""
        learner, data = self.crew.session.learner, self._data
        assert data is not None and self.total is not None
        if learner.merged_old:
            self.prepare(self._step)
        with self.crew.clock.phase("gradient"):
            learner.add(self.total, data, number)
        self._summed.append(number)

    def _open_draws(self) -> None:
        """Begin every step whose version is there and whose turn will come."""
        session, config = self.crew.session, self.crew.session.config
        for step in range(self._step, min(self._step + self.staleness, config.train.num_steps) + 1):
            if step not in self._said:
                prompts = self._prompts(step)
                seeds = group_seeds(config.seed, step, len(prompts), config.pool_size)
                with self.crew.clock.phase("encode"):
                    self._said[step] = prompts, session.ahead.conditioning(prompts), seeds
                jobs = self.crew.begin_step(step, *self._said[step])
                if jobs is not None:
                    self._jobs[step] = jobs

    def _prompts(self, step: int) -> list[str]:
        """Of ``step``; none where the run is over before."""
        session, config = self.crew.session, self.crew.session.config
        number = config.prompts.per_step if step <= config.train.num_steps else 0
        return step_prompts(session.train_prompts, config.seed, step, number)

    def _train_and_draw(self, following: int | None) -> None:
        """The gradients of this step are summed up where they were computed, and ``following`` is ready."""
        crew, learner, data = self.crew, self.crew.session.learner, self._data
        self._summed, updates = [], list[Job]()
        if data is not None:
            self.total = learner.begin(data)
            number = (self._step + 2) * NUMBERS - learner.num_batches(data)  # after what is awaited
            updates = [
                Job(number + n, EXPLORE, {"stage": "update", "number": n}, 1, "update")
                for n in range(learner.num_batches(data))
            ]
        outcome = self._work(following, updates)
        self._check_sums(outcome["update"], len(updates))
        if following is not None:
            self._ready[following] = crew.gather(following, outcome["drawn"])
            self._jobs.pop(following, None)

    def _work(self, awaited: int | None, updates: list[Job]) -> dict[str, Any]:
        if not self.crew.session.world.is_main:
            return self.crew.work(None)
        window = Window(self._jobs, awaited, updates)
        return self.crew.work(window, window.is_enough)

    def _check_sums(self, owners: list[int], number: int) -> None:
        """Every micro-batch is in exactly one process's sum, the one that said so."""
        world = self.crew.session.world
        counts = torch.zeros(number + 1, dtype=torch.int64)
        for batch in self._summed:
            counts[batch] += 1
        counts[number] = sorted(self._summed) != [batch for batch, owner in enumerate(owners) if owner == world.rank]
        if world.sum_(counts).tolist() != [1] * number + [0]:
            raise SolrlError(f"step {self._step}: a micro-batch of the update is not in the gradient exactly once")


class Training:
    """A micro-batch of the update: one round, all of it or nothing."""

    def __init__(self, overlap: Overlap, number: int) -> None:
        self.overlap, self.number = overlap, number

    def advance(self) -> dict[str, Any]:
        """Its gradient is added."""
        self.overlap.add(self.number)
        return {}

    def give_back(self) -> None:
        """Nothing is kept."""
