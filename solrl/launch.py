"""What `accelerate launch` promised against what the run needs and what was started.

The launcher passes its settings in the environment, where a library that does not use them would ignore them in
silence; and `accelerate launch --cpu --num_processes 2` starts one process without a word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import psutil

from solrl.config import Config
from solrl.errors import UsageError

WORKING_CPU_LAUNCH = (
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {} --num_machines 1 --mixed_precision no "
    "--dynamo_backend no scripts/train.py ..."
)


def check_launcher(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError where the launcher was asked for something that this run does not do, or did not do it."""
    _check_settings(config, environment)
    asked = processes_asked_for(_parent_command())
    started = int(environment.get("WORLD_SIZE", "1"))
    if asked is not None and asked > 1 and asked != started:
        raise UsageError(
            f"accelerate launch was asked for {asked} processes but started {started}, as it does with --cpu or "
            f"without GPUs; on CPUs use: {WORKING_CPU_LAUNCH.format(asked)}"
        )


def processes_asked_for(command: Sequence[str]) -> int | None:
    """The number of processes in an `accelerate launch` command line or its config file; None for any other command."""
    arguments = _launch_arguments(command)
    if arguments is None:
        return None
    # Heavy (it imports torch), so only under a launcher; its own parser knows every spelling of its flags.
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    parsed, _ = launch_command_parser().parse_known_args(arguments)
    reads_file = parsed.config_file is not None or (os.path.isfile(default_config_file) and not parsed.cpu)
    number = parsed.num_processes
    if number is None and reads_file:
        number = load_config_from_file(parsed.config_file).num_processes
    return None if number is None else int(number)


def _launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch`, `accelerate-launch` or `python -m accelerate.commands.launch`."""
    for position, word in enumerate(command[:4]):
        name = os.path.basename(word)
        if name == "accelerate-launch" or word == "accelerate.commands.launch" or name == "launch.py":
            return list(command[position + 1 :])
        if name in ("accelerate", "accelerate.exe") and command[position + 1 : position + 2] == ["launch"]:
            return list(command[position + 2 :])
    return None


def _parent_command() -> list[str]:
    parent = psutil.Process().parent()
    try:
        return [] if parent is None else parent.cmdline()
    except psutil.Error:  # another user's process, or gone: then nothing can be compared
        return []


def _check_settings(config: Config, environment: Mapping[str, str]) -> None:
    def is_on(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on")

    for variable, what in (
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism config"),
    ):
        if is_on(variable):
            instead = " and set model.shard" if what == "FSDP" else ""
            raise UsageError(
                f"the launcher turns on {what}, which solrl does not use: launch with --multi_gpu only{instead}"
            )

    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no" and not (precision == "bf16" and _computes_in_bfloat16(config, is_on("ACCELERATE_USE_CPU"))):
        raise UsageError(
            f"the launcher asks for mixed precision {precision} but the run computes as model.dtype = "
            f'"{config.model.dtype}" says: launch with --mixed_precision no'
        )
    dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        raise UsageError(f"the launcher asks for dynamo backend {dynamo}: launch with --dynamo_backend no")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        raise UsageError(
            f"the launcher asks for {accumulation} gradient accumulation steps, which solrl derives itself from "
            "batch.train: launch with --gradient_accumulation_steps 1"
        )


def _computes_in_bfloat16(config: Config, is_cpu: bool) -> bool:
    if config.model.dtype != "auto":
        return config.model.dtype == "bfloat16"
    import torch

    return not is_cpu and torch.cuda.is_available()
