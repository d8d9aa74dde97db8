"""What only a GPU can show, in one command: ``python tests/gpu/run.py [RESULT.json]`` from the checkout's root.

It checks that the Triton quantizers write the reference's bytes, that each format's layers compute what they say by the
kernel they name, that compiled explorers follow new weights without compiling anew; and measures the quantizers'
bandwidth, products of matrices, and quantized against bfloat16 transformer blocks of FLUX, SD3.5 and SANA, all
compiled. Formats are those the GPU has: FP8 from Ada and Hopper on, NVFP4 too on Blackwell. Whatever cannot run is left
out, with the reason. The exit code is 1 if a check failed.

Needs torch and Triton; pydantic, peft and diffusers for the parts on transformer blocks. ``--dry-run`` runs all of it
on a CPU with tiny shapes, plain torch in the place of FP4's kernel, and no Inductor: it shows that the script works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant import kernels
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.linear import QuantLinear, SharedInput
from solrl.quant.native import NativeLinear, StandInLinear
from solrl.quant.proof import product_format, profile, prove_kind
from tests.quantizer_cases import cases, differences, quantized

BATCHES = (8, 24)
BLOCK_ERROR = {"fp8": 0.1, "nvfp4": 0.3}
"""Largest relative distance of what quantized blocks add to their input from what bfloat16 ones add."""
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, SolrlError)


@dataclass
class Report:
    """What was found, as it goes to the file."""

    is_dry: bool
    device: torch.device
    limit_s: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def check(self, name: str, is_passed: bool, detail: str) -> None:
        """One line on the screen, one entry in the file."""
        self.checks.append({"name": name, "passed": bool(is_passed), "detail": detail})
        print(f"{'ok    ' if is_passed else 'FAILED'} {name}: {detail}", flush=True)

    def measure(self, name: str, **values: Any) -> None:
        """The same for numbers."""
        self.measured[name] = values
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"       {name}: {', '.join(shown)}", flush=True)

    def leave_out(self, name: str, reason: str) -> None:
        """The same for what could not be done."""
        self.left_out[name] = reason
        print(f"       {name}: left out, {reason}", flush=True)

    def is_late(self, name: str) -> bool:
        """Whether the time for measurements is over; says so."""
        spent = time.monotonic() - self.begin
        if spent > self.limit_s:
            self.leave_out(name, f"{spent:.0f} s are spent, the limit is {self.limit_s:.0f}")
        return spent > self.limit_s

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What goes wrong inside is a failed check, and the rest goes on."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            self.leave_out(name, str(error).splitlines()[0])
        except FAILURES + triton_errors() as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}")


def main(argv: list[str]) -> int:
    """Run everything; 0 if no check failed."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("path", nargs="?", type=Path, default=Path("results/gpu.json"), help="where the JSON file goes")
    made.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    made.add_argument("--limit-s", type=float, default=200, help="start no measurement after so many seconds (200)")
    options = made.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        print("tests/gpu/run.py: error: no NVIDIA GPU here; --dry-run tries the script on a CPU", file=sys.stderr)
        return 2
    report = Report(options.dry_run, torch.device("cpu" if options.dry_run else "cuda"), options.limit_s)
    known = facts(report.device)
    print(", ".join(f"{key} {value}" for key, value in known.items()), flush=True)
    formats = formats_of(report)
    for name, run in {
        "quantizers: bytes": check_bytes,
        "quantizers: bandwidth": measure_bandwidth,
        "products": lambda report: check_products(report, formats),
        "CUDA graphs": lambda report: check_graphs(report, formats),
        "blocks": lambda report: check_blocks(report, formats),
    }.items():
        with report.section(name):
            run(report)
    failed = [check["name"] for check in report.checks if not check["passed"]]
    payload = {
        "script": "tests/gpu/run.py", "dry_run": options.dry_run, "environment": known, "formats": sorted(formats),
        "checks": report.checks, "measured": report.measured, "left_out": report.left_out,
        "seconds": round(time.monotonic() - report.begin, 1),
    }  # fmt: skip
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text(json.dumps(payload, indent=1) + "\n")
    print(f"{len(report.checks) - len(failed)} checks passed, {len(failed)} failed, {len(report.left_out)} parts left "
          f"out, {payload['seconds']} s; wrote {options.path}")  # fmt: skip
    return 1 if failed else 0


