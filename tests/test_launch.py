"""Launcher settings that contradict a run, and processes that were asked for but not started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solrl.errors import UsageError
from solrl.launch import check_launcher, processes_asked_for
from solrl.settings import load_config

ROOT = Path(__file__).parent.parent
CHECK = """
import os, sys
from solrl.errors import UsageError
from solrl.launch import check_launcher
from solrl.settings import load_config
try:
    check_launcher(load_config("tiny_flux"))
except UsageError as error:
    sys.exit(f"refused: {error}")
open(os.path.join(sys.argv[1], os.environ.get("RANK", "alone")), "w").close()
"""


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "--mixed_precision no"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "--mixed_precision no"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend no"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "4 gradient accumulation steps"),
    ],
)
def test_a_setting_the_run_would_ignore_stops_it_in_one_line(variable: str, value: str, word: str) -> None:
    config = load_config("tiny_flux", {"model.dtype": "float32"})
    with pytest.raises(UsageError, match=word) as caught:
        check_launcher(config, {variable: value})
    assert len(str(caught.value).splitlines()) == 1


def test_settings_that_agree_with_the_run_pass() -> None:
    config = load_config("tiny_flux", {"model.dtype": "bfloat16"})
    check_launcher(config, {})
    check_launcher(config, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"})
    check_launcher(config, {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "false"})


def test_every_spelling_of_the_number_of_processes_is_understood(tmp_path: Path) -> None:
    launch = ["/v/bin/python", "/v/bin/accelerate", "launch"]
    file = tmp_path / "launch.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n"
    )
    assert processes_asked_for([*launch, "--cpu", "--num_processes", "2", "train.py", "--seed", "9"]) == 2
    assert processes_asked_for([*launch, "--num-processes=4", "train.py"]) == 4
    assert processes_asked_for(["/v/bin/accelerate-launch", "--num_processes", "2", "train.py"]) == 2
    assert processes_asked_for(["python", "-m", "accelerate.commands.launch", "--num_processes", "2", "t.py"]) == 2
    assert processes_asked_for([*launch, "--config_file", str(file), "train.py"]) == 3
    assert processes_asked_for([*launch, "--cpu", "train.py", "--num_processes", "2"]) is None, "the script's own flag"
    assert processes_asked_for(["bash"]) is None
    assert processes_asked_for([]) is None


def launched(tmp_path: Path, flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    accelerate = Path(sys.executable).parent / "accelerate"
    command = [sys.executable, str(accelerate), "launch", *flags.split(), str(script), str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "rewards")])
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_accelerate_launch_that_starts_one_process_for_two_is_refused(tmp_path: Path) -> None:
    done = launched(tmp_path, "--cpu --num_processes 2 --mixed_precision no --dynamo_backend no")
    assert done.returncode != 0
    refusal = next(line for line in done.stderr.splitlines() if line.startswith("refused: "))
    assert "2 processes but started 1" in refusal and "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu" in refusal


@pytest.mark.slow
def test_the_command_that_the_refusal_gives_starts_two(tmp_path: Path) -> None:
    flags = (
        "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    )
    done = launched(tmp_path, flags, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"check.py", "0", "1"}


@pytest.mark.slow
def test_one_process_and_no_launcher_are_fine(tmp_path: Path) -> None:
    done = launched(tmp_path, "--cpu --num_processes 1 --mixed_precision no --dynamo_backend no")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "alone").exists()
    started = time.monotonic()
    check_launcher(load_config("tiny_flux"), {})
    assert time.monotonic() - started < 1, "nothing heavy without a launcher"


@pytest.mark.parametrize(("name", "processes"), [("multi_gpu", 8), ("two_nodes", 16)])
def test_shipped_launcher_configs_start_what_they_say_and_turn_nothing_else_on(name: str, processes: int) -> None:
    from accelerate.commands.config import load_config_from_file

    file = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    words = ["accelerate", "launch", "--config_file", str(file), "scripts/train.py", "flux1_dev"]
    assert processes_asked_for(words) == processes
    settings = load_config_from_file(str(file))
    assert settings.mixed_precision == "no" and settings.distributed_type == "MULTI_GPU"
    assert not settings.dynamo_config and not settings.deepspeed_config and not settings.fsdp_config
