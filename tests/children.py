"""Runs in processes of their own, which may be killed at any moment. Forked: nothing has to be imported again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from solrl.errors import SolrlError


def in_child(action: Callable[[], object]) -> tuple[int, str]:
    """(exit code or minus the signal, message of the SolrlError) of ``action`` in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99  # anything but a SolrlError: pytest shows its traceback as captured output
        try:
            action()
            code = 0
        except SolrlError as error:
            os.write(writer, str(error).encode())
            code = error.exit_code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
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
