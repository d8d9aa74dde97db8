"""Plans: what is counted is what shapes give, and what is proposed fits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solrl import cli
from solrl.errors import UsageError
from solrl.footprint import peak_bytes
from solrl.hardware import GPUS, Gpu, find_gpu
from solrl.models.adapters import lora_parameters
from solrl.models.architectures import PUBLISHED
from solrl.models.base import load_policy
from solrl.models.skeleton import skeleton_pipeline
from solrl.plan import GIB, Plan, changes_that_fit, lines, make_plan
from solrl.settings import load_config, shipped_configs
from solrl.shapes import Shapes
from tests.parts import CPU, tiny_config

META = torch.device("meta")
LARGE = find_gpu("H-200")


@pytest.fixture(scope="module")
def shapes() -> Iterator[Shapes]:
    yield Shapes(tiny_config())


def test_the_peak_is_what_is_alive_at_once() -> None:
    x = torch.empty(1000, device=META)  # 4000 bytes

    def chain() -> torch.Tensor:
        y = x * 2
        y = y + 1  # two are alive, the first goes
        return y.view(10, 100).double()  # 4000 and 8000

    assert peak_bytes(chain, [x]) == 12000
    assert peak_bytes(lambda: x.mul_(2), [x]) == 0
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4))).to(META)

    def update() -> None:
        torch.autograd.backward(layers(torch.empty(10, 100, device=META)).sum())

    weights = list(layers.parameters())
    assert 4 * 40000 < peak_bytes(update, weights) < 4 * 40000 + 8 * 4000, "four gradients, and what is left then"


def test_attention_keeps_no_table_of_scores() -> None:
    q = torch.empty(1, 2, 4096, 8, device=META, dtype=torch.bfloat16)
    before = torch.nn.functional.scaled_dot_product_attention
    peak = peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), [q])
    assert peak == q.numel() * 2 + 2 * 4096 * 4
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_shapes_are_those_of_the_loaded_model(shapes: Shapes) -> None:
    policy = load_policy(tiny_config(), CPU)
    assert shapes.num_trained == sum(p.numel() for p in lora_parameters(policy.transformer, "default"))
    for name, part in policy.named_children():
        if name != "transformer":  # a GPU's bfloat16 takes half of a CPU's float32
            parameters = sum(p.numel() for p in part.parameters())
            buffers = sum(b.numel() * b.element_size() for b in part.buffers())
            assert 2 * parameters <= shapes.frozen[name] <= 2 * parameters + buffers
    found, encoded = shapes.conditioning(2), policy.encode(["a red circle", "a blue square"])
    assert found.embeds.shape == encoded.embeds.shape
    assert found.pooled is not None and encoded.pooled is not None and found.pooled.shape == encoded.pooled.shape


def test_a_plan_says_what_is_needed_in_80_columns(shapes: Shapes) -> None:
    plan = make_plan(tiny_config(), LARGE, 2, shapes=shapes)
    assert plan.fits and changes_that_fit(plan, shapes) == {}
    largest = max(part.bytes for part in plan.working)
    assert plan.needed == sum(part.bytes for part in plan.resident) + largest + 0.06 * 139 * GIB
    text = lines(plan, {})
    assert text[0] == "An estimate from shapes and a data sheet: nothing here was measured."
    assert all(len(line) <= 80 for line in text) and any("3 prompts x 6 = 18 samples" in line for line in text)
    assert json.dumps(plan.as_dict()) and plan.as_dict()["is_estimate"]


def test_encoders_that_rest_in_host_memory_take_a_gpus_only_while_they_encode(shapes: Shapes) -> None:
    config = tiny_config()
    model = config.model.model_copy(update={"offload_encoders": True})
    here = make_plan(config, LARGE, 1, shapes=shapes)
    away = make_plan(config.model_copy(update={"model": model}), LARGE, 1, shapes=shapes)
    text = sum(size for name, size in shapes.frozen.items() if name.startswith("text_encoder"))
    held = {part.what: part.bytes for part in here.resident}
    assert held.pop("text encoders") == text > 0
    assert {part.what: part.bytes for part in away.resident} == held
    assert [part.bytes for part in away.working] == [text, *(part.bytes for part in here.working)]


@pytest.mark.slow
def test_checkpoints_and_smaller_batches_make_an_update_fit(shapes: Shapes) -> None:
    config = tiny_config(explore={"precision": "full"}, batch={"rollout": 16, "train": 16, "decode": 16})
    assert shapes.training_bytes(True) < shapes.training_bytes(False)
    plan = make_plan(config, LARGE, 1, shapes=shapes)
    resident = sum(part.bytes for part in plan.resident)
    small = dataclasses.replace(LARGE, memory_gib=(resident + 4 * shapes.training_bytes(False)) / 0.94 / GIB)
    plan = make_plan(config, small, 1, shapes=shapes)
    changes = changes_that_fit(plan, shapes)
    assert not plan.fits and changes is not None
    assert list(changes)[:2] == ["model.offload_encoders", "model.gradient_checkpointing"]
    shrunk = tiny_config(
        explore={"precision": "full"},
        model={"gradient_checkpointing": True, "offload_encoders": True},
        batch={"rollout": 16, "decode": 16, "train": changes.get("batch.train", 16)},
    )
    assert make_plan(shrunk, small, 1, shapes=shapes).fits
    assert any("DOES NOT FIT" in line for line in lines(plan, changes))
    none = dataclasses.replace(LARGE, memory_gib=resident / 2 / GIB)
    hopeless = make_plan(config, none, 1, shapes=shapes)
    assert changes_that_fit(hopeless, shapes) is None
    assert any("No setting makes it fit" in line for line in lines(hopeless, None))


def test_sharding_divides_what_full_fine_tuning_holds_and_is_what_makes_it_fit() -> None:
    sections = {"lora": {"enabled": False}, "explore": {"precision": "nvfp4"}}
    config, b200 = tiny_config(**sections), find_gpu("b200")
    shapes = Shapes(config)
    assert shapes.num_trained == sum(p.numel() for p in shapes.plain.parameters())
    plan = make_plan(config, b200, 4, shapes=shapes)
    sharded = tiny_config(model={"shard": True}, **sections)
    shared = {part.what: part.bytes for part in make_plan(sharded, b200, 4, shapes=shapes).resident}
    whole = {part.what: part.bytes for part in plan.resident}
    assert whole["weights, averages, optimizer, gradients"] == 32 * shapes.num_trained
    assert shared["1/4 of weights, averages, optimizer, gradients"] == 24 * shapes.num_trained / 4
    for name in ("rollout tree", "reference_policy"):
        assert shared[f"1/4 of {name}"] == whole[name] / 4 == 2 * shapes.num_trained / 4
    explorer = "explorer: weights in nvfp4"
    assert whole[explorer] < shared[explorer] < whole[explorer] + whole["rollout tree"], (
        "what is not quantized is whole"
    )
    held = sum(whole.values()) + max(part.bytes for part in plan.working)
    small = dataclasses.replace(b200, memory_gib=0.7 * held / 0.94 / GIB)
    tight = make_plan(config, small, 4, shapes=shapes)
    assert not tight.fits and "model.shard" in (changes_that_fit(tight, shapes) or {})
    assert changes_that_fit(make_plan(config, small, 1, shapes=shapes), shapes) is None, "nobody to share with"


def test_seconds_follow_work_and_gpus(shapes: Shapes) -> None:
    def seconds(num_gpus: int, gpu: Gpu = LARGE, **sections: dict[str, Any]) -> dict[str, float]:
        config = tiny_config(prompts={"per_step": 4}, **sections)
        return make_plan(config, gpu, num_gpus, shapes=shapes).seconds

    one = seconds(1)
    assert list(one) == [
        "encode prompts (every GPU does)", "explore, decode, score", "regenerate, decode, score", "update",
    ]  # fmt: skip
    assert seconds(2)["update"] == pytest.approx(one["update"] / 2)
    assert seconds(3)["update"] == pytest.approx(one["update"] / 2), "4 micro-batches on 3 GPUs: one does two"
    doubled = seconds(1, train={"timestep_fraction": 0.34})
    assert doubled["update"] == pytest.approx(one["update"] / 2)
    quick = dataclasses.replace(LARGE, bf16_tflops=2 * LARGE.bf16_tflops, fp8_tflops=2 * 1979)
    assert sum(seconds(1, quick).values()) == pytest.approx(sum(one.values()) / 2)


def test_a_judge_with_gpus_of_its_own_takes_no_memory_beside_the_model(shapes: Shapes) -> None:
    def plan(num_gpus: int = 4, **reward: Any) -> Plan:
        config = tiny_config(reward={"name": "pick_score"} | reward, runtime={"mode": "shiftable"})
        return make_plan(config, LARGE, num_gpus, shapes=shapes)

    beside, resident = plan(), plan(process="resident", process_gpus=2)
    shared = plan(process="shifting", process_gpus=2)
    judge = 4e9 * 0.986
    for apart in (resident, shared):
        assert sum(part.bytes for part in beside.resident) - sum(part.bytes for part in apart.resident) == judge
    assert resident.notes == ["each process's reward has 2 GPUs of its own, which are not counted"]
    held = sum(part.bytes for part in shared.resident) / GIB
    assert "the judge has GPUs of 2 processes to itself" in shared.notes[0] and f"{held:.1f} GiB" in shared.notes[1]
    assert all(line in lines(shared, None) for line in (f"note: {note}" for note in shared.notes))
    with pytest.raises(UsageError, match="process_gpus = 2 processes score together: 3 GPUs are no multiple of that"):
        plan(3, process="shifting", process_gpus=2)


def test_what_cannot_be_planned_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["tiny_flux", "--gpu", "v100"], "--gpu v100: known are a100, "),
        (["tiny_flux", "--gpu", "h200", "--gpus", "0"], "--gpus is at least 1"),
        (["tiny_flux"], "required: --gpu"),
        (["tiny_flux", "--gpu", "h200", "--model.path", "some/body"], "its architecture is not among the known ones"),
    ):
        assert cli.main(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert expected in error and len(error.splitlines()) == 1


def test_a_format_that_the_gpu_lacks_is_refused(shapes: Shapes) -> None:
    with pytest.raises(UsageError, match="nvfp4: a H200 SXM has no such arithmetic"):
        make_plan(tiny_config(explore={"precision": "nvfp4"}), LARGE, 1, shapes=shapes)
    assert {name: gpu.cheapest for name, gpu in GPUS.items()}["b200"] == "nvfp4"


def test_a_known_hub_id_needs_no_network(tmp_path: Path) -> None:
    from diffusers import SanaPipeline

    path = "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers"
    assert path in PUBLISHED
    pipeline = skeleton_pipeline(SanaPipeline, load_config("sana_1600m").model, path, torch.bfloat16)
    assert all(p.device.type == "meta" for p in pipeline.text_encoder.parameters())
    assert sum(p.numel() for p in pipeline.vae.parameters()) / 1e6 == pytest.approx(312, abs=1)


COUNTED = {"flux1_dev": (15.8, None), "sd35_large": (31.1, 256), "sana_1600m": (2.97, None)}
"""TFLOP of one velocity, counted once by other means, and the length of T5's text where it was not the config's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in shipped_configs() if not name.startswith("tiny")])
def test_every_real_config_has_a_plan(name: str) -> None:
    config = load_config(name)
    shapes = Shapes(config)
    for gpu in ("h200", "rtx5090"):
        plan = make_plan(config, find_gpu(gpu), 8, shapes=shapes)
        changes = changes_that_fit(plan, shapes)
        assert lines(plan, changes)
    if name in COUNTED:
        operations, text = COUNTED[name]
        counted = Shapes(load_config(name, {"model.max_text_tokens": text})) if text else shapes
        assert counted.work("full").velocity / 1e12 == pytest.approx(operations, rel=0.01)
    if name == "flux1_dev":  # Sol-RL, Table 5: 79 s of rollout and 90 s of training on 8 B200
        seconds = make_plan(config, find_gpu("b200"), 8, shapes=shapes).seconds
        rollout = seconds["explore, decode, score"] + seconds["regenerate, decode, score"]
        assert 0.6 < rollout / 79 < 1.6 and 0.6 < seconds["update"] / 90 < 1.6
