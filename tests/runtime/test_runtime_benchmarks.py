"""The benchmarks of the runtime at tiny settings: labels, widths, JSON, and the grid of ``auto``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from benchmarks import auto_regret, planner_time, store_bandwidth
from benchmarks.__main__ import main
from benchmarks.common import WIDTH
from benchmarks.deployments import scaled
from benchmarks.simulated import GROUPS, setting_of, tuned_split, workload_file
from solrl.runtime.simulator import simulate
from solrl.runtime.strategies import disaggregated
from solrl.runtime.workload import draw
from tests.runtime.parts import tiny_setting


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(tiny_setting().model_dump(exclude_none=True)))
    return str(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deployments", ["--workloads"]),
        ("strategies", ["--workloads"]),
        ("horizon", ["--only-horizon", "--workload"]),
        ("headroom", ["--workload"]),
        ("modes", ["--workloads"]),
    ],
)
def test_simulated_numbers_are_labelled_fit_the_page_and_are_in_the_file(
    name: str, words: list[str], tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main([name, *words, tiny, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "SIMULATED" in text
    assert "no GPU was used" in text
    table = [line for line in text.splitlines() if not line.startswith(("hardware", "wrote", "SIMULATED", "paper"))]
    assert max(map(len, table)) <= WIDTH + 10
    assert json.loads(out.read_text())["benchmark"] == name


def test_a_trace_of_a_run_and_lengths_from_a_file_and_a_picture(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, trace, picture = tmp_path / "lengths.jsonl", tmp_path / "trace.jsonl", tmp_path / "a.png"
    lengths.write_text('{"explore": 100, "score": 50}\n{"explore": 300, "score": 900}\n')
    words = ["deployments", "--workloads", tiny, "--no-tuning", "--lengths", str(lengths), "--trace", str(trace)]
    assert main([*words, "--png", str(picture)]) == 0
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {"train", "trained", "shift", "decision"} <= {event["event"] for event in events}
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_the_tuned_split_is_at_least_as_fast_as_the_published_one_and_as_any_other() -> None:
    setting = tiny_setting()
    sample = draw(setting, 0)
    tuned = tuned_split(setting, sample, 2)
    for split in ((2, 2, 4), (2, 4, 2), (4, 2, 2)):
        assert tuned.result.throughput >= simulate(setting, sample, disaggregated(setting, split)).throughput
    assert sum(tuned.result.split) == 8


def test_a_cluster_of_another_size_keeps_the_proportions() -> None:
    base = setting_of(workload_file(GROUPS[1]))
    larger = scaled(base, 128)
    assert larger.deployments.disaggregated == (48, 48, 32)
    assert (larger.batch.num_groups, larger.train.gpus) == (1024, 32)


def test_the_planner_is_timed_on_the_committed_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = planner_time.read_loads(planner_time.LOADS)
    assert {128, 1024} <= set(loads)
    assert all(len(row) == 24 for roles in loads.values() for rows in roles.values() for row in rows)
    out = tmp_path / "out.json"
    assert main(["planner_time", "--gpus", "16,32", "--repeats", "1", "--json", str(out)]) == 0
    first = json.loads(out.read_text())["timings"][0]
    assert first["same"] is True
    assert main(["planner_time", "--gpus", "17"]) == 2
    assert "no 17 GPUs" in capsys.readouterr().err


def test_moving_jobs_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migration", "--gpus", "16", "--repeats", "1", "--jobs", "4"]) == 0
    assert "re-prefill" in capsys.readouterr().out


def test_the_grid_of_auto_has_at_least_200_different_workloads() -> None:
    grid = list(auto_regret.grid())
    assert len(grid) >= 200
    assert len({name for name, _ in grid}) == len({str(setting) for _, setting in grid}) == len(grid)


def test_errors_of_coefficients_are_twenty_percent_either_way() -> None:
    setting = next(setting for _, setting in auto_regret.grid())
    guess = auto_regret.disturbed(setting, 5)
    ratios = [getattr(guess.explore, name) / getattr(setting.explore, name) for name in ("b_s", "c_s", "d_s")]
    ratios += [getattr(guess.score, name) / getattr(setting.score, name) for name in ("a_s", "b_s", "c_s", "d_s")]
    assert {round(ratio, 6) for ratio in ratios} == {0.8, 1.2}


def test_regret_is_never_negative_and_parts_are_put_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        auto_regret, "grid", lambda: [("a", tiny_setting()), ("b", tiny_setting(**{"score.c_s": 1e-3}))]
    )
    files = [tmp_path / f"{number}.json" for number in (0, 1)]
    for number, file in enumerate(files):
        main(["auto_regret", "--every", "2", "--offset", str(number), "--json", str(file)])
    main(["auto_regret", "--from", *map(str, files)])
    assert "2 workloads" in capsys.readouterr().out
    for file in files:
        (one,) = json.loads(file.read_text())["scores"]
        assert one["regret"] >= 0


@pytest.mark.parametrize("change", ["batch.num_groups", "nothing.here=3", "batch.num_groups=none"])
def test_a_wrong_assumption_on_the_command_line_is_bad_usage(
    change: str, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["headroom", "--workload", tiny, "--set", change]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_store_bandwidth_measures_all_ways_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["store_bandwidth", "--mib", "1", "--adapters", "2", "--weights", "3", "--repeats", "4"]
    words += ["--networks", "gloo", "--json", str(out)]
    assert main(words) in (0, 1)  # at this size the targets mean nothing
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if not line.startswith(("hardware", "wrote"))) <= WIDTH
    found = json.loads(out.read_text())
    assert [(copies["name"], copies["nbytes"]) for copies in found["copies"]] == [("base", 2**20), ("adapter", 786432)]
    for copies in found["copies"]:
        assert set(copies["speeds"]) == {"memcpy", "read", "write"}
        assert all(len(speed["wall"]) == len(speed["cpu"]) == 4 for speed in copies["speeds"].values())
        assert f"{copies['name']}: read at {copies['share']['read']:.0%} of memcpy, target 90%" in text
    assert [(one["network"], one["name"], len(one["pull"]), len(one["memcpy"])) for one in found["pulls"]] == [
        ("gloo", "base", 4, 4),
        ("gloo", "adapter", 4, 4),
    ]
    assert found["planning"]["transfers"] == 3 * 2 * 4


def test_a_share_of_memcpy_is_that_of_bandwidths_and_a_missed_target_is_said() -> None:
    slow = store_bandwidth.Speed([9.0] * 3, [2.0] * 3)
    fast = store_bandwidth.Speed([1.0] * 3, [1.0] * 3)
    copies = store_bandwidth.Copies("base", 1, 2**30, {"memcpy": fast, "read": slow, "write": fast})
    assert (copies.share("read"), copies.share("write")) == (0.5, 1.0)
    planned = store_bandwidth.Planning(1, 8, 0.01, 2e-4)
    assert [kept for _, kept in store_bandwidth.targets([copies], planned)] == [False, False]
    text = store_bandwidth.report([copies], [], planned)
    assert "read at 50% of memcpy, target 90%: MISSED" in text
    assert "200.0 us, target 100 us: MISSED" in text
