"""A prompt's encoding: the same bits whoever else is encoded, ahead or not, and wherever the encoders rest."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solrl.clock import Stopwatch
from solrl.encoding import EncodeAhead, Place
from solrl.models import load_policy
from solrl.models.base import DiffusersPolicy
from solrl.models.encoders import SaidOnce, TextEncoders
from solrl.models.flux import FluxPolicy
from solrl.session import open_session
from solrl.train import run_step, train
from solrl.types import Conditioning, SolrlError
from tests.families import FAMILIES, family_config, save_random_pipeline
from tests.parts import ALONE, CPU, never, stopwatch, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above", "", "a blue square"]
RED = {"name": "tests.parts:Redness"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DiffusersPolicy]:
    """Family -> a random policy, for tests that change nothing."""
    root = tmp_path_factory.mktemp("random")

    def load(family: str) -> DiffusersPolicy:
        policy = load_policy(family_config(family, save_random_pipeline(family, root / family)), CPU)
        assert isinstance(policy, DiffusersPolicy)
        return policy

    return functools.cache(load)


def assert_equal(one: Conditioning, two: Conditioning) -> None:
    for name in ("embeds", "pooled", "mask"):
        a, b = getattr(one, name), getattr(two, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_encoded_with_the_same_bits_whatever_its_neighbours(
    family: str, loaded: Callable[[str], DiffusersPolicy]
) -> None:
    policy = loaded(family)
    alone = [policy.encode([prompt]) for prompt in PROMPTS]
    assert_equal(policy.encode(PROMPTS), Conditioning.stack(alone))
    order = [3, 1, 1, 0, 2, 0]
    assert_equal(policy.encode([PROMPTS[i] for i in order]), Conditioning.stack([alone[i] for i in order]))
    assert len({row.embeds.sum().item() for row in alone}) == len(PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_rest_elsewhere_come_in_for_an_encoding_and_leave_again_even_after_an_error(
    family: str, loaded: Callable[[str], DiffusersPolicy]
) -> None:
    policy = loaded(family)
    before = policy.encode(PROMPTS)
    resident = policy.encoders
    homes = {p: p.data_ptr() for module in resident.modules.values() for p in module.parameters()}
    policy.encoders = TextEncoders(policy.pipeline.components, CPU, offload=True)
    try:
        with policy.encoders.here():
            assert not {p.data_ptr() for p in homes} & set(homes.values()), "copies on the device"
            assert_equal(Conditioning.stack([policy.encode_alone(prompt) for prompt in PROMPTS]), before)
        assert {p: p.data_ptr() for p in homes} == homes
        assert_equal(policy.encode(PROMPTS), before)
        with pytest.raises(KeyError), policy.encoders.here():
            raise KeyError
        assert {p: p.data_ptr() for p in homes} == homes
    finally:
        policy.encoders = resident


def test_one_warning_says_that_prompts_are_cut(
    loaded: Callable[[str], DiffusersPolicy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(FluxPolicy.pipeline_class.__module__)
    policy = loaded("flux")
    (once,) = [one for one in logger.filters if isinstance(one, SaidOnce)]
    monkeypatch.setattr(once, "_said", set())
    logger.addHandler(caplog.handler)
    try:
        policy.encode([f"{number} a red circle left of a blue square left of a red circle" for number in range(3)])
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in dict.fromkeys(caplog.records)]  # the root logger may have it, too
    cut = [message for message in said if "truncated" in message]
    assert len(cut) == 2 and "CLIP" in cut[0] and "max_sequence_length" in cut[1], "one an encoder"


def two_steps(place: Place | None, **sections: dict[str, Any]) -> tuple[Any, list[str]]:
    """(what two small steps computed, the thread of every call of an encoder while they ran)."""
    small = {
        "reward": RED,
        "explore": {"group_size": 4},
        "regenerate": {"group_size": 2},
        "train": {"num_steps": 2},
        "output": {"audit_every_steps": 0},  # an audit's calibration batch is encoded, too
    }
    session = open_session(tiny_config(**(small | {"prompts": {"per_step": 2}} | sections)), ALONE, never)
    session.ahead = EncodeAhead(session.policy, place)
    threads: list[str] = []
    assert isinstance(session.policy, DiffusersPolicy)
    session.policy.pipeline.text_encoder.register_forward_hook(
        lambda *_: threads.append(threading.current_thread().name.partition("_")[0])
    )
    records = [run_step(session, step, stopwatch()) for step in (1, 2)]
    state = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
    return (state, [record.metrics for record in records], records[1].rewards.values.tolist()), threads


@pytest.mark.slow
def test_the_next_steps_prompts_are_encoded_by_a_thread_while_a_step_runs_and_nothing_else_changes() -> None:
    plain, threads = two_steps(None)
    assert threads == ["MainThread"] * 4
    for place in ("draw", "requantize"):
        found, threads = two_steps(place)
        assert threads == ["MainThread"] * 2 + ["encode"] * 2, "the last step encodes nothing ahead"
        assert found == plain
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


class Slow(nn.Module):
    """Encodes after a while, or fails at one prompt; knows the thread's settings."""

    device = CPU

    def __init__(self, seconds: float = 0.0, fails_at: str = "") -> None:
        super().__init__()
        self.seconds, self.fails_at = seconds, fails_at
        self.threads: list[int] = []

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        time.sleep(self.seconds)
        self.threads.append(torch.get_num_threads())
        if self.fails_at in prompts:
            raise SolrlError(f"cannot encode the prompt {self.fails_at!r}")
        return Conditioning(torch.tensor([[[float(len(prompt))]] for prompt in prompts]))


