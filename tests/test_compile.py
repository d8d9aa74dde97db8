"""Compiled graphs: nothing recompiles in a run, weights written in place are followed, and the guard bites."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from solrl.compute import compile_, compile_mode, drawing, eagerly, repeated_blocks, updating, use_cache_folder
from solrl.config import Config
from solrl.evaluate import HeldOut
from solrl.models import lora_state
from solrl.session import Session, open_session
from solrl.train import run_step
from solrl.types import Policy, UsageError
from tests.parts import ALONE, CPU, Redness, never, stopwatch, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above a cyan triangle"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def inputs(policy: Policy, batch: int = 2) -> tuple[Tensor, Tensor, Any]:
    """Latents, sigmas and conditioning, the same at every call."""
    latents = torch.randn(batch, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    return latents, torch.full((batch,), 0.7), policy.encode(PROMPTS).rows([i % 2 for i in range(batch)])


def drawn(policy: Policy, given: tuple[Tensor, Tensor, Any]) -> Tensor:
    with drawing(policy):
        return policy.velocity(*given)


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def other_adapters(session: Session, seed: int) -> dict[str, Any]:
    """Adapters of the model's shapes with random weights."""
    generator = torch.Generator().manual_seed(seed)
    pairs = lora_state(session.policy.transformer, "old").items()
    return {
        name: dataclasses.replace(pair, b=torch.randn(pair.b.shape, generator=generator) * 0.01) for name, pair in pairs
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["emulated_nvfp4", "fp8"])
def test_fifty_requantizations_recompile_nothing_break_no_graph_and_are_followed(precision: str) -> None:
    session = open_session(tiny_config(explore={"precision": precision}), ALONE, never)
    explorer, given = session.explorer, inputs(session.explorer)
    blocks = repeated_blocks(explorer.transformer)
    stored = [*explorer.transformer.parameters(), *explorer.transformer.buffers()]
    pointers = [tensor.data_ptr() for tensor in stored]
    compile_(blocks, "default", deterministic=True)
    first = drawn(explorer, given)
    # two kinds of blocks; the first single block's input has other strides than its output, which the next one gets
    assert counters["stats"]["unique_graphs"] == 3 and len(blocks) == 7
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(50):
            session.sync(other_adapters(session, number))
            output = drawn(explorer, given)
        with eagerly():
            eager = drawn(explorer, given)
        session.sync()
        assert torch.equal(drawn(explorer, given), first)
    # where a compiled operation differs in its last bit, an input near a tie of the format takes the other neighbour;
    # FP8's scales are those of the rows at hand: changing its input by 1e-6 moves its output by 0.027, uncompiled
    limit = {"emulated_nvfp4": 5e-3, "fp8": 0.04}[precision]
    assert relative(output, eager) < limit < relative(eager, first) / 2
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    assert [tensor.data_ptr() for tensor in stored] == pointers


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["emulated_nvfp4", "fp8"])
def test_a_compiled_quantized_layer_computes_what_it_computes_eagerly(precision: str) -> None:
    session = open_session(tiny_config(explore={"precision": precision}), ALONE, never)
    layer = next(iter(session.trees.quant_layers().values()))
    x = torch.randn(24, layer.in_features, generator=torch.Generator().manual_seed(0))
    with drawing(session.explorer):
        expected = layer(x)
        compile_([layer], "default", deterministic=True)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("old_from_rollout", [False, pytest.param(True, marks=pytest.mark.long)])
