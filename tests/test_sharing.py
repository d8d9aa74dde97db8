"""Compiled layers: an input that several read is quantized once, weights and scales are followed, no recompiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from solrl.quant.emulated import EmulatedLinear
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.linear import Place, QuantLinear, SharedInput
from solrl.quant.native import NativeLinear, StandInLinear

torch.set_num_threads(1)


class Block(nn.Module):
    """q, k and v read one tensor, the output layer another."""

    def __init__(self, kind: type[QuantLinear]) -> None:
        super().__init__()
        shared = SharedInput()
        for number, name in enumerate("qkvo"):
            generator = torch.Generator().manual_seed(number)
            layer = kind(torch.randn(64, 64, generator=generator), None, dtype=torch.float32, name=name, shared=shared)
            if layer.needs_calibration:
                layer.set_act_amax_(64.0)
            self.add_module(name, layer)

    def link(self) -> None:
        for name, place in zip(
            "qkvo", (Place(True, False), Place(False, False), Place(False, True), Place()), strict=True
        ):
            self.get_submodule(name).place = place  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        q, k, v = (self.get_submodule(name)(x) for name in "qkv")
        out: Tensor = self.get_submodule("o")(torch.tanh(q) * k + v)
        return out


def captured() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def quantizations(graph: torch.fx.GraphModule) -> int:
    named = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sum(any(word in name for word in ("nvfp4_quantize", "fp8_quantize_rows")) for name in named)


@pytest.mark.parametrize("kind", [EmulatedLinear, StandInLinear, Fp8Linear, Fp8TensorLinear])
def test_compiled_readers_share_and_follow_weights_and_scales_without_recompiling(kind: type[QuantLinear]) -> None:
    torch._dynamo.reset()
    block, x = Block(kind), torch.randn(5, 64)
    graphs, backend = captured()
    with torch.no_grad():
        expected = block(x)
        apart = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
        torch.testing.assert_close(apart(x), expected)
        torch._dynamo.reset()
        block.link()
        together = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
        torch.testing.assert_close(together(x), expected)
        assert len(graphs) == 2
        sizes = [len(graph.graph.nodes) for graph in graphs]
        assert sizes[1] < sizes[0]
        if kind in (StandInLinear, Fp8Linear):
            assert [quantizations(graph) for graph in graphs] == [4, 2]
        assert block.get_submodule("q").shared._traced is None  # type: ignore[union-attr]
        with torch.compiler.set_stance("fail_on_recompile"):
            for number, layer in enumerate(block.children()):
                assert isinstance(layer, QuantLinear)
                layer.requantize_(torch.randn(64, 64, generator=torch.Generator().manual_seed(10 + number)))
                if layer.needs_calibration:
                    layer.set_act_amax_(32.0)
            after = together(x)
        assert not torch.allclose(after, expected)
        torch.testing.assert_close(after, block(x))


@pytest.mark.parametrize("kind", [NativeLinear, Fp8Linear, Fp8TensorLinear])
@pytest.mark.parametrize("is_convolution", [False, True])
def test_the_call_for_a_gpu_fits_on_fake_tensors(kind: type[QuantLinear], is_convolution: bool) -> None:
    """Shapes, dtypes and number of scales are torch's to check; no kernel runs."""
    shared = SharedInput()
    layer = kind(
        torch.randn(48, 96).bfloat16(), torch.randn(48).bfloat16(), dtype=torch.bfloat16, name="q", shared=shared,
        is_convolution=is_convolution,
    )  # fmt: skip
    if layer.needs_calibration:
        layer.set_act_amax_(64.0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_gpu = mode.from_tensor
        for name, buffer in list(layer.named_buffers()):
            setattr(layer, name, on_gpu(buffer).to("cuda"))
        if layer._scale is not None:
            scales = layer._scale.tensor_scale
            moved = type(scales)(*(on_gpu(part).to("cuda") for part in scales))
            layer._scale = layer._scale._replace(amax=layer.act_amax, tensor_scale=moved)
        shape = (2, 96, 7, 5) if is_convolution else (2, 35, 96)
        y = layer(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
    assert y.shape == ((2, 48, 7, 5) if is_convolution else (2, 35, 48))
    assert y.dtype == torch.bfloat16 and y.device.type == "cuda"
