"""A process of the run at work: it takes jobs of the role it has, one at a time, until the controller says that all are
done.

Between two rounds of a job it looks for messages. Told to shift, it gives the job back as it is and takes the other
role. A role that fails (out of memory, a scorer that raises) costs the job a try, not the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from solrl.errors import Interrupted, RewardFailed, SolrlError
from solrl.runtime.context import Residency, ShiftFailed
from solrl.runtime.mailbox import (
    CONTROLLER,
    Ending,
    Failed,
    Finish,
    Message,
    Post,
    Raised,
    Result,
    Run,
    Shift,
    Shifted,
    Spent,
    Stop,
    Yielded,
)

LONGEST = 2000
"""Characters of an error that travel."""
ALIVE_S = 1.0
"""Between two looks whether the controller's process lives."""


class Work(Protocol):
    """A job in progress. What it says and takes is plain JSON."""

    def advance(self) -> dict[str, Any] | None:
        """One round; the job's value once it is done, None before."""
        ...

    def give_back(self) -> dict[str, Any] | None:
        """Where another worker can go on from; None: from the start."""
        ...


Begin = Callable[[dict[str, Any], dict[str, Any] | None], Work]
"""(payload of a job, state it was given back in) -> the job in progress."""


class Worker:
    """One process; its role lasts from one ``serve`` to the next."""

    def __init__(self, post: Post, residency: Residency, stop: Callable[[], None]) -> None:
        self.post, self.residency, self.stop = post, residency, stop
        self._box = str(post.rank)
        self._next: Message | None = None  # came in while a job was running
        self._looked = time.monotonic()

    def serve(self, roles: Mapping[str, Begin]) -> dict[str, Any]:
        """Work until all jobs are done; what the controller has to say in the end. ``roles`` begin jobs.

        Raises what ended the run, here or elsewhere: SolrlError, RewardFailed or Interrupted.
        """
        while True:
            message = self._next or self._wait()
            self._next = None
            if isinstance(message, Run):
                self._run(message, roles[message.role])
            elif isinstance(message, Shift):
                self._shift(message)
            elif isinstance(message, Finish):
                return message.value
            elif isinstance(message, Stop):
                raise ended(message.ending, message.reason)
            else:
                raise SolrlError(f"process {self.post.rank} got a message for the controller: {message.kind}")

    def report(self, error: BaseException) -> None:
        """Tell the controller that this process leaves because of ``error``."""
        self.post.send(CONTROLLER, Failed(rank=self.post.rank, ending=ending(error), error=describe(error)))

    def _wait(self) -> Message:
        while True:
            message = self.post.wait(self._box, time.monotonic() + ALIVE_S, self._look)
            if message is not None:
                return message

    def _look(self) -> None:
        self.stop()
        now = time.monotonic()
        if self.post.rank and now - self._looked > ALIVE_S:
            self._looked = now
            self.post.check_alive([0])

    def _run(self, run: Run, begin: Begin) -> None:
        if run.role != self.residency.current:
            raise SolrlError(f"process {self.post.rank} is in role {self.residency.current}, its job needs {run.role}")
        began, started, rounds = time.time(), time.perf_counter(), 0

        def spent() -> Spent:
            return Spent(began=began, seconds=time.perf_counter() - started)

        try:
            work = begin(run.payload, run.state)
            while True:
                self.stop()
                self._next = self.post.receive(self._box)
                if self._next is not None:
                    state = work.give_back()
                    return self._say(
                        Yielded(job=run.job, rank=self.post.rank, state=state, rounds=rounds, spent=spent())
                    )
                value = work.advance()
                rounds += 1
                if value is not None:
                    break
        except (RewardFailed, RuntimeError) as error:  # the role's failure; torch's own are RuntimeErrors
            how, line = ending(error), describe(error)
            return self._say(Raised(job=run.job, rank=self.post.rank, spent=spent(), error=line, ending=how))
        self._say(Result(job=run.job, rank=self.post.rank, value=value, rounds=rounds, spent=spent()))

    def _shift(self, shift: Shift) -> None:
        started = time.perf_counter()
        error = None
        try:
            self.residency.shift_to(shift.role)
        except ShiftFailed as failure:  # and the previous role is back
            error = describe(failure)
        seconds = time.perf_counter() - started
        role = self.residency.current
        self._say(Shifted(rank=self.post.rank, role=role, number=shift.number, seconds=seconds, error=error))

    def _say(self, message: Message) -> None:
        self.post.send(CONTROLLER, message)


def ending(error: BaseException) -> Ending:
    """How ``error`` ends a run."""
    if isinstance(error, Interrupted):
        return "interrupted"
    return "reward" if isinstance(error, RewardFailed) else "failed"


def ended(how: Ending, reason: str) -> SolrlError:
    """The error to raise in every process when one has ended the run."""
    kinds: dict[str, type[SolrlError]] = {"interrupted": Interrupted, "reward": RewardFailed, "failed": SolrlError}
    return kinds[how](reason)


def describe(error: BaseException) -> str:
    """``error`` in one line."""
    text = str(error).splitlines()[0][:LONGEST] if str(error) else ""
    return text if isinstance(error, SolrlError) else f"{type(error).__name__}: {text}"
