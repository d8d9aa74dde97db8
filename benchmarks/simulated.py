"""What the simulated benchmarks share: workloads by name, deployments of one, and the words that say what numbers
are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from solrl.errors import UsageError
from solrl.runtime.simulator import Deployment, Result, simulate
from solrl.runtime.strategies import colocated, disaggregated, rollout_reward_colocated, shiftable
from solrl.runtime.workload import Sample, Setting, load_setting

FOLDER = Path(__file__).parent / "workloads"
LABEL = "SIMULATED from the assumptions in benchmarks/workloads; no GPU was used. paper: measured there on H20 GPUs"
GROUPS = (
    "g1_qwen2.5-1.5b_glm-z1-9b", "g2_qwen2.5-7b_qwen3-30b-a3b", "g3_qwen2.5-32b_qwen3-30b-a3b",
    "g4_qwen2.5-72b_qwen3.5-122b-a10b",
)  # fmt: skip
SHORT = {"colocated": "coloc", "disaggregated": "disagg", "rollout-reward colocated": "RR", "shiftable": "shift"}


def workload_file(text: str) -> Path:
    """An option's value: a name from benchmarks/workloads, or a TOML file."""
    shipped = FOLDER / f"{text}.toml"
    path = shipped if shipped.is_file() else Path(text)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        raise UsageError(f"no workload {text!r}: neither a TOML file nor one of {names}")
    return path


def add_set_option(options_of: argparse.ArgumentParser) -> None:
    """--set section.key=value, for any assumption."""
    options_of.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another assumption, e.g. batch.num_groups=64"
    )


def setting_of(path: Path, changes: Sequence[str] = ()) -> Setting:
    """The workload with ``KEY=VALUE`` put over it."""
    setting = load_setting(path)
    values = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY=VALUE, got {change!r}")
        values[key.strip()] = value.strip()
    return setting.with_values(values) if values else setting


@dataclass(frozen=True)
class Tuned:
    """A fixed split and what it reaches."""

    deployment: Deployment
    result: Result


def four(setting: Setting) -> list[Deployment]:
    """The paper's deployments, with the GPUs of its Table 4."""
    split, shared = setting.deployments.disaggregated, setting.deployments.shared_train
    if split is None or shared is None:
        raise UsageError(f"{setting.name} gives no deployments.disaggregated and deployments.shared_train")
    return [
        colocated(setting), disaggregated(setting, split), rollout_reward_colocated(setting, shared), shiftable(setting)
    ]  # fmt: skip


def tuned_split(setting: Setting, sample: Sample, grain: int) -> Tuned:
    """The disaggregated split of the highest throughput in this simulator, by descent over splits of ``grain`` GPUs."""
    gpus = setting.cluster.gpus
    known: dict[tuple[int, int, int], Tuned] = {}

    def value(split: tuple[int, int, int]) -> float:
        if min(split) < grain or split[0] < setting.explore.gpus or split[1] < setting.score.gpus:
            return 0.0
        if split not in known:
            deployment = disaggregated(setting, split)
            known[split] = Tuned(deployment, simulate(setting, sample, deployment))
        return known[split].result.throughput

    start = setting.deployments.disaggregated or (gpus - 2 * (gpus // 3), gpus // 3, gpus // 3)
    here = (gpus - 2 * (gpus // 3 // grain * grain), gpus // 3 // grain * grain, gpus // 3 // grain * grain)
    here = max((start, here), key=value)
    step = max(grain, gpus // 4 // grain * grain)
    while True:
        moves = [
            (here[0] + a * step, here[1] + b * step, here[2] + c * step)
            for a, b, c in ((1, -1, 0), (-1, 1, 0), (1, 0, -1), (-1, 0, 1), (0, 1, -1), (0, -1, 1))
        ]
        best = max(moves, key=value)
        if value(best) > value(here):
            here = best
        elif step > grain:
            step = max(grain, step // 2 // grain * grain)
        else:
            return known[here]
