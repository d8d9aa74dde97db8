"""What a run says while it runs: one JSON line a step, trackers beside it, and a display of how it goes."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from solrl.config import Config
from solrl.display import Display
from solrl.files import saving
from solrl.types import SolrlError, UsageError

FILE = "metrics.jsonl"

Row = dict[str, float]
"""The metrics of one step; ``step`` among them."""

PIP_NAMES = {"comet_ml": "comet-ml"}


class Metrics:
    """Appends one strict JSON line a step to a file, unbuffered: a killed run has lost at most the line in flight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with saving(path):
            self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, float]) -> None:
        """Append ``row``, whole or not at all; a number that is NaN or infinite is a failure with its name."""
        line = (json.dumps(strict(row), allow_nan=False) + "\n").encode("ascii")
        before = self._file.seek(0, os.SEEK_END)
        with saving(self.path):
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                with suppress(OSError):  # the reason it is about to name counts, not that of tidying up
                    self._file.truncate(before)
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Tracking:
    """Everything that leaves a run while it runs. Every rank has one and sees ``history``; only rank 0 writes.

    Make it after the run folder is ready (and, on a resume, cut back to its checkpoint). A context manager.
    """

    def __init__(self, config: Config, *, is_main: bool, stream: IO[str] | None = None) -> None:
        path = config.output.dir / FILE
        self.history: list[Row] = read_metrics(path) if path.exists() else []
        """All rows so far, those of before a resume included, oldest first."""
        self.display: Display | None = None
        self._metrics: Metrics | None = None
        self._trackers: list[Any] = []
        if is_main:
            self._metrics = Metrics(path)
            self._trackers = start_trackers(config)
            self.display = Display(
                config.train.num_steps, reward=config.reward.name, history=self.history, stream=stream
            )

    def plan(self, lines: Sequence[str]) -> None:
        """Print what the run is about to do."""
        if self.display:
            self.display.lines(lines)

    def phase(self, name: str) -> None:
        """Show what is being done now."""
        if self.display:
            self.display.phase(name)

    def log(self, row: Mapping[str, float]) -> None:
        """Record one step's metrics everywhere. ``row["step"]`` counts up; step 0 is the evaluation before training."""
        clean = strict(row)
        if self.history and clean["step"] <= self.history[-1]["step"]:
            raise ValueError(f"step {clean['step']} was already recorded")
        self.history.append(clean)
        if self._metrics:
            self._metrics.write(clean)
        for tracker in self._trackers:
            tracker.log({key: value for key, value in clean.items() if key != "step"}, step=int(clean["step"]))
        if self.display:
            self.display.step(clean)

    def close(self) -> None:
        """End display and trackers, and close the file."""
        if self.display:
            self.display.close()
        if self._metrics:
            self._metrics.close()
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def strict(row: Mapping[str, float]) -> Row:
    """A copy of ``row`` with an integer ``step``, or SolrlError naming the first value that JSON cannot hold."""
    for key, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"metric {key} must be an int or a float, got {type(value).__name__}")
        if not math.isfinite(value):
            raise SolrlError(
                f"step {row['step']}: metric {key} is {value}; "
                "resume from an earlier checkpoint with a lower train.learning_rate"
            )
    if not isinstance(row["step"], int):
        raise TypeError(f"step must be an int, got {row['step']!r}")
    return dict(row)


def read_metrics(path: Path) -> list[Row]:
    """All rows of a metrics file, oldest first. Raises SolrlError naming file and line where one is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SolrlError(f"{path} is not text ({error.reason}); restore it from a copy") from error
    except OSError as error:
        raise SolrlError(f"cannot read {path}: {error.strerror or error}") from error
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        problem = ""
        try:
            row = json.loads(line, parse_constant=_refuse)
            rows.append(strict(row))
            if len(rows) > 1 and rows[-1]["step"] <= rows[-2]["step"]:
                problem = f"step {rows[-1]['step']} comes after step {rows[-2]['step']}"
        except (ValueError, TypeError, KeyError, AttributeError, SolrlError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise SolrlError(f"{path}, line {number}: not a metrics line ({problem}); repair or remove that line")
    return rows


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def check_trackers(names: Sequence[str]) -> None:
    """UsageError for a tracker unknown to accelerate or not installed; call before any model loads."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    known, built_in = sorted(LOGGER_TYPE_TO_CLASS), {kind.value for kind in LoggerType}
    installed = {kind.value for kind in get_available_trackers()}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise UsageError(f"output.trackers: accelerate has no tracker {name!r}; {hint}")
        if name in built_in and name not in installed:  # others were registered from Python
            package = PIP_NAMES.get(name, name)
            raise UsageError(f"output.trackers: {name} is not installed; run: pip install {package}")


def start_trackers(config: Config) -> list[Any]:
    """The configured trackers, started and told the settings. Needs accelerate's state (distributed.start)."""
    if not config.output.trackers:
        return []
    check_trackers(config.output.trackers)
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    folder = config.output.dir
    options: dict[str, dict[str, str]] = {
        "wandb": {"name": folder.name, "dir": str(folder)},
        "trackio": {"name": folder.name},
    }
    trackers = []
    for name in config.output.trackers:
        kind = LOGGER_TYPE_TO_CLASS[name]
        if kind.requires_logging_directory:
            tracker = kind(name, logging_dir=str(folder), **options.get(name, {}))
        else:
            tracker = kind("solrl", **options.get(name, {}))
        try:
            tracker.start()
            tracker.store_init_configuration(_flat(config.model_dump(mode="json")))
        except Exception as error:  # somebody else's code, often about an account or a network: name it and stop
            raise SolrlError(
                f"tracker {name} did not start: {type(error).__name__}: {error}; "
                "set it up or take it out of output.trackers"
            ) from error
        trackers.append(tracker)
    return trackers


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings -> ``section.key`` with plain values, as trackers take them."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return flat
