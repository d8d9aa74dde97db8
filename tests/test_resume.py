"""A run that was killed and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import solrl.checkpoint
import solrl.evaluate
import solrl.export
import solrl.learner
import solrl.ledger
import solrl.objectives.nft
import solrl.rollout
import solrl.session
import solrl.tracking
from solrl.checkpoint import checkpoint_path, list_checkpoints, newest_checkpoint
from solrl.config import Config
from solrl.errors import SolrlError
from solrl.session import open_session
from solrl.train import train
from tests.children import in_child, in_children, signal_at
from tests.parts import ALONE, never, tiny_config

ROLLOUT = sys.modules["solrl.rollout"]  # the attribute of the package is the function


def run_config(dir: Path, num_steps: int = 3, checkpoint_every_steps: int = 2) -> Config:
    """A checkpoint after the second step, evaluation and checkpoint after the third."""
    return tiny_config(
        dir,
        reward={"name": "tests.parts:Redness"},
        prompts={"per_step": 2},
        explore={"precision": "emulated_nvfp4"},  # 3 micro-batches a step
        regenerate={"group_size": 2},  # 1 micro-batch, and 2 for the audit of step 2
        train={"num_steps": num_steps},  # 2 micro-batches of 2 timesteps
        evaluate={"images_per_prompt": 4},  # 2 micro-batches and a grid of 2 rows
        output={"checkpoint_every_steps": checkpoint_every_steps},
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dir = tmp_path_factory.mktemp("uninterrupted")
    assert in_child(lambda: train(run_config(dir))) == (0, "")
    return dir


def results(dir: Path) -> dict[str, Any]:
    """Everything a run computed, by file; not how long it took."""
    files: dict[str, Any] = {}
    for path in sorted(dir.rglob("*")):
        name = str(path.relative_to(dir))
        if path.name == solrl.export.WEIGHTS:  # safetensors writes metadata in any order
            with safetensors.safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key).numpy().tobytes() for key in sorted(file.keys())}
                files[name] = tensors, sorted(file.metadata().items())
        elif (
            path.suffix in (".safetensors", ".png")
            or name.startswith(("ledger/", "heldout/"))
            or path.name == "README.md"
        ):
            files[name] = path.read_bytes()
    lines = [json.loads(line) for line in (dir / "metrics.jsonl").read_text().splitlines()]
    files["metrics"] = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    return files


def assert_same_run(dir: Path, reference: Path) -> None:
    ours, theirs = results(dir), results(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "calibrating": (ROLLOUT, "sample", 1),
    "first evaluation": (solrl.evaluate, "weighted", 1),
    "exploring step 1": (ROLLOUT, "require_finite", 2),
    "updating step 1": (solrl.objectives.nft, "nft_loss", 3),
    "optimizer stepped, averages not yet": (solrl.learner.Learner, "_average", 2),
    "ledger of step 2": (solrl.ledger, "write_atomic", 2),
    "metrics of step 2": (solrl.tracking.Metrics, "write", 3),
    "saving step 2": (solrl.checkpoint.os, "rename", 1),
    "exporting step 2": (solrl.export, "write_atomic", 3),
    "exploring step 3": (ROLLOUT, "require_finite", 12),
    "updating step 3": (solrl.objectives.nft, "nft_loss", 10),
    "last evaluation": (solrl.evaluate, "weighted", 4),
    "saving step 3": (solrl.checkpoint, "_write_checkpoint", 2),
    "exporting step 3": (solrl.export, "write_atomic", 5),
}
"""Before which call the process is killed: module or class, function, and the how-manieth call."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    killed_and_resumed(tmp_path, uninterrupted, monkeypatch, moment)


