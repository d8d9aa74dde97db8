"""`solrl train` on Ray: the environment of each process, and real clusters on this machine (marked ray)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solrl.ray_launch import main, rank_environment
from solrl.settings import save_config
from tests.parts import tiny_config
from tests.test_processes import launch, same_bits

ROOT = Path(__file__).parent.parent
PLACES = [("a", "10.0.0.1", ["2"], 40001), ("a", "10.0.0.1", ["0"], 40002), ("b", "10.0.0.2", ["1"], 40003)]


def test_each_process_gets_what_torchrun_would_give_it() -> None:
    found = [rank_environment(rank, PLACES, cpu=False) for rank in range(3)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [tuple(one[name] for name in names) for one in found] == [
        ("0", "0", "0", "2", "2,0"),
        ("1", "1", "0", "2", "2,0"),
        ("2", "0", "1", "1", "1"),
    ]
    for one in found:
        assert (one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) == ("3", "10.0.0.1", "40001")
        assert "ACCELERATE_USE_CPU" not in one
    on_cpu = rank_environment(1, PLACES, cpu=True)
    assert on_cpu["ACCELERATE_USE_CPU"] == "true" and "CUDA_VISIBLE_DEVICES" not in on_cpu


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--num_processes", "0", "tiny_flux"], "must be at least 1, got 0"), (["--num_processes", "2"], "'solrl[ray]'")],
)
def test_what_cannot_start_is_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("solrl: error: ") and says in error and error.count("\n") == 1


def on_ray(folder: Path, *words: str, paths: tuple[Path, ...] = ()) -> subprocess.Popen[str]:
    """`solrl train` on two CPUs of a cluster that exists only for it."""
    pytest.importorskip("ray")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "rewards", *paths])),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, "-m", "solrl.ray_launch", "--address", "local", "--num_processes", "2", "--cpu", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.ray
def test_on_ray_a_run_is_the_run_of_accelerate_launch(tmp_path: Path) -> None:
    expected = launch(tmp_path, 2, train={"num_steps": 2}, reward={"name": "picky:Picky"})
    config = tiny_config(tmp_path / "on_ray", train={"num_steps": 2}, reward={"name": "picky:Picky"})
    save_config(config, tmp_path / "on_ray.toml")
    process = on_ray(tmp_path, "on_ray.toml", paths=(tmp_path,))  # a path from where it was started
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said[-3000:]
    assert "2 processes" in said
    same_bits(expected, tmp_path / "on_ray")


DIES = """
import os, torch

class Dies:
    name, description, range = "dies", "fails on rank 1", (0.0, 1.0)

    def __call__(self, images, prompts):
        if os.environ["RANK"] == "1":
            raise RuntimeError("no more")
        return images[:, 0].mean((1, 2))
"""


@pytest.mark.ray
def test_on_ray_one_that_fails_ends_all_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    save_config(tiny_config(tmp_path / "run", reward={"name": "dies:Dies"}), tmp_path / "dies.toml")
    process = on_ray(tmp_path, "dies.toml", paths=(tmp_path,))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said[-3000:]
    assert "no more" in said.splitlines()[-1] and "process " in said.splitlines()[-1], said[-3000:]


@pytest.mark.ray
def test_on_ray_a_stopped_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    save_config(tiny_config(tmp_path / "run", train={"num_steps": 1000}), tmp_path / "long.toml")
    process = on_ray(tmp_path, "long.toml")
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1) and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 3 and "stopped by SIGTERM; continue with --resume" in said, said[-3000:]
    assert [*(tmp_path / "run" / "checkpoints").glob("step_*")]


@pytest.mark.ray
def test_on_ray_too_little_room_is_one_line_that_says_what_is_free(tmp_path: Path) -> None:
    process = on_ray(tmp_path, "--num_processes", "4096", "--wait_s", "1", "tiny_flux")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said[-3000:]
    assert "solrl: error: no room for 4096 processes in 1 s; free: " in said
