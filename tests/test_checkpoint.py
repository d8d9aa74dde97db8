"""The run folder: nothing saved is ever lost, nothing damaged is ever used, nobody else writes."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl import checkpoint as saving
from solrl import files, ledger
from solrl.checkpoint import (
    Checkpoint,
    RunFolder,
    check_folder,
    checkpoint_path,
    list_checkpoints,
    newest_checkpoint,
)
from solrl.config import Config
from solrl.errors import SolrlError, UsageError
from solrl.ledger import LedgerEntry
from solrl.settings import load_config
from tests.children import in_child

ENVIRONMENT: dict[str, Any] = {"python": "3.11", "precision": "full"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the kernel has; only a power cut does, and that is not tested here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def config(dir: Path, **sections: dict[str, Any]) -> Config:
    return Config.model_validate({"output": {"dir": dir}, "reward": {"options": {"weight": 0.5}}, **sections})


def state(step: int, heldout: float | None = None) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "step": torch.tensor(step),
        "policy/a.A": torch.randn(3, 4, generator=generator),
        "activation/a": torch.randn((), generator=generator).bfloat16(),
    }
    return Checkpoint(step, tensors, heldout, base="abc")


def train_step(folder: RunFolder, step: int) -> None:
    """What the loop writes before it saves."""
    entry = LedgerEntry("a circle", 0, 0, step, step - 1, "full", 2, "euler", 0.5, True, 0.25)
    ledger.write(folder.dir, step, [entry])
    with (folder.dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def run(dir: Path, last: int, heldout: dict[int, float] | None = None) -> None:
    """A run of ``last`` steps that saved every one of them."""
    with RunFolder.create(dir, config(dir), ENVIRONMENT) as folder:
        for step in range(1, last + 1):
            train_step(folder, step)
            folder.save(state(step, (heldout or {}).get(step)))


def metrics_steps(dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (dir / "metrics.jsonl").read_text().splitlines()]


def ledger_steps(dir: Path) -> list[str]:
    return sorted(path.name for path in (dir / "ledger").iterdir())


def assert_equal(some: Checkpoint | None, other: Checkpoint) -> None:
    assert some is not None and (some.step, some.heldout, some.base) == (other.step, other.heldout, other.base)
    assert some.tensors.keys() == other.tensors.keys()
    for name, tensor in some.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name])


def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path, 2, {2: 0.75})
    assert_equal(newest_checkpoint(tmp_path), state(2, 0.75))
    assert_equal(newest_checkpoint(tmp_path, at_most=1), state(1))
    assert newest_checkpoint(tmp_path, at_most=0) is None


def test_the_last_three_and_the_best_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 8, {2: 0.6, 3: 0.9, 4: 0.9, 6: 0.7})
    assert list(list_checkpoints(tmp_path)) == [3, 6, 7, 8]  # of the equals 3 and 4 the earlier
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step_00000{n}" for n in (3, 6, 7, 8)]


def test_a_new_run_leaves_an_existing_one_alone(tmp_path: Path) -> None:
    run(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(UsageError, match="already holds a run; pass --resume"):
        RunFolder.create(tmp_path, config(tmp_path, train={"num_steps": 5}), ENVIRONMENT)
    assert before == {path: path.read_bytes() for path in before}
    RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT).close()


def test_a_run_that_recorded_nothing_can_be_started_again_with_other_settings(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT).close()
    (tmp_path / "metrics.jsonl").touch()
    RunFolder.create(tmp_path, config(tmp_path, lora={"rank": 4}), ENVIRONMENT).close()
    RunFolder.resume(tmp_path, config(tmp_path, lora={"rank": 8}), ENVIRONMENT).close()
    assert load_config(tmp_path).lora.rank == 8


def test_settings_and_environment_are_written(tmp_path: Path) -> None:
    settings = config(tmp_path, reward={"name": "shapes", "options": {"weights": [1, 2.5], "deep": {"name": 'a "b"'}}})
    RunFolder.create(tmp_path, settings, ENVIRONMENT).close()
    assert load_config(tmp_path) == settings
    assert json.loads((tmp_path / "environment.json").read_text()) == ENVIRONMENT


def test_settings_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="settings cannot be saved"):
        RunFolder.create(tmp_path, config(tmp_path, reward={"options": {"scorer": object()}}), ENVIRONMENT)


def test_resuming_where_there_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume; leave out --resume"):
        RunFolder.resume(tmp_path / "new", config(tmp_path), ENVIRONMENT)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # /proc refuses everybody, root included
    for dir in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/solrl")):
        with pytest.raises(SolrlError, match=r"cannot write .*choose another output.dir") as caught:
            RunFolder.create(dir, config(dir), ENVIRONMENT)
        assert "\n" not in str(caught.value)


def test_a_resume_may_change_how_long_and_what_is_reported_but_no_result(tmp_path: Path) -> None:
    run(tmp_path, 2)
    longer = config(tmp_path, train={"num_steps": 900}, output={"dir": tmp_path, "trackers": ["tensorboard"]})
    RunFolder.resume(tmp_path, longer, ENVIRONMENT).close()
    assert load_config(tmp_path) == longer
    other = config(tmp_path, train={"learning_rate": 1e-3, "num_steps": 900}, lora={"rank": 16})
    with pytest.raises(UsageError, match=r"cannot change lora.rank \(32 in the run, 16 now\)"):
        RunFolder.resume(tmp_path, other, ENVIRONMENT)
    with pytest.raises(UsageError, match=r"reward.options.weight \(0.5 in the run, unset now\)"):
        RunFolder.resume(tmp_path, config(tmp_path, reward={}), ENVIRONMENT)
    with pytest.raises(UsageError, match=r"at step 2; train.num_steps must be at least that"):
        RunFolder.resume(tmp_path, config(tmp_path, train={"num_steps": 1}), ENVIRONMENT)
    assert load_config(tmp_path) == longer


def test_every_changeable_setting_exists() -> None:
    flat = saving._flat(Config().model_dump())
    assert flat.keys() >= saving.CHANGEABLE


def test_two_processes_cannot_hold_one_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT):
        with pytest.raises(SolrlError, match=f"in use by process {os.getpid()}"):
            RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT)
        with pytest.raises(SolrlError, match=f"in use by process {os.getpid()}"):
            RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT)

    def die_holding_it() -> None:
        folder = RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT)
        os.kill(os.getpid(), signal.SIGKILL)
        folder.close()

    assert in_child(die_holding_it)[0] == -signal.SIGKILL
    RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT).close()


def truncated(path: Path) -> None:
    os.truncate(path / "state.safetensors", 100)


def flipped(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "state.safetensors").write_bytes(data)


def without_state(path: Path) -> None:
    (path / "state.json").unlink()


def cut_state(path: Path) -> None:
    os.truncate(path / "state.json", 20)


@pytest.mark.parametrize("damage", [truncated, flipped, without_state, cut_state])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run(tmp_path, 3)
    damage(checkpoint_path(tmp_path, 3))
    warnings: list[str] = []
    with RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT, warn=warnings.append) as folder:
        assert len(warnings) == 1
        assert f"{checkpoint_path(tmp_path, 3)} is damaged" in warnings[0]
        assert f"going back to {checkpoint_path(tmp_path, 2)}" in warnings[0]
        assert_equal(newest_checkpoint(tmp_path), state(2))
        assert metrics_steps(tmp_path) == [1, 2]
        train_step(folder, 3)
        folder.save(state(3))
    assert_equal(newest_checkpoint(tmp_path), state(3))
    assert (tmp_path / "checkpoints" / "step_000003.damaged").is_dir()


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over_silently(tmp_path: Path) -> None:
    run(tmp_path, 2)
    truncated(checkpoint_path(tmp_path, 1))
    flipped(checkpoint_path(tmp_path, 2))
    for _ in range(2):  # asking again changes nothing
        with pytest.raises(SolrlError, match=r"step_000002 is damaged.*step_000001 is damaged.*no sound checkpoint"):
            RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT)
    assert metrics_steps(tmp_path) == [1, 2]


def test_removed_checkpoints_do_not_restart_the_run_silently(tmp_path: Path) -> None:
    settings = config(tmp_path, output={"dir": tmp_path, "checkpoint_every_steps": 2})
    with RunFolder.create(tmp_path, settings, ENVIRONMENT) as folder:
        for step in (1, 2, 3):
            train_step(folder, step)
    with pytest.raises(SolrlError, match=r"checkpoints of .* are gone"):
        RunFolder.resume(tmp_path, settings, ENVIRONMENT)
    assert metrics_steps(tmp_path) == [1, 2, 3]


def test_a_checkpoint_of_a_later_format_is_no_damage(tmp_path: Path) -> None:
    run(tmp_path, 2)
    path = checkpoint_path(tmp_path, 2) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": saving.FORMAT + 1}))
    with pytest.raises(SolrlError, match="use the version that wrote it"):
        RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT)


def test_a_kill_at_any_moment_of_saving_leaves_the_old_state_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for moment in range(100):
        dir = tmp_path / str(moment)
        run(dir, 4, {1: 0.9})

        def die_at_a_call(moment: int = moment, dir: Path = dir) -> None:
            calls = iter(range(moment + 1))

            def counted(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **options: Any) -> Any:
                    if next(calls) == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **options)

                return call

            with RunFolder.resume(dir, config(dir), ENVIRONMENT) as folder:
                train_step(folder, 5)
                for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open"):
                    monkeypatch.setattr(os, name, counted(getattr(os, name)))
                folder.save(state(5))
                monkeypatch.undo()  # closing is not saving

        status, _ = in_child(die_at_a_call)
        with RunFolder.resume(dir, config(dir), ENVIRONMENT, warn=pytest.fail):
            newest = newest_checkpoint(dir)
            assert newest is not None
            assert_equal(newest, state(newest.step))
            assert metrics_steps(dir) == list(range(1, newest.step + 1))
            assert [saving.read_checkpoint(path).step for path in list_checkpoints(dir).values()]
            assert [p.name for p in (dir / "checkpoints").iterdir() if not p.name.startswith("step_")] == []
        outcomes.append(newest.step)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert set(outcomes) == {4, 5} and outcomes == sorted(outcomes) and len(outcomes) > 8


def test_a_full_disk_names_the_file_and_the_remedy_and_loses_nothing(tmp_path: Path) -> None:
    run(tmp_path, 2)

    def save_with_a_file_limit() -> None:
        with RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT) as folder:
            train_step(folder, 3)
            big = Checkpoint(3, {"policy": torch.zeros(100_000)})
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            folder.save(big)

    status, message = in_child(save_with_a_file_limit)
    assert status == 1 and "\n" not in message
    assert f"cannot write {checkpoint_path(tmp_path, 3)}: File too large; raise the file size limit" in message
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT, warn=pytest.fail).close()
    assert_equal(newest_checkpoint(tmp_path), state(2))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def write_with_a_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        files.write_atomic(path, b"x" * 2000)

    status, message = in_child(write_with_a_limit)
    assert status == 1 and f"cannot write {path}" in message
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_resume_cuts_metrics_and_ledger_back_to_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 2)
    expected = (tmp_path / "metrics.jsonl").read_bytes()
    with RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT) as folder:
        train_step(folder, 3)
        train_step(folder, 4)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "rew')  # the process died here
    RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == expected
    assert ledger_steps(tmp_path) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT) as folder:
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/shapes/mean": 0.4}\n')
        train_step(folder, 1)
    RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT).close()
    assert newest_checkpoint(tmp_path) is None
    assert metrics_steps(tmp_path) == [] and ledger_steps(tmp_path) == []


def test_a_broken_line_amid_the_metrics_is_not_dropped_in_silence(tmp_path: Path) -> None:
    run(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(SolrlError, match=r"metrics.jsonl: line 2"):
        RunFolder.resume(tmp_path, config(tmp_path), ENVIRONMENT)


def test_a_step_without_its_metrics_line_cannot_be_saved(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config(tmp_path), ENVIRONMENT) as folder:
        with pytest.raises(ValueError, match="write its line first"):
            folder.save(state(1))
        train_step(folder, 1)
        folder.save(state(1))
        folder.save(state(1))  # a run stopped right after a checkpoint


def test_a_changed_environment_is_told_and_recorded(tmp_path: Path) -> None:
    run(tmp_path, 1)
    warnings: list[str] = []
    later = {**ENVIRONMENT, "python": "3.13"}
    for _ in range(2):
        RunFolder.resume(tmp_path, config(tmp_path), later, warn=warnings.append).close()
    assert len(warnings) == 1 and "(python)" in warnings[0]
    assert json.loads((tmp_path / "environment.json").read_text()) == {**later, "earlier": [ENVIRONMENT]}


def test_a_folder_that_cannot_be_is_found_before_anything_loads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below" / "it"):
        with pytest.raises(UsageError, match="is a file; choose another"):
            check_folder(folder, resume=False)
    check_folder(tmp_path / "new" / "one", resume=False)
    with pytest.raises(UsageError, match="no run to resume"):
        check_folder(tmp_path / "new", resume=True)
