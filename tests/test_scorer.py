"""A reward in a child process says what it says in this one, and neither outlives the other unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import solrl.pipeline
from solrl.errors import Interrupted, RewardFailed, SolrlError, UsageError
from solrl.rollout import call_parts
from solrl.runtime.context import Context, Residency, ShiftFailed
from solrl.runtime.mailbox import Role
from solrl.scorer import ChildReward, child_devices, open_reward
from solrl.tracking import FILE
from solrl.train import train
from tests.children import in_child, in_children
from tests.moody import Moody, Two
from tests.parts import CPU, tiny_config
from tests.test_pipeline import decisions, run_config
from tests.test_processes import same_bits

PROMPTS = ["a red circle", "a blue square", "a green cross"]
MOODY = "tests.moody:Moody"


def images(count: int = 3, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def is_gone(pid: int) -> bool:
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def shared() -> Iterator[ChildReward]:
    child = ChildReward(MOODY, {})
    yield child
    child.close()


@pytest.mark.slow
def test_a_child_says_what_the_reward_says_bit_for_bit_for_any_size(shared: ChildReward) -> None:
    assert (shared.name, shared.range, shared.description) == ("moody", (0.0, 1.0), Moody.description)
    for count, size in ((3, 8), (1, 8), (3, 64)):  # the last needs a larger ring
        prompts = [*PROMPTS[: count - 1], "missing"]
        values, present = call_parts(shared, images(count, size), prompts)
        wanted, there = call_parts(Moody(), images(count, size), prompts)
        assert torch.equal(values, wanted) and torch.equal(present, there) and not present[-1]


@pytest.mark.slow
def test_a_failure_names_the_reward_and_the_next_call_has_a_new_child(shared: ChildReward) -> None:
    shared.start()
    first = shared.pid
    with pytest.raises(RewardFailed, match=r"reward 'moody' failed in process \d+: ValueError: no such shape"):
        call_parts(shared, images(1), ["raise"])
    assert shared.pid == first
    with pytest.raises(RewardFailed, match=r"'moody': its process \d+ was killed by SIGKILL .* scored 1 images"):
        call_parts(shared, images(1), ["die"])
    call_parts(shared, images(), PROMPTS)
    first = shared.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert is_gone(first)
    call_parts(shared, images(), PROMPTS)
    assert shared.pid not in (None, first)


@pytest.mark.slow
def test_stopped_it_leaves_nothing_behind_and_starts_again(shared: ChildReward) -> None:
    call_parts(shared, images(1), ["grand"])
    pid = shared.pid
    assert pid is not None
    (grandchild,) = psutil.Process(pid).children()
    shared.stop()
    assert shared.pid is None and is_gone(pid) and is_gone(grandchild.pid)
    shared.stop()
    call_parts(shared, images(), PROMPTS)
    assert shared.pid != pid


@pytest.mark.slow
def test_an_answer_that_does_not_come_ends_by_time_or_signal() -> None:
    calls = iter(range(10**6))

    def stop() -> None:
        if next(calls) > limit:
            raise Interrupted("SIGTERM")

    limit = 10**6
    slow = ChildReward(MOODY, {"slow_s": 60}, stop=stop)
    slow.timeout_s = 0.5
    pid = slow.pid
    with pytest.raises(RewardFailed, match=r"has not scored 3 images in 0.5 s; .* raise runtime.job_timeout_s"):
        slow(images(), PROMPTS)
    assert pid is not None and is_gone(pid)
    slow.timeout_s, limit = 60.0, 0
    with pytest.raises(Interrupted):
        slow(images(), PROMPTS)
    slow.close()


@pytest.mark.slow
def test_what_is_wrong_with_the_reward_is_said_as_without_a_child() -> None:
    for name, options in (("no_such_reward", {}), (MOODY, {"slow": 1})):
        with pytest.raises(UsageError) as alone:
            open_reward("reward.name", name, options)
        with pytest.raises(UsageError) as child:
            ChildReward(name, options)
        assert str(alone.value) == str(child.value)
    two = ChildReward("tests.moody:Two", {})
    assert two.part_weights == (0.25, 0.75)
    assert torch.equal(call_parts(two, images(), PROMPTS)[0], call_parts(Two(), images(), PROMPTS)[0])
    two.close()
    with pytest.raises(UsageError, match=r"reward.options cannot be sent to another process"):
        ChildReward(MOODY, {"slow_s": object()})


@pytest.mark.slow
def test_killed_while_it_waits_a_parent_leaves_no_child_and_no_shared_memory(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from solrl.scorer import ChildReward\n"
        f"child = ChildReward({MOODY!r}, {{'slow_s': 60}}); print(child.pid, flush=True)\n"
        "child(torch.rand(2, 3, 8, 8), ['a', 'b'])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # it is scoring, and looks at no socket
    assert psutil.pid_exists(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert is_gone(child)
    parent.stdout.close()


def test_a_child_has_its_parents_device_or_some_behind_those_of_the_run() -> None:
    node = {"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2"}
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert child_devices(0, CPU, node) == ""
    assert [child_devices(0, gpu, node) for gpu in gpus] == ["7", "6"]
    assert [child_devices(2, gpu, node | {"LOCAL_RANK": str(gpu.index)}) for gpu in gpus] == ["5,4", "3,2"]
    both = [child_devices(2, gpu, node | {"LOCAL_RANK": str(gpu.index)}, shared=True) for gpu in gpus]
    assert both == ["7,6", "7,6"] and child_devices(2, CPU, node, shared=True) == ""
    assert child_devices(2, gpus[1], node | {"LOCAL_RANK": "3"}, shared=True) == "5,4"
    with pytest.raises(UsageError, match=r"process_gpus = 3: 2 processes and their rewards need 8 GPUs .* are 6"):
        child_devices(3, gpus[1], node | {"LOCAL_RANK": "1"})


# As a role


def test_what_is_no_tensor_starts_and_stops_with_its_role_and_is_rolled_back() -> None:
    said: list[str] = []

    def broken() -> None:
        said.append("start score")
        raise RewardFailed("no memory")

    contexts = [
        Context(
            "explore", dict, (), start=lambda: said.append("start explore"), stop=lambda: said.append("stop explore")
        ),
        Context("score", dict, (), start=broken, stop=lambda: said.append("stop score")),
        Context("train", dict, ()),
    ]
    residency = Residency(contexts, "train")
    residency.shift_to("explore")
    with pytest.raises(ShiftFailed, match="role score did not come up, explore is back: no memory"):
        residency.shift_to("score")
    assert residency.current == "explore"
    assert said == ["start explore", "stop explore", "start score", "stop score", "start explore"]


def test_settings_that_contradict_each_other_are_refused() -> None:
    for reward, message in (({"process": "shifting"}, "needs a runtime.mode"), ({"process_gpus": 1}, "needs a reward")):
        with pytest.raises(ValueError, match=message):
            tiny_config(reward=reward)
    pair = {"process": "shifting", "process_gpus": 2}
    with pytest.raises(ValueError, match=r"mode = auto measures a step .* choose shiftable or async_score"):
        tiny_config(reward=pair, runtime={"mode": "auto"})
    with pytest.raises(ValueError, match=r"score_processes \(1\) must be a multiple of reward.process_gpus \(2\)"):
        tiny_config(reward=pair, runtime={"mode": "async_score"})
    assert tiny_config(reward=pair, runtime={"mode": "async_score", "score_processes": 4}).replica_size == 2
    assert tiny_config(reward=pair | {"process": "resident"}, runtime={"mode": "auto"}).replica_size == 0


def test_processes_that_make_no_whole_replica_are_refused_before_a_model_loads(tmp_path: Path) -> None:
    config = run_config(tmp_path, "shiftable", reward={"process": "shifting", "process_gpus": 2})
    with pytest.raises(UsageError, match=r"process_gpus = 2: so many processes score together, and a machine has 1"):
        train(config)


@pytest.mark.slow
def test_a_run_with_rewards_in_shifting_children_has_the_bits_of_one_without(tmp_path: Path) -> None:
    one, two, reward = tmp_path / "one", tmp_path / "two", {"name": MOODY}
    assert in_child(lambda: train(run_config(one, "colocated", num_steps=1, reward=reward))) == (0, "")
    config = run_config(two, "shiftable", num_steps=1, reward=reward | {"process": "shifting"})
    left = tmp_path / "left"

    def run(rank: int) -> None:
        train(config)
        left.with_suffix(f".{rank}").write_text(str(len(psutil.Process().children())))

    assert in_children(2, run) == [(0, "")] * 2
    same_bits(one, two)
    assert [left.with_suffix(f".{rank}").read_text() for rank in range(2)] == ["0", "0"]
    starts = [line["of_which_shifting_s"] for line in decisions(two, "shift") if line["role"] == "score"]
    assert starts and min(starts) > 0.3  # a process came up, and imported torch
    assert json.loads((two / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


@pytest.mark.slow
def test_a_child_that_is_killed_costs_a_try_in_a_run_with_roles_and_ends_one_without(tmp_path: Path) -> None:
    def kill_first() -> None:
        real, victims = ChildReward.__call__, iter([True])

        def call(child: ChildReward, images: Tensor, prompts: Sequence[str]) -> Any:
            if child.pid and next(victims, False):
                os.kill(child.pid, signal.SIGKILL)
                assert is_gone(child.pid)
                child.start = lambda: {}  # type: ignore[method-assign]  # found dead only while it is asked
            try:
                return real(child, images, prompts)
            finally:
                vars(child).pop("start", None)

        ChildReward.__call__ = call  # type: ignore[method-assign]

    def run(mode: str) -> None:
        config = run_config(tmp_path / mode, mode, num_steps=1, reward={"name": MOODY, "process": "resident"})
        if mode == "shiftable":
            real = solrl.pipeline.Scoring.advance

            def advance(work: Any) -> Any:
                if not armed:
                    armed.append(True)
                    kill_first()
                return real(work)

            armed: list[bool] = []
            solrl.pipeline.Scoring.advance = advance  # type: ignore[method-assign]
        else:
            kill_first()
        train(config)

    assert in_child(lambda: run("shiftable")) == (0, "")
    (raised,) = decisions(tmp_path / "shiftable", "raised")
    assert "was killed by SIGKILL" in raised["error"]
    code, message = in_child(lambda: run("colocated"))
    assert code == SolrlError.exit_code and "'moody': its process" in message and "was killed by SIGKILL" in message


# One judge on the GPUs of two processes


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a colocated run, one of four processes whose judges have two each): one judge does not start, one is killed."""
    one, four = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("four")
    reward: dict[str, Any] = {"name": "tests.moody:Frail"}
    assert in_child(lambda: train(run_config(one, "colocated", num_steps=1, reward=reward))) == (0, "")
    # starts: to hear its facts, the first evaluation, the step; calls: the first evaluation, the step
    options = {"folder": str(four), "fails_at": [3], "dies_at": [3]}
    reward |= {"process": "shifting", "process_gpus": 2, "options": options}
    config = run_config(four / "run", "shiftable", num_steps=1, reward=reward)

    def held(residency: Residency) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in residency.contexts["train"].tensors().values())

    def run(rank: int) -> None:
        shift_to, call = Residency.shift_to, ChildReward.__call__

        def noted(residency: Residency, role: Role) -> None:
            try:
                shift_to(residency, role)
            finally:
                (four / f"holds.{rank}").write_text(str(held(residency)))

        def watched(child: ChildReward, images: Tensor, prompts: Sequence[str]) -> Any:
            with (four / "scored").open("a") as file:
                print(rank, *((four / f"holds.{each}").read_text() for each in (rank, rank + 1)), file=file)
            return call(child, images, prompts)

        Residency.shift_to = noted  # type: ignore[method-assign]
        ChildReward.__call__ = watched  # type: ignore[method-assign]
        train(config)
        assert not psutil.Process().children()

    assert in_children(4, run) == [(0, "")] * 4
    return one, four


