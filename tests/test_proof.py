"""The proof of quantized layers: what is right passes, and each planted fault is caught by the layer's name.

FP4 hardware is not needed: the stand-in for its kernel reads the same packed codes and swizzled scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.linear import InputScale, Operand, Quantized, QuantLinear, SharedInput
from solrl.quant.native import StandInLinear, unswizzling_mm
from solrl.quant.nvfp4 import quantize
from solrl.quant.proof import (
    FINGERPRINTS,
    KernelTime,
    check_products,
    count_products,
    product_format,
    prove,
    prove_layer,
)

torch.set_num_threads(1)
NAME = "transformer_blocks.3.attn.to_q"


def weight(rows: int = 144, columns: int = 192, seed: int = 0) -> Tensor:
    """More than one tile of scales, and not a multiple of it."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def layer(kind: type[QuantLinear], dtype: torch.dtype = torch.float32, **options: Any) -> QuantLinear:
    held = weight().to(dtype)
    bias = torch.randn(len(held), generator=torch.Generator().manual_seed(5)).to(dtype)
    made = kind(held, bias, dtype=dtype, name=NAME, shared=SharedInput(), **options)
    if made.needs_calibration:
        made.set_act_amax_(32.0)
    return made


def swap(packed: Tensor) -> Tensor:
    return (packed >> 4) | (packed << 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [EmulatedLinear, StandInLinear, Fp8Linear, Fp8TensorLinear])
def test_a_sound_layer_passes_with_its_formats_fingerprint(kind: type[QuantLinear], dtype: torch.dtype) -> None:
    for options in ({}, {"is_dynamic": True}, {"is_convolution": True}):
        proof = prove([(layer(kind, dtype, **options), weight().to(dtype).float())])
        lower, upper = FINGERPRINTS[kind.number_format]
        for low, high in (*proof.format_error.values(), *proof.fingerprint.values()):
            assert lower < low <= high < upper
        assert proof.num_layers == 1 and proof.kernel_error < 5e-3
        assert proof.kernels == {f"{kind.number_format}: {kind.kernel}": 1}


def test_weights_of_other_shapes_zeros_and_outliers_pass() -> None:
    outliers = weight(32, 64)
    outliers[:, 3] *= 300
    for held in (torch.zeros(32, 64), torch.ones(16, 32), outliers, weight(16, 32) * 1e-6):
        for kind in (EmulatedLinear, StandInLinear, Fp8Linear):
            made = kind(held, None, dtype=torch.float32, name=NAME, shared=SharedInput())
            if made.needs_calibration:
                made.set_act_amax_(4.0)
            prove([(made, held)])


class SwappedInput(StandInLinear):
    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        packed, scales = super().quantize_input(x, scale)
        return swap(packed), scales


class SwappedWeight(StandInLinear):
    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        stored = super().encode(weight)
        return stored | {"qweight": swap(stored["qweight"])}


