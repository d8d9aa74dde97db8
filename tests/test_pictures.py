"""Finished runs side by side: the images of equal seeds, before training once, then a row a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import pictures
from benchmarks.__main__ import main
from solrl.images import save_grid
from solrl.settings import save_config
from tests.parts import tiny_config

PROMPTS = ["a red circle", "a blue square left of a green cross"]
COLOURS = {"base": (0, 0, 255), "plain": (255, 0, 0), "explored": (0, 255, 0)}


def a_run(folder: Path, colour: str, prompts: list[str] | None = None, **sections: dict[str, Any]) -> Path:
    """The grids of a run that ends with plain ``colour``; the second image of a prompt is black."""
    folder.mkdir()
    save_config(tiny_config(**sections), folder / "config.toml")
    for step, shown in ((0, "base"), (8, colour)):
        pixels = torch.tensor(COLOURS[shown]).div(255).view(3, 1, 1).expand(3, 8, 8)
        images = torch.stack([pixels, torch.zeros_like(pixels)]).expand(2, -1, -1, -1, -1)
        rewards = torch.tensor([[0.1, 0.9], [0.3, 0.9]]) * (1 + step)
        save_grid(folder / "samples" / f"step_{step:06d}.png", images, prompts or PROMPTS, rewards=rewards)
    return folder


def test_rows_are_the_weights_before_and_those_of_every_run_at_equal_seeds(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, name) for name in ("plain", "explored")]
    prompts, rows, _ = pictures.read([f"one={runs[0]}", f"two={runs[1]}"], image=0)
    assert prompts == PROMPTS
    assert [row.label for row in rows] == ["tiny_flux, before", "one", "two"]
    assert [row.images[1].getpixel((4, 4)) for row in rows] == [COLOURS["base"], COLOURS["plain"], COLOURS["explored"]]
    assert rows[2].rewards == pytest.approx([0.9, 2.7])


def test_the_picture_is_drawn_and_the_mean_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", "plain")
    assert main(["pictures", f"mine={run}", "--png", str(tmp_path / "out.png")]) == 0
    with Image.open(tmp_path / "out.png") as picture:
        assert (255, 0, 0) in {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
    assert "mine               0.90  2.70  1.800" in capsys.readouterr().out


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = a_run(tmp_path / "run", "plain"), a_run(tmp_path / "other", "plain", ["a cyan cross", "a red square"])
    for words, line in (
        ([f"a={run}", f"b={other}"], "shows other prompts"),
        ([f"a={run}", "--image", "3"], "lower --image"),
        ([str(run)], "is not LABEL=RUN"),
        ([f"a={tmp_path}"], "holds 0 image grids"),
    ):
        assert main(["pictures", *words, "--png", str(tmp_path / "out.png")]) == 2
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value", "usual"),
    [
        ("reward.name", "clip_score", "shapes"),
        ("reward.options", {"grid": 2}, {}),
        ("model.path", "elsewhere", "tiny_flux"),
        ("model.height", 64, 32),
        ("model.width", 64, 32),
        ("model.guidance", 3.5, 1.0),
        ("evaluate.seed", 7, 1234),
        ("evaluate.num_steps", 4, 2),
        ("evaluate.solver", "dpm2", "euler"),
    ],
)
def test_runs_that_draw_or_score_in_other_ways_make_no_picture(
    setting: str, value: Any, usual: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, name = setting.split(".")
    run, other = a_run(tmp_path / "run", "plain"), a_run(tmp_path / "other", "plain", **{section: {name: value}})
    png = tmp_path / "out.png"
    assert main(["pictures", f"a={run}", f"b={other}", "--png", str(png)]) == 2
    error = capsys.readouterr().err
    assert f"{setting} is {usual} in {run} and {value} in {other}: " in error
    assert error.count("\n") == 1 and not png.exists()


def test_runs_may_train_in_other_ways(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "plain")
    other = a_run(tmp_path / "other", "explored", explore={"enabled": False}, evaluate={"images_per_prompt": 4})
    assert len(pictures.read([f"one={run}", f"two={other}"], image=0)[1]) == 3
