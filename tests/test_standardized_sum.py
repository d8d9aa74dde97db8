"""Rewards of several parts: each is standardized within its group for training, and summed as it is for the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from solrl import ledger
from solrl.fidelity import spearman
from solrl.groups import group_advantages, select_contrastive, standardized_sum
from solrl.quant.trees import SyncReport
from solrl.recorder import step_fidelity
from solrl.rollout import ScoreBoard, call_parts, call_reward
from solrl.session import StepRecord
from solrl.train import train
from solrl.types import RewardFailed, Rollouts, Scores, SolrlError
from tests.parts import ALONE, tiny_config

torch.set_num_threads(1)


def rewards(groups: int = 3, candidates: int = 8, parts: int = 2) -> Tensor:
    return torch.randn(groups, candidates, parts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_each_part_counts_by_its_weight_whatever_its_scale_and_offset() -> None:
    values, present = rewards(), torch.ones(3, 8, dtype=torch.bool)
    signal = standardized_sum(values, (2.0, -1.0), present)
    moved = values * torch.tensor([1000.0, 0.5]) + torch.tensor([7.0, -3.0])
    torch.testing.assert_close(standardized_sum(moved, (2.0, -1.0), present), signal, atol=2e-3, rtol=0)
    red, blue = values.unbind(-1)

    def standard(part: Tensor) -> Tensor:
        return (part - part.mean(1, keepdim=True)) / (part.std(1, keepdim=True, unbiased=False) + 1e-4)

    torch.testing.assert_close(signal, 2 * standard(red) - standard(blue))


def test_a_missing_candidate_changes_no_other() -> None:
    values = rewards()
    present = torch.ones(3, 8, dtype=torch.bool)
    present[:, 7] = False
    signal = standardized_sum(values, (1.0, 1.0), present)
    torch.testing.assert_close(signal[:, :7], standardized_sum(values[:, :7], (1.0, 1.0), present[:, :7]))
    assert (signal[:, 7] == 0).all()


def test_a_part_without_spread_says_nothing() -> None:
    values = rewards()
    values[..., 1] = 0.25
    present = torch.ones(3, 8, dtype=torch.bool)
    torch.testing.assert_close(
        standardized_sum(values, (1.0, 5.0), present), standardized_sum(values[..., :1], (1.0,), present)
    )


class Parts:
    """Red, and a thousandth of blue."""

    name = "parts"
    range = (0.0, 2.0)
    description = "red and a little blue"
    part_weights = (1.0, 1.0)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.stack([images[:, 0].mean((1, 2)), images[:, 2].mean((1, 2)) / 1000], 1)


class Wrong(Parts):
    part_weights = (1.0,)  # type: ignore[assignment]


def test_a_board_sums_for_the_record_and_standardizes_for_training() -> None:
    images = torch.rand(8, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    board = ScoreBoard((2, 4), Parts.part_weights)
    for index in torch.arange(8).split(3):
        part = Rollouts(index, ["x"] * len(index), torch.zeros(len(index), 1), images[index])
        board.add(part, *call_parts(Parts(), part.images, part.prompts))
    scores = board.gather(ALONE)
    total, present = call_reward(Parts(), images, ["x"] * 8)
    assert torch.equal(scores.values.flatten(), total) and present.all() and scores.values.dtype == torch.float64
    expected = standardized_sum(Parts()(images, []).view(2, 4, 2), (1.0, 1.0), torch.ones(2, 4, dtype=torch.bool))
    torch.testing.assert_close(scores.signal, expected)
    assert not torch.equal(scores.signal.argsort(1), scores.values.argsort(1))


def test_another_number_of_parts_than_weights_fails() -> None:
    with pytest.raises(RewardFailed, match=r"shape \(2, 1\), got \(2, 2\)"):
        call_reward(Wrong(), torch.rand(2, 3, 2, 2), ["a", "b"])


def test_training_selects_and_learns_by_the_standardized_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import solrl.learner

    seen: list[Tensor] = []
    real = solrl.learner.Learner.update

    def watched(self: solrl.learner.Learner, data: solrl.learner.TrainingSet, *rest: object) -> dict[str, float]:
        seen.append(data.advantages)
        return real(self, data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(solrl.learner.Learner, "update", watched)
    options = {"weights": {"tests.test_standardized_sum:Red": 1.0, "tests.test_standardized_sum:FaintBlue": 1.0}}
    config = tiny_config(
        tmp_path / "run", reward={"name": "normalized_sum", "options": options},
        explore={"enabled": False}, train={"num_steps": 1},
    )  # fmt: skip
    folder = train(config)
    entries = ledger.read(folder, 1)
    plain = torch.tensor([entry.reward for entry in entries], dtype=torch.float64).view(3, 4)
    advantages = seen[0].view(3, 4)
    assert not torch.allclose(advantages, group_advantages(plain), atol=0.05)
    torch.testing.assert_close(
        advantages.double().std(unbiased=False), torch.tensor(1.0, dtype=torch.float64), atol=1e-3, rtol=0
    )
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/mean"] == pytest.approx(float(plain.mean())) and line["eval/normalized_sum/mean"] > 0


def stage(parts: Tensor) -> Scores:
    present = torch.ones(parts.shape[:2], dtype=torch.bool)
    return Scores(parts.sum(-1), present, {}, standardized_sum(parts, (1.0, 1.0), present))


def test_fidelity_is_that_of_the_order_which_selects() -> None:
    """The explorer sees the loud part exactly and the faint one not at all: half of what selects is noise."""
    loud, seen, true = torch.randn(3, 1, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proxy, whole = (stage(torch.stack([loud, part / 100], -1)) for part in (seen, true))
    selection = select_contrastive(proxy.signal, 24)
    kept = stage(torch.stack([loud, true / 100], -1)[:, selection.indices[0]])
    record = StepRecord(["x"], [], proxy, selection, kept, {0: whole}, {}, SyncReport(0, 0.0, 0), {}, 0, 0)
    found = step_fidelity(record)
    assert spearman(proxy.values, whole.values) > 0.99
    assert 0.7 > found["fidelity/full_spearman"] == pytest.approx(float(spearman(proxy.signal, whole.signal)))
    explored = proxy.signal.gather(1, selection.indices)
    assert 0.9 > found["fidelity/kept_spearman"] == pytest.approx(float(spearman(explored, kept.signal)))


class Red(Parts):
    part_weights = None  # type: ignore[assignment]

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return super().__call__(images, prompts)[:, 0]


class FaintBlue(Red):
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return Parts.__call__(self, images, prompts)[:, 1]


@pytest.mark.slow
def test_a_run_folder_that_names_code_inside_a_sum_is_not_replayed_unasked(tmp_path: Path) -> None:
    from solrl.replay import replay

    options = {"weights": {"tests.test_standardized_sum:Red": 1.0}}
    config = tiny_config(tmp_path / "run", reward={"name": "weighted_sum", "options": options}, train={"num_steps": 1})
    folder = train(config)
    with pytest.raises(SolrlError, match="runs code of its own"):
        replay(folder, 1, 0)
    assert replay(folder, 1, 0, trust_code=True)
