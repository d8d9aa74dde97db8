"""What benchmarks share: the line that names the hardware, tables, JSON, figures, options that say what is wrong."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from solrl.environment import environment
from solrl.errors import UsageError
from solrl.files import saving, write_atomic
from solrl.settings import read_flags

WIDTH = 100
"""Columns that a table may take."""


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")


def parser(name: str, description: str) -> Parser:
    """Options of the benchmark ``name``; --json is one of them."""
    made = Parser(f"python -m benchmarks {name}", description=description, allow_abbrev=False)
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    return made


def parse(options_of: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The options, and as ``overrides`` what looks like settings: ``--section.key value``, as ``solrl train`` takes."""
    options, rest = options_of.parse_known_args(argv)
    wrong = next((word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]), None)
    if wrong:
        raise UsageError(f"{options_of.prog}: no option {wrong} ({options_of.prog} --help)")
    options.overrides = read_flags(rest)
    return options


def whole_number(text: str) -> int:
    """An option's value: 1 or more."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def positive_number(text: str) -> float:
    """An option's value: above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def name_list(text: str) -> list[str]:
    """``a,b`` -> ["a", "b"]; without empty names or repeats."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def number_list(text: str) -> list[int]:
    """``2,4`` -> [2, 4]."""
    return [whole_number(word) for word in name_list(text)]


def facts(device: torch.device | None = None) -> dict[str, Any]:
    """Versions and hardware, for the JSON file."""
    return environment(device or torch.device("cpu"), "")


def hardware(known: dict[str, Any]) -> str:
    """One line out of ``facts``."""
    chip = known["cpu"] if known["cuda"] is None else f"{known['device']}, {known['cpu']}"
    threads = "1 thread" if known["num_threads"] == 1 else f"{known['num_threads']} threads"
    return f"hardware: {chip} ({threads} of {known['num_cpus']}), torch {known['packages']['torch']}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in ruled
    )  # fmt: skip


def write_json(path: Path | None, payload: dict[str, Any]) -> None:
    """``payload`` is in ``path``, whole; nothing happens without a path. NaN becomes null."""
    if path is None:
        return
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(_plain(payload), indent=1, allow_nan=False) + "\n").encode())
    print(f"wrote {path}")


def read_json(path: Path, benchmark: str) -> dict[str, Any]:
    """A file that ``write_json`` wrote for ``benchmark``."""
    try:
        payload: dict[str, Any] = json.loads(path.read_text())
        if payload["benchmark"] != benchmark:
            raise UsageError(f"{path} was written by {payload['benchmark']}, not by {benchmark}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as the JSON file of {benchmark}: {error}") from None
    return payload


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'solrl[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_figure(figure: Any, path: Path) -> None:
    """The figure is in ``path``."""
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, bbox_inches="tight")
    print(f"wrote {path}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and value != value else value
