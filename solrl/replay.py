"""Draw a ledger entry again, as it was drawn: the same policy version, seed, prompt and arithmetic.

Old adapters are not stored for every step (a FLUX.1 LoRA is 75 MB), and need not be: training is bit-exact, so the
newest checkpoint before the step, or step 0, plus the steps in between, run again in memory, give the policy that drew
the entry. The run folder is only read; images go where ``out`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from solrl import ledger
from solrl.checkpoint import newest_checkpoint
from solrl.clock import Stopwatch
from solrl.config import StageConfig
from solrl.distributed import start
from solrl.environment import fingerprint
from solrl.errors import SolrlError, UsageError
from solrl.files import saving, temporary_of
from solrl.gate import rung_of
from solrl.ledger import LedgerEntry
from solrl.prompts import step_prompts
from solrl.rollout import call_reward, rollout
from solrl.session import Session, open_session
from solrl.settings import load_config
from solrl.signals import SignalStop
from solrl.tracking import FILE, read_metrics
from solrl.train import run_step
from solrl.trust import require_trust
from solrl.types import Policy

TOLERANCE = 1e-4
"""Rewards are scored alone here and in micro-batches there: they may differ in their last bits, images may not."""


@dataclass(frozen=True)
class Redrawn:
    """One image of an entry."""

    stage: str
    """"explore" or "regenerate"."""
    image: Tensor  # [3, H, W] float32 in [0, 1]
    path: Path
    recorded: float | None
    """The ledger's score; None: missing."""
    score: float | None
    """The score now."""


def replay(
    run_dir: Path,
    step: int,
    candidate: int,
    *,
    prompt_index: int | None = None,
    out: Path | None = None,
    trust_code: bool = False,
    report: Callable[[str], None] = print,
) -> list[Redrawn]:
    """The images of an entry: as explored, and as regenerated if it was. Saved as PNG in ``out`` (``run_dir/replay``).

    ``candidate`` counts within group ``prompt_index``, or through the whole step where that is None. Raises SolrlError
    when a score differs from the ledger's: then the run cannot be reproduced here.
    """
    config = load_config(run_dir)
    if not trust_code:
        require_trust(run_dir, config)
    entry = _find(ledger.read(run_dir, step), step, candidate, prompt_index)
    with SignalStop() as stop, start(config.cpu_threads, config.deterministic) as world:
        if world.size > 1:
            raise UsageError("replay runs on one process: start it without a launcher")
        session = open_session(config, world, stop)
        _advance(session, run_dir, step - 1, report)
        version = session.learner.old_versions[0]
        if version != entry.policy_version:
            raise SolrlError(
                f"{run_dir}: the ledger says policy version {entry.policy_version} drew step {step}, running it again "
                f"gives version {version}; was the run made by other code or on another machine?"
            )
        name = f"step_{step:06d}_prompt_{entry.prompt_index}_candidate_{entry.candidate}"
        folder = run_dir / "replay" if out is None else out
        report(f"{entry.prompt!r}, seed {entry.seed:032x}, policy version {entry.policy_version}")
        redrawn = []
        for stage, policy, settings, recorded in _stages(session, entry):
            image, score = _draw(session, policy, settings, step, entry)
            path = folder / f"{name}_{stage}.png"
            _save(path, image)
            report(f"{stage}: ledger {_text(recorded)}, replayed {_text(score)}, {path}")
            redrawn.append(Redrawn(stage, image, path, recorded, score))
    _check(redrawn, run_dir)
    return redrawn


def _advance(session: Session, run_dir: Path, step: int, report: Callable[[str], None]) -> None:
    """Bring a session at step 0 to the state after ``step`` steps of the run."""
    checkpoint = newest_checkpoint(run_dir, at_most=step)
    first = 0
    if checkpoint:
        checkpoint.check_base(fingerprint(session.policy.transformer))
        session.load_state_dict(checkpoint.tensors)
        first = checkpoint.step
    where, again = f"checkpoint step {first}" if checkpoint else "the start", step - first
    report(f"from {where}" + (f", running {again} step{'s' * (again > 1)} again" if again else ""))
    rungs = {row["step"]: rung_of(row) for row in read_metrics(run_dir / FILE)}
    for number in range(first + 1, step + 1):
        session.climb_to(rungs[number])
        record = run_step(session, number, Stopwatch(session.world.device))
        drawn = [(prompt, seed) for prompt, row in zip(record.prompts, record.seeds, strict=True) for seed in row]
        if drawn != [(entry.prompt, entry.seed) for entry in ledger.read(run_dir, number)]:
            raise SolrlError(
                f"step {number} draws other prompts or seeds than in {run_dir}: restore {session.config.prompts.train}"
            )
        report(f"step {number} of {step}")
    session.climb_to(rungs[step + 1])


def _stages(session: Session, entry: LedgerEntry) -> list[tuple[str, Policy, StageConfig, float | None]]:
    """(name, policy, settings, recorded score) of every draw of the entry."""
    config = session.config
    stages: list[tuple[str, Policy, StageConfig, float | None]] = []
    if config.explore.enabled:
        stages.append(("explore", session.explorer, config.explore, entry.proxy_reward))
    if config.regenerate.enabled and entry.reward is not None:
        stages.append(("regenerate", session.rollout_policy, config.regenerate, entry.reward))
    return stages


def _draw(
    session: Session, policy: Policy, stage: StageConfig, step: int, entry: LedgerEntry
) -> tuple[Tensor, float | None]:
    """(image [3, H, W], score or None where it is missing) of the entry in a stage."""
    config = session.config
    prompts = step_prompts(session.train_prompts, config.seed, step, config.prompts.per_step)
    if prompts[entry.prompt_index] != entry.prompt:
        raise SolrlError(f"step {step} has other prompts now than in the ledger: restore {config.prompts.train}")
    # all prompts of the step, as then: for a policy of the user's own the batch's shape may decide the last bits
    conditioning = session.policy.encode(prompts).rows([entry.prompt_index])
    parts = rollout(
        policy, conditioning, [entry.prompt], [[entry.seed]], stage, batch=config.batch,
        world=session.world, clock=Stopwatch(session.world.device), stop=session.stop, phase="replay",
        sampler=session.sampler(stage),
    )  # fmt: skip
    (part,) = parts
    values, present = call_reward(session.reward, part.images, part.prompts)
    return part.images[0].cpu(), float(values[0]) if present[0] else None


def _find(entries: list[LedgerEntry], step: int, candidate: int, prompt_index: int | None) -> LedgerEntry:
    if prompt_index is not None:
        groups = entries[-1].prompt_index + 1
        if not 0 <= prompt_index < groups:
            raise UsageError(f"step {step} has prompts 0 to {groups - 1}, not {prompt_index}")
        entries = [entry for entry in entries if entry.prompt_index == prompt_index]
    if not 0 <= candidate < len(entries):
        raise UsageError(f"step {step} has candidates 0 to {len(entries) - 1}, not {candidate}")
    return entries[candidate]


def _save(path: Path, image: Tensor) -> None:
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(temporary_of(path), format="PNG")
        temporary_of(path).replace(path)


def _check(redrawn: list[Redrawn], run_dir: Path) -> None:
    for one in redrawn:
        if (one.recorded is None) != (one.score is None) or abs((one.recorded or 0) - (one.score or 0)) > TOLERANCE:
            raise SolrlError(
                f"{run_dir}: {one.stage} was scored {_text(one.recorded)} in the ledger and {_text(one.score)} now; "
                "environment.json says what the run ran on"
            )


def _text(score: float | None) -> str:
    return "missing" if score is None else f"{score:.4f}"
