"""What a compiled graph depends on, in one place: what is compiled and how, grad mode, autocast.

torch.compile guards on grad mode, autocast, shapes and Python attributes, and compiles anew where one differs. So
whatever is drawn (rollouts, evaluation, replay) is drawn inside ``drawing``, and whatever a loss is made of is computed
inside ``updating``; micro-batches are padded to fixed shapes. Weights are inputs of a graph, so writing them in place
recompiles nothing.

Of a transformer only the repeated blocks are compiled, one by one: blocks of a kind share a graph, so compile time does
not grow with depth. What cannot be captured whole is an error, never a silent break into slow pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl.config import Config
from solrl.types import Policy, UsageError

GRAPHS_PER_CLASS = 64
"""Graphs that one class of blocks may have: trees, adapter states, batch sizes, variants among its blocks."""


def compile_mode(config: Config, device: torch.device) -> str:
    """``config.compile`` with auto resolved for ``device``: off, default or max-autotune-no-cudagraphs."""
    if config.compile != "auto":
        return config.compile
    return "off" if device.type == "cpu" else "default"


def compile_(regions: Iterable[nn.Module], mode: str, *, deterministic: bool, backend: str = "inductor") -> None:
    """Compile each module in place; code is made at its first call. One compiled before is left as it is.

    ``deterministic`` keeps Inductor from choosing kernels by timing.
    """
    torch._dynamo.config.recompile_limit = GRAPHS_PER_CLASS
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = torch._inductor.list_mode_options(mode) | {"deterministic": deterministic}
    for region in regions:
        if region._compiled_call_impl is None:
            region.compile(backend=backend, options=options, dynamic=False, fullgraph=True)


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """The members of the transformer's own lists: its blocks; the transformer itself where it has none."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks] or [transformer]


def use_cache_folder(rank: int) -> Path:
    """Keep compiled code between runs, in a folder of this rank's own: ranks compile at once and share no file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache / "solrl" / "inductor")
    folder = root if root.name == f"rank_{rank}" else root / f"rank_{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror}; set TORCHINDUCTOR_CACHE_DIR to a folder for compiled code, or compile = off"
        ) from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


@contextmanager
def drawing(policy: Policy) -> Iterator[None]:
    """Inside, samples are drawn: no gradient, and the weights' own dtype, whatever the caller had switched on."""
    with torch.no_grad(), torch.autocast(policy.device.type, enabled=False):
        yield


@contextmanager
def updating(policy: Policy, *, gradient: bool) -> Iterator[None]:
    """Inside, velocities of a loss are computed, in the dtype of the frozen weights beside float32 trained ones.

    The one place where compute precision differs from that of the weights.
    """
    parameters = chain(policy.transformer.parameters(), policy.parameters())  # full fine-tuning freezes only the rest
    dtype = next(p for p in parameters if not p.requires_grad).dtype
    autocast: AbstractContextManager[Any] = nullcontext()
    if dtype != torch.float32:
        autocast = torch.autocast(policy.device.type, dtype)
    with torch.set_grad_enabled(gradient), autocast:
        yield


def eagerly() -> AbstractContextManager[Any]:
    """Inside, nothing runs compiled: for work with hooks, which a compiled graph does not see."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
