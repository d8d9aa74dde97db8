"""Going on with a run: with what it measured when it began, and after the launcher has restarted the processes.

When a process of a run dies, ``accelerate launch --max_restarts N`` (torchrun) ends the others and starts all of them
again with the same command line. Such a run goes on from its newest checkpoint without being told ``--resume``, but
only in a folder that this very launcher has begun: one that held a run before stays refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from solrl.checkpoint import holds_results
from solrl.config import Config
from solrl.errors import UsageError
from solrl.files import saving, write_atomic
from solrl.settings import load_config


def goes_on(run_dir: Path, resume: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the run in ``run_dir`` is to be continued: it was asked for, or the launcher restarted its processes."""
    if resume or environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not holds_results(run_dir):
        return resume
    # process 0's launcher is the one that wrote the mark; on other machines there is nothing to compare
    if environment.get("RANK") == "0" and _read(run_dir) != _launcher():
        raise UsageError(f"{run_dir} already holds a run; pass --resume to continue it or choose another output.dir")
    return True


def as_begun(config: Config) -> Config:
    """``config`` with what its run measured when it began: ``batch.decode``, where 0 asks for as much as fits."""
    if config.batch.decode:
        return config
    measured = load_config(config.output.dir / "config.toml").batch.decode
    return config.model_copy(update={"batch": config.batch.model_copy(update={"decode": measured})})


def mark(run_dir: Path) -> None:
    """The run in ``run_dir`` belongs to the launcher that started this process."""
    with saving(_mark(run_dir)):
        write_atomic(_mark(run_dir), _launcher().encode())


def _launcher() -> str:
    """The parent process: it outlives the processes that it restarts."""
    parent = psutil.Process().parent()
    return f"{socket.gethostname()} {parent.pid} {parent.create_time()}" if parent else ""


def _read(run_dir: Path) -> str:
    path = _mark(run_dir)
    return path.read_text() if path.is_file() else ""


def _mark(run_dir: Path) -> Path:
    return run_dir / ".launcher"
