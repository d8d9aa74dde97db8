"""The same run on 1, 2, 3 and 4 real processes has the same bits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from solrl.settings import save_config
from solrl.train import train
from tests.children import in_child
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


def launch(folder: Path, num_processes: int, *, machines: int = 1, **sections: object) -> Path:
    """Run scripts/train.py under accelerate on ``num_processes`` processes; returns the run folder.

    ``machines``: so many launchers, each of which takes this machine for one of its own.
    """
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
    port = "0"
    if machines > 1:  # one that all know; the system cannot choose it
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
    command += ["--num_machines", str(machines), "--num_processes", str(num_processes), "--main_process_port", port]
    command += ["--main_process_ip", "127.0.0.1"] if machines > 1 else []
    command += ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    logs = [folder / f"on_{num_processes}.log", *(folder / f"machine_{rank}.log" for rank in range(1, machines))]
    launchers, timeout_s = [], 400
    for rank, log in enumerate(logs):
        own = [*command, "--machine_rank", str(rank), str(ROOT / "scripts" / "train.py"), str(path)]
        with log.open("w") as file:
            launchers.append(subprocess.Popen(own, env=environment, stdout=subprocess.DEVNULL, stderr=file))
    try:
        codes = [launcher.wait(timeout_s) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert codes == [0] * machines, logs[0].read_text()[-3000:]
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
@pytest.mark.parametrize("precision", ["full", pytest.param("emulated_nvfp4", marks=pytest.mark.long)])
def test_any_number_of_processes_gives_the_same_seeds_and_weights(tmp_path: Path, precision: str) -> None:
    """12 kept samples are 3 micro-batches of 4: on 4 processes one rank has nothing to redraw or train."""
    counts = (1, 2, 3, 4) if precision == "full" else (1, 2)
    sections = {"explore": {"precision": precision}, "train": {"num_steps": 2}, "reward": {"name": "picky:Picky"}}
    runs = {count: launch(tmp_path, count, **sections) for count in counts}
    for count in counts[1:]:
        same_bits(runs[1], runs[count])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocated", "shiftable"])
def test_two_machines_give_the_bits_of_one_process(tmp_path: Path, mode: str) -> None:
    """Two launchers of one process each, over the loopback interface."""
    sections: dict[str, Any] = {"train": {"num_steps": 1}, "reward": {"name": "tests.parts:Redness"}}
    alone = tiny_config(tmp_path / "alone", **sections)
    assert in_child(lambda: train(alone)) == (0, "")
    same_bits(tmp_path / "alone", launch(tmp_path, 2, machines=2, **sections, runtime={"mode": mode}))


@pytest.mark.slow
@pytest.mark.long
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
@pytest.mark.long
def test_naive_scaling_agrees_as_well(tmp_path: Path) -> None:
    """Without regeneration the kept samples lie on other ranks than the ones that train on them."""
    sections = {"regenerate": {"enabled": False}, "train": {"num_steps": 2}, "reward": {"name": "picky:Picky"}}
    one, two = (launch(tmp_path, count, **sections) for count in (1, 2))
    same_bits(one, two)
