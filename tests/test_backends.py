"""Which format a run gets on which machine, what it is told about it, and that nothing is replaced in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl.config import Config, ExploreConfig, RegenerateConfig
from solrl.errors import UsageError
from solrl.quant import backends
from solrl.quant.backends import EMULATED, FP8, FULL, Backend, choose_backend, describe
from solrl.quant.bounds import Bounds, Work, measure_work, speed_bounds
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.fp8 import Fp8Linear, Fp8TensorLinear
from solrl.quant.layers import plan_layers
from solrl.quant.native import NativeLinear
from solrl.session import open_session
from solrl.train import train
from tests.children import in_children
from tests.parts import ALONE, CPU, never, tiny_config

torch.set_num_threads(1)
GPU = torch.device("cuda")


def explore(precision: str, backend: str = "auto") -> ExploreConfig:
    return ExploreConfig.model_validate({"precision": precision, "backend": backend})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this machine look like one with a GPU of a compute capability whose kernels accept some layers only."""

    def pretend(capability: tuple[int, int], *runs: type) -> None:
        def attempt(kind: type, device: torch.device) -> None:
            if kind not in runs:
                raise RuntimeError(f"{kind.__name__} is refused\nwith more lines")

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(backends, "try_layer", attempt)

    return pretend


def test_the_line_of_a_cpu_says_what_emulation_would_cost() -> None:
    line = describe(choose_backend(ExploreConfig(), CPU), 6)
    assert line.startswith("full precision, 6 steps (auto: ") and "emulated_nvfp4 would cost up to 1.5 times" in line


def test_a_cpu_runs_full_precision_fp8_and_emulation_by_name() -> None:
    assert choose_backend(explore("auto"), CPU).precision == "full"
    assert choose_backend(explore("full"), CPU) == FULL
    assert choose_backend(explore("fp8"), CPU) == FP8
    assert choose_backend(explore("emulated_nvfp4"), CPU) == EMULATED


def test_a_format_that_cannot_run_is_an_error_with_the_reason_and_what_would_work(gpu: Any) -> None:
    with pytest.raises(
        UsageError, match=r"nvfp4 cannot run here: FP4 needs an NVIDIA GPU .*; what can: fp8 or full, or"
    ):
        choose_backend(explore("nvfp4"), CPU)
    gpu((9, 0), Fp8Linear)
    with pytest.raises(
        UsageError, match=r"Some GPU has compute capability 9\.0, FP4 needs 10\.0; what can: fp8 or full"
    ):
        choose_backend(explore("nvfp4"), GPU)
    gpu((8, 0))
    with pytest.raises(
        UsageError, match=r"fp8 cannot run here: Some GPU has compute capability 8\.0, FP8 needs 8\.9; use"
    ):
        choose_backend(explore("fp8"), GPU)
    gpu((10, 0), Fp8Linear)
    with pytest.raises(
        UsageError, match=r"nvfp4 cannot run here: torch scaled_mm.*: NativeLinear is refused; what can: fp8"
    ):
        choose_backend(explore("nvfp4"), GPU)
    for precision in ("auto", "fp8", "full", "emulated_nvfp4"):
        with pytest.raises(UsageError, match=r"explore\.backend = te is for explore\.precision = nvfp4 only"):
            choose_backend(explore(precision, "te"), GPU)


def test_a_kernel_that_runs_but_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_precision(self: Fp8Linear, codes: Any, scale: Any, weight_scale: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight_values().to(x.dtype), self.bias)

    monkeypatch.setattr(Fp8Linear, "_scaled_mm", full_precision)
    with pytest.raises(
        UsageError, match=r"explore\.precision = fp8 cannot run here: .* is not proved to run in FP8: .*; use"
    ):
        choose_backend(explore("fp8"), CPU)


@pytest.mark.parametrize(
    ("capability", "runs", "precision", "layers", "reason"),
    [
        ((10, 0), (NativeLinear, Fp8Linear), "nvfp4", {"nvfp4": NativeLinear, "fp8": Fp8Linear}, ""),
        ((12, 0), (NativeLinear, Fp8TensorLinear), "nvfp4", {"nvfp4": NativeLinear, "fp8": Fp8TensorLinear}, ""),
        ((10, 0), (Fp8Linear,), "fp8", {"fp8": Fp8Linear}, "no NVFP4: torch scaled_mm, two-level scales: Native"),
        ((9, 0), (Fp8Linear,), "fp8", {"fp8": Fp8Linear}, "no NVFP4: Some GPU has compute capability 9.0"),
        ((8, 9), (Fp8TensorLinear,), "fp8", {"fp8": Fp8TensorLinear}, "no NVFP4: Some GPU"),
        ((8, 0), (), "full", {}, "no NVFP4 (Some GPU has compute capability 8.0, FP4 needs 10.0), no FP8 (Some GPU"),
    ],
)
def test_auto_takes_the_cheapest_format_that_runs(
    gpu: Any, capability: tuple[int, int], runs: tuple[type, ...], precision: str, layers: dict[str, type], reason: str
) -> None:
    gpu(capability, *runs)
    backend = choose_backend(explore("auto"), GPU)
    assert backend.precision == precision and backend.layers == layers and backend.reason.startswith(reason)


