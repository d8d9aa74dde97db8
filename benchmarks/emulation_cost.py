"""What emulated NVFP4 costs: one forward of the explorer beside one of the rollout tree, on one CPU thread.

Emulation does everything full precision does and quantizes the activations besides, so its ratio is above 1; FP4
hardware is what makes exploration cheaper. Processor time is counted, forwards alternate, each pair gives a ratio, so
that other load on the machine, which hits both, largely cancels; the median and quartiles of the ratios are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import facts, hardware, number_list, parser, table, whole_number, write_json
from solrl.config import LoraConfig, ModelConfig
from solrl.models.adapters import add_adapters, lora_state
from solrl.models.flux import FluxPolicy
from solrl.quant.backends import EMULATED
from solrl.quant.trees import RolloutTrees
from solrl.types import Conditioning

LIMIT = 1.5
"""The ratio that emulation is held to."""


def main(argv: Sequence[str]) -> int:
    """Print the ratio at each batch size; 1 when one is above LIMIT."""
    args = options().parse_args(argv)
    torch.set_num_threads(1)
    trees, velocity = load(args.model)
    known = facts()
    print(f"emulated NVFP4 against full precision, one forward of {args.model}, {args.pairs} pairs")
    print(hardware(known))
    print(trees.report()[-1])
    rows = [measure(trees, velocity, batch, args.pairs) for batch in args.batch]
    header = ("batch", "full ms", "emulated ms", "ratio", "quartiles")
    print(table(header, [
        (str(row["batch"]), f"{row['full_ms']:.0f}", f"{row['emulated_ms']:.0f}", f"{row['ratio']:.2f}",
         f"{row['lower']:.2f} {row['upper']:.2f}")
        for row in rows
    ]))  # fmt: skip
    is_passed = all(row["ratio"] <= LIMIT for row in rows)
    print(f"limit {LIMIT}: {'kept' if is_passed else 'BROKEN'}")
    write_json(args.json, {"benchmark": "emulation_cost", "facts": known, "limit": LIMIT, "rows": rows})
    return int(not is_passed)


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser("emulation_cost", "What emulating NVFP4 costs, against full precision.")
    made.add_argument("--model", default="tiny_flux", help="an embedded model or a diffusers FluxPipeline folder")
    made.add_argument("--batch", type=number_list, default=[24, 48], metavar="LIST", help="samples in a forward")
    made.add_argument("--pairs", type=whole_number, default=40, help="pairs of forwards at each batch size")
    return made


def load(path: str) -> tuple[RolloutTrees, Callable[[torch.nn.Module, int], object]]:
    """Calibrated trees of the model, and a function that runs one of them at a batch size."""
    cpu = torch.device("cpu")
    policy = FluxPolicy(ModelConfig(path=path, height=32, width=32, max_text_tokens=12), cpu)
    policy.requires_grad_(False).eval()
    add_adapters(policy.transformer, LoraConfig(targets=policy.lora_targets), run_seed=0)
    trees = RolloutTrees(policy.transformer, EMULATED)
    trees.requantize_(lora_state(policy.transformer, "old"))
    prompt = policy.encode(["a red circle left of a blue square"])
    generator = torch.Generator().manual_seed(0)
    siblings = {id(tree): policy.sibling(tree) for tree in (trees.rollout, trees.explorer)}

    @torch.no_grad()
    def velocity(tree: torch.nn.Module, batch: int) -> object:
        latents = torch.randn(batch, *policy.latent_shape, generator=generator)
        conditioning: Conditioning = prompt.rows([0] * batch)
        return siblings[id(tree)].velocity(latents, torch.full((batch,), 0.7), conditioning)

    with trees.calibration():
        velocity(trees.explorer, 24)
    trees.set_activation_scales_()
    return trees, velocity


def measure(
    trees: RolloutTrees, velocity: Callable[[torch.nn.Module, int], object], batch: int, pairs: int
) -> dict[str, Any]:
    """Alternating forwards of both trees."""

    def seconds(tree: torch.nn.Module) -> float:
        start = time.process_time()
        velocity(tree, batch)
        return time.process_time() - start

    for tree in (trees.rollout, trees.explorer):
        velocity(tree, batch)
    times = [(seconds(trees.rollout), seconds(trees.explorer)) for _ in range(pairs)]
    lower, ratio, upper = statistics.quantiles([emulated / full for full, emulated in times], n=4)
    full_ms, emulated_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return {
        "batch": batch,
        "ratio": ratio,
        "lower": lower,
        "upper": upper,
        "full_ms": full_ms,
        "emulated_ms": emulated_ms,
    }
