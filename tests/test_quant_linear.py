"""The quantized linear layer: what it computes, how it follows its weight, that sharing an input changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant import emulated as module
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.linear import SharedInput
from solrl.quant.nvfp4 import NVFP4, dequantize, fake_quantize, quantize

torch.set_num_threads(1)
AMAX = 64.0


def layer(seed: int = 0, shared: SharedInput | None = None, amax: float | None = AMAX) -> EmulatedLinear:
    """48 -> 24 with a bias."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(24, 48, generator=generator), torch.randn(24, generator=generator)
    made = EmulatedLinear(weight, bias, dtype=torch.float32, name="block.to_q", shared=shared or SharedInput())
    if amax is not None:
        made.set_act_amax_(amax)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every input that was really quantized."""
    seen: list[Tensor] = []
    original: Callable[..., Tensor] = fake_quantize

    def counting(x: Tensor, *args: object, **options: object) -> Tensor:
        seen.append(x)
        return original(x, *args, **options)

    monkeypatch.setattr(module, "fake_quantize", counting)
    return seen


def test_forward_multiplies_what_the_stored_codes_stand_for() -> None:
    quantized, x = layer(), torch.randn(2, 5, 48)
    weight = dequantize(NVFP4(quantized.qweight, quantized.scales, quantized.global_scale))
    activation = dequantize(quantize(x.view(10, 48), torch.tensor(AMAX))).view(2, 5, 48)
    assert torch.equal(quantized(x), nn.functional.linear(activation, weight, quantized.bias))


def test_requantizing_fills_the_same_buffers_and_equals_a_new_layer() -> None:
    quantized, new = layer(), torch.randn(24, 48)
    pointers = {name: buffer.data_ptr() for name, buffer in quantized.named_buffers()}
    quantized.requantize_(new)
    fresh = EmulatedLinear(new, quantized.bias, dtype=torch.float32, shared=SharedInput())
    for name in ("qweight", "scales", "global_scale", "dequantized"):
        stored, expected = getattr(quantized, name), getattr(fresh, name)
        assert torch.equal(stored.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
    assert {name: buffer.data_ptr() for name, buffer in quantized.named_buffers()} == pointers
    assert torch.equal(quantized.dequantized, dequantize(quantize(new)))


def test_a_layer_without_an_activation_scale_refuses_to_run() -> None:
    with pytest.raises(SolrlError, match=r"block\.to_q has no activation scale"):
        layer(amax=None)(torch.randn(1, 48))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SolrlError, match="positive and finite"):
            layer(amax=bad)


def test_observing_scales_by_the_input_itself_and_remembers_the_largest() -> None:
    quantized = layer(amax=None)
    small, large = torch.randn(3, 48), 10 * torch.randn(3, 48)
    quantized.start_observing()
    expected = nn.functional.linear(fake_quantize(small), quantized.dequantized, quantized.bias)
    assert torch.equal(quantized(small), expected)
    quantized(large), quantized(small)
    quantized.stop_observing()
    assert quantized.observed is not None and torch.equal(quantized.observed, large.abs().max())
    with pytest.raises(SolrlError):
        quantized(small)


def test_a_non_finite_number_is_an_error_that_names_the_layer() -> None:
    with pytest.raises(SolrlError, match=r"block\.to_q: NVFP4 input .* non-finite"):
        layer()(torch.full((1, 48), torch.inf))
    with pytest.raises(SolrlError, match=r"weight of block\.to_q"):
        layer().requantize_(torch.full((24, 48), torch.nan))


def test_layers_that_read_one_tensor_quantize_it_once_with_equal_results(calls: list[Tensor]) -> None:
    shared, x = SharedInput(), torch.randn(4, 48)
    layers = [layer(seed, shared) for seed in range(3)]
    with torch.no_grad():
        together = [quantized(x) for quantized in layers]
        assert len(calls) == 1
        apart = [layer(seed)(x) for seed in range(3)]
    assert len(calls) == 4 and all(map(torch.equal, together, apart))


def test_sharing_notices_a_changed_tensor_another_tensor_and_another_scale(calls: list[Tensor]) -> None:
    shared = SharedInput()
    first, second, other_scale = layer(0, shared), layer(1, shared), layer(2, shared, amax=2.0)
    with torch.no_grad():
        x = torch.randn(4, 48)
        first(x)
        x[:, :24].mul_(3)  # through a view
        changed = second(x).clone()
        assert len(calls) == 2
        assert torch.equal(changed, layer(1)(x))
        same_numbers = x.clone()
        second(same_numbers), other_scale(same_numbers)
        assert len(calls) == 5  # and layer(1) alone was one
        assert torch.equal(other_scale(same_numbers), layer(2, amax=2.0)(x))


def test_a_failed_quantization_leaves_nothing_behind() -> None:
    quantized, x, bad = layer(0), torch.randn(4, 48), torch.randn(4, 48)
    bad[3, 0] = torch.nan
    expected = quantized(x)
    with pytest.raises(SolrlError):
        quantized(bad)
    assert torch.equal(quantized(x), expected)


def test_sharing_keeps_no_activation_alive_and_forgets_with_it() -> None:
    shared = SharedInput()
    quantized = layer(0, shared)
    x = torch.randn(4, 48)
    alive = weakref.ref(x)
    quantized(x)
    assert shared._quantized is not None and shared._quantized.operand[0].numel() == 4 * 48
    del x
    gc.collect()
    assert alive() is None and shared._quantized is None and shared._source is None


def test_inputs_of_all_sizes_take_turns_in_one_piece_of_memory() -> None:
    shared = SharedInput()
    quantized = layer(0, shared)
    inputs = [torch.randn(rows, 48) for rows in (2, 7, 2, 3)]
    assert all(torch.equal(quantized(x), layer(0)(x)) for x in inputs)
    assert {work.result.data_ptr() for work in shared._workspaces.values()} == {shared._memory.data_ptr()}


def test_inference_mode_gives_the_same_numbers_without_sharing(calls: list[Tensor]) -> None:
    shared = SharedInput()
    quantized, x = layer(0, shared), torch.randn(4, 48)
    expected = quantized(x)
    with torch.inference_mode():
        inside = x.clone()
        assert torch.equal(quantized(inside), expected)
        inside.mul_(2)
        assert torch.equal(quantized(inside), layer(0)(2 * x))
    assert torch.equal(quantized(x), expected)


def test_the_result_carries_no_gradient() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    assert not layer()(x).requires_grad


def test_compiled_layers_follow_requantization_without_recompiling() -> None:
    shared = SharedInput()
    pair = nn.ModuleList([layer(0, shared), layer(1, shared)])

    def both(x: Tensor) -> Tensor:
        return pair[0](x) + pair[1](x)

    x = torch.randn(4, 48)
    compiled = torch.compile(both, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(x), both(x))
        with torch.compiler.set_stance("fail_on_recompile"):
            for quantized in pair:
                quantized.requantize_(torch.randn(24, 48))
            assert torch.equal(compiled(x), both(x))
