"""NVFP4 arithmetic against a second implementation (numpy, nearest entry of a sorted table), bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from solrl.quant import nvfp4

torch.set_num_threads(1)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:127]
FLOAT_MAX = np.finfo(np.float32).max


def nearest_code(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the entry nearest to x >= 0; the even index where two are equally near; the last where x is beyond."""
    x = np.minimum(x.astype(np.float64), table[-1])
    upper = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    below, above = x - table[upper - 1], table[upper] - x
    return np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)


def second_quantize(
    x: np.ndarray, amax: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """(packed, scale bytes, global scale, values) of x [M, K] float32."""
    one, top = np.float32(1), np.float32(2688)
    blocks = x.reshape(-1, 16)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max() if amax is None else amax
        encode = one if amax == 0 else np.minimum(top / amax, FLOAT_MAX)
        ideal = np.abs(blocks).max(1) * (encode * (one / np.float32(6)))
        scale_codes = nearest_code(ideal, E4M3)
        scales = E4M3[scale_codes].astype(np.float32)
        scaled = blocks * np.minimum(one / (scales * (one / encode)), FLOAT_MAX)[:, None]
    codes = nearest_code(np.abs(scaled), E2M1)
    signs = np.where(np.signbit(blocks), np.float32(-1), one)
    signed = np.where(codes == 0, np.float32(0), signs * E2M1[codes].astype(np.float32))
    values = signed * (scales * (amax / top))[:, None]
    nibbles = (codes + 8 * np.signbit(blocks)).reshape(x.shape).astype(np.uint8)
    packed = np.zeros((x.shape[0], x.shape[1] // 2), np.uint8)
    for column in range(x.shape[1]):
        packed[:, column // 2] += nibbles[:, column] << (4 * (column % 2))
    return packed, scale_codes.reshape(x.shape[0], -1).astype(np.uint8), amax / top, values.reshape(x.shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the sign of zero."""
    assert a.dtype == b.dtype
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def inputs() -> dict[str, Tensor]:
    """Matrices that meet every branch of the arithmetic."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(64, 128, generator=generator)
    spread = plain * torch.exp(4 * torch.randn(64, 1, generator=generator))
    holes = plain.clone()
    holes[3], holes[5, 16:32], holes[7, :16], holes[9, 4] = 0, -0.0, 1e-6, -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]).repeat(64, 16) * torch.sign(plain)
    return {
        "plain": plain,
        "rows of different size": spread,
        "zero blocks, tiny blocks, negative zeros": holes,
        "ties": ties,
        "one large value": plain.index_fill(1, torch.tensor([17]), 300.0),
        "near the top of float32": plain * 7e37,
        "near the bottom": plain * 1e-37,
        "denormal": plain * 1e-41,
        "zeros": torch.zeros(2, 32),
    }


@pytest.mark.parametrize("amax", [None, 0.0, 3.0, 64.0, 4096.0])
@pytest.mark.parametrize("name", inputs())
def test_quantization_equals_a_second_implementation_bit_for_bit(name: str, amax: float | None) -> None:
    x = inputs()[name]
    quantized = nvfp4.quantize(x, None if amax is None else torch.tensor(amax))
    packed, scales, global_scale, values = second_quantize(x.numpy(), None if amax is None else np.float32(amax))
    np.testing.assert_array_equal(quantized.packed.numpy(), packed)
    np.testing.assert_array_equal(quantized.scales.view(torch.uint8).numpy(), scales)
    assert quantized.global_scale.numpy().tobytes() == global_scale.tobytes()
    assert nvfp4.dequantize(quantized).numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("amax", [None, 3.0, 64.0])
@pytest.mark.parametrize("name", inputs())
def test_fake_quantization_equals_quantization_bit_for_bit(name: str, amax: float | None) -> None:
    x, scale = inputs()[name], None if amax is None else torch.tensor(amax)
    assert same_bits(nvfp4.fake_quantize(x, scale), nvfp4.dequantize(nvfp4.quantize(x, scale)))
    low = x.bfloat16()
    if low.isfinite().all():
        expected = nvfp4.dequantize(nvfp4.quantize(low, scale), torch.bfloat16)
        assert same_bits(nvfp4.fake_quantize(low, scale), expected)


def test_two_million_points_midpoints_and_their_neighbours_round_to_the_even_nearest_code() -> None:
    generator = torch.Generator().manual_seed(1)
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    edges = torch.cat([middle, torch.tensor(E2M1, dtype=torch.float32)])
    near = [edges]
    for direction in (torch.inf, -torch.inf):
        for _ in range(4):
            near.append(torch.nextafter(near[-1] if direction > 0 else near[-1].clone(), torch.tensor(direction)))
    special = torch.cat([*near, torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 5.9999995, 6.0])])
    points = torch.cat([special, torch.rand(2_000_000, generator=generator) * 6])
    points = torch.cat([points, torch.zeros(-len(points) % 15)])
    points *= torch.where(torch.arange(len(points)) % 2 == 0, 1.0, -1.0)
    points = torch.cat([points, -special, torch.zeros(-(len(points) + len(special)) % 15)])
    expected = nearest_code(points.abs().numpy(), E2M1) + 8 * np.signbit(points.numpy())
    np.testing.assert_array_equal(nvfp4.encode_e2m1(points).numpy(), expected)
    # With amax 2688 and a 6 in each block every scale is 1, so that fake_quantize meets the very same points.
    blocks = torch.cat([points.view(-1, 15).clamp(-6, 6), torch.full((len(points) // 15, 1), 6.0)], 1)
    fake = nvfp4.fake_quantize(blocks, torch.tensor(2688.0))
    assert same_bits(fake, nvfp4.decode_e2m1(nvfp4.encode_e2m1(blocks)))


def test_every_block_scale_rounds_to_the_even_nearest_e4m3_number() -> None:
    middle = torch.tensor((E4M3[1:] + E4M3[:-1]) / 2, dtype=torch.float32)
    points = [torch.tensor(E4M3, dtype=torch.float32), middle]
    points += [torch.nextafter(p, torch.tensor(to)) for p in points for to in (0.0, 1e9)]
    scales = torch.cat([*points, torch.rand(100_000) * 448]).clamp(0, 448)
    expected = torch.tensor(E4M3[nearest_code(scales.numpy(), E4M3)], dtype=torch.float32)
    rounded = scales.clone()
    nvfp4._round(rounded, torch.empty_like(scales), nvfp4.E4M3_MIN_NORMAL, 3)
    assert same_bits(rounded, expected)
    assert same_bits(scales.to(torch.float8_e4m3fn).float(), expected)


def test_the_roundings_of_block_scales_and_codes_come_in_the_documented_order() -> None:
    generator = torch.Generator().manual_seed(3)
    middle = torch.tensor((E4M3[1:] + E4M3[:-1]) / 2, dtype=torch.float32)
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6, -6]) / 6
    for amax in (torch.rand(20, generator=generator) * 100).unbind():
        near_tie = middle * 6 * (amax / 2688)  # block magnitudes whose scale lies between two E4M3 numbers
        sizes = torch.cat([near_tie, *(torch.nextafter(near_tie, torch.tensor(to)) for to in (0.0, 1e9))])
        x = sizes[:, None] * grid
        quantized = nvfp4.quantize(x, amax)
        packed, scales, _, values = second_quantize(x.numpy(), amax.numpy())
        np.testing.assert_array_equal(quantized.scales.view(torch.uint8).numpy(), scales)
        np.testing.assert_array_equal(quantized.packed.numpy(), packed)
        assert nvfp4.fake_quantize(x, amax).numpy().tobytes() == values.tobytes()


def test_a_worked_example() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -3.0, 0.25, -0.5])  # largest magnitude 6: block scale 448, global scale 6 / 2688
    quantized = nvfp4.quantize(x)
    assert quantized.packed[0].tolist() == [7 | (8 + 5) << 4, 0 | (8 + 1) << 4, 0, 0, 0, 0, 0, 0]
    assert quantized.scales.float().item() == 448 and quantized.global_scale.item() == pytest.approx(6 / 2688)
    assert nvfp4.dequantize(quantized)[0, :4].tolist() == pytest.approx([6.0, -3.0, 0.0, -0.5])


def test_zeros_come_back_as_zeros() -> None:
    x = torch.zeros(4, 32)
    x[1], x[2, :16] = -0.0, torch.randn(16)
    quantized = nvfp4.quantize(x)
    assert quantized.packed[1].tolist() == [0x88] * 16 and quantized.scales.float()[2, 1] == 0  # codes keep the sign
    for values in (nvfp4.dequantize(quantized), nvfp4.fake_quantize(x)):
        assert same_bits(values[[0, 1, 3]], torch.zeros(3, 32)) and same_bits(values[2, 16:], torch.zeros(16))
    for zeros in (torch.zeros(2, 16), torch.full((1, 16), -0.0)):
        assert same_bits(nvfp4.dequantize(nvfp4.quantize(zeros)), torch.zeros_like(zeros))
        assert same_bits(nvfp4.fake_quantize(zeros), torch.zeros_like(zeros))
    assert nvfp4.fake_quantize(torch.full((1, 16), 3.0), torch.tensor(0.0)).abs().max() == 0  # a static amax of 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_non_finite_input_is_an_error_that_says_where(bad: float) -> None:
    x = torch.randn(5, 64)
    x[3, 20] = bad
    for convert in (nvfp4.quantize, nvfp4.fake_quantize):
        for amax in (None, torch.tensor(8.0)):
            with pytest.raises(ValueError, match=r"\[5, 64\] holds 1 non-finite values, first at \[3, 20\]"):
                convert(x, amax)
    # Unchecked, it poisons its block and nothing else.
    for values in (
        nvfp4.fake_quantize(x, torch.tensor(8.0), check=False),
        nvfp4.dequantize(nvfp4.quantize(x, torch.tensor(8.0), check=False)),
    ):
        assert values[3, 16:32].isnan().all() and values.isnan().sum() == 16


@pytest.mark.parametrize("shape", [(4, 24), (0, 16), (4, 8)])
def test_rows_that_do_not_fit_blocks_are_refused(shape: tuple[int, int]) -> None:
    for convert in (nvfp4.quantize, nvfp4.fake_quantize):
        with pytest.raises(ValueError, match="multiple of 16"):
            convert(torch.zeros(shape))


def test_chunks_layout_and_workspace_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 80, 5).transpose(1, 2)  # [6, 5, 80], not contiguous
    for chunk in (16, 112, 2400, 10**6):
        monkeypatch.setattr(nvfp4, "_CHUNK", chunk)
        memory = torch.full((nvfp4.Workspace.room(2400) + 7,), torch.nan)
        workspace = nvfp4.Workspace(2400, memory)
        for factor in (1, 1000):  # the second use finds the first one's leavings
            scaled = x * factor
            expected = nvfp4.dequantize(nvfp4.quantize(scaled.reshape(30, 80))).view(6, 5, 80)
            result = nvfp4.fake_quantize(scaled, workspace=workspace)
            assert same_bits(result, expected) and result.data_ptr() == memory.data_ptr()
            assert same_bits(nvfp4.fake_quantize(scaled), expected) and memory[-7:].isnan().all()