class KernelReadsHighNibbleFirst(StandInLinear):
    @staticmethod
    def product(x: Tensor, xs: Tensor, xg: Tensor, w: Tensor, ws: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
        return unswizzling_mm(x, xs, xg, swap(w), ws, wg, bias)


class UnswizzledInput(StandInLinear):
    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        packed, swizzled = super().quantize_input(x, scale)
        assert scale is not None
        plain = quantize(x.reshape(-1, self.in_features), scale.amax).scales.flatten().view(torch.uint8)
        padded = torch.zeros(swizzled.numel(), dtype=torch.uint8)
        padded[: plain.numel()] = plain
        return packed, padded.view(torch.float8_e4m3fn)


class UnswizzledWeight(StandInLinear):
    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        stored = super().encode(weight)
        padded = torch.zeros(stored["scales"].numel(), dtype=torch.uint8)
        plain = quantize(weight).scales.flatten().view(torch.uint8)
        padded[: plain.numel()] = plain
        return stored | {"scales": padded.view(torch.float8_e4m3fn)}


class KernelReadsScalesInOrder(StandInLinear):
    @staticmethod
    def product(x: Tensor, xs: Tensor, xg: Tensor, w: Tensor, ws: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
        other = ws.view(torch.uint8).view(-1, 32, 4, 4).transpose(1, 2).reshape(-1).view(torch.float8_e4m3fn)
        return unswizzling_mm(x, xs, xg, w, other, wg, bias)


class StrayPadding(StandInLinear):
    def quantize_input(self, x: Tensor, scale: InputScale | None) -> Operand:
        packed, scales = super().quantize_input(x, scale)
        stray = scales.view(torch.uint8).clone()
        stray[-1] = 0x7F
        return packed, stray.view(torch.float8_e4m3fn)


class Bfloat16InDisguise(StandInLinear):
    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight().to(x.dtype), self.bias)


class Fp8InDisguise(StandInLinear):
    def multiply(self, quantized: Quantized, x: Tensor) -> Tensor:
        other = Fp8Linear(weight(), self.bias, dtype=x.dtype, shared=SharedInput())
        return other(x)


class HonestFp8CalledNvfp4(Fp8Linear):
    """Everything it says of itself agrees, but for the name of the format."""

    number_format: Literal["nvfp4", "fp8"] = "nvfp4"


class WithoutGlobalScale(StandInLinear):
    @staticmethod
    def product(x: Tensor, xs: Tensor, xg: Tensor, w: Tensor, ws: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
        return unswizzling_mm(x, xs, torch.ones_like(xg), w, ws, wg, bias)


class ForgottenBias(StandInLinear):
    @staticmethod
    def product(x: Tensor, xs: Tensor, xg: Tensor, w: Tensor, ws: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
        return unswizzling_mm(x, xs, xg, w, ws, wg, None)


class NanProduct(StandInLinear):
    @staticmethod
    def product(x: Tensor, xs: Tensor, xg: Tensor, w: Tensor, ws: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
        return unswizzling_mm(x, xs, xg, w, ws, wg, bias).index_fill(0, torch.tensor([150]), torch.nan)


FAULTS: list[tuple[type[QuantLinear], str]] = [
    (SwappedInput, "of its quantized input differ from the reference: the nibbles are swapped"),
    (SwappedWeight, "weights are not those it should hold"),
    (KernelReadsHighNibbleFirst, "in another order than they are stored in"),
    (UnswizzledInput, "input differ from the reference: they are the right ones in the wrong order"),
    (UnswizzledWeight, "weights are not those it should hold"),
    (KernelReadsScalesInOrder, "in another order than they are stored in"),
    (StrayPadding, "1 of .* bytes of its quantized input differ from the reference"),
    (Bfloat16InDisguise, "computes in full precision, not in NVFP4"),
    (Fp8InDisguise, "computes in FP8, not in NVFP4"),
    (HonestFp8CalledNvfp4, "computes in FP8, not in NVFP4"),
    (WithoutGlobalScale, r"a scale is wrong: .* gave 84 times"),
    (ForgottenBias, "away from the product"),
    (NanProduct, "144 numbers that are not finite"),
]


@pytest.mark.parametrize(("kind", "message"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_a_planted_fault_is_caught_and_names_the_layer(kind: type[QuantLinear], message: str) -> None:
    with pytest.raises(SolrlError, match=rf"{NAME} is not proved to run in NVFP4: .*{message}"):
        prove_layer(layer(kind), weight())
    with pytest.raises(SolrlError, match=NAME):
        prove([(layer(kind), weight())])


def stale(held: QuantLinear) -> None:
    held.requantize_(weight(seed=1))


def nan_scale(held: QuantLinear) -> None:
    held.scales.view(torch.uint8)[7] = 0x7F


def doubled(held: QuantLinear) -> None:
    held.global_scale.mul_(2)


def one_bit(held: QuantLinear) -> None:
    held.qweight.view(torch.uint8)[3, 3] ^= 0x08


SPOILT: list[tuple[Callable[[QuantLinear], None], str]] = [
    (stale, "stale"),
    (one_bit, "1 of its 27648 weights|1 of .* bytes of its quantized weight .qweight. differ"),
    (nan_scale, "not finite|weight .scales. differ"),
    (doubled, "misscaled|weight .global_scale. differ"),
]


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [(kind, *spoilt) for kind in (StandInLinear, EmulatedLinear) for spoilt in SPOILT]
    + [(Fp8Linear, *spoilt) for spoilt in SPOILT[:2]],
)
def test_a_spoilt_stored_weight_is_caught(
    kind: type[QuantLinear], spoil: Callable[[QuantLinear], None], message: str
) -> None:
    spoilt = layer(kind)
    spoil(spoilt)
    with pytest.raises(SolrlError, match=f"{NAME}.*({message})"):
        prove([(spoilt, weight())])


@pytest.mark.parametrize(
    ("name", "number_format"),
    [
        ("nvjet_sm100_ootst_128x256_256x5_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_bias_TNT", "nvfp4"),
        ("nvjet_ootst_256x128_256x4_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT", "nvfp4"),
        ("cutlass3x_sm100_bstensorop_s256x192x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16_f16", "nvfp4"),
        ("void cutlass::device_kernel<GemmUniversal<cutlass::float_e2m1_t, cutlass::float_ue4m3_t>>", "nvfp4"),
        ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "fp8"),
        ("nvjet_sm90_qqtst_128x160_128x4_2x1_v_bz_TNT", "fp8"),
        ("sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "fp8"),
        ("void cutlass::device_kernel<enable_3x_kernel_for_sm9x<GemmUniversal<cutlass::float_e4m3_t>>>", "fp8"),
        ("nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT", None),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", None),
        ("nvfp4_kernel", None),
        ("fp8_rows_kernel", None),
        ("flash_fwd_kernel_e4m3", None),
        ("splitKreduce_kernel", None),
    ],
)
def test_a_kernels_name_tells_its_format(name: str, number_format: str | None) -> None:
    assert product_format(name) == number_format


def test_products_are_counted_with_their_share_of_the_time_and_must_be_all() -> None:
    kernels = [
        KernelTime("nvjet_sm100_ootst_a_Avec16UE4M3_Bvec16UE4M3_TNT", 12, 30.0),
        KernelTime("nvjet_ootst_b", 8, 10.0),
        KernelTime("nvjet_tst_c", 5, 20.0),
        KernelTime("flash", 4, 40.0),
    ]
    assert count_products(kernels) == {"nvfp4": (20, 0.4), "fp8": (0, 0.0)}
    assert check_products(kernels, {"nvfp4": 20}) == {"nvfp4": {"products": 20, "share_of_gpu_time": 0.4}}
    with pytest.raises(
        SolrlError, match=r"ran 20 NVFP4 matrix products, its layers asked for 25; .*flash, nvjet_sm100"
    ):
        check_products(kernels, {"nvfp4": 25})
    with pytest.raises(SolrlError, match="ran 0 FP8 matrix products"):
        check_products(kernels, {"fp8": 1})
