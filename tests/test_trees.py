"""The rollout trees: merged and quantized copies that share only what no adapter touches, and a sync that is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.quant import emulated as emulated_module
from solrl.quant import trees as trees_module
from solrl.quant.backends import EMULATED, FP8, FULL, Backend
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.linear import Place, QuantLinear, SharedInput
from solrl.quant.trees import RolloutTrees
from solrl.types import LoraPair

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "norm_out.linear"]  # the last one is adapted but never quantized
ADAPTED = 4 + 3 + 1


def transformer(dtype: torch.dtype = torch.float32) -> Any:
    """A random FLUX transformer of one double and one single block with adapters "default" and "old"."""
    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    model.to(dtype).requires_grad_(False).eval()
    for name in ("default", "old"):
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS), name)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for name in ("default", "old"):
                nn.init.normal_(module.lora_B[name].weight, std=0.3)
            module.set_adapter("default")
    return model


def pairs(model: nn.Module, adapter: str = "old") -> dict[str, LoraPair]:
    return {
        name: LoraPair(
            module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach(), module.scaling[adapter]
        )
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def scaled(adapters: dict[str, LoraPair], factor: float) -> dict[str, LoraPair]:
    return {name: dataclasses.replace(pair, scale=pair.scale * factor) for name, pair in adapters.items()}


@torch.no_grad()
def forward(model: Any, batch: int = 3, mates: int = 0) -> Tensor:
    """Outputs for fixed inputs; ``mates`` selects what all samples but the first are."""
    dtype = model.x_embedder.weight.dtype
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        first = torch.randn(1, *shape, generator=generator)
        others = torch.randn(batch - 1, *shape, generator=torch.Generator().manual_seed(mates))
        return torch.cat([first, others * (1 + mates)]).to(dtype)

    output: Tensor = model(
        hidden_states=draw(16, 16), timestep=torch.full((batch,), 0.5, dtype=dtype), guidance=torch.ones(batch),
        pooled_projections=draw(32), encoder_hidden_states=draw(6, 32), txt_ids=torch.zeros(6, 3),
        img_ids=torch.zeros(16, 3), return_dict=False,
    )[0]  # fmt: skip
    return output


def ready(model: Any, backend: Backend = EMULATED) -> RolloutTrees:
    """Trees that hold "old", calibrated."""
    trees = RolloutTrees(model, backend)
    trees.requantize_(pairs(model))
    with trees.calibration():
        forward(trees.explorer)
    trees.set_activation_scales_()
    return trees


@pytest.fixture(scope="module")
def shared_model() -> Any:
    """For tests that leave it as it is."""
    return transformer()


def test_the_rollout_tree_draws_what_the_old_adapter_draws(shared_model: Any) -> None:
    trees = RolloutTrees(shared_model, FULL)
    assert trees.explorer is trees.rollout
    trees.requantize_(pairs(shared_model))
    for module in shared_model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter("old")
    expected = forward(shared_model)
    for module in shared_model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter("default")
    torch.testing.assert_close(forward(trees.rollout), expected, rtol=1e-5, atol=1e-5)
    assert (forward(shared_model) - expected).abs().max() > 0.01


def test_neither_tree_contains_peft_and_only_untouched_storages_are_shared(shared_model: Any) -> None:
    trees = ready(shared_model)
    layers = trees.quant_layers()
    base = {name: p for name, p in shared_model.named_parameters() if "lora_" not in name}
    for tree in (trees.rollout, trees.explorer):
        assert not any(isinstance(module, BaseTunerLayer) for module in tree.modules())
        assert not {id(module) for module in tree.modules()} & {id(module) for module in shared_model.modules()}
        assert not any(p.requires_grad for p in tree.parameters()) and not any(m.training for m in tree.modules())
        assert not hasattr(tree, "peft_config")
        for name, parameter in tree.named_parameters():
            owner = name.rpartition(".")[0]
            if owner in trees.adapted and name.endswith("weight"):
                assert parameter.data_ptr() != base[f"{owner}.base_layer.weight"].data_ptr()
            else:
                original = base.get(name, base.get(f"{owner}.base_layer.{name.rpartition('.')[2]}"))
                assert original is not None and parameter.data_ptr() == original.data_ptr(), name
    assert len(trees.adapted) == ADAPTED and len(layers) == 12 + 5
    assert {"transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_mlp"} <= set(layers)
    assert not {"norm_out.linear", "x_embedder", "proj_out", "transformer_blocks.0.norm1.linear"} & set(layers)
    assert (
        trees.explorer.get_submodule("norm_out.linear").weight.data_ptr()
        == trees.rollout.get_submodule("norm_out.linear").weight.data_ptr()
    )
    assert len({id(layer.shared) for layer in layers.values()}) == 1


def test_what_happens_to_the_policy_reaches_no_tree() -> None:
    model = transformer()
    trees = ready(model)
    before = [forward(trees.rollout), forward(trees.explorer)]
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    changes: list[Callable[[], object]] = [
        lambda: [layer.set_adapter("old") for layer in layers],
        lambda: [layer.enable_adapters(False) for layer in layers],
        model.train,
        model.enable_gradient_checkpointing,
        lambda: [nn.init.normal_(layer.lora_B["old"].weight) for layer in layers],
    ]
    for change in changes:
        change()
        for tree, output in zip((trees.rollout, trees.explorer), before, strict=True):
            assert torch.equal(forward(tree), output)


def test_trees_never_checkpoint_gradients() -> None:
    model = transformer()
    model.enable_gradient_checkpointing()
    assert not any(
        getattr(module, "gradient_checkpointing", False) for module in RolloutTrees(model, FULL).rollout.modules()
    )


def test_requantizing_merges_in_float32_in_place_and_reports_it() -> None:
    model = transformer(torch.bfloat16)
    trees, adapters = ready(model), pairs(model)
    stored = [*trees.rollout.parameters(), *trees.explorer.parameters(), *trees.explorer.buffers()]
    pointers = [tensor.data_ptr() for tensor in stored]
    before = [tensor.clone() for tensor in stored]
    assert trees.requantize_(adapters).changed_bytes == 0  # nothing new
    report = trees.requantize_(scaled(adapters, 2))
    assert [tensor.data_ptr() for tensor in stored] == pointers
    assert report.num_layers == ADAPTED and report.changed_bytes > 1000
    changes = []
    for name, pair in adapters.items():
        base = model.get_submodule(name).get_base_layer().weight
        merged = base.float() + 2 * pair.scale * (pair.b.float() @ pair.a.float())
        weight = trees.rollout.get_submodule(name).weight
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, merged.bfloat16())
        once = (base.float() + pair.scale * (pair.b.float() @ pair.a.float())).bfloat16()
        changes.append(float((weight.float() - once.float()).abs().max()))
        layer = trees.explorer.get_submodule(name)
        if isinstance(layer, QuantLinear):
            fresh = EmulatedLinear(merged, None, dtype=torch.bfloat16, shared=SharedInput())
            assert torch.equal(layer.qweight, fresh.qweight) and torch.equal(layer.dequantized, fresh.dequantized)
    assert report.max_change == max(changes)
    owners = {
        id(p): name
        for tree in (trees.rollout, trees.explorer)
        for name, p in [*tree.named_parameters(), *tree.named_buffers()]
    }
    moved = {owners[id(t)].rpartition(".")[0] for t, old in zip(stored, before, strict=True) if not torch.equal(t, old)}
    assert moved == set(trees.adapted)


def test_other_weights_and_back_restores_every_output(shared_model: Any) -> None:
    trees = ready(shared_model)
    before = [forward(trees.rollout), forward(trees.explorer)]
    trees.requantize_(pairs(shared_model, "default"))
    assert not torch.equal(forward(trees.rollout), before[0]) and not torch.equal(forward(trees.explorer), before[1])
    trees.requantize_(pairs(shared_model))
    assert torch.equal(forward(trees.rollout), before[0]) and torch.equal(forward(trees.explorer), before[1])


def test_missing_unknown_misshapen_and_non_finite_adapters_are_refused_and_change_nothing(shared_model: Any) -> None:
    trees, adapters = ready(shared_model), pairs(shared_model)
    before = forward(trees.explorer)
    first, last = trees.adapted[0], trees.adapted[-1]
    bad = dataclasses.replace(adapters[last], b=adapters[last].b.clone().index_fill_(0, torch.tensor([0]), torch.inf))
    moved = scaled(adapters, 3)
    for given, message in (
        ({name: pair for name, pair in moved.items() if name != first}, f"1 missing, 0 unknown .missing {first}"),
        (moved | {"proj_out": moved[first]}, "0 missing, 1 unknown .unknown proj_out"),
        ({}, f"{ADAPTED} missing"),
        (moved | {last: bad}, f"adapter of {last} holds non-finite"),
        (
            moved | {first: dataclasses.replace(moved[first], scale=float("nan"))},
            f"adapter of {first} holds non-finite",
        ),
    ):
        with pytest.raises(SolrlError, match=message):
            trees.requantize_(given)
        assert torch.equal(forward(trees.explorer), before)
    with pytest.raises(SolrlError, match=f"adapter of {first} makes a 32 x 16 matrix"):
        trees.requantize_(moved | {first: dataclasses.replace(moved[first], a=moved[first].a[:, :16])})


def test_a_sync_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    trees, adapters = ready(model), pairs(model)
    name = trees.adapted[0]
    with monkeypatch.context() as patch:
        patch.setattr(QuantLinear, "requantize_", lambda self, weight: None)
        with pytest.raises(
            SolrlError, match=f"{name}: the weight moved by more than a quantization step but no stored"
        ):
            trees.requantize_(scaled(adapters, 3))
    trees = ready(model)
    with monkeypatch.context() as patch:
        requantize_ = QuantLinear.requantize_
        patch.setattr(QuantLinear, "requantize_", lambda self, weight: requantize_(self, weight.roll(1, -1)))
        with pytest.raises(SolrlError, match=f"{name}: the explorer's weight is further from the merged one"):
            trees.requantize_(scaled(adapters, 3))
    trees = ready(model)
    with monkeypatch.context() as patch:
        patch.setattr(trees_module, "_parameter", lambda tree, name: tree.get_parameter(name).detach().clone())
        with pytest.raises(SolrlError, match="rollout tree's weight is not the merged one"):
            trees.requantize_(scaled(adapters, 3))


def test_a_replaced_weight_is_an_error() -> None:
    model = transformer()
    for tree in ("rollout", "explorer"):
        trees = ready(model)
        layer: Any = getattr(trees, tree).get_submodule(trees.adapted[0])
        if tree == "rollout":
            layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
        else:
            layer.qweight = layer.qweight.clone()
        with pytest.raises(SolrlError, match="replaced instead of filled in place"):
            trees.requantize_(pairs(model))


def test_a_change_below_a_quantization_step_may_leave_the_explorer_as_it_is(shared_model: Any) -> None:
    trees = ready(shared_model)
    report = trees.requantize_(scaled(pairs(shared_model), 1 + 1e-6))
    assert 0 < report.max_change < 1e-4


def test_models_that_cannot_be_merged_are_refused() -> None:
    model = transformer()
    next(module for module in model.modules() if isinstance(module, BaseTunerLayer)).merge()
    with pytest.raises(SolrlError, match=r"merged into transformer_blocks\.0\.attn\.to_q"):
        RolloutTrees(model, FULL)
    with pytest.raises(SolrlError, match="no LoRA layer"):
        RolloutTrees(nn.Sequential(nn.Linear(4, 4)), FULL)


def test_the_explorer_differs_from_the_rollout_tree_by_quantization_only(shared_model: Any) -> None:
    trees = ready(shared_model)
    full, quantized = forward(trees.rollout), forward(trees.explorer)
    assert 0.01 < (quantized - full).norm() / full.norm() < 0.3
    everything_full = RolloutTrees(shared_model, EMULATED, [("*", "full")])
    everything_full.requantize_(pairs(shared_model))
    assert everything_full.explorer is not everything_full.rollout
    assert torch.equal(forward(everything_full.explorer), full)


def test_sharing_inputs_saves_quantizations_and_changes_no_bit(
    shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees, calls = ready(shared_model), []
    quantize = emulated_module.fake_quantize
    monkeypatch.setattr(
        emulated_module, "fake_quantize", lambda x, *a, **k: calls.append(x.shape) or quantize(x, *a, **k)
    )
    together = forward(trees.explorer)
    assert len(calls) == 8 + 2  # double block: qkv, added qkv, 2 outputs, 2 x 2 feed-forward; single: qkv + mlp, output
    for layer in trees.quant_layers().values():
        layer.shared = SharedInput()
    assert torch.equal(forward(trees.explorer), together) and len(calls) == 10 + 17


def test_a_sample_does_not_depend_on_its_batch_mates(shared_model: Any) -> None:
    trees = ready(shared_model)
    assert torch.equal(forward(trees.explorer, mates=0)[0], forward(trees.explorer, mates=3)[0])
    with trees.calibration():  # scaled by what is in the batch
        assert not torch.equal(forward(trees.explorer, mates=0)[0], forward(trees.explorer, mates=3)[0])


def test_activation_scales_are_sixteen_times_the_largest_input_as_a_power_of_two(shared_model: Any) -> None:
    trees = RolloutTrees(shared_model, EMULATED)
    trees.requantize_(pairs(shared_model))
    with pytest.raises(SolrlError, match="calibrate"):
        forward(trees.explorer)
    with pytest.raises(SolrlError, match="saw no usable input in calibration"):
        trees.set_activation_scales_()
    assert trees.activation_scales() == {}
    seen: dict[str, float] = {}
    for name, layer in trees.quant_layers().items():
        layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, max(seen.get(name, 0), float(args[0].abs().max())))
        )
    with trees.calibration():
        forward(trees.explorer)
        forward(trees.explorer, mates=2)
    trees.set_activation_scales_()
    scales = trees.activation_scales()
    assert set(scales) == set(seen) == set(trees.quant_layers())
    for name, scale in scales.items():
        assert (
            16 * seen[name] <= float(scale) < 32 * seen[name]
            and float(scale).hex().split("p")[0] == "0x1.0000000000000"
        )
    assert trees_module._power_of_two_above(32.0) == 32 and trees_module._power_of_two_above(32.1) == 64


def test_activation_scales_travel_through_a_checkpoint(shared_model: Any) -> None:
    trees = ready(shared_model)
    scales = trees.activation_scales()
    other = RolloutTrees(shared_model, EMULATED)
    other.load_activation_scales_(scales)
    other.requantize_(pairs(shared_model))
    assert torch.equal(forward(other.explorer), forward(trees.explorer))
    scales[next(iter(scales))].fill_(1.0)
    assert not torch.equal(next(iter(trees.activation_scales().values())), torch.tensor(1.0))  # copies
    missing = next(iter(scales))
    del scales[missing]
    with pytest.raises(SolrlError, match=f"1 missing, 0 unknown .missing {missing}"):
        other.load_activation_scales_(scales)
    full = RolloutTrees(shared_model, FULL)
    full.set_activation_scales_(), full.load_activation_scales_(full.activation_scales())


def test_an_audit_counts_clipped_blocks(shared_model: Any) -> None:
    trees = ready(shared_model)
    with trees.audit() as counts:
        forward(trees.explorer)
    assert set(counts) == set(trees.quant_layers())
    assert all(count.blocks > 0 and count.clipped == 0 for count in counts.values())
    for layer in trees.quant_layers().values():
        layer.set_act_amax_(1e-3)
    with trees.audit() as counts:
        forward(trees.explorer)
    assert sum(count.clipped for count in counts.values()) > 0


def test_the_report_tells_formats_and_the_share_of_work(shared_model: Any) -> None:
    trees = ready(shared_model)
    assert "nvfp4" in trees.report()[0] or "full" in trees.report()[0]
    assert trees.report()[-1].endswith("of the linear layers' work is quantized")
    assert 50 < float(trees.report()[-1].split("%")[0]) < 100


def test_an_fp8_explorer_is_synced_proved_and_needs_no_scales(shared_model: Any) -> None:
    trees, adapters = ready(shared_model, FP8), pairs(shared_model)
    assert trees.activation_scales() == {}
    full, quantized = forward(trees.rollout), forward(trees.explorer)
    assert 0.001 < (quantized - full).norm() / full.norm() < 0.1
    proof = trees.prove(adapters)
    assert proof is not None and proof.num_layers == len(trees.quant_layers()) and set(proof.fingerprint) == {"fp8"}
    assert torch.equal(forward(trees.explorer, mates=0)[0], forward(trees.explorer, mates=3)[0])
    pointers = [buffer.data_ptr() for buffer in trees.explorer.buffers()]
    assert trees.requantize_(scaled(adapters, 2)).changed_bytes > 1000
    assert not torch.equal(forward(trees.explorer), quantized)
    assert [buffer.data_ptr() for buffer in trees.explorer.buffers()] == pointers
    assert trees.num_products(calls=3) == {"fp8": 3 * len(trees.quant_layers())}


def test_the_proof_names_a_layer_that_stayed_behind(shared_model: Any) -> None:
    for backend in (EMULATED, FP8):
        trees, adapters = ready(shared_model, backend), pairs(shared_model)
        assert trees.prove(adapters) is not None
        with pytest.raises(SolrlError, match=rf"^{trees.adapted[0]} is not proved"):
            trees.prove(scaled(adapters, 3))
    assert RolloutTrees(shared_model, FULL).prove(adapters) is None


def test_calibration_finds_out_which_layers_read_one_tensor(shared_model: Any) -> None:
    trees = ready(shared_model)
    places = {name.removeprefix("single_transformer_blocks.0."): layer.place for name, layer in
              trees.quant_layers().items() if name.startswith("single")}  # fmt: skip
    assert sorted(places.values()) == sorted(
        [Place(True, False), Place(False, False), Place(False, False), Place(False, True), Place(True, True)]
    )
    assert places["proj_out"] == Place(True, True)


def test_layers_of_one_explorer_may_differ_in_format(shared_model: Any) -> None:
    trees = RolloutTrees(shared_model, EMULATED, [("*attn*", "fp8"), ("*ff*", "auto"), ("*proj_mlp", "auto")])
    trees.requantize_(pairs(shared_model))
    with trees.calibration():
        forward(trees.explorer)
    trees.set_activation_scales_()
    assert {layer.number_format for layer in trees.quant_layers().values()} == {"fp8", "nvfp4"}
    proof = trees.prove(pairs(shared_model))
    assert proof is not None and set(proof.fingerprint) == {"fp8", "nvfp4"}
    assert set(trees.activation_scales()) == {name for name in trees.quant_layers() if "attn" not in name}
    assert bool(forward(trees.explorer).isfinite().all())