def test_one_line_tells_format_kernel_share_and_bound_and_never_calls_fp8_fp4() -> None:
    bounds = Bounds(step=1.8249, rollout=1.426)
    for kind, kernel in ((Fp8Linear, "a scale for each row"), (Fp8TensorLinear, "a scale for each tensor")):
        line = describe(Backend("fp8", {"fp8": kind}, "no NVFP4: too old"), 6, 0.94, bounds)
        assert "FP4" not in line.replace("no NVFP4: too old", "") and "\n" not in line
        for part in (
            "FP8 (",
            kernel,
            "6 steps",
            "94% of",
            "1.82x a step",
            "1.43x explore",
            "decode and scoring",
            "at most",
        ):
            assert part in line, part
    line = describe(Backend("nvfp4", {"nvfp4": NativeLinear}), 6, 0.94, bounds)
    assert line.startswith("NVFP4 (torch scaled_mm") and "1/4 of the time" in line
    assert describe(EMULATED, 6, 0.94, bounds).startswith("emulated NVFP4 (emulation in plain torch), 6 steps, 94%")
    assert describe(FULL, 6) == "full precision, 6 steps"
    assert describe(Backend("full", reason="a CPU"), 6) == "full precision, 6 steps (auto: a CPU)"


def test_the_bound_is_that_of_counted_operations() -> None:
    work = Work(velocity=100.0, quantized={"nvfp4": 80.0, "fp8": 10.0}, linear_share=0.9, decode=30.0, score=20.0)
    first = ExploreConfig(group_size=96, num_steps=6)
    second = RegenerateConfig(group_size=24, num_steps=10)
    bounds = speed_bounds(work, work, first, second)
    step = 100 - 60 - 5
    assert bounds.step == pytest.approx(100 / step)
    kept = 24 * (10 * 100 + 50)
    assert bounds.rollout == pytest.approx((96 * (600 + 50) + kept) / (96 * (6 * step + 50) + kept))
    alone = speed_bounds(work, work, first, second.model_copy(update={"enabled": False}))
    assert alone.rollout == pytest.approx(650 / (6 * step + 50))


def test_work_counts_products_attention_and_what_is_quantized() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 16))
    plan = plan_layers(model, [("1", "fp8")])
    q = torch.randn(1, 2, 8, 4)

    def velocity() -> None:
        model(torch.randn(5, 32))
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    work = measure_work(model, plan, velocity=velocity, decode=lambda: q @ q.mT, score=lambda: None)
    assert work.velocity == 2 * 5 * (32 * 64 + 64 * 16) + 2 * 2 * (2 * 8 * 8 * 4)
    assert work.quantized == {"fp8": 2 * 5 * 64 * 16} and work.linear_share == pytest.approx(1 / 3)
    assert (work.decode, work.score) == (2 * 2 * 8 * 8 * 4, 0)


def test_a_run_writes_its_proof_and_line_and_counts_how_well_its_scales_fit(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    config = tiny_config(
        tmp_path / "run", explore={"precision": "emulated_nvfp4", "recalibrate_every_steps": 1}, train={"num_steps": 2}
    )
    train(config, on_step=rows.append)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["precision"].startswith("emulated NVFP4") and environment["proof"]["num_layers"] == 56
    assert environment["proof"]["kernels"] == {f"nvfp4: {EmulatedLinear.kernel}": 56}
    assert "health/clipped_blocks" not in rows[0]
    assert rows[1]["health/clipped_blocks"] == 0 and 0 <= rows[1]["health/subnormal_scales"] < 0.01


def test_recalibration_changes_scales_in_place_and_only_when_due() -> None:
    config = tiny_config(explore={"precision": "emulated_nvfp4", "recalibrate_every_steps": 2})
    session = open_session(config, ALONE, never)
    layers = session.trees.quant_layers()
    measured = session.trees.activation_scales()
    pointers = [layer.act_amax.data_ptr() for layer in layers.values()]
    for layer in layers.values():
        layer.set_act_amax_(1.0)
    session.recalibrate(3)
    assert all(float(scale) == 1 for scale in session.trees.activation_scales().values())
    session.recalibrate(4)
    assert session.trees.activation_scales() == measured
    assert [layer.act_amax.data_ptr() for layer in layers.values()] == pointers


def test_static_scales_are_the_largest_of_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        from solrl.distributed import start

        with start(1, True) as world:
            seen = world.max_(torch.tensor([1.0, 5.0]) if rank else torch.tensor([3.0, 2.0]))
            assert seen.tolist() == [3.0, 5.0]

    assert in_children(2, on_rank) == [(0, ""), (0, "")]


@pytest.mark.parametrize("precision", ["fp8", "emulated_nvfp4"])
def test_a_seeds_image_does_not_depend_on_its_batch_mates(precision: str) -> None:
    session = open_session(tiny_config(explore={"precision": precision}), ALONE, never)
    policy = session.explorer
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1, *policy.latent_shape, generator=generator)
    conditioning = policy.encode(session.train_prompts[:1]).rows([0] * 4)
    outcomes = []
    for size in (1.0, 20.0):
        mates = size * torch.randn(3, *policy.latent_shape, generator=generator)
        with torch.no_grad():
            outcomes.append(policy.velocity(torch.cat([first, mates]), torch.full((4,), 0.5), conditioning)[0])
    assert torch.equal(*outcomes)


def test_dynamic_scales_need_no_calibration_and_do_depend_on_it() -> None:
    config = tiny_config(explore={"precision": "emulated_nvfp4", "activation_scale": "dynamic"})
    session = open_session(config, ALONE, never)
    assert session.trees.activation_scales() == {} and session.audit_scales() == {}
    x = torch.randn(4, 4, 128)
    layer = session.trees.quant_layers()["single_transformer_blocks.0.attn.to_q"]
    mates = x.clone()
    mates[1:] *= 50
    assert not torch.equal(layer(x)[0], layer(mates)[0])


def test_settings_of_the_explorer_are_checked() -> None:
    with pytest.raises(ValueError, match="precision"):
        Config.model_validate({"explore": {"precision": "fp4"}})
