"""All processes of a run at work together: each serves as a worker, and a thread of process 0 controls.

Whatever ends the work in one process ends it in all, with the same message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from solrl.errors import SolrlError
from solrl.runtime.context import Residency
from solrl.runtime.controller import Controller, Jobs, Plan
from solrl.runtime.mailbox import BEAT_S, Post, ProcessLost, Stop
from solrl.runtime.worker import Begin, Worker, describe, ending


class Gang:
    """This process among those that work. Make it on all ranks; rank 0 writes to ``log``.

    ``replica_size`` processes are a score replica, led by the lowest of them.
    """

    def __init__(
        self,
        post: Post,
        residency: Residency,
        log: Callable[[dict[str, Any]], None],
        *,
        stop: Callable[[], None],
        job_timeout_s: float,
        replica_size: int = 1,
    ) -> None:
        self.post = post
        self._failure: BaseException | None = None
        self.worker = Worker(post, residency, stop)
        self.controller: Controller | None = None
        if post.rank == 0:
            self.controller = Controller(post.clone(), log, job_timeout_s=job_timeout_s, replica_size=replica_size)

    def work(
        self,
        roles: Mapping[str, Begin],
        jobs: Jobs | None,
        plan: Plan,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Work off ``jobs``, which rank 0 has, in roles by ``plan``; their outcome, on every rank. All train then.

        Once ``is_enough`` (asked on rank 0) the rest is given back: those jobs can be done another time.

        Raises what ended the run, wherever it happened; an error of process 0's controller is its cause.
        """
        if self.controller is None:
            return self._serve(roles)
        assert jobs is not None
        self._failure = None
        thread = threading.Thread(target=self._control, args=(self.controller, jobs, plan, is_enough), daemon=True)
        thread.start()
        try:
            return self._serve(roles)
        except BaseException as error:
            thread.join()
            if error.__cause__ is None and self._failure is not None:
                raise error from self._failure
            raise
        finally:
            thread.join()

    def _serve(self, roles: Mapping[str, Begin]) -> dict[str, Any]:
        try:
            return self.worker.serve(roles)
        except BaseException as error:
            with suppress(SolrlError):  # nobody is left to be told
                self.worker.report(error)
            raise

    def _control(self, controller: Controller, jobs: Jobs, plan: Plan, is_enough: Callable[[], bool]) -> None:
        try:
            controller.run(jobs, plan, is_enough)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._failure = error
            controller.stop(Stop(ending=ending(error), reason=describe(error)))

    @contextmanager
    def naming_the_lost(self, is_stopping: Callable[[], bool]) -> Iterator[None]:
        """Inside, a collective that fails because a process died raises ProcessLost, which names it."""
        try:
            yield
        except RuntimeError as error:
            if self.post.size == 1 or is_stopping() or not _is_connection(error):
                raise
            others = [rank for rank in range(self.post.size) if rank != self.post.rank]
            end = time.monotonic() + self.post.timeout_s + 2 * BEAT_S
            while time.monotonic() < end:
                try:
                    self.post.check_alive(others)
                except ProcessLost as lost:
                    raise lost from error
                time.sleep(BEAT_S / 4)
            raise


def _is_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
