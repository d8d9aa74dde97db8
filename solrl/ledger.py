"""Every candidate of every step: enough to draw it again, and to audit how well its proxy reward ranked it.

One file a step, ``ledger/step_000123.jsonl``, renamed into place; one line a candidate, groups in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from solrl.config import StageConfig
from solrl.errors import SolrlError
from solrl.files import saving, write_atomic
from solrl.groups import Selection
from solrl.types import Scores, Seeds


@dataclass(frozen=True)
class LedgerEntry:
    """One candidate. ``precision``, ``num_steps`` and ``solver`` are those of the stage that drew all candidates."""

    prompt: str
    prompt_index: int
    """Group number within the step."""
    candidate: int
    """Candidate number within the group."""
    seed: int
    """128 bits; written as 32 hexadecimal digits."""
    policy_version: int
    """Optimizer steps done before the draw: which old_policy drew it."""
    precision: str
    num_steps: int
    solver: str
    proxy_reward: float | None
    """Score of the explored sample; None: missing, or nothing was explored."""
    kept: bool
    """Whether it was trained on."""
    reward: float | None
    """Score in the policy's precision; None unless regenerated (kept, or part of an audited group)."""

    def line(self) -> str:
        """One line of JSON; NaN and inf are refused."""
        values = {name: getattr(self, name) for name in _FIELDS}  # dataclasses.asdict copies: slow for thousands
        return json.dumps({**values, "seed": f"{self.seed:032x}"}, allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> LedgerEntry:
        """The inverse of ``line``."""
        values: dict[str, Any] = json.loads(line)
        return cls(**{**values, "seed": int(values["seed"], 16)})


_FIELDS = tuple(field.name for field in fields(LedgerEntry))


def step_entries(
    prompts: Sequence[str],
    seeds: Seeds,
    stage: StageConfig,
    *,
    precision: str,
    policy_version: int,
    proxy: Scores | None,
    selection: Selection,
    rewards: Scores,
    audits: dict[int, Scores] | None = None,
) -> list[LedgerEntry]:
    """The entries of a step of G groups and N candidates.

    ``proxy`` [G, N], or None when nothing was explored; ``rewards`` [len(selection.groups), K]; ``audits`` holds
    [1, N] rewards of groups that were regenerated whole.
    """
    proxies = proxy.rows() if proxy is not None else [[None] * len(row) for row in seeds]
    regenerated: dict[tuple[int, int], float | None] = {}
    for group, scores in (audits or {}).items():
        regenerated |= {(group, candidate): value for candidate, value in enumerate(scores.rows()[0])}
    kept: set[tuple[int, int]] = set()
    for group, row, values in zip(selection.groups, selection.indices.tolist(), rewards.rows(), strict=True):
        regenerated |= {(group, candidate): value for candidate, value in zip(row, values, strict=True)}
        kept |= {(group, candidate) for candidate in row}
    return [
        LedgerEntry(
            prompt=prompt,
            prompt_index=group,
            candidate=candidate,
            seed=seed,
            policy_version=policy_version,
            precision=precision,
            num_steps=stage.num_steps,
            solver=stage.solver,
            proxy_reward=proxies[group][candidate],
            kept=(group, candidate) in kept,
            reward=regenerated.get((group, candidate)),
        )
        for group, prompt in enumerate(prompts)
        for candidate, seed in enumerate(seeds[group])
    ]


def ledger_path(run_dir: Path, step: int) -> Path:
    """The file of a step (the first step is 1)."""
    return run_dir / "ledger" / f"step_{step:06d}.jsonl"


def write(run_dir: Path, step: int, entries: Sequence[LedgerEntry]) -> Path:
    """The step's file is in place, whole. A seed used twice in a step is a failure: both draws would be one sample."""
    owner: dict[int, LedgerEntry] = {}
    for entry in entries:
        first = owner.setdefault(entry.seed, entry)
        if first is not entry:
            raise SolrlError(
                f"step {step}: candidates ({first.prompt_index}, {first.candidate}) and ({entry.prompt_index}, "
                f"{entry.candidate}) share seed {entry.seed:032x}; every candidate of a step needs its own"
            )
    path = ledger_path(run_dir, step)
    with saving(path):
        path.parent.mkdir(exist_ok=True)
    # a checkpoint syncs the ledger of its steps: nobody waits for the disk in between
    write_atomic(path, "".join(f"{entry.line()}\n" for entry in entries).encode(), sync=False)
    return path


def read(run_dir: Path, step: int) -> list[LedgerEntry]:
    """The entries of a step, in the order they were written."""
    path = ledger_path(run_dir, step)
    if not path.exists():
        raise SolrlError(f"no ledger of step {step} in {run_dir}; {_known_steps(run_dir)}")
    try:
        return [LedgerEntry.parse(line) for line in path.read_text().splitlines()]
    except (ValueError, TypeError, KeyError) as error:
        raise SolrlError(f"{path} is not a ledger ({error}); restore it or replay another step") from error


def truncate(run_dir: Path, step: int) -> None:
    """No file of a step after ``step`` is left, and no half-written one."""
    folder = run_dir / "ledger"
    if folder.is_dir():
        with saving(folder):
            for path in sorted(folder.glob("step_*.jsonl"), reverse=True):
                if _step_of(path) > step:
                    path.unlink()
            for path in folder.glob(".step_*.tmp"):
                path.unlink()


def _known_steps(run_dir: Path) -> str:
    steps = sorted(_step_of(path) for path in (run_dir / "ledger").glob("step_*.jsonl"))
    return f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; is it a run folder?"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