def test_the_input_is_left_alone() -> None:
    x = torch.randn(8, 32)
    before = x.clone()
    nvfp4.quantize(x), nvfp4.fake_quantize(x), nvfp4.fake_quantize(x, torch.tensor(1.0)), nvfp4.count_blocks(x, x[0, 0])
    assert same_bits(x, before)


def test_with_a_static_amax_a_row_does_not_depend_on_the_others() -> None:
    row, amax = torch.randn(1, 64), torch.tensor(64.0)
    alone = nvfp4.fake_quantize(row, amax)
    assert same_bits(nvfp4.fake_quantize(torch.cat([row, 40 * torch.randn(3, 64)]), amax)[:1], alone)
    assert not same_bits(nvfp4.fake_quantize(torch.cat([row, 40 * torch.randn(3, 64)]))[:1], alone)


def test_headroom_is_free_and_a_static_amax_that_is_too_small_is_not() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))

    def error(factor: float) -> float:
        return float((nvfp4.fake_quantize(x, x.abs().max() * factor) - x).norm() / x.norm())

    assert 0.09 < error(1) < 0.10
    assert all(abs(error(factor) - error(1)) < 0.001 for factor in (16, 32, 256))
    assert error(0.25) > 0.2


def test_blocks_that_clip_or_lose_precision_are_counted() -> None:
    x = torch.ones(4, 32)
    x[0, 3], x[1, :16], x[2, :16] = 9.0, 1e-5, 0.0
    assert nvfp4.count_blocks(x, torch.tensor(9.0)) == (8, 0, 1)
    assert nvfp4.count_blocks(x, torch.tensor(4.0)) == (8, 1, 1)
    assert nvfp4.count_blocks(x, torch.tensor(0.5)) == (8, 6, 1)


def test_element_2k_is_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert nvfp4.pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (130, 5), (1, 1), (256, 12)])
def test_swizzled_scales_lie_where_matrix_units_read_them(rows: int, columns: int) -> None:
    scales = torch.randint(1, 127, (rows, columns), dtype=torch.uint8)
    flat = nvfp4.swizzle_scales(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    tiles_across = -(-columns // 4)
    assert len(flat) == -(-rows // 128) * tiles_across * 512
    seen = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(columns):
            place = ((r // 128) * tiles_across + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert flat[place] == scales[r, c]
            seen[place] = 1
    assert flat[seen == 0].sum() == 0