def facts(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    known: dict[str, Any] = {"device": "cpu", "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        known |= {"device": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", "cuda": torch.version.cuda}
    for package in ("triton", "diffusers"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = None
    return known


def formats_of(report: Report) -> dict[str, type[QuantLinear]]:
    """Format -> the layer that computes it here; what cannot run is left out with the reason."""
    wanted: dict[str, list[type[QuantLinear]]] = {"fp8": [Fp8Linear, Fp8TensorLinear], "nvfp4": [NativeLinear]}
    capability = (9, 0)
    if report.is_dry:
        wanted["nvfp4"] = [StandInLinear]
    else:
        capability = torch.cuda.get_device_capability()
        needed = {"fp8": (8, 9), "nvfp4": (10, 0)}
        for name in [name for name, least in needed.items() if capability < least]:
            report.leave_out(name, f"needs compute capability {needed[name]}, this GPU has {capability}")
            del wanted[name]
    found: dict[str, type[QuantLinear]] = {}
    for name, kinds in wanted.items():
        for kind in kinds:
            try:
                layer_of(kind, torch.ones(128, 128, device=report.device))(
                    torch.ones(128, 128, device=report.device, dtype=torch.bfloat16)
                ).sum().item()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                report.leave_out(f"{name} by {kind.kernel}", str(error).strip().splitlines()[0][:160])
            else:
                found[name] = kind
                break
        else:
            if not report.is_dry:  # torch 2.11 multiplies FP8 on GPUs only
                report.check(f"{name} runs", False, f"no kernel takes it, though the GPU has capability {capability}")
    return found


def layer_of(kind: type[QuantLinear], weight: Tensor) -> QuantLinear:
    """A layer for bfloat16 inputs, calibrated for normal ones."""
    bias = torch.zeros(len(weight), device=weight.device, dtype=torch.bfloat16)
    layer = kind(weight, bias, dtype=torch.bfloat16, shared=SharedInput())
    if layer.needs_calibration:
        layer.set_act_amax_(64.0)
    return layer


def check_bytes(report: Report) -> None:
    """The quantizers' bytes on the device against those of the CPU."""
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(1000 if report.is_dry else 9300, 96 if report.is_dry else 3072, generator=generator)
    spread = large * torch.exp(3 * torch.randn(len(large), 1, generator=generator))
    tried = cases() | {
        "large, bfloat16|64.0": large.bfloat16(), "large, float32|4.7": spread,
        "fp8 large, bfloat16": spread.bfloat16(), "fp8 large, float32": large,
    }  # fmt: skip
    wrong: list[str] = []
    for name, x in tried.items():
        wrong += differences(name, quantized(name, x.to(report.device)), quantized(name, x))
    detail = "; ".join(wrong) or f"equal to the reference in {len(tried)} inputs"
    report.check("quantizers write the reference's bytes", not wrong, detail)


def measure_bandwidth(report: Report) -> None:
    """Bytes read and written a second at the size of FLUX's tokens at batch 24, beside a copy's."""
    rows, columns = (256, 96) if report.is_dry else (27648, 3072)
    x = torch.randn(rows, columns, device=report.device).bfloat16()
    amax = torch.full((), 64.0, device=report.device)
    copy = 2 * x.nbytes / seconds(report, lambda: x.clone()) / 1e9
    quantizers: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "nvfp4_quantize": lambda: kernels.nvfp4_quantize(x, amax),
        "fp8_quantize_rows": lambda: kernels.fp8_quantize_rows(x),
    }
    for name, quantize in quantizers.items():
        moved = x.nbytes + sum(part.nbytes for part in quantize())
        spent = seconds(report, quantize)
        rate = moved / spent / 1e9
        report.measure(name, rows=rows, columns=columns, us=1e6 * spent, GB_per_s=rate, share_of_copy=rate / copy)


def check_products(report: Report, formats: dict[str, type[QuantLinear]]) -> None:
    """Each format's layers proved; one product of FLUX's size timed; the kernel's name says its format."""
    shapes = [(64, 96)] if report.is_dry else [(3072, 3072), (9728, 2432), (2240, 2240)]
    rows, outputs, inputs = (64, 64, 96) if report.is_dry else (27648, 12288, 3072)
    x = torch.randn(rows, inputs, device=report.device).bfloat16()
    weight = torch.randn(outputs, inputs, device=report.device) / inputs**0.5
    low = weight.bfloat16()
    work = 2.0 * rows * outputs * inputs / 1e12
    plain = seconds(report, lambda: nn.functional.linear(x, low))
    report.measure("product, bf16", ms=1e3 * plain, TFLOP_per_s=work / plain)
    for name, kind in formats.items():
        with report.section(f"{name}: proof"):
            for shape in shapes:
                proof = prove_kind(layer_of(kind, torch.ones(shape, device=report.device)), name=f"{name} {shape}")
                report.check(
                    f"{name} {shape[0]} x {shape[1]} computes what it says", True,
                    f"kernel error {proof.kernel_error:.2g}, format error {proof.format_error:.3g} ({kind.kernel})",
                )  # fmt: skip
        with report.section(f"{name}: product"), torch.no_grad():
            measure_product(report, name, layer_of(kind, weight), x, plain)


def measure_product(report: Report, name: str, layer: QuantLinear, x: Tensor, plain_s: float) -> None:
    """The layer's product alone and with the input's quantization, beside ``plain_s`` of the one in bfloat16."""
    work = 2.0 * len(x) * layer.out_features * layer.in_features / 1e12
    operand = layer.quantized_input(x)
    multiply = seconds(report, lambda: layer.multiply(operand, x))
    whole = seconds(report, lambda: layer(x.view(x.shape)))  # a tensor it has not seen is quantized anew
    report.measure(
        f"product, {name}", ms=1e3 * multiply, TFLOP_per_s=work / multiply, speedup=plain_s / multiply,
        speedup_with_quantizing=plain_s / whole,
    )  # fmt: skip
    check_kernel_name(report, name, lambda: layer.multiply(operand, x))


def check_kernel_name(report: Report, name: str, run: Callable[[], object]) -> None:
    """The dearest kernel of ``run`` is recognized as the format's."""
    if report.device.type != "cuda":
        report.leave_out(f"{name}: kernel name", "no GPU")
        return
    dearest = max(profile(run), key=lambda kernel: kernel.microseconds)
    report.measure(f"kernel, {name}", name=dearest.name)
    report.check(f"{name}: the kernel's name says its format", product_format(dearest.name) == name, dearest.name)


def check_graphs(report: Report, formats: dict[str, type[QuantLinear]]) -> None:
    """A captured CUDA graph of two quantized layers follows their new weights."""
    width = 96 if report.is_dry else 2048
    for name, kind in formats.items():
        if report.is_late(f"{name}: CUDA graph"):
            continue
        with report.section(f"{name}: CUDA graph"), torch.no_grad():
            generator = torch.Generator(report.device).manual_seed(3)
            weights = torch.randn(4, width, width, generator=generator, device=report.device) / width**0.5
            layers = nn.Sequential(*(layer_of(kind, weight) for weight in weights[:2]))
            x = torch.randn(512, width, generator=generator, device=report.device).bfloat16()
            options: dict[str, Any] = {"backend": "aot_eager"} if report.is_dry else {"mode": "reduce-overhead"}
            compiled = torch.compile(layers, dynamic=False, fullgraph=True, **options)
            for _ in range(4):
                before = compiled(x).clone()
            for layer, weight in zip(layers, weights[2:], strict=True):
                layer.requantize_(weight)  # type: ignore[operator]
            with torch.compiler.set_stance("fail_on_recompile"):
                after = compiled(x).clone()
            changed, error = distance(after, before), distance(after, layers(x))
            report.check(
                f"{name}: a CUDA graph follows new weights", changed > 0.5 and error < 0.02,
                f"changed by {changed:.2f}, {error:.2g} from eager",
            )  # fmt: skip


def check_blocks(report: Report, formats: dict[str, type[QuantLinear]]) -> None:
    """Explorers of transformer blocks: right, faster or slower than bfloat16, and following new weights."""
    try:
        from tests.gpu.stacks import Explored
    except ModuleNotFoundError as error:
        report.leave_out("blocks", f"{error.name} is not installed")
        return
    explored: dict[tuple[str, str], Explored] = {}
    for batch in (2,) if report.is_dry else BATCHES:
        for family in ("flux", "sd3", "sana"):
            for name, kind in formats.items():
                label = f"{family}, batch {batch}, {name}"
                if report.is_late(label):
                    continue
                with report.section(label), torch.no_grad():
                    if (family, name) not in explored:
                        explored[family, name] = Explored(family, name, kind, report.device, is_tiny=report.is_dry)
                    check_stack(report, label, explored[family, name], batch)
                    if family == "flux" and batch != BATCHES[-1]:
                        check_requantize(report, f"{label}, requantize", explored[family, name], batch)


def check_stack(report: Report, label: str, stack: Any, batch: int) -> None:
    """Both trees compiled, at one batch size."""
    inputs = stack.inputs(batch)
    compiling = time.monotonic()
    full, low = stack.full(*inputs), stack.explorer(*inputs)
    compiling = time.monotonic() - compiling
    error = distance(low - inputs[0], full - inputs[0])
    limit = BLOCK_ERROR[stack.number_format]
    report.check(f"{label}: near bfloat16", 0 < error < limit, f"relative distance {error:.3g}, at most {limit}")
    plain, cheap = (seconds(report, lambda run=run: run(*inputs)) for run in (stack.full, stack.explorer))
    report.measure(
        label,
        bf16_ms=1e3 * plain,
        quantized_ms=1e3 * cheap,
        speedup=plain / cheap,
        compile_s=compiling,
        what=stack.what,
    )


def check_requantize(report: Report, label: str, stack: Any, batch: int) -> None:
    """New adapters reach compiled explorer and rollout tree in place, with nothing compiled anew."""
    inputs = stack.inputs(batch)
    before = stack.explorer(*inputs)
    for seed in (1, 2):
        sync(report)
        begin = time.monotonic()
        stack.requantize_(seed)
        sync(report)
        spent = time.monotonic() - begin
        with torch.compiler.set_stance("fail_on_recompile"):
            after, full = stack.explorer(*inputs), stack.full(*inputs)
        with torch.compiler.set_stance("force_eager"):
            expected, expected_full = stack.explorer(*inputs), stack.full(*inputs)
        changed = distance(after - inputs[0], before - inputs[0])
        errors = [distance(a - inputs[0], b - inputs[0]) for a, b in ((after, expected), (full, expected_full))]
        report.check(
            f"{label} {seed}", changed > 2 * max(errors) and max(errors) < BLOCK_ERROR[stack.number_format],
            f"no recompile, buffers in place, changed by {changed:.2g}, {max(errors):.2g} from eager; "
            f"{1e3 * spent:.0f} ms",
        )  # fmt: skip
        before = after


def seconds(report: Report, run: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of ``run`` on the device; repeats end after a second and a half."""
    run()
    sync(report)
    if report.device.type != "cuda":
        return statistics.median(_wall(run) for _ in range(3))
    begin = time.monotonic()
    run()
    sync(report)
    repeats = max(5, min(repeats, math.ceil(1.5 / max(time.monotonic() - begin, 1e-5))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    sync(report)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _wall(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def sync(report: Report) -> None:
    """Everything given to the device is done."""
    if report.device.type == "cuda":
        torch.cuda.synchronize()


def distance(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|; inf where x is not finite."""
    x, y = x.float(), y.float()
    return float((x - y).norm() / y.norm()) if bool(x.isfinite().all()) else math.inf


def triton_errors() -> tuple[type[Exception], ...]:
    """Triton's own, which are no RuntimeErrors."""
    try:
        from triton.errors import TritonError
    except ModuleNotFoundError:
        return ()
    return (TritonError,)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
