"""What a run in a mode with roles has done, moment by moment: ``decisions.jsonl`` in its folder.

One JSON line for each decision, shift, job, failure and phase of the update. Every line has ``step`` and ``time`` (of
writing, as time.time says); what took time has ``began`` and ``seconds``. The report and ``solrl trace`` read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import torch

from solrl.clock import Stopwatch
from solrl.errors import SolrlError
from solrl.files import write_atomic

Line = dict[str, Any]


def decisions_path(run_dir: Path) -> Path:
    """The file, whether or not the run has one."""
    return run_dir / "decisions.jsonl"


def read_decisions(run_dir: Path) -> list[Line]:
    """All lines, in the order of writing; none where the run has no roles. A last line that a kill cut off is left
    out."""
    path = decisions_path(run_dir)
    if not path.exists():
        return []
    lines, texts = list[Line](), path.read_text("utf-8").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            float(line["time"]), int(line["step"]), str(line["event"])
            lines.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(texts):
                raise SolrlError(f"{path}: line {number} is no decision; repair or remove it") from error
    return lines


class DecisionLog:
    """Writes the file of a run; kept by rank 0. A resume drops what came after its step."""

    def __init__(self, run_dir: Path | None, step: int) -> None:
        self.step = step
        self._file: IO[str] | None = None
        if run_dir is not None:
            kept = [json.dumps(line) for line in read_decisions(run_dir) if line["step"] <= step]
            path = decisions_path(run_dir)
            write_atomic(path, "".join(line + "\n" for line in kept).encode())
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, line: Line) -> None:
        """Add ``line``, with the step it belongs to and the time."""
        if self._file is not None:
            self._file.write(json.dumps({"step": self.step, "time": time.time()} | line) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


class LoggedStopwatch(Stopwatch):
    """A stopwatch whose phases outside of jobs, which all processes go through together, are lines of the log."""

    PHASES = ("audit", "update", "requantize")

    def __init__(self, device: torch.device, log: DecisionLog) -> None:
        super().__init__(device)
        self._log = log

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        began = time.time()
        with super().phase(name):
            yield
        if name in self.PHASES:
            self._log({"event": "phase", "name": name, "began": began, "seconds": time.time() - began})
