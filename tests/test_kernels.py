"""The quantizers as operators: the reference's bytes on a CPU, and in Triton as far as a machine without a GPU shows.

Triton's interpreter runs the kernels on the CPU (in a process of its own: a switch at import turns it on), its compiler
makes them for GPUs that are not there, and fake tensors trace the native linear that reads what they write. That the
compiled bytes are the same is tests/gpu/run.py's to say.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from solrl.quant import kernels, nvfp4
from tests.quantizer_cases import cases, differences, e4m3_numbers, matrix, quantized, raw

torch.set_num_threads(1)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

INTERPRET = """
import sys
import torch
from safetensors.torch import load_file, save_file
from solrl.quant import triton_kernels
made = {}
for name, x in load_file(sys.argv[1]).items():
    kind, _, amax = name.partition("|")
    triton_kernels.ROWS = 16 if "16 rows" in kind else 128  # the interpreter's time goes by the number of programs
    if amax:
        made[name + " codes"], made[name + " scales"] = triton_kernels.nvfp4_quantize(x, torch.tensor(float(amax)))
    else:
        made[name + " codes"], made[name + " scales"] = triton_kernels.fp8_quantize_rows(x)
save_file(made, sys.argv[2])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What Triton's interpreter makes of ``cases()``."""
    folder = tmp_path_factory.mktemp("interpreted")
    save_file({name: x.clone() for name, x in cases().items()}, folder / "in.safetensors")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRET, folder / "in.safetensors", folder / "out.safetensors"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}, check=True,
    )  # fmt: skip
    return load_file(folder / "out.safetensors")


