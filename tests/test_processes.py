"""The same run on 1, 2, 3 and 4 real processes has the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from solrl.settings import save_config
from tests.parts import tiny_config

ROOT = Path(__file__).resolve().parent.parent

# A reward whose first prompt of every step has no spread: that group is skipped.
REWARD = """
import torch

class Picky:
    name, range, description = "picky", (0.0, 1.0), "mean red, but equal for everything that starts with the given word"

    def __init__(self, first: str = "") -> None:
        self.first = first

    def __call__(self, images, prompts):
        red = images[:, 0].mean((1, 2))
        alike = torch.tensor([bool(self.first) and p.startswith(self.first) for p in prompts])
        return torch.where(alike, torch.full_like(red, 0.5), red)
"""


def launch(folder: Path, num_processes: int, **sections: object) -> Path:
    """Run scripts/train.py under accelerate on ``num_processes`` processes; returns the run folder."""
    (folder / "picky.py").write_text(REWARD)
    run = folder / f"on_{num_processes}"
    config = tiny_config(run, **sections)  # type: ignore[arg-type]
    path = folder / f"on_{num_processes}.toml"
    save_config(config, path)
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "rewards"), str(folder)]),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_machines", "1", "--num_processes", str(num_processes), "--main_process_port", "0"]
    command += ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    command += [str(ROOT / "scripts" / "train.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / f"on_{num_processes}.log").write_text(done.stderr)
    return run


def kept_and_rewards(run: Path) -> list[tuple[object, ...]]:
    rows = []
    for file in sorted((run / "ledger").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            rows.append((file.name, entry["seed"], entry["kept"], entry["proxy_reward"], entry["reward"]))
    return rows


def final_state(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step_*"))
    return load_file(newest / "state.safetensors")


def same_bits(one: Path, other: Path) -> None:
    assert kept_and_rewards(one) == kept_and_rewards(other)
    mine, theirs = final_state(one), final_state(other)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, different[:3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["full", "emulated_nvfp4"])
def test_any_number_of_processes_gives_the_same_seeds_and_weights(tmp_path: Path, precision: str) -> None:
    """12 kept samples are 3 micro-batches of 4: on 4 processes one rank has nothing to redraw or train."""
    counts = (1, 2, 3, 4) if precision == "full" else (1, 2)
    sections = {"explore": {"precision": precision}, "train": {"num_steps": 2}, "reward": {"name": "picky:Picky"}}
    runs = {count: launch(tmp_path, count, **sections) for count in counts}
    for count in counts[1:]:
        same_bits(runs[1], runs[count])


@pytest.mark.slow
def test_a_skipped_group_changes_nothing_about_that(tmp_path: Path) -> None:
    from solrl.prompts import load_prompts, step_prompts

    first = step_prompts(load_prompts("shapes_train"), 0, 1, 3)[1]
    sections = {"train": {"num_steps": 2}, "reward": {"name": "picky:Picky", "options": {"first": first}}}
    one, two = (launch(tmp_path, count, **sections) for count in (1, 2))
    same_bits(one, two)
    skipped = json.loads((one / "metrics.jsonl").read_text().splitlines()[1])["health/skipped_groups"]
    assert skipped == 1
    assert f"step 1 skips {first!r}: all scores equal 0.5" in (tmp_path / "on_2.log").read_text()


@pytest.mark.slow
def test_naive_scaling_agrees_as_well(tmp_path: Path) -> None:
    """Without regeneration the kept samples lie on other ranks than the ones that train on them."""
    sections = {"regenerate": {"enabled": False}, "train": {"num_steps": 2}, "reward": {"name": "picky:Picky"}}
    one, two = (launch(tmp_path, count, **sections) for count in (1, 2))
    same_bits(one, two)
