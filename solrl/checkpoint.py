"""The run folder: one run, one writer, and checkpoints from which it continues bit for bit.

A checkpoint holds everything training changes and nothing it does not: adapters (policy, old_policy, EMA), optimizer
moments, counters, activation scales; never the frozen base. It is written to a temporary folder, synced, then renamed,
so a folder named ``step_N`` is complete. Its hash is checked on reading all the same: disks and copies fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from solrl import __version__, ledger
from solrl.config import Config
from solrl.errors import SolrlError, UsageError
from solrl.files import saving, sync_paths, temporary_of, write_atomic
from solrl.settings import load_config, save_config
from solrl.verdict import BAD, Kind

FORMAT = 1
"""Raised when older versions cannot read a checkpoint any more."""

NUM_RECENT = 3
"""The newest checkpoints that are kept beside the best one."""

CHANGEABLE = frozenset(
    {
        "train.num_steps",
        "train.early_stop",
        "model.offload_encoders",
        "prompts.cache_gb",
        "reward.max_missing_share",
        "evaluate.every_steps",
        "output.dir",
        "output.checkpoint_every_steps",
        "output.audit_every_steps",
        "output.trackers",
        "output.push_to",
        "model.shard",
        "runtime.mode",
        "reward.process",
        "reward.process_gpus",
        "runtime.score_processes",
        "runtime.lost_after_s",
        "runtime.job_timeout_s",
    }
)
"""Settings that a resume may change: how long to go on, what to report and who works, never what a step computes."""

Warn = Callable[[str], None]


def _to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


class DamagedCheckpoint(SolrlError):
    """A checkpoint that cannot be trusted."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``step`` optimizer steps."""

    step: int
    tensors: dict[str, Tensor]
    """The learner's state and the activation scales ("activation/<layer>")."""
    heldout: float | None = None
    """Held-out reward measured at this step, if it was: decides which checkpoint is the best."""
    base: str | None = None
    """Fingerprint of the frozen weights the adapters belong to (solrl.environment.fingerprint)."""
    verdict: Kind | None = None
    """What the run was judged to be with it (solrl/verdict.py), if it was evaluated."""

    def check_base(self, base: str) -> None:
        """Raise SolrlError where the frozen weights loaded now are others than the run's."""
        if self.base not in (None, base):
            raise SolrlError(
                "the model has other weights now than when the run began; restore model.path and model.revision, "
                "or start a new run in another output.dir"
            )


class RunFolder:
    """A run folder held by this process; nobody else can write to it until ``close`` or the end of the process."""

    def __init__(self, dir: Path, lock: IO[str]) -> None:
        self.dir = dir
        self._lock = lock

    @classmethod
    def create(cls, dir: Path, config: Config, environment: dict[str, Any]) -> Self:
        """A folder for a new run; an error if it holds one. A run that recorded nothing yet counts as none."""
        folder = cls(dir, _acquire(dir))
        try:
            check_folder(dir, resume=False)
            folder._write_settings(config, environment)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(cls, dir: Path, config: Config, environment: dict[str, Any], *, warn: Warn = _to_stderr) -> Self:
        """The folder as it was at its newest sound checkpoint (or at the start, when the run died before the first).

        Damaged checkpoints are set aside under another name with a warning; metrics and ledger lose what came after.
        """
        check_folder(dir, resume=True)
        folder = cls(dir, _acquire(dir))
        try:
            before = load_config(dir)
            if holds_results(dir):
                _check_same_run(dir, before, config)
            _remove_leftovers(dir)
            checkpoint = newest_checkpoint(dir, warn=warn, set_aside=True)
            step = checkpoint.step if checkpoint else 0
            if checkpoint is None and (_last_metrics_step(dir) or 0) > before.output.checkpoint_every_steps:
                raise SolrlError(f"the checkpoints of {dir} are gone; restore them or choose another output.dir")
            if step > config.train.num_steps:
                raise UsageError(f"{dir} is at step {step}; train.num_steps must be at least that to resume it")
            # without a checkpoint the run starts over, evaluation before step 1 included
            truncate_metrics(dir / "metrics.jsonl", step if checkpoint else -1)
            ledger.truncate(dir, step)
            folder._write_settings(config, environment, warn, step)
        except BaseException:
            folder.close()
            raise
        return folder

    def save(self, checkpoint: Checkpoint) -> Path:
        """The checkpoint is on the disk, whole; older ones are pruned to the newest three and the best.

        The metrics line and ledger of its step must be written before: a resume keeps them and does not redo them.
        """
        path = checkpoint_path(self.dir, checkpoint.step)
        if checkpoint.step < 1 or _last_metrics_step(self.dir) != checkpoint.step:
            raise ValueError(f"step {checkpoint.step} is not the last one in metrics.jsonl: write its line first")
        if not path.exists():  # a run stopped right after a checkpoint saves the same state again
            self._sync_records(checkpoint.step)
            _write_checkpoint(path, checkpoint)
        self._prune()
        return path

    def note_climb(self, step: int, precision: str, proof: dict[str, Any]) -> None:
        """environment.json says what the explorer was replaced by after ``step``, and how that was proved."""
        path = self.dir / "environment.json"
        facts = json.loads(path.read_text())
        facts["climbs"] = [*facts.get("climbs", []), {"after_step": step, "precision": precision, "proof": proof}]
        write_atomic(path, (json.dumps(facts, indent=2) + "\n").encode())

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_settings(
        self, config: Config, environment: dict[str, Any], warn: Warn = _to_stderr, step: int = 0
    ) -> None:
        path = self.dir / "environment.json"
        if path.is_file() and holds_results(self.dir):
            environment = _continued(json.loads(path.read_text()), environment, warn, step)
        write_atomic(path, (json.dumps(environment, indent=2) + "\n").encode())
        _write_config(self.dir / "config.toml", config)  # last: a folder with settings can be resumed

    def _sync_records(self, step: int) -> None:
        """Metrics and ledger since the last checkpoint are on the disk, as the new checkpoint will claim."""
        last = max(list_checkpoints(self.dir), default=0)
        files = [ledger.ledger_path(self.dir, number) for number in range(last + 1, step + 1)]
        with saving(self.dir):
            sync_paths(*filter(Path.exists, [*files, self.dir / "ledger", self.dir / "metrics.jsonl"]))

    def _prune(self) -> None:
        paths = list_checkpoints(self.dir)
        best = best_checkpoint(self.dir)
        for step in sorted(paths)[:-NUM_RECENT]:
            if step != best:
                with saving(paths[step]):
                    gone = temporary_of(paths[step])  # renamed first: a half-removed folder must not look complete
                    os.rename(paths[step], gone)
                    shutil.rmtree(gone)


