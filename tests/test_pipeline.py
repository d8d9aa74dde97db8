"""Every mode of the runtime is the colocated run, bit for bit, whatever happens to its processes on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import solrl.learner
import solrl.pipeline
import solrl.recorder
from solrl.checkpoint import checkpoint_path
from solrl.config import Config
from solrl.decisions import read_decisions
from solrl.errors import SolrlError, UsageError
from solrl.groups import group_seeds
from solrl.pipeline import Crew, Drawing, open_crew, pipeline
from solrl.prompts import step_prompts
from solrl.rollout import rollout
from solrl.runtime.blobs import Blobs
from solrl.runtime.mailbox import ProcessLost
from solrl.session import Session, open_session
from solrl.train import train
from solrl.types import Reward
from tests.children import in_child, in_children
from tests.parts import ALONE, Redness, never, stopwatch, tiny_config
from tests.test_processes import same_bits


def run_config(dir: Path, mode: str, *, num_steps: int = 2, **sections: Any) -> Config:
    """5 micro-batches to explore, the last of them padded, and 3 to draw again."""
    settings: dict[str, Any] = {
        "reward": {"name": "tests.parts:Redness"},
        "explore": {"group_size": 3, "solver": "dpm2", "num_steps": 3},
        "regenerate": {"group_size": 2},
        "train": {"num_steps": num_steps, "timestep_fraction": 0.4},
        "batch": {"rollout": 2, "train": 2, "decode": 2},
        "evaluate": {"num_prompts": 1, "images_per_prompt": 2},
        "output": {"audit_every_steps": 0},
        "runtime": {"mode": mode, "lost_after_s": 8.0},
    }
    return tiny_config(
        dir, **{name: settings.get(name, {}) | sections.get(name, {}) for name in {*settings, *sections}}
    )


def decisions(dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in read_decisions(dir) if line["event"] == event]


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dir = tmp_path_factory.mktemp("colocated")
    assert in_child(lambda: train(run_config(dir, "colocated"))) == (0, "")
    return dir


def test_two_processes_that_shift_give_the_bits_of_a_colocated_run(tmp_path: Path, colocated: Path) -> None:
    assert in_children(2, lambda rank: train(run_config(tmp_path, "shiftable"))) == [(0, "")] * 2
    same_bits(tmp_path, colocated)
    shifts = decisions(tmp_path, "shift")
    assert {(line["rank"], line["role"]) for line in shifts} >= {(0, "train"), (1, "train"), (0, "explore")}
    assert any(line["role"] == "score" for line in shifts)
    assert all(line["candidates"] for line in decisions(tmp_path, "decision") if line.get("role"))


# Moving a micro-batch


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return open_session(run_config(tmp_path_factory.mktemp("session"), "shiftable"), ALONE, never)


@pytest.fixture
def crew(session: Session) -> Iterator[Crew]:
    session.config.output.dir.mkdir(exist_ok=True)
    with open_crew(session, 0) as crew:
        prompts = step_prompts(session.train_prompts, 0, 1, 1)
        crew.begin_step(1, prompts, session.policy.encode(prompts), group_seeds(0, 1, 1, 3))
        yield crew


def drawn(crew: Crew, payload: dict[str, Any], moves: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(clean latents, images) of a micro-batch that moves on after each of ``moves`` denoising steps."""
    work = Drawing(crew, payload, None)
    value = None
    while value is None:
        if work.state.step in moves:
            state = work.give_back()
            work = Drawing(crew, payload, None if state is None else json.loads(json.dumps(state)))
        value = work.advance()
    images = crew.take(value["images"])["images"]
    crew.free(value["images"])
    found = crew.draws[1].clean["explore"]
    return torch.stack([found[at] for at in sorted(found)]), images


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_moved_at_every_step_of_every_solver_a_job_ends_bit_equal(
    crew: Crew, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = crew.session
    stage = session.config.explore.model_copy(update={"solver": solver, "num_steps": 4})
    monkeypatch.setattr(session, "config", session.config.model_copy(update={"explore": stage}))
    draw = crew.draws[1]
    _, second = rollout(
        session.explorer, draw.conditioning, draw.prompts, draw.seeds, stage,
        batch=session.config.batch, world=ALONE, clock=stopwatch(), stop=never, phase="explore",
    )  # fmt: skip
    payload = {"step": 1, "stage": "explore", "first": 2, "members": [[0, 2]]}  # the second, which is padded
    for moves in ([], [0], [1], [2], [3], [4], [0, 1, 2, 3, 4]):
        clean, images = drawn(crew, payload, moves)
        assert torch.equal(clean, second.clean) and torch.equal(images, second.images), moves
    assert crew.blobs.num_waiting == 0


# Refusals


def test_what_cannot_work_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"runtime.score_processes = 1 of 1 processes leaves none to draw"):
        pipeline(run_config(tmp_path, "async_score"))
    config = run_config(tmp_path, "shiftable", train={"objective": "flow_grpo"}, regenerate={"solver": "euler"})
    with pytest.raises(UsageError, match=r"flow_grpo trains on trajectories.* use runtime.mode = colocated"):
        pipeline(config)


# Longer runs


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "size"), [("shiftable", 1), ("async_score", 2), ("auto", 1), ("auto", 2)])
def test_every_mode_gives_the_bits_of_a_colocated_run(tmp_path: Path, colocated: Path, mode: str, size: int) -> None:
    assert in_children(size, lambda rank: train(run_config(tmp_path, mode))) == [(0, "")] * size
    same_bits(tmp_path, colocated)


