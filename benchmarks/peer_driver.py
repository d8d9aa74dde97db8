"""Runs the training script of a DiffusionNFT checkout for a few steps and writes what each of them took.

`python benchmarks/peer_driver.py CHECKOUT GEOMETRY.json RESULT.json`, in a process of its own: ``benchmarks.peer_step``
starts it. The script is imported as it is. Names in it are bound to timers and counters, on a CPU also its process
group (gloo for NCCL), its device, and DistributedDataParallel without device ids. Prompts are encoded by the pipeline,
which knows how many tokens its encoders take. What is timed is left alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ON_GPU = torch.cuda.is_available()


class OnCpu:
    """torch, whose every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(_: str) -> torch.device:
        """The CPU."""
        return torch.device("cpu")


class Steps:
    """What each step took and how many samples went through the transformer, between the calls that end them."""

    def __init__(self) -> None:
        self.finished: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)
        self.phase = "rollout"
        self._update_began: float | None = None

    def clock(self) -> float:
        """Wall time on a GPU that is idle, processor time on a CPU: other work on the machine counts in neither."""
        if ON_GPU:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def timed_rollout(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Drawing and decoding."""

        def run(*arguments: Any, **named: Any) -> Any:
            began = self.clock()
            result = function(*arguments, **named)
            self.now["rollout"] += self.clock() - began
            return result

        return run

    def begin_update(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The last call before the update."""

        def run(*arguments: Any) -> Any:
            result = function(*arguments)
            self.phase, self._update_began = "update", self.clock()
            return result

        return run

    def end_update(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The first call of the next step."""

        def run(*arguments: Any, **named: Any) -> Any:
            if self._update_began is not None:
                self.now["update"] = self.clock() - self._update_began
                self.finished.append(dict(self.now))
                self.now, self.phase, self._update_began = defaultdict(float), "rollout", None
            return function(*arguments, **named)

        return run

    def count(self, _: Any, __: Any, output: Any) -> None:
        """A forward pass of the transformer."""
        self.now[pass_name(self.phase)] += len(output[0])


def pass_name(part: str) -> str:
    """What samples that pass through the transformer now, in ``part`` of a step, are counted as on both sides."""
    return f"{part}, {'with' if torch.is_grad_enabled() else 'without'} gradient"


def main(checkout: Path, geometry: dict[str, Any], result: Path) -> None:
    """Run and write."""
    sys.path.insert(0, str(checkout))
    spec = importlib.util.spec_from_file_location("peer", checkout / "scripts" / "train_nft_sd3.py")
    assert spec and spec.loader
    peer: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    steps, text = Steps(), geometry.pop("text")
    if not ON_GPU:
        peer.torch = OnCpu()
        peer.DDP = lambda module, find_unused_parameters, **_: DistributedDataParallel(module)
        peer.setup_distributed = lambda rank, _, size: dist.init_process_group("gloo", rank=rank, world_size=size)
    peer.pipeline_with_logprob = steps.timed_rollout(peer.pipeline_with_logprob)
    peer.PerPromptStatTracker.clear = steps.begin_update(peer.PerPromptStatTracker.clear)
    load = peer.StableDiffusion3Pipeline.from_pretrained

    def counted(*arguments: Any) -> Any:
        pipeline = load(*arguments)
        pipeline.transformer.register_forward_hook(steps.count)

        def encode(prompts: list[str], *_: Any, **__: Any) -> tuple[Any, Any]:
            embeds, _, pooled, _ = pipeline.encode_prompt(
                prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=text["tokens"]
            )
            return embeds, pooled

        peer.compute_text_embeddings = steps.end_update(torch.no_grad()(encode))
        return pipeline

    peer.StableDiffusion3Pipeline.from_pretrained = counted
    peer.FLAGS(["peer", f"--config={checkout / 'config' / 'base.py'}"])
    with peer.FLAGS.config.unlocked():
        for section, settings in geometry.items():
            target = peer.FLAGS.config[section] if section else peer.FLAGS.config
            for name, value in settings.items():
                target[name] = value
    peer.main(None)
    result.write_text(json.dumps(steps.finished))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
