"""What a run ran on: versions, hardware, source revision. Written to ``environment.json``."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl import __version__
from solrl.sharding import whole

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """``precision`` is the line that says what arithmetic the explorer runs and why."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"solrl": __version__} | {name: version(name) for name in PACKAGES},
        "git_commit": _git_commit(Path(__file__).resolve().parent),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "precision": precision,
    }


def device_name(device: torch.device) -> str:
    """The processor that a run computes on, for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {_cpu_model()}"


def fingerprint(module: nn.Module, skip: str = "lora_") -> str:
    """Names, shapes, dtypes and first values of the frozen tensors: enough to notice other weights, at any size."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(module.state_dict().items()):
            if skip not in name:
                # peft renames the layers it wraps; the same weights must keep their name
                plain = name.replace(".base_layer.", ".")
                digest.update(f"{plain} {tuple(tensor.shape)} {tensor.dtype}".encode())
                # copied, because numpy() forbids for good that the memory it was called on be given back
                head = whole(tensor.detach()).flatten()[:256].to("cpu", torch.float32, copy=True)
                digest.update(head.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_commit(folder: Path) -> str | None:
    """The checkout's commit, with "+changes" when files differ from it; None outside a checkout or without git."""
    if not (folder.parent / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
