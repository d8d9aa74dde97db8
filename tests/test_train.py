"""The loop as a whole, on the embedded model: what it trains on, its baselines, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl import ledger
from solrl.checkpoint import newest_checkpoint
from solrl.config import Config
from solrl.groups import group_advantages
from solrl.learner import Learner, TrainingSet
from solrl.signals import SignalStop
from solrl.train import train
from solrl.types import Interrupted, SolrlError
from tests.parts import Redness, tiny_config

RED = {"name": "tests.parts:Redness"}


class Broken:
    """NaN from the call number ``after`` on."""

    name, range, description = "broken", (0.0, 1.0), "test"

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.left -= 1
        value = Redness()(images, prompts)
        return value if self.left >= 0 else value * float("nan")


def updates(monkeypatch: pytest.MonkeyPatch) -> list[TrainingSet]:
    """What reaches Learner.update, which still does its work."""
    seen: list[TrainingSet] = []
    real = Learner.update

    def spy(self: Learner, data: TrainingSet, *rest: object) -> dict[str, float]:
        seen.append(data)
        return real(self, data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "update", spy)
    return seen


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_only_regenerated_samples_and_their_rewards_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = updates(monkeypatch)
    folder = train(tiny_config(tmp_path / "run", train={"num_steps": 1}, reward=RED))
    entries = ledger.read(folder, 1)
    kept = {entry.seed: entry for entry in entries if entry.kept}
    assert len(entries) == 18 and len(kept) == 12 and set(seen[0].seeds) == set(kept)
    assert all(entry.reward is None for entry in entries if not entry.kept)
    rewards = torch.tensor([[kept[seed].reward for seed in seen[0].seeds]], dtype=torch.float64).view(3, 4)
    proxies = torch.tensor([[kept[seed].proxy_reward for seed in seen[0].seeds]], dtype=torch.float64).view(3, 4)
    assert torch.equal(seen[0].advantages, group_advantages(rewards).flatten())
    assert not torch.equal(rewards, proxies)
    for group in range(3):  # the best and the worst half of what was explored
        scores = sorted(entry.proxy_reward or 0.0 for entry in entries if entry.prompt_index == group)
        assert sorted(proxies[group].tolist()) == scores[:2] + scores[-2:]


@pytest.mark.parametrize(
    ("sections", "explored", "kept"),
    [
        ({"explore": {"enabled": False}}, 0, 12),
        ({"regenerate": {"enabled": False}}, 18, 12),
        ({"regenerate": {"enabled": False}, "explore": {"precision": "emulated_nvfp4"}}, 18, 12),
    ],
    ids=["plain NFT", "naive scaling", "naive quantized"],
)
def test_baselines_are_settings_of_the_same_loop(
    tmp_path: Path, sections: dict[str, dict[str, object]], explored: int, kept: int
) -> None:
    folder = train(tiny_config(tmp_path / "run", train={"num_steps": 1}, reward=RED, **sections))
    entries = ledger.read(folder, 1)
    assert sum(entry.proxy_reward is not None for entry in entries) == explored
    assert sum(entry.kept for entry in entries) == kept
    last = metrics(folder)[-1]
    assert last["health/policy_change"] > 0 and last["step"] == 1 and "reward/mean" in last
    if "explore" not in sections:
        assert all(entry.reward == entry.proxy_reward for entry in entries if entry.kept)


def test_a_reward_that_turns_nan_stops_and_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    # one call before training, then 5 explored, 3 regenerated micro-batches and the audit: step 2 fails while exploring
    bad = {"name": "tests.test_train:Broken", "options": {"after": 12}}
    with pytest.raises(SolrlError, match="returned nan"):
        train(tiny_config(tmp_path / "run", reward=bad))
    assert [row["step"] for row in metrics(tmp_path / "run")][-1] == 1
    good = {"name": "tests.test_train:Broken", "options": {"after": 1000}}
    with pytest.raises(SolrlError, match=r"reward\.options"):  # another reward would be another run
        train(tiny_config(tmp_path / "run", reward=good), resume=True)


def blind(folder: Path, calls: list[int], num_steps: int = 1, **sections: Any) -> Config:
    """Steps on one prompt. Calls: the evaluation; two explored micro-batches and one regenerated; the evaluation."""
    reward = {"name": "tests.parts:Blind", "options": {"blind": calls}} | sections.pop("reward", {})
    return tiny_config(folder, reward=reward, train={"num_steps": num_steps}, prompts={"per_step": 1}, **sections)


@pytest.mark.parametrize(
    ("calls", "sections"), [([4], {}), ([2], {"explore": {"enabled": False}})], ids=["regenerated", "not explored"]
)
def test_a_step_without_any_score_teaches_nothing_and_is_allowed_or_named(
    tmp_path: Path, calls: list[int], sections: dict[str, Any]
) -> None:
    with pytest.raises(SolrlError, match=r"^step 1: 4 of \d+ scores are missing .* raise reward.max_missing_share"):
        train(blind(tmp_path / "named", calls, **sections))
    last = metrics(train(blind(tmp_path / "run", calls, reward={"max_missing_share": 1.0}, **sections)))[-1]
    assert last["health/trained_groups"] == last["health/zero_std_groups"] == 0 and last["health/skipped_groups"] == 1
    assert "grad_norm" not in last and "reward/mean" not in last


def test_an_evaluation_without_any_score_is_named_and_the_steps_before_it_are_saved(tmp_path: Path) -> None:
    line = r"^reward tests.parts:Blind could judge none of the 4 held-out images: look at why [^\n]*reward\.name[^\n]*$"
    with pytest.raises(SolrlError, match=line):
        train(blind(tmp_path / "first", [1]))
    with pytest.raises(SolrlError, match=line):
        train(blind(tmp_path / "last", [8], num_steps=2, output={"audit_every_steps": 0}))
    newest = newest_checkpoint(tmp_path / "last")
    assert newest is not None and newest.step == 1


def test_a_failure_before_the_first_step_lets_go_of_the_folder(tmp_path: Path) -> None:
    broken = {"name": "tests.test_train:Broken", "options": {"after": 0}}
    with pytest.raises(SolrlError, match="returned nan"):
        train(tiny_config(tmp_path / "run", reward=broken))
    assert train(tiny_config(tmp_path / "run", reward=RED, train={"num_steps": 1})) == tmp_path / "run"


def test_a_signal_during_the_evaluation_takes_the_update_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 ends with an evaluation; stopped there, the checkpoint is step 2's and the rest repeats bit for bit."""
    whole = train(tiny_config(tmp_path / "whole", reward=RED))
    real = SignalStop.__call__
    asked = []

    def stop_in_the_last_evaluation(self: SignalStop) -> None:
        asked.append((tmp_path / "cut" / "ledger" / "step_000002.jsonl").exists())
        if sum(asked) == 5 + 3 + 6 + 1:  # step 3 has explored, regenerated and trained: this is its evaluation
            raise Interrupted("stopped by a test")
        real(self)

    monkeypatch.setattr(SignalStop, "__call__", stop_in_the_last_evaluation)
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path / "cut", reward=RED))
    monkeypatch.setattr(SignalStop, "__call__", real)
    assert metrics(tmp_path / "cut")[-1]["step"] == 2
    cut = train(tiny_config(tmp_path / "cut", reward=RED), resume=True)

    def timeless(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(folder)]

    assert timeless(cut) == timeless(whole)
    one, two = (f / "checkpoints" / "step_000003" / "state.safetensors" for f in (whole, cut))
    assert one.read_bytes() == two.read_bytes()


def test_on_step_sees_what_is_written(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    folder = train(tiny_config(tmp_path / "run", train={"num_steps": 2}, reward=RED), on_step=seen.append)
    assert seen == metrics(folder)[1:]
    assert metrics(folder)[2].keys() >= {"fidelity/full_spearman", "fidelity/kept_kendall", "health/old_distance"}