def test_waiting_for_the_thread_is_timed_and_an_interrupted_step_leaves_none_behind() -> None:
    policy: Any = Slow(seconds=0.2, fails_at="none")
    encoder, clock = EncodeAhead(policy, "draw"), Stopwatch(CPU)
    with encoder.beside("draw", ["a", "bb"], clock):
        pass
    assert clock.seconds["encode"] > 0.15
    assert encoder.conditioning(["a", "bb"]).embeds.flatten().tolist() == [1, 2] and len(policy.threads) == 1
    assert encoder.conditioning(["a", "bb"]).embeds.numel() == 2 and len(policy.threads) == 2, "taken once"
    with encoder.beside("draw", ["a"], clock):
        pass
    assert encoder.conditioning(["ccc"]).embeds.item() == 3, "what was encoded ahead was for others"
    with pytest.raises(KeyboardInterrupt), encoder.beside("draw", ["a"], clock):
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]
    assert set(policy.threads) == {torch.get_num_threads()}


def test_an_error_of_the_thread_comes_up_in_the_step_that_needs_the_prompts() -> None:
    policy: Any = Slow(fails_at="bb")
    encoder = EncodeAhead(policy, "draw")
    with encoder.beside("draw", ["a", "bb"], stopwatch()):
        done = "this step is not disturbed"
    assert done
    with pytest.raises(SolrlError, match="cannot encode the prompt 'bb'"):
        encoder.conditioning(["a", "bb"])


def test_while_the_first_step_compiles_no_thread_runs_a_model() -> None:
    policy: Any = Slow(fails_at="none")
    encoder = EncodeAhead(policy, "draw", compiles=True)
    calls: list[int] = []
    for _ in range(2):
        for place in ("draw", "requantize"):
            with encoder.beside(place, ["a"], stopwatch()):
                pass
            calls.append(len(policy.threads))
    assert calls == [0, 1, 2, 2], "beside the first requantizing, then beside drawing"


class Picky(FluxPolicy):
    """Cannot encode the prompts of the second step."""

    steps = 0

    def encode_alone(self, prompt: str) -> Conditioning:
        if threading.current_thread().name.startswith("encode"):
            raise ValueError("no such word\nand more")
        return super().encode_alone(prompt)


@pytest.mark.slow
def test_a_prompt_that_cannot_be_encoded_is_named_and_the_step_before_is_recorded(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "run", reward=RED, model={**tiny_config().model.model_dump(), "family": f"{__name__}:Picky"}
    )
    with pytest.raises(SolrlError, match=r"tiny_flux cannot encode the prompt '[^']+': no such word$"):
        train(config)
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