@pytest.mark.slow
def test_processes_of_two_machines_shift_and_give_the_bits_of_a_colocated_run(tmp_path: Path, colocated: Path) -> None:
    """To its processes this machine is two: latents and images of one reach the other over TCP."""
    sent = tmp_path / "sent"

    def run(rank: int) -> None:
        answer = Blobs._answer

        def counted(blobs: Blobs, request: dict[str, Any]) -> memoryview | bytes:
            with sent.open("a") as file:
                file.write(request["do"] + "\n")
            return answer(blobs, request)

        Blobs._answer = counted  # type: ignore[method-assign]
        train(run_config(tmp_path / "run", "async_score"))

    assert in_children(2, run, machines=2) == [(0, "")] * 2
    same_bits(tmp_path / "run", colocated)
    done = sent.read_text().splitlines()
    assert done.count("get") == done.count("acknowledge") == 2 * (5 + 3)  # every micro-batch's images, twice


@pytest.mark.slow
def test_four_processes_that_shift_often_give_the_bits_of_a_colocated_run(tmp_path: Path) -> None:
    """Four processes on two cores, with at least ten shifts."""
    more: dict[str, Any] = {"num_steps": 2, "output": {"audit_every_steps": 2}}
    one, four = tmp_path / "one", tmp_path / "four"
    assert in_child(lambda: train(run_config(one, "colocated", **more))) == (0, "")
    assert in_children(4, lambda rank: train(run_config(four, "shiftable", **more))) == [(0, "")] * 4
    same_bits(one, four)
    shifts = decisions(four, "shift")
    assert len(shifts) >= 10 and {line["role"] for line in shifts} == {"explore", "score", "train"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["explore", "regenerate"])
def test_without_one_of_the_stages_the_bits_are_the_same_too(tmp_path: Path, stage: str) -> None:
    more: dict[str, Any] = {"num_steps": 1, stage: {"enabled": False}}
    one, two = tmp_path / "one", tmp_path / "two"
    assert in_child(lambda: train(run_config(one, "colocated", **more))) == (0, "")
    assert in_children(2, lambda rank: train(run_config(two, "shiftable", **more))) == [(0, "")] * 2
    same_bits(one, two)


class Broken(Redness):
    """A judge that fails."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise RuntimeError("out of memory")


@pytest.mark.slow
def test_a_reward_that_fails_now_and_then_costs_tries_and_changes_nothing(
    tmp_path: Path, colocated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = iter(range(1000)), solrl.pipeline.call_parts

    def moody(reward: Reward, images: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
        return real(Broken() if next(calls) % 5 == 1 else reward, images, prompts)

    monkeypatch.setattr(solrl.pipeline, "call_parts", moody)
    assert in_children(2, lambda rank: train(run_config(tmp_path, "shiftable"))) == [(0, "")] * 2
    raised = decisions(tmp_path, "raised")
    assert raised and "reward 'redness' failed: RuntimeError: out of memory" in raised[0]["error"]
    same_bits(tmp_path, colocated)


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "drawing step 2": (Drawing, "advance", lambda work: work.crew.log.step == 2 and work.state.step == 1),
    "updating step 2": (solrl.learner.Learner, "_accumulate", lambda learner, *_: learner.step == 1),
    "recording step 2": (solrl.recorder.Recorder, "_facts", lambda recorder, step, _: step == 2),
}
"""Class, method, and when a call of it is the moment."""


def signal_in(monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals) -> None:
    """This process sends itself ``number`` when ``moment`` comes."""
    target, name, is_now = MOMENTS[moment]
    real = getattr(target, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        if is_now(*arguments):
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, watched)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_by_name_and_a_resume_completes_it(
    tmp_path: Path, colocated: Path, monkeypatch: pytest.MonkeyPatch, moment: str, victim: int
) -> None:
    def run(rank: int) -> None:
        if rank == victim:
            signal_in(monkeypatch, moment, signal.SIGKILL)
        train(run_config(tmp_path, "shiftable"))

    outcomes = in_children(2, run)
    assert outcomes[victim][0] == -signal.SIGKILL
    code, line = outcomes[1 - victim]
    assert code == ProcessLost.exit_code and line.startswith(f"process {victim}") and "--resume" in line
    assert "\n" not in line
    assert in_children(2, lambda rank: train(run_config(tmp_path, "shiftable"), resume=True)) == [(0, "")] * 2
    same_bits(tmp_path, colocated)


@pytest.mark.slow
def test_a_signal_saves_and_ends_all_and_a_resume_in_another_mode_completes_it(
    tmp_path: Path, colocated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            signal_in(monkeypatch, "drawing step 2", signal.SIGTERM)
        train(run_config(tmp_path, "shiftable", output={"checkpoint_every_steps": 9}))

    outcomes = in_children(2, run)
    assert [code for code, _ in outcomes] == [3, 3] and all("SIGTERM" in line for _, line in outcomes)
    assert checkpoint_path(tmp_path, 1).is_dir()
    assert in_child(lambda: train(run_config(tmp_path, "colocated"), resume=True)) == (0, "")
    same_bits(tmp_path, colocated)


@pytest.mark.slow
def test_a_model_that_draws_nan_ends_the_run_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> None:
        if rank == 1:
            monkeypatch.setattr(solrl.pipeline, "decode", lambda policy, clean, at_once: clean.fill_(float("nan")))
        train(run_config(tmp_path, "shiftable"))

    outcomes = in_children(2, run)
    assert all(code == SolrlError.exit_code and "came out NaN or infinite" in line for code, line in outcomes)
