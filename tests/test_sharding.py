"""A sharded run is the run that is not: the same seeds kept, the same weights, in half the memory on each of two."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from solrl.checkpoint import list_checkpoints
from solrl.clock import Stopwatch
from solrl.comparison import Comparison, compare
from solrl.config import Config
from solrl.distributed import start
from solrl.hardware import find_gpu
from solrl.learner import Learner
from solrl.models.loading import ASSETS
from solrl.plan import make_plan
from solrl.recorder import Recorder
from solrl.session import Session, open_session
from solrl.train import run_step, train
from tests.children import in_child, in_children
from tests.parts import never, tiny_config

DONE = (0, "")
Look = Callable[[Session], None]


def run_config(folder: Path, kind: str, *, shard: bool, num_steps: int = 2) -> Config:
    """A step has 3 micro-batches to explore and 1 to redraw: of two processes one joins in for nobody."""
    full = {
        "lora": {"enabled": False},
        # An epsilon above most gradients: else Adam's step is a sign, which rounding decides where they are about 0.
        "train": {"learning_rate": 3e-3, "adam_eps": 1e-3, "kl_weight": 0.1, "num_steps": num_steps},
    }
    more: dict[str, dict[str, Any]] = {} if kind == "adapter" else full
    return tiny_config(
        folder,
        model={"dtype": "float32", "shard": shard},
        reward={"name": "tests.parts:Redness"},
        prompts={"per_step": 2},
        explore={"precision": "emulated_nvfp4"},
        regenerate={"group_size": 2},
        **{"train": {"num_steps": num_steps, "kl_weight": 0.1}} | more,
    )


def run(config: Config, look: Look = lambda session: None, *, resume: bool = False) -> None:
    with start(config.cpu_threads, config.deterministic) as world:
        session = open_session(config, world, never)
        with Recorder(session, resume) as recorder:
            for step in recorder.steps():
                clock = Stopwatch(world.device)
                recorder.record(step, run_step(session, step, clock), clock)
        look(session)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> folder of two steps on one process."""
    folder, done = tmp_path_factory.mktemp("alone"), set()

    def of(kind: str) -> Path:
        if kind not in done:
            assert in_child(lambda: run(run_config(folder / kind, kind, shard=False))) == DONE
            done.add(kind)
        return folder / kind

    return of


def kept(folder: Path) -> list[tuple[object, ...]]:
    lines = [line for file in sorted((folder / "ledger").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [(row["prompt"], row["seed"], row["kept"]) for row in map(json.loads, lines)]


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(max((folder / "checkpoints").glob("step_*")) / "state.safetensors")


def difference(one: Path, other: Path) -> float:
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def bytes_of(tensors: Any) -> int:
    """What this process holds of them."""
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in here}.values())