def test_after_its_first_step_a_run_with_evaluation_audit_and_calibration_recompiles_nothing(
    old_from_rollout: bool,
) -> None:
    config = tiny_config(
        explore={"precision": "emulated_nvfp4"},
        train={"old_from_rollout": old_from_rollout},
        output={"audit_every_steps": 1},
    )
    session = open_session(config, ALONE, never)
    compile_(session.regions(), "default", deterministic=True, backend="aot_eager")
    heldout = HeldOut(PROMPTS, session.policy.encode(PROMPTS), {"redness": Redness()})

    def everything(step: int) -> None:
        run_step(session, step, stopwatch())
        found = heldout.evaluate(session.rollout_policy, config, world=ALONE, clock=stopwatch(), stop=never)
        heldout.grid(session.rollout_policy, config, found)
        session.calibrate()

    everything(1)
    graphs = counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):
        everything(2)
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


@pytest.mark.slow
def test_the_guard_bites_on_a_ragged_batch_and_on_another_grad_mode_or_autocast() -> None:
    session = open_session(tiny_config(), ALONE, never)
    policy = session.rollout_policy
    compile_(repeated_blocks(policy.transformer)[-1:], "default", deterministic=True, backend="eager")
    given, ragged = inputs(policy, 4), inputs(policy, 3)
    expected = drawn(policy, given)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(drawn(policy, given), expected)
        with torch.autocast("cpu", torch.bfloat16):  # whatever the caller does, drawing is drawing
            assert torch.equal(drawn(policy, given), expected)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            drawn(policy, ragged)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            policy.velocity(*given)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="recompile"):
            policy.velocity(*given)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_compiled_update_takes_the_same_step_and_each_adapter_state_has_its_own_graphs(checkpointing: bool) -> None:
    config = tiny_config(train={"kl_weight": 0.1}, model={"gradient_checkpointing": checkpointing})
    eager, compiled = (open_session(config, ALONE, never) for _ in range(2))
    compile_(repeated_blocks(compiled.policy.transformer), "default", deterministic=True, backend="aot_eager")
    for step in (1, 2):
        metrics = [run_step(session, step, stopwatch()).metrics for session in (eager, compiled)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-7)
    # old and reference: 3 graphs each, as above; policy: one more, since the first block's input needs no gradient
    assert counters["stats"]["unique_graphs"] == 3 + 3 + 4
    for ours, theirs in zip(eager.learner.parameters, compiled.learner.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_auto_compiles_on_a_gpu_only() -> None:
    config = tiny_config()
    assert config.compile == "auto"
    assert compile_mode(config, CPU) == "off" and compile_mode(config, torch.device("cuda")) == "default"
    assert compile_mode(tiny_config(compile="default"), CPU) == "default"


def test_kernels_picked_by_timing_contradict_determinism() -> None:
    with pytest.raises(ValueError, match="picks kernels by timing: set deterministic = false"):
        Config.model_validate({"compile": "max-autotune-no-cudagraphs"})
    Config.model_validate({"compile": "max-autotune-no-cudagraphs", "deterministic": False})


def test_each_rank_keeps_its_compiled_code_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert use_cache_folder(3) == tmp_path / "solrl" / "inductor" / "rank_3"
    assert use_cache_folder(3) == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # a second session in the process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert use_cache_folder(0) == tmp_path / "mine" / "rank_0" and (tmp_path / "mine" / "rank_0").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set TORCHINDUCTOR_CACHE_DIR to a folder for compiled code, or compile = off"):
        use_cache_folder(0)


def test_drawing_and_updating_own_grad_mode_and_autocast() -> None:
    session = open_session(tiny_config(model={"dtype": "bfloat16"}), ALONE, never)

    def state() -> tuple[bool, bool, torch.dtype | None]:
        cast = torch.is_autocast_enabled("cpu")
        return torch.is_grad_enabled(), cast, torch.get_autocast_dtype("cpu") if cast else None

    for outside in (torch.autocast("cpu", torch.float16), torch.no_grad(), torch.enable_grad()):
        with outside:
            with drawing(session.rollout_policy):
                assert state() == (False, False, None)
            with updating(session.policy, gradient=True):
                assert state() == (True, True, torch.bfloat16)
            with updating(session.policy, gradient=False):
                assert state() == (False, True, torch.bfloat16)