def test_killed_in_an_update_and_resumed_equals_uninterrupted(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_and_resumed(tmp_path, uninterrupted, monkeypatch, "updating step 3")


def killed_and_resumed(dir: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def run_until_killed() -> None:
        signal_at(monkeypatch, *MOMENTS[moment])
        train(run_config(dir))

    assert in_child(run_until_killed)[0] == -signal.SIGKILL
    if (dir / "config.toml").exists():
        assert in_child(lambda: train(run_config(dir), resume=True)) == (0, "")
    else:  # killed before the folder was made: nothing to resume, nothing in the way
        assert in_child(lambda: train(run_config(dir))) == (0, "")
    assert_same_run(dir, reference)


def remove_checkpoint(dir: Path, step: int) -> None:
    shutil.rmtree(checkpoint_path(dir, step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "where", "saved"),
    [
        pytest.param(signal.SIGTERM, (solrl.objectives.nft, "nft_loss", 2), None, id="nothing to save yet"),
        pytest.param(signal.SIGTERM, (solrl.objectives.nft, "nft_loss", 6), 1, id="updating"),
        pytest.param(signal.SIGINT, (ROLLOUT, "require_finite", 12), 2, id="exploring"),
        # after the update of step 3, before its metrics: the update is taken back
        pytest.param(signal.SIGTERM, (solrl.evaluate, "weighted", 3), 2, id="evaluating"),
    ],
)
def test_a_signal_saves_the_last_whole_step_and_exits_3(
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    where: tuple[Any, str, int],
    saved: int | None,
) -> None:
    def run_until_stopped() -> None:
        signal_at(monkeypatch, *where, number)
        train(run_config(tmp_path, checkpoint_every_steps=9))  # so that only the signal saves

    code, message = in_child(run_until_stopped)
    assert code == 3 and number.name in message
    assert max(list_checkpoints(tmp_path), default=None) == saved
    assert in_child(lambda: train(run_config(tmp_path), resume=True)) == (0, "")
    if saved == 1:
        remove_checkpoint(tmp_path, 1)  # the extra one that the signal made
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_that_hear", [(0, 1), (0,)])
def test_of_two_processes_the_one_that_saves_leaves_first(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, ranks_that_hear: tuple[int, ...]
) -> None:
    def run_until_stopped(rank: int) -> None:
        if rank in ranks_that_hear:  # rank 1 hears it first
            moment = (ROLLOUT, "require_finite", 2) if rank else (solrl.objectives.nft, "nft_loss", 6)
            signal_at(monkeypatch, *moment, signal.SIGTERM)
        train(run_config(tmp_path))

    outcomes = in_children(2, run_until_stopped)
    assert outcomes[0][0] == 3
    assert outcomes[1][0] == (3 if 1 in ranks_that_hear else 99)
    assert list(list_checkpoints(tmp_path)) == [1]
    assert in_child(lambda: train(run_config(tmp_path), resume=True)) == (0, "")
    remove_checkpoint(tmp_path, 1)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_longer_run_goes_on_from_a_finished_one(tmp_path: Path, uninterrupted: Path) -> None:
    assert in_child(lambda: train(run_config(tmp_path, num_steps=1))) == (0, "")
    assert in_child(lambda: train(run_config(tmp_path), resume=True)) == (0, "")
    ours, theirs = newest_checkpoint(tmp_path), newest_checkpoint(uninterrupted)
    assert ours is not None and theirs is not None and ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_a_checkpoint_holds_what_training_changes_and_no_frozen_weight(uninterrupted: Path) -> None:
    path = checkpoint_path(uninterrupted, 3) / "state.safetensors"
    names = safetensors.torch.load_file(path)
    kinds = {name.partition("/")[0] for name in names}
    assert kinds == {"step", "policy", "old", "ema", "adam_mean", "adam_square", "activation"}
    lora = safetensors.torch.load_file(uninterrupted / "lora" / solrl.export.WEIGHTS)
    adapter_bytes = sum(tensor.nbytes for tensor in lora.values())
    assert path.stat().st_size < 5.5 * adapter_bytes


def test_a_session_takes_back_everything_its_state_names(tmp_path: Path) -> None:
    session = open_session(run_config(tmp_path), ALONE, never)
    state = {name: torch.full_like(tensor, 1 + i % 7) for i, (name, tensor) in enumerate(session.state_dict().items())}
    session.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    now = session.state_dict()
    assert now.keys() == state.keys() and any(name.startswith("activation/") for name in now)
    assert [name for name in now if not torch.equal(now[name], state[name])] == []


def test_other_base_weights_are_refused(tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    real: Callable[..., Any] = solrl.session.load_policy

    def other_weights(config: Config, device: torch.device) -> Any:
        policy = real(config, device)
        next(p for name, p in policy.transformer.named_parameters() if "lora" not in name).data[0] += 1
        return policy

    monkeypatch.setattr(solrl.session, "load_policy", other_weights)
    with pytest.raises(SolrlError, match="other weights"):
        train(run_config(tmp_path, num_steps=4), resume=True)
    assert results(tmp_path) == results(uninterrupted)
