"""FP8 layers: what they compute on a CPU, by the kernel's own name, and that they follow their weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.linear import SharedInput

torch.set_num_threads(1)
KINDS = [Fp8Linear, Fp8TensorLinear]


def layer(kind: type[Fp8Linear] = Fp8Linear, dtype: torch.dtype = torch.float32, seed: int = 0) -> Fp8Linear:
    """64 -> 32 with a bias."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(32, 64, generator=generator), torch.randn(32, generator=generator)
    made = kind(weight.to(dtype), bias.to(dtype), dtype=dtype, name="block.to_q", shared=SharedInput())
    if made.needs_calibration:
        made.set_act_amax_(64.0)
    return made


def distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_that_of_the_stored_numbers_and_has_fp8s_error(
    kind: type[Fp8Linear], dtype: torch.dtype
) -> None:
    quantized, x = layer(kind, dtype), torch.randn(2, 5, 64).to(dtype)
    y = quantized(x)
    assert y.shape == (2, 5, 32) and y.dtype == dtype and not y.requires_grad
    assert quantized.qweight.dtype == torch.float8_e4m3fn
    values = quantized.input_values(quantized.quantized_input(x)).double()
    bias = quantized.get_buffer("bias").double()
    assert distance(y.view(10, 32), values @ quantized.weight_values().double().t() + bias) < 3e-3
    assert (
        0.02
        < distance(values @ quantized.weight_values().double().t(), x.view(10, 64).double() @ original().t())
        < 0.06
    )


def original() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).double()


def test_rows_do_not_depend_on_each_other() -> None:
    quantized, x = layer(), torch.randn(160, 64)
    mates = x * 100
    mates[:3] = x[:3]
    assert torch.equal(quantized(x)[:3], quantized(mates)[:3])
    assert torch.equal(quantized(x)[:3], quantized(x[:3].clone()))


@pytest.mark.parametrize("kind", KINDS)
def test_requantizing_fills_the_same_buffers_and_equals_a_new_layer(kind: type[Fp8Linear]) -> None:
    quantized, other = layer(kind), layer(kind, seed=1)
    pointers = {name: buffer.data_ptr() for name, buffer in quantized.named_buffers()}
    generator = torch.Generator().manual_seed(1)
    quantized.requantize_(torch.randn(32, 64, generator=generator))
    assert {name: buffer.data_ptr() for name, buffer in quantized.named_buffers()} == pointers
    for mine, theirs in zip(quantized.stored(), other.stored(), strict=True):
        assert torch.equal(mine.float(), theirs.float())
    error = (quantized.weight_values() - torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).abs()
    assert bool((error <= quantized.rounding()[0]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_the_bias_and_what_is_not_finite_does_not_vanish(kind: type[Fp8Linear]) -> None:
    quantized, x = layer(kind), torch.zeros(3, 64)
    assert torch.equal(quantized(x), quantized.get_buffer("bias").expand(3, -1))
    x[1, 5] = torch.nan
    assert quantized(x)[1].isnan().all() and quantized(x)[0].isfinite().all()
    with pytest.raises(SolrlError, match=r"weight of block\.to_q: 1 of 2048 values are not finite"):
        quantized.requantize_(
            torch.zeros(32, 64).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(torch.inf))
        )


def test_rows_need_no_calibration_and_a_whole_tensor_does() -> None:
    assert not layer().needs_calibration
    uncalibrated = Fp8TensorLinear(
        torch.randn(32, 64), None, dtype=torch.float32, name="block.to_q", shared=SharedInput()
    )
    with pytest.raises(SolrlError, match=r"block\.to_q has no activation scale"):
        uncalibrated(torch.randn(1, 64))


def test_a_pointwise_convolution_is_the_same_product() -> None:
    convolution = nn.Conv2d(64, 32, 1)
    weight = convolution.weight.detach().flatten(1)
    bias = torch.randn(32)
    shared = SharedInput()
    quantized = Fp8Linear(weight, bias, dtype=torch.float32, shared=shared, is_convolution=True)
    linear = Fp8Linear(weight, bias, dtype=torch.float32, shared=shared)
    x = torch.randn(2, 64, 3, 5)
    assert quantized(x).shape == (2, 32, 3, 5)
    assert torch.equal(quantized(x), linear(x.movedim(1, -1)).movedim(-1, 1))