def holds_what_the_plan_says(session: Session) -> None:
    """Of two processes: half of every large thing, as a DTensor, and the explorer whole."""
    learner, trees, config = session.learner, session.trees, session.config
    policy: nn.Module = session.policy.transformer
    for module in (policy, trees.rollout, *([learner.reference.transformer] if learner.reference else [])):
        names = [name for name, weight in module.named_parameters() if not isinstance(weight, DTensor)]
        assert all("lora_" in name for name in names), names
    explorer = [*trees.explorer.parameters(), *trees.explorer.buffers()]
    assert session.world.in_step and not any(isinstance(tensor, DTensor) for tensor in explorer)

    parts = {part.what: part.bytes for part in make_plan(config, find_gpu("h200"), 2).resident}
    assert parts["1/2 of rollout tree"] == pytest.approx(bytes_of(trees.rollout.parameters()), rel=0.01)
    assert parts["explorer: weights in emulated_nvfp4"] == pytest.approx(bytes_of(explorer), rel=0.01)
    moments = [moment for of in learner.optimizer.state.values() for name, moment in of.items() if name != "step"]
    trained = [*learner.parameters, *learner.old_parameters, *learner.ema_parameters, *moments]
    if config.lora.enabled:
        frozen = [weight for weight in policy.parameters() if isinstance(weight, DTensor)]
        assert parts["1/2 of transformer, frozen"] == pytest.approx(bytes_of(frozen), rel=0.01)
        return
    assert learner.reference is not None and all(isinstance(tensor, DTensor) for tensor in trained)
    frozen = list(learner.reference.transformer.parameters())
    assert parts["1/2 of reference_policy"] == pytest.approx(bytes_of(frozen), rel=0.01)
    gradients = bytes_of(learner.parameters)  # gone again
    wanted = parts["1/2 of weights, averages, optimizer, gradients"]
    assert wanted == pytest.approx(bytes_of(trained) + gradients, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_two_processes_with_half_each_do_what_one_does(kind: str, tmp_path: Path, alone: Callable[[str], Path]) -> None:
    config = run_config(tmp_path, kind, shard=True)
    assert in_children(2, lambda rank: run(config, holds_what_the_plan_says)) == [DONE] * 2
    one = alone(kind)
    assert kept(one) == kept(tmp_path) and len(kept(one)) == 24
    if kind == "adapter":
        assert difference(one, tmp_path) == 0
        return
    before, after = load_file(ASSETS / "tiny_flux/transformer/diffusion_pytorch_model.safetensors"), state(one)
    moved = max(float((after[f"policy/{name}"] - weight).abs().max()) for name, weight in before.items())
    assert difference(one, tmp_path) < 1e-4 < moved / 10
    exported = AutoModel.from_pretrained(str(tmp_path / "transformer")).state_dict()
    assert exported.keys() == before.keys()
    assert all(torch.equal(weight, state(tmp_path)[f"ema/{name}"]) for name, weight in exported.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("adapter", 2), ("full", 1)])
def test_a_run_goes_on_with_another_number_of_processes(
    kind: str, first: int, tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    def on(size: int, num_steps: int, *, resume: bool) -> None:
        config = run_config(tmp_path, kind, shard=True, num_steps=num_steps)
        assert in_children(size, lambda rank: run(config, resume=resume)) == [DONE] * size

    on(first, 1, resume=False)
    on(3 - first, 2, resume=True)
    assert kept(alone(kind)) == kept(tmp_path)
    assert difference(alone(kind), tmp_path) < (1e-4 if kind == "full" else 1e-30)


@pytest.mark.slow
def test_two_processes_evaluate_a_full_fine_tuning_as_the_run_did(tmp_path: Path, alone: Callable[[str], Path]) -> None:
    wanted, folder = Comparison(overrides={"model.shard": True}, out=tmp_path / "out"), alone("full")
    assert in_children(2, lambda rank: compare(folder, wanted, trust_code=True)) == [DONE] * 2
    rows = json.loads((tmp_path / "out" / "scores.json").read_text())["results"]["run"]["summary"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    means = {row["weights"]: row["mean"] for row in rows}
    for weights, line in (("base", lines[0]), ("ema", lines[-1])):
        assert means[weights] == pytest.approx(line["eval/tests.parts:Redness/mean"], abs=1e-6)
    assert abs(means["ema"] - means["base"]) > 1e-3


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_saves_their_shares(
    tmp_path: Path, alone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, whole_run = Learner._accumulate, alone("full")

    def interrupted(learner: Learner, *arguments: Any, **options: Any) -> Tensor:
        if learner.step == 1 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(learner, *arguments, **options)

    config = run_config(tmp_path / "cut", "full", shard=True)
    monkeypatch.setattr(Learner, "_accumulate", interrupted)
    codes = [code for code, _ in in_children(2, lambda rank: train(config))]
    assert codes == [3, 3]
    assert list(list_checkpoints(tmp_path / "cut")) == [1]
    first = load_file(whole_run / "checkpoints" / "step_000001" / "state.safetensors")
    saved = state(tmp_path / "cut")
    assert max(float((first[name] - saved[name]).abs().max()) for name in first) < 1e-4