@needs_triton
@pytest.mark.parametrize("name", cases())
def test_triton_writes_the_bytes_of_the_reference(name: str, interpreted: dict[str, Tensor]) -> None:
    found = (interpreted[name + " codes"], interpreted[name + " scales"])
    assert differences(name, found, quantized(name, cases()[name])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_the_nvfp4_operator_is_the_reference(dtype: torch.dtype) -> None:
    x, amax = torch.randn(130, 80, generator=torch.Generator().manual_seed(1)).to(dtype), torch.tensor(4.0)
    packed, scales = kernels.nvfp4_quantize(x, amax)
    reference = nvfp4.quantize(x, amax)
    assert torch.equal(packed, reference.packed)
    assert torch.equal(raw(scales), raw(nvfp4.swizzle_scales(reference.scales))) and len(scales) == 256 * 8
    rows, amax = torch.randn(64, 80).t(), torch.tensor(2.0)  # strided
    assert torch.equal(kernels.nvfp4_quantize(rows, amax)[0], nvfp4.quantize(rows.contiguous(), amax).packed)


def test_fp8_rows_round_to_the_nearest_number_of_their_scale() -> None:
    x = matrix()
    codes, scale = kernels.fp8_quantize_rows(x)
    assert codes.shape == x.shape and scale.shape == (320, 1) and scale.dtype == torch.float32
    amax = x.abs().amax(1, keepdim=True)
    normal = amax[:, 0] > 448 * 2.0**-120
    assert torch.equal(codes.float().abs().amax(1)[normal], torch.full((int(normal.sum()),), 448.0))
    numbers = e4m3_numbers().double()
    scaled = (x.double() / scale.double()).abs()
    nearest = (scaled[..., None] - numbers).abs().amin(-1)
    assert bool(((codes.double().abs() - scaled).abs() <= nearest * (1 + 1e-6) + 1e-4).all())
    zero = kernels.fp8_quantize_rows(torch.zeros(2, 16))
    assert raw(zero[0]).sum() == 0 and bool(zero[1].isfinite().all())


def test_bad_numbers_poison_a_row_on_a_cpu_too() -> None:
    x = torch.randn(4, 32)
    x[1, 3], x[2, 0] = torch.nan, -torch.inf
    codes, scale = kernels.fp8_quantize_rows(x)
    assert scale.isnan()[:, 0].tolist() == [False, True, True, False]
    assert codes.float().isnan().all(1).tolist() == [False, True, True, False]
    _, scales = kernels.nvfp4_quantize(x, torch.tensor(4.0))
    assert int(scales.float().isnan().sum()) == 2


@pytest.mark.parametrize("shape", [(4, 24), (0, 16), (16,), (2, 2, 16)])
def test_shapes_that_do_not_fit_are_refused_also_while_tracing(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.nvfp4_quantize(torch.zeros(shape), torch.tensor(1.0))
    with FakeTensorMode(), pytest.raises(ValueError, match="multiple of 16"):
        kernels.nvfp4_quantize(torch.zeros(shape, device="cuda"), torch.zeros((), device="cuda"))


def test_operators_keep_torchs_rules() -> None:
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(5, 48)
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(kernels.nvfp4_quantize, (x.to(dtype), torch.tensor(3.0)), test_utils=checks)
        torch.library.opcheck(kernels.fp8_quantize_rows, (x.to(dtype),), test_utils=checks)


class NativeLinear(torch.nn.Module):
    """An NVFP4 linear by torch's two-level block scaling: what the native back end runs, without its state keeping."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        room = -(-num_out // 128) * 128 * (-(-num_in // 64) * 4)
        self.register_buffer("qweight", torch.zeros(num_out, num_in // 2, dtype=torch.uint8, device="cuda"))
        self.register_buffer("scales", torch.zeros(room, dtype=torch.float8_e4m3fn, device="cuda"))
        self.register_buffer("global_scale", torch.ones((), device="cuda"))
        self.register_buffer("amax", torch.ones((), device="cuda"))
        self.register_buffer("bias", torch.zeros(num_out, dtype=torch.bfloat16, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        packed, scales = kernels.nvfp4_quantize(x.reshape(-1, x.shape[-1]), self.amax)
        recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        f4 = torch.float4_e2m1fn_x2
        product = scaled_mm(
            packed.view(f4), self.qweight.view(f4).t(), [scales, self.amax / 2688], recipe,
            [self.scales, self.global_scale], recipe, swizzle, swizzle, bias=self.bias, output_dtype=torch.bfloat16,
        )  # fmt: skip
        return product.view(*x.shape[:-1], -1)


SHAPES = [((2, 1152, 3072), 9216), ((1, 3, 3072), 18432), ((1, 1152, 3072), 64), ((300, 2240), 2240), ((1, 32), 16)]


@pytest.mark.parametrize(("shape", "num_out"), SHAPES)
def test_torch_takes_what_the_quantizer_writes(shape: tuple[int, ...], num_out: int) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        y = NativeLinear(shape[-1], num_out)(x)
    assert y.shape == (*shape[:-1], num_out) and y.dtype == torch.bfloat16 and y.device.type == "cuda"


def test_the_native_linear_is_one_graph_with_one_quantizer_and_one_product() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode():
        linear = NativeLinear(3072, 256)
        x = torch.empty(2, 4, 3072, dtype=torch.bfloat16, device="cuda")
        y = torch.compile(linear, backend=record, fullgraph=True, dynamic=False)(x)
    assert y.shape == (2, 4, 256) and len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("nvfp4_quantize" in name for name in called) == 1 and sum("scaled_mm" in name for name in called) == 1


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_gpus_and_keep_every_rounding(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from solrl.quant import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [
        ASTSource(
            triton_kernels.nvfp4_kernel,
            {"x_ptr": f"*{dtype}", "amax_ptr": "*fp32", "packed_ptr": "*u8", "scales_ptr": "*u8", "num_rows": "i32",
             "num_columns": "i32", "row_stride": "i32", "ROWS": "constexpr", "BLOCKS": "constexpr"},
            {"ROWS": triton_kernels.ROWS, "BLOCKS": triton_kernels.BLOCKS},
        ),
        ASTSource(
            triton_kernels.fp8_rows_kernel,
            {"x_ptr": f"*{dtype}", "codes_ptr": "*u8", "scale_ptr": "*fp32", "num_columns": "i32", "row_stride": "i32",
             "WIDTH": "constexpr"},
            {"WIDTH": 4096},
        ),
    ]  # fmt: skip
    for source in sources:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        ptx = made.asm["ptx"]
        assert f".target sm_{capability}" in ptx and len(made.asm["cubin"]) > 0
        # no flushed subnormals, fused multiply-adds, approximate divisions or conversions to small formats
        assert not re.search(r"\.ftz|\bfma\.|div\.(full|approx)|rcp\.approx|cvt\S*(e4m3|e2m1)", ptx)
        assert "div.rn.f32" in ptx
