"""Runs in processes of their own, which may be killed at any moment. Forked: nothing has to be imported again."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

import pytest
import torch

from solrl.errors import SolrlError

# Autograd starts a thread for each device at its first backward, and no process may fork after that. A test with fake
# CUDA tensors makes it see a GPU for good; so the first backward comes before any test.
torch.ones((), requires_grad=True).mul(2).backward()

Outcome = tuple[int, str]
"""(exit code or minus the signal, message of the SolrlError)."""


def in_child(action: Callable[[], object]) -> Outcome:
    """What becomes of ``action`` in a forked process; 99 is an error that is no SolrlError, shown on stderr."""
    return _wait(*_start(action))


def in_children(size: int, action: Callable[[int], object], *, machines: int = 1) -> list[Outcome]:
    """The same for ``size`` processes at once, given their rank, in the environment that a launcher makes on as many
    ``machines`` (which here are all this one)."""
    return [_wait(*child) for child in _start_ranks(size, action, size // machines)]


def in_gang(size: int, action: Callable[[int], object], *, max_restarts: int) -> int:
    """``action`` on ``size`` processes, done at last; how often all of them were started again. As torchrun does it:
    when one fails, the others get SIGTERM, and SIGKILL where that does not help."""
    for restart in range(max_restarts + 1):

        def as_rank(rank: int, restart: int = restart) -> object:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
            return action(rank)

        children = dict(_start_ranks(size, as_rank, size))
        failed = False
        while children and not failed:
            time.sleep(0.05)
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.pop(child).close()
                    failed |= status != 0
        if not failed:
            return restart
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in children:
                os.kill(child, number)
            end = time.monotonic() + 20
            while children and time.monotonic() < end:
                time.sleep(0.05)
                for child in list(children):
                    if os.waitpid(child, os.WNOHANG)[0]:
                        children.pop(child).close()
    raise AssertionError(f"still failing after {max_restarts} restarts")


def _start_ranks(size: int, action: Callable[[int], object], here: int) -> list[tuple[int, IO[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_rank(rank: int) -> object:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank % here), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(here),
            GROUP_RANK=str(rank // here), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        return action(rank)

    return [_start(lambda rank=rank: as_rank(rank)) for rank in range(size)]


def _start(action: Callable[[], object]) -> tuple[int, IO[str]]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            action()
            code = 0
        except SolrlError as error:
            os.write(writer, str(error).encode())
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    return child, os.fdopen(reader)


def _wait(child: int, pipe: IO[str]) -> Outcome:
    with pipe:
        message = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message


def signal_at(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int, number: signal.Signals = signal.SIGKILL
) -> None:
    """From now on the ``call``-th call (from 1) of ``target.name`` first sends ``number`` to its own process."""
    real, calls = getattr(target, name), iter(range(1, call + 1))

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) == call:
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, counted)