def check_folder(dir: Path, resume: bool) -> None:
    """UsageError where a run cannot start (or, with ``resume``, go on) in ``dir``; before anything slow is loaded."""
    existing = next(folder for folder in (dir, *dir.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UsageError(f"output.dir {dir} cannot be a folder: {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"output.dir {dir}: {existing} is not writable; choose another or change its permissions")
    if resume and not (dir / "config.toml").is_file():
        raise UsageError(f"{dir} holds no run to resume; leave out --resume to start one there")
    if not resume and holds_results(dir):
        raise UsageError(f"{dir} already holds a run; pass --resume to continue it or choose another output.dir")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Step -> folder, oldest first. Not checked for damage."""
    names = {path.name.removeprefix("step_"): path for path in (run_dir / "checkpoints").glob("step_*")}
    return {int(name): names[name] for name in sorted(names) if name.isdigit()}


def best_checkpoint(run_dir: Path) -> int | None:
    """The step with the highest held-out reward (the earliest of equals), among those where it was measured.

    One that was judged suspicious or broken is the best only where all were: an exploited reward is high, too.
    """
    measured: dict[int, tuple[bool, float]] = {}
    for step, path in list_checkpoints(run_dir).items():
        try:
            state = json.loads((path / "state.json").read_text())
            heldout = state["heldout"]
        except (OSError, ValueError, KeyError, TypeError):  # damaged: never the best; reading it says more
            continue
        if heldout is not None:
            measured[step] = state.get("verdict") not in BAD, heldout
    return max(measured, key=lambda step: measured[step], default=None)


def newest_checkpoint(
    run_dir: Path, *, at_most: int | None = None, warn: Warn = _to_stderr, set_aside: bool = False
) -> Checkpoint | None:
    """The newest sound checkpoint (up to step ``at_most``); None if none was saved; an error if all are damaged."""
    paths = list_checkpoints(run_dir)
    steps = [step for step in sorted(paths, reverse=True) if at_most is None or step <= at_most]
    damaged: dict[Path, str] = {}
    for step in steps:
        try:
            checkpoint = read_checkpoint(paths[step])
        except DamagedCheckpoint as error:
            damaged[paths[step]] = str(error)
            continue
        for path, problem in damaged.items():
            warn(f"{problem}; going back to {paths[step]}")
            if set_aside:
                _set_aside(path)
        return checkpoint
    if damaged:
        raise SolrlError(f"{'; '.join(damaged.values())}; no sound checkpoint is left: choose another output.dir")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``, its hash verified."""
    try:
        state = json.loads((path / "state.json").read_text())
        data = (path / "state.safetensors").read_bytes()
        if state["format"] != FORMAT:
            raise SolrlError(
                f"{path} has format {state['format']} (written by solrl {state['solrl']}), this version reads "
                f"format {FORMAT}; use the version that wrote it"
            )
        if hashlib.sha256(data).hexdigest() != state["sha256"]:
            raise DamagedCheckpoint(f"{path} is damaged (state.safetensors does not match its hash)")
        tensors = safetensors.torch.load(data)
        return Checkpoint(state["step"], tensors, state["heldout"], state["base"], state.get("verdict"))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is damaged ({Path(error.filename).name} is missing)") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({type(error).__name__}: {error})") from error


def truncate_metrics(path: Path, step: int) -> None:
    """No line of a step after ``step`` is left; a last line that a crash cut off goes, too."""
    if not path.is_file():
        return
    lines = path.read_text().splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise SolrlError(f"{path}: line {number} is not a metrics line; repair or remove it") from error
    if len(kept) < len(lines):
        write_atomic(path, "".join(f"{line}\n" for line in kept).encode())


def _write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()})
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "heldout": checkpoint.heldout,
        "verdict": checkpoint.verdict,
        "base": checkpoint.base,
        "solrl": __version__,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    temporary = temporary_of(path)
    with saving(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / "state.safetensors").write_bytes(data)
            (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            sync_paths(*temporary.iterdir(), temporary)
            os.rename(temporary, path)
            sync_paths(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this also frees what the attempt took
            raise


def _set_aside(path: Path) -> None:
    number = sum(1 for _ in path.parent.glob(f"{path.name}.damaged*"))
    with saving(path):
        os.rename(path, path.with_name(f"{path.name}.damaged{number or ''}"))


def _remove_leftovers(run_dir: Path) -> None:
    for leftover in (run_dir / "checkpoints").glob(".step_*.tmp"):
        with saving(leftover):
            shutil.rmtree(leftover)


def _acquire(dir: Path) -> IO[str]:
    """Hold the folder until the file is closed; the kernel lets go when the process dies, however it dies."""
    with saving(dir):
        dir.mkdir(parents=True, exist_ok=True)
        lock = (dir / ".lock").open("a+")
    try:
        with saving(dir / ".lock"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
    except BaseException as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        if isinstance(error.__cause__, BlockingIOError):
            raise SolrlError(
                f"{dir} is in use by process {owner or 'unknown'}; wait for it to end or choose another output.dir"
            ) from None
        raise
    return lock


def holds_results(dir: Path) -> bool:
    """Whether a run has recorded anything there."""
    metrics = dir / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any(
        any((dir / name).glob("step_*")) for name in ("ledger", "checkpoints")
    )


def _write_config(path: Path, config: Config) -> None:
    temporary = temporary_of(path)
    try:
        with saving(path):
            save_config(config, temporary)
            os.replace(temporary, path)
    except (TypeError, ValueError) as error:  # reward.options may hold anything
        temporary.unlink(missing_ok=True)
        raise UsageError(f"the settings cannot be saved ({error}); use numbers, strings, lists and tables") from error


def _check_same_run(dir: Path, before: Config, now: Config) -> None:
    """An error that names the first setting a resume would change although results depend on it."""
    old, new = (_flat(config.model_dump(mode="json", exclude_none=True)) for config in (before, now))
    changeable = CHANGEABLE - ({"output.audit_every_steps"} if now.explore.min_fidelity else set())  # audits decide
    for key in [*old, *new]:
        if key not in changeable and old.get(key) != new.get(key):
            raise UsageError(
                f"{dir}: a resume cannot change {key} ({old.get(key, 'unset')} in the run, "
                f"{new.get(key, 'unset')} now); restore it or choose another output.dir"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _continued(before: dict[str, Any], now: dict[str, Any], warn: Warn, step: int) -> dict[str, Any]:
    """The current environment, with the climbs up to ``step``; earlier ones that differ are kept under "earlier"."""
    kept = {"earlier": before.pop("earlier", [])}
    kept["climbs"] = [climb for climb in before.pop("climbs", []) if climb["after_step"] <= step]
    # what was measured differs a little from start to start
    changed = [key for key in now if now[key] != before.get(key) and key != "proof"]
    if changed:
        warn(
            f"the environment changed since the run began ({', '.join(changed)}): results may differ in their last bits"
        )
        kept["earlier"] = [*kept["earlier"], before]
    return now | {name: value for name, value in kept.items() if value}


def _last_metrics_step(dir: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl."""
    path = dir / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, 1 << 20), os.SEEK_END)
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["step"]) if whole else None