@pytest.mark.slow
def test_a_judge_on_two_processes_gives_the_bits_of_a_colocated_run_whatever_becomes_of_it(
    rough: tuple[Path, Path],
) -> None:
    one, four = rough
    same_bits(one, four / "run")
    said = [[json.loads(line) for line in (run / FILE).read_text().splitlines()] for run in (one, four / "run")]
    mine, theirs = [[{k: row[k] for k in row if not k.startswith("time/")} for row in rows] for rows in said]
    assert mine == theirs and "eval/tests.moody:Frail/mean" in mine[0]
    shifts = decisions(four / "run", "shift")
    scoring = {line["rank"] for line in shifts if line["role"] == "score"}
    assert len(shifts) >= 10 and ({0, 1} <= scoring or {2, 3} <= scoring)


@pytest.mark.slow
def test_while_a_judge_scores_no_process_of_its_replica_holds_anything(rough: tuple[Path, Path]) -> None:
    _, four = rough
    scored = [line.split() for line in (four / "scored").read_text().splitlines()]
    assert len(scored) >= 2 + 5 + 3 and {tuple(held) for _, *held in scored} == {("0", "0")}
    assert {rank for rank, *_ in scored} <= {"0", "2"}
    assert all(int((four / f"holds.{rank}").read_text()) > 2**20 for rank in range(4))  # it is back


@pytest.mark.slow
def test_a_judge_that_does_not_start_leaves_both_processes_in_their_roles_and_a_killed_one_costs_a_try(
    rough: tuple[Path, Path],
) -> None:
    run = rough[1] / "run"
    (failed,) = [line for line in decisions(run, "shift") if line["error"]]
    assert (failed["role"], failed["wanted"]) == ("explore", "score")
    assert "role score did not come up, explore is back" in failed["error"]
    assert "MemoryError: no room for the weights" in failed["error"]
    other = [line for line in decisions(run, "shift") if line["rank"] == failed["rank"] + 1]
    after = next(number for number, line in enumerate(other) if line["time"] > failed["time"])
    assert [line["role"] for line in other[after - 2 : after + 1]] == ["explore", "score", "explore"]
    (raised,) = decisions(run, "raised")
    assert "was killed by SIGKILL" in raised["error"] and not decisions(run, "quarantine")
