"""A polite stop: SIGTERM or Ctrl-C ends the run at the next micro-batch, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from solrl.errors import Interrupted


class SignalStop:
    """Inside the context SIGTERM and SIGINT only raise a flag; calling the object raises ``Interrupted`` once it is up.

    A second SIGINT raises KeyboardInterrupt at once: files are written atomically, so even that loses nothing
    but the unfinished step. Outside the main thread no handler can be installed, and none is.

    A launcher sends the signal to all processes. Only rank 0, which saves, leaves because of it: were another rank to
    leave first, rank 0 would be stuck in a sum. The others fail in their next sum once it is gone, which then is no
    failure but the same stop.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that asked for a stop."""
        self._is_main = os.environ.get("RANK", "0") == "0"
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be put back by name
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        if self.received and not self._is_main and isinstance(error, RuntimeError):
            raise self._stopped() from error

    def __call__(self) -> None:
        """Raise ``Interrupted`` if a signal has asked this process for a stop and it is the one that saves."""
        if self.received and self._is_main:
            raise self._stopped()

    def _stopped(self) -> Interrupted:
        assert self.received
        return Interrupted(f"stopped by {self.received.name}; continue with --resume")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
