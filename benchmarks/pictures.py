"""What finished runs draw, side by side: one row a run, one column a prompt, the same seeds in all rows.

The images are those of the runs' own evaluations (`RUN/samples`), the first row those before training. No run is picked
by its images and no seed either: every prompt of the grid is shown with its first seed, unless --image says another.
Runs whose settings draw or score other images from equal weights are refused.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from PIL import Image

from benchmarks.common import parser, pyplot, save_figure, table, whole_number
from solrl.config import Config
from solrl.errors import UsageError
from solrl.images import load_grid
from solrl.settings import load_config

SHARED = (
    *("reward.name", "reward.options"),
    *("model.family", "model.path", "model.revision", "model.height", "model.width", "model.max_text_tokens"),
    *("model.guidance", "model.cfg_scale", "model.init_lora"),
    *("evaluate.seed", "evaluate.num_steps", "evaluate.solver"),
)
"""What equal weights draw, and the number below it, depend on; not on how many images a prompt was given."""


@dataclass(frozen=True)
class Row:
    """One set of weights."""

    label: str
    images: list[Image.Image]
    rewards: list[float]


def main(words: Sequence[str]) -> int:
    """Draw the picture, print the mean reward of each row."""
    options = parser("pictures", __doc__.split("\n")[0])
    options.add_argument("runs", nargs="+", metavar="LABEL=RUN", help="what a row is called, and a run folder")
    options.add_argument("--png", type=Path, required=True, metavar="FILE", help="where the picture goes")
    options.add_argument("--image", type=whole_number, default=1, help="which image of each prompt (1)")
    chosen = options.parse_args(list(words))
    prompts, rows, reward = read(chosen.runs, chosen.image - 1)
    draw(prompts, rows, chosen.png)
    cells = [[row.label, *(f"{value:.2f}" for value in row.rewards), f"{fmean(row.rewards):.3f}"] for row in rows]
    print(f"{reward} of image {chosen.image} of each prompt; the mean of {len(prompts)} images says little")
    print(table(["", *(str(number) for number in range(1, len(prompts) + 1)), "mean"], cells))
    return 0


def read(named: Sequence[str], image: int) -> tuple[list[str], list[Row], str]:
    """(prompts, the rows with the one before training first, the reward's name)."""
    rows: list[Row] = []
    prompts: list[str] = []
    first: tuple[str, Config] | None = None
    for word in named:
        label, sign, folder = word.partition("=")
        if not sign:
            raise UsageError(f"{word} is not LABEL=RUN, as in Sol-RL=runs/sol_rl")
        paths = sorted((Path(folder) / "samples").glob("step_*.png"))
        if len(paths) < 2:
            raise UsageError(
                f"{folder}/samples holds {len(paths)} image grids: one before training and one after needed"
            )
        config = load_config(Path(folder))
        first = first or (folder, config)
        require_shared(first, (folder, config))
        for name, path in ((f"{config.model.path}, before", paths[0]), (label, paths[-1])):
            grid = load_grid(path)
            if image >= len(grid.images[0]):
                raise UsageError(f"{path} has {len(grid.images[0])} images of a prompt: lower --image")
            if prompts and grid.prompts != prompts:
                raise UsageError(f"{path} shows other prompts than {named[0].partition('=')[2]}: compare runs of equal "
                                 "held-out prompts")  # fmt: skip
            prompts = grid.prompts
            if not rows or path != paths[0]:
                values = [float("nan") if row[image] is None else float(row[image] or 0.0) for row in grid.rewards]
                rows.append(Row(name, [row[image] for row in grid.images], values))
    return prompts, rows, config.reward.name


def require_shared(one: tuple[str, Config], other: tuple[str, Config]) -> None:
    """Raise UsageError where two runs (folder, settings) differ in ``SHARED``."""
    for name in SHARED:
        here, there = (attrgetter(name)(config) for _, config in (one, other))
        if here != there:
            raise UsageError(f"{name} is {here} in {one[0]} and {there} in {other[0]}: draw a picture for each, or "
                             "compare runs in which it is equal")  # fmt: skip


def draw(prompts: Sequence[str], rows: Sequence[Row], path: Path) -> None:
    """The picture is in ``path``."""
    plt = pyplot()
    figure, axes = plt.subplots(len(rows), len(prompts), figsize=(1.35 * len(prompts), 1.5 * len(rows) + 0.6),
                                squeeze=False)  # fmt: skip
    for row, places in zip(rows, axes, strict=True):
        for image, reward, place in zip(row.images, row.rewards, places, strict=True):
            place.imshow(image, interpolation="nearest")
            place.set(xticks=[], yticks=[])
            place.set_xlabel(f"{reward:.2f}", fontsize=8, labelpad=2)
        places[0].set_ylabel(row.label, fontsize=9)
    for prompt, place in zip(prompts, axes[0], strict=True):
        place.set_title(textwrap.fill(prompt, 17), fontsize=7.5, loc="left")
    figure.tight_layout(pad=0.4)
    save_figure(figure, path)
    plt.close(figure)
