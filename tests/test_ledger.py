"""The ledger: every candidate, written whole and read back exactly."""

import dataclasses
from pathlib import Path

import pytest
import torch

from solrl import ledger
from solrl.config import ExploreConfig
from solrl.groups import group_seeds, select_contrastive
from solrl.types import Scores, SolrlError

PROMPTS = ["a red circle", 'a "quoted", green\nsquare']


def entries(step: int = 1, audited: int | None = None) -> list[ledger.LedgerEntry]:
    """Two groups of six candidates, four of each kept; candidate (0, 5) has no proxy reward."""
    proxy = torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.4, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    present = torch.ones(2, 6, dtype=torch.bool)
    present[0, 5] = False
    selection = select_contrastive(proxy, 4, present)
    rewards = Scores(10 + torch.arange(8, dtype=torch.float64).view(2, 4), torch.ones(2, 4, dtype=torch.bool), {})
    audits = {}
    if audited is not None:
        audits[audited] = Scores(torch.arange(6, dtype=torch.float64)[None] / 3, torch.ones(1, 6, dtype=torch.bool), {})
    return ledger.step_entries(
        PROMPTS,
        group_seeds(7, step, 2, 6),
        ExploreConfig(group_size=6, num_steps=3),
        precision="emulated_nvfp4",
        policy_version=step - 1,
        proxy=Scores(proxy, present, {}),
        selection=selection,
        rewards=rewards,
        audits=audits,
    )


def test_a_step_reads_back_exactly(tmp_path: Path) -> None:
    written = entries(step=3, audited=1)
    path = ledger.write(tmp_path, 3, written)
    assert path == tmp_path / "ledger" / "step_000003.jsonl"
    assert ledger.read(tmp_path, 3) == written
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert len(path.read_text().splitlines()) == 12


def test_entries_say_who_was_kept_missing_and_regenerated() -> None:
    table = {(e.prompt_index, e.candidate): e for e in entries(step=2)}
    assert [e.candidate for e in table.values() if e.kept and e.prompt_index == 0] == [0, 1, 3, 4]
    assert table[0, 5].proxy_reward is None and not table[0, 5].kept
    assert table[0, 1].proxy_reward == 0.5 and table[0, 1].reward == 10  # the best of group 0 comes first
    assert table[0, 0].reward == 13 and table[0, 2].reward is None
    assert {e.policy_version for e in table.values()} == {1}
    assert table[1, 0].seed == group_seeds(7, 2, 2, 6)[1][0]
    assert (table[1, 0].precision, table[1, 0].num_steps, table[1, 0].solver) == ("emulated_nvfp4", 3, "dpm2")


def test_an_audited_group_has_every_reward_and_keeps_the_kept_ones() -> None:
    plain, audited = entries(), entries(audited=1)
    assert plain[:6] == audited[:6]
    assert [e.kept for e in plain] == [e.kept for e in audited]
    assert [e.reward for e in audited[6:]] == [10 + 4, 10 + 5, 2 / 3, 3 / 3, 10 + 6, 10 + 7]


def test_a_seed_used_twice_in_a_step_is_a_failure_that_names_both_candidates(tmp_path: Path) -> None:
    rows = entries()
    rows[9] = dataclasses.replace(rows[9], seed=rows[1].seed)
    with pytest.raises(SolrlError, match=r"\(0, 1\) and \(1, 3\) share seed"):
        ledger.write(tmp_path, 1, rows)
    assert not (tmp_path / "ledger").exists()


def test_nan_never_reaches_the_ledger(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        ledger.write(tmp_path, 1, [dataclasses.replace(entries()[0], reward=float("nan"))])


def test_truncation_removes_later_steps_and_half_written_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 11):
        ledger.write(tmp_path, step, entries(step))
    (tmp_path / "ledger" / ".step_000004.jsonl.tmp").write_text('{"prompt": "a r')
    ledger.truncate(tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "ledger").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    ledger.truncate(tmp_path / "nowhere", 2)


def test_a_missing_or_broken_step_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(SolrlError, match="is it a run folder"):
        ledger.read(tmp_path, 1)
    for step in (1, 2):
        ledger.write(tmp_path, step, entries(step))
    with pytest.raises(SolrlError, match="steps 1 to 2"):
        ledger.read(tmp_path, 9)
    ledger.ledger_path(tmp_path, 2).write_text('{"prompt": "a"}\n')
    with pytest.raises(SolrlError, match=r"step_000002.jsonl is not a ledger"):
        ledger.read(tmp_path, 2)
