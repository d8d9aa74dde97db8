"""How fast a weight is quantized to NVFP4 on one CPU thread, beside torchao's quantizer in the same run.

solrl's arithmetic is Transformer Engine's; torchao rounds in another order and has a smallest block scale of 2^-6. Both
conventions are timed with solrl's encoder, and in torchao's every byte must equal what torchao makes. Processor time is
counted and the quantizers take turns, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.common import facts, hardware, parser, table, whole_number, write_json
from solrl.errors import UsageError
from solrl.quant.nvfp4 import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    NVFP4,
    dequantize,
    encode_e2m1,
    pack,
    quantize,
)

LIMIT = 1.5
"""solrl's quantizer is held to this many times torchao's speed."""


def main(argv: Sequence[str]) -> int:
    """Print seconds and ratios; 1 where a byte differs or the limit is broken."""
    args = options().parse_args(argv)
    torch.set_num_threads(1)
    torchao = load_torchao()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(args.size, args.size, generator=generator).bfloat16()
    packed, scales, global_scale = torchao(weight)
    ours = quantize_as_torchao(weight)
    is_equal = (
        torch.equal(ours.packed, packed)
        and torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))
        and torch.equal(ours.global_scale, global_scale)
    )
    quantized = quantize(weight)
    runs: dict[str, Callable[[], object]] = {
        "torchao nvfp4_quantize": lambda: torchao(weight),
        "solrl, torchao's convention": lambda: quantize_as_torchao(weight),
        "solrl (a run's own)": lambda: quantize(weight),
        "solrl, back to numbers": lambda: dequantize(quantized),
    }
    seconds = measure(runs, args.rounds)
    known = facts()
    print(f"quantizing a {args.size} x {args.size} bfloat16 weight to NVFP4, {args.rounds} rounds")
    print(hardware(known))
    baseline = seconds["torchao nvfp4_quantize"]
    print(table(("quantizer", "ms", "times torchao's speed"), [
        (name, f"{1000 * found:.0f}", f"{baseline / found:.2f}") for name, found in seconds.items()
    ]))  # fmt: skip
    ratio = baseline / seconds["solrl, torchao's convention"]
    print(f"bytes in torchao's convention: {'equal' if is_equal else 'DIFFERENT'}")
    print(f"limit {LIMIT}: {'kept' if ratio >= LIMIT else 'BROKEN'}")
    write_json(args.json, {
        "benchmark": "quantizer_throughput", "facts": known, "size": args.size, "rounds": args.rounds,
        "seconds": seconds, "ratio": ratio, "limit": LIMIT, "equal_bytes": is_equal,
    })  # fmt: skip
    return int(not is_equal or ratio < LIMIT)


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser("quantizer_throughput", "NVFP4 quantization of a weight on one CPU thread, beside torchao's.")
    made.add_argument("--size", type=whole_number, default=3072, help="rows and columns of the weight (3072)")
    made.add_argument("--rounds", type=whole_number, default=9, help="turns that each quantizer takes (9)")
    return made


def quantize_as_torchao(x: Tensor) -> NVFP4:
    """x [M, K] in torchao's order of roundings. A tensor of zeros has no scale in it."""
    blocks = x.float().reshape(-1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    global_scale = block_amax.max() / (E4M3_MAX * E2M1_MAX)
    scales = (block_amax / E2M1_MAX / global_scale).clamp(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks * (global_scale.reciprocal() / scales.float()).unsqueeze(-1))
    return NVFP4(pack(codes.view(x.shape)), scales.view(x.shape[0], -1), global_scale)


def load_torchao() -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """torchao's quantizer: weight -> (packed, scales, global scale). It grumbles while it is imported."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as error:
        # in no extra: where it is installed, diffusers and peft import it too and print warnings
        raise UsageError("quantizer_throughput needs torchao: pip install 'torchao>=0.18'") from error

    def run(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        global_scale = per_tensor_amax_to_scale(weight.abs().amax())
        scales, packed = nvfp4_quantize(weight, BLOCK, global_scale)
        return packed.view(len(weight), -1), scales.view(len(weight), -1), global_scale

    return run


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, taking turns; one round before does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if number:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}
