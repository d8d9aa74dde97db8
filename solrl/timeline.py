"""Which process did what, and when: what ``decisions.jsonl`` says, as spans of time.

A step begins with its first decision and ends with its last phase; what comes between steps (evaluation, checkpoints)
is in none. All times are seconds as time.time counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from solrl.decisions import Line, read_decisions
from solrl.runtime.roles import TRAIN

KINDS = ("explore", "regenerate", "score", "update", "requantize", "audit", "shift")
"""What a process can be busy with; the update's phases are common to all."""


@dataclass(frozen=True)
class Span:
    """A process held a role, or was busy, from ``began`` to ``ended``."""

    rank: int
    kind: str
    began: float
    ended: float
    facts: dict[str, Any]
    """What the log says about it."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Step:
    """One step of a run in a mode with roles."""

    number: int
    began: float
    ended: float
    num_processes: int
    roles: list[Span]
    """Without gaps in every process."""
    busy: list[Span]
    queues: list[tuple[float, dict[str, int]]]
    """(time, role -> jobs that wait), after every job."""
    lines: list[Line]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def busy_seconds(self) -> dict[str, float]:
        """Process-seconds by kind, with what is left as "idle"."""
        seconds = {kind: math.fsum(s.seconds for s in self.busy if s.kind == kind) for kind in KINDS}
        seconds = {kind: value for kind, value in seconds.items() if value}
        return seconds | {"idle": max(self.num_processes * self.seconds - math.fsum(seconds.values()), 0.0)}

    def num_done(self, *kinds: str) -> int:
        """Jobs of these kinds that were finished."""
        return sum(span.kind in kinds and span.facts["ended"] == "result" for span in self.busy)


def read_steps(run_dir: Path) -> list[Step]:
    """Every step that was done by roles, in order; none for a run in mode colocated."""
    found = read_decisions(run_dir)
    size = 1 + max((line["rank"] for line in found if "rank" in line), default=-1)
    steps = []
    for number, lines in groupby(found, lambda line: int(line["step"])):
        ours = list(lines)
        if any(line["event"] == "job" for line in ours):
            steps.append(_step(number, ours, size))
    return steps


def _step(number: int, lines: list[Line], size: int) -> Step:
    began = min(min(line.get("began", math.inf), line["time"]) for line in lines)
    ended = max(line["began"] + line["seconds"] if "began" in line else line["time"] for line in lines)
    shifts = [line for line in lines if line["event"] == "shift"]
    busy = [span for line in lines for span in _busy(line, size)]
    roles = [span for rank in range(size) for span in _roles(rank, shifts, began, ended)]
    queues = [(line["time"], line["waiting"]) for line in lines if line["event"] == "job"]
    return Step(number, began, ended, size, roles, sorted(busy, key=lambda s: (s.rank, s.began)), queues, lines)


def _busy(line: Line, size: int) -> Iterator[Span]:
    if line["event"] == "job":
        yield Span(line["rank"], line["kind"], line["began"], line["began"] + line["seconds"], line)
    elif line["event"] == "phase":
        for rank in range(size):
            yield Span(rank, line["name"], line["began"], line["began"] + line["seconds"], line)
    elif line["event"] == "shift":
        yield Span(line["rank"], "shift", line["time"] - line["of_which_shifting_s"], line["time"], line)


def _roles(rank: int, shifts: Sequence[Line], began: float, ended: float) -> Iterator[Span]:
    """A step begins and ends in role train."""
    role, since = TRAIN, began
    for line in shifts:
        if line["rank"] == rank and line["role"] != role:
            yield Span(rank, role, since, line["time"], {})
            role, since = line["role"], line["time"]
    yield Span(rank, role, since, ended, {})
