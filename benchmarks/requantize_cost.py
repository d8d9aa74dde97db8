"""What it costs to bring explorer and rollout tree to new weights after an update, beside the step it is part of.

Every sync merges, quantizes, writes in place and proves what it wrote. Its time is the median of several, each with
other weights; the step is one whole training step of the config, measured in the same run after one that warms up.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import facts, hardware, name_list, parse, parser, table, whole_number, write_json
from solrl.clock import Stopwatch
from solrl.distributed import World, start
from solrl.models.adapters import lora_state
from solrl.quant.linear import QuantLinear
from solrl.session import Session, open_session
from solrl.settings import load_config
from solrl.train import run_step

LIMIT = 0.02
"""The share of a step that a sync is held to."""


def main(argv: Sequence[str]) -> int:
    """Print cost and share for each precision; 1 where a share is above the limit."""
    args = parse(options(), argv)
    rows = []
    for precision in args.precision:
        config = load_config(args.config, args.overrides | {"explore.precision": precision})
        with start(config.cpu_threads, config.deterministic) as world:
            print(f"opening {args.config} in {precision} ...", file=sys.stderr, flush=True)
            session = open_session(config, world, lambda: None)
            rows.append({"precision": precision} | measure(session, world, args.syncs))
            known = facts(world.device)
    print(f"bringing explorer and rollout tree to new weights, {args.config}, {args.syncs} syncs")
    print(hardware(known))
    header = ("precision", "layers", "ms", "ms a layer", "bytes written a layer", "step s", "share")
    print(table(header, [
        (row["precision"], str(row["layers"]), f"{1000 * row['sync_s']:.1f}",
         f"{1000 * row['sync_s'] / row['layers']:.2f}", f"{row['bytes'] / row['layers']:,.0f}", f"{row['step_s']:.1f}",
         f"{row['share']:.2%}")
        for row in rows
    ]))  # fmt: skip
    is_kept = all(row["share"] < LIMIT for row in rows)
    print(f"limit {LIMIT:.0%}: {'kept' if is_kept else 'BROKEN'}")
    write_json(args.json, {"benchmark": "requantize_cost", "facts": known, "limit": LIMIT, "rows": rows})
    return int(not is_kept)


def options() -> Any:
    """The command line."""
    made = parser("requantize_cost", "The cost of new weights in explorer and rollout tree, as a share of a step.")
    made.add_argument("--config", default="tiny_flux", help="TOML file or shipped name (tiny_flux); its settings can"
                      " be overridden as --section.key value")  # fmt: skip
    made.add_argument("--precision", type=name_list, default=["full", "fp8", "emulated_nvfp4"], metavar="P,..",
                      help="explorer's formats (full,fp8,emulated_nvfp4)")  # fmt: skip
    made.add_argument("--syncs", type=whole_number, default=9, help="syncs that are timed (9)")
    return made


def measure(session: Session, world: World, syncs: int) -> dict[str, Any]:
    """Seconds of a sync and of a step, and the bytes that a sync writes."""
    trees = session.trees
    adapters = lora_state(session.policy.transformer, "old")
    run_step(session, 1, Stopwatch(world.device))
    clock = Stopwatch(world.device)
    run_step(session, 2, clock)
    step = clock.metrics()["time/total_s"]
    times = []
    for number in range(syncs):
        other = {
            name: dataclasses.replace(pair, scale=pair.scale * (1 + 0.1 * number)) for name, pair in adapters.items()
        }
        begin = time.perf_counter()
        trees.requantize_(other)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - begin)
    session.sync()
    sync = statistics.median(times)
    return {
        "layers": len(trees.adapted),
        "sync_s": sync,
        "step_s": step,
        "share": sync / step,
        "bytes": sum(_written(session, name) for name in trees.adapted),
    }


def _written(session: Session, name: str) -> int:
    """Bytes of one layer's buffers in both trees that a sync fills."""
    weight: Any = session.trees.rollout.get_submodule(name).weight
    layer = session.trees.explorer.get_submodule(name)
    stored = layer.stored() if isinstance(layer, QuantLinear) else []
    return sum(tensor.numel() * tensor.element_size() for tensor in [weight, *stored])
