"""Runs in modes with roles beside the colocated one: what is trained, what the table says, the check of equality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.alignment.study import Cell
from benchmarks.convergence import Trained, likenesses, main, recorded, report, wanted
from benchmarks.likeness import likeness
from solrl.errors import UsageError
from solrl.settings import save_config
from solrl.train import train
from tests.children import in_children
from tests.families import save_random_pipeline
from tests.test_pipeline import run_config

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base.toml, and in runs/ every run of one seed of a FLUX of a few thousand parameters, by two processes each."""
    folder = tmp_path_factory.mktemp("convergence")
    path = save_random_pipeline("flux", folder / "flux")
    model = {"family": "flux", "path": str(path), "height": 16, "width": 16, "guidance": 1.5}
    save_config(run_config(folder / "unused", "colocated", model=model), folder / "base.toml")
    for run in wanted(folder / "runs", str(folder / "base.toml"), STEPS, 1, [1], {}):
        assert in_children(2, lambda rank, run=run: train(run.config)) == [(0, "")] * 2  # type: ignore[misc]
    return folder


def words(folder: Path) -> list[str]:
    return [str(folder / "runs"), "--config", str(folder / "base.toml"), "--steps", str(STEPS), "--seeds", "1",
            "--staleness", "1", "--no-train"]  # fmt: skip


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of the first table."""
    lines = text.split("held-out")[1].split("\n\n")[0].splitlines()[3:]
    return {line[:11].strip(): line[11:].split() for line in lines}


@pytest.mark.slow
def test_shiftable_runs_are_colocated_ones_and_stale_ones_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = folder / "convergence.json"
    assert main([*words(folder), "--json", str(written), "--png", str(folder / "convergence.png")]) == 0
    said = capsys.readouterr().out
    assert "seed 0: shiftable IS colocated bit for bit: 18 of 18 candidates" in said
    found = rows(said)
    assert list(found) == ["colocated", "shiftable", "staleness 1"]
    assert found["shiftable"] == [*found["colocated"], "+0.0000"]
    kept = json.loads(written.read_text())
    found_in = {run["cell"]["arm"]: (run["lag"], run["shifts"]) for run in kept["runs"]}
    assert {arm: lag for arm, (lag, _) in found_in.items()} == {"colocated": 0, "shiftable": 0, "staleness 1": 0.5}
    assert [arm for arm, (_, shifts) in found_in.items() if not shifts] == ["colocated"]
    assert (folder / "convergence.png").stat().st_size > 10_000
    assert not likeness(folder / "runs/staleness 1/seed_0", folder / "runs/colocated/seed_0", STEPS).is_equal


@pytest.mark.slow
def test_a_candidate_that_differs_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = folder / "runs" / "shiftable" / "seed_0" / "ledger" / "step_000002.jsonl"
    whole = ledger.read_text()
    try:
        ledger.write_text(whole.replace('"kept": true', '"kept": false', 1))
        assert main(words(folder)) == 1
        assert "shiftable IS NOT colocated bit for bit: 17 of 18 candidates" in capsys.readouterr().out
        ledger.write_text("".join(whole.splitlines(keepends=True)[:-1]))
        assert main(words(folder)) == 1
    finally:
        ledger.write_text(whole)


def test_all_arms_of_a_seed_come_first_and_the_equal_one_last_and_once(tmp_path: Path) -> None:
    every = wanted(tmp_path, "tiny_flux", 8, 2, [1, 2], {})
    assert [(run.arm, run.seed) for run in every] == [
        *((arm, seed) for seed in (0, 1) for arm in ("staleness 1", "staleness 2", "colocated")), ("shiftable", 0)
    ]  # fmt: skip
    modes = {run.arm: (run.config.runtime.mode, run.config.runtime.staleness) for run in every}
    assert modes == {
        "colocated": ("colocated", 0), "shiftable": ("shiftable", 0),
        "staleness 1": ("shiftable", 1), "staleness 2": ("shiftable", 2),
    }  # fmt: skip
    assert {(run.config.train.num_steps, run.config.evaluate.every_steps) for run in every} == {(8, 2)}
    assert likenesses([], 8) == {}


def test_differences_are_taken_seed_by_seed() -> None:
    """Seeds differ far more than arms, and the second seed has no colocated run."""

    def trained(arm: str, seed: int, final: float) -> Trained:
        curve = [(0, 0.3, 0.02), (8, final, 0.02)]
        return Trained(Cell("shapes", arm, seed, "", {"shapes": curve}, {}, [0.0, 9.0], "a machine"), [1.0, 3.0], 0, 0)

    base = {("colocated", seed): trained("colocated", seed, 0.4 + 0.1 * seed) for seed in (0, 1)}
    stale = {("staleness 1", seed): trained("staleness 1", seed, 0.39 + 0.1 * seed) for seed in (0, 1, 2)}
    line = rows(report(base | stale, {}))["staleness 1"]
    assert line[0] == "3" and " ".join(line[3:]) == "-0.0100 [-0.0100, -0.0100] *"


def test_what_alignment_trained_with_the_same_settings_stands_for_colocated_runs() -> None:
    """Its plain two-stage runs, and none of another number of steps."""
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "alignment.json"
    found = recorded(results, wanted(Path("runs"), "tiny_flux", 8, 3, [1], {}))
    assert set(found) == {("colocated", seed) for seed in range(3)} and found["colocated", 0].cell.last_step == 8
    assert not recorded(results, wanted(Path("runs"), "tiny_flux", 16, 3, [1], {}))


def test_one_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--processes 1"):
        main([str(tmp_path), "--processes", "1"])
