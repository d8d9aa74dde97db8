"""The table of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learning_curve import main
from solrl.environment import environment
from solrl.errors import UsageError
from solrl.settings import save_config
from tests.parts import CPU, tiny_config


def finished(folder: Path, means: dict[int, float]) -> Path:
    folder.mkdir()
    save_config(tiny_config(folder, evaluate={"rewards": ["clip_score"]}, seed=7), folder / "config.toml")  # type: ignore[arg-type]
    (folder / "environment.json").write_text(json.dumps(environment(CPU, "")))
    rows = [
        {"step": step, "eval/shapes/mean": mean, "eval/shapes/stderr": 0.01, "eval/clip_score/mean": 0.5}
        for step, mean in means.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_gain_is_relative_to_the_evaluation_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path / "run", {0: 0.4, 8: 0.5, 16: 0.3})
    assert main([str(run), "--json", str(tmp_path / "out.json")]) == 0
    assert "-25.0%" in capsys.readouterr().out
    assert main([str(run), "--at", "10"]) == 0
    printed = capsys.readouterr().out
    assert "+25.0%" in printed and "clip_score 0.500 -> 0.500" in printed
    curve = json.loads((tmp_path / "out.json").read_text())["runs"][0]["curve"]
    assert [point["mean"] for point in curve] == [0.4, 0.5, 0.3]


def test_a_run_without_a_second_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 evaluations"):
        main([str(finished(tmp_path / "run", {0: 0.4}))])
