"""Transformer Engine's back end, as far as it can be tested without its hardware: its calls and what is around them.

tests/te_signatures.json holds the parameter names of the functions that are called, read from the released wheel.
"""

from __future__ import annotations

import ast
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import UsageError
from solrl.quant import te as module
from solrl.quant.linear import SharedInput
from solrl.quant.nvfp4 import fake_quantize
from solrl.quant.proof import prove
from solrl.quant.te import TELinear, transformer_engine

torch.set_num_threads(1)
SIGNATURES: dict[str, list[str]] = json.loads((Path(__file__).parent / "te_signatures.json").read_text())["parameters"]


def calls() -> dict[str, ast.Call]:
    """Every call of a Transformer Engine function in our source, by the function's name."""
    found = {}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")).removeprefix("_")
            if name in SIGNATURES:
                found[name] = node
    return found


def test_every_call_fits_the_released_signatures() -> None:
    assert set(calls()) == set(SIGNATURES)
    for name, call in calls().items():
        assert len(call.args) <= len(SIGNATURES[name]), name
        for keyword in call.keywords:
            assert keyword.arg in SIGNATURES[name][len(call.args) :], (name, keyword.arg)


def test_what_costs_accuracy_or_concerns_gradients_is_switched_off() -> None:
    keywords = {
        k.arg: k.value.value for k in calls()["NVFP4BlockScaling"].keywords if isinstance(k.value, ast.Constant)
    }
    assert keywords == dict.fromkeys(("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), True)


def test_it_is_imported_by_nobody_and_missing_is_a_usage_error() -> None:
    assert "transformer_engine" not in sys.modules
    with pytest.raises(UsageError, match=r"cannot be imported \(No module named 'transformer_engine'\); pip install"):
        transformer_engine()


class Linear(nn.Linear):
    """What Transformer Engine's would compute: both operands in NVFP4, the input by its own amax."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) % 16 == 0
        return nn.functional.linear(fake_quantize(x), fake_quantize(self.weight.float()).to(x.dtype), self.bias)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def context(*, enabled: bool, recipe: object) -> AbstractContextManager[None]:
        return nullcontext()

    parts: dict[str, Any] = {name: ModuleType(name) for name in (
        "transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
        "transformer_engine.common.recipe",
    )}  # fmt: skip
    top, pytorch, common, recipe = parts.values()
    top.pytorch, top.common, common.recipe = pytorch, common, recipe
    pytorch.Linear, pytorch.autocast, pytorch.quantized_model_init = Linear, context, context
    pytorch.is_nvfp4_available = lambda return_reason: (True, "")
    recipe.NVFP4BlockScaling = lambda **disabled: SimpleNamespace(**disabled)
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)


def test_rows_are_padded_weights_follow_and_the_proof_applies(stand_in: None) -> None:
    weight, bias = torch.randn(32, 64), torch.randn(32)
    layer = TELinear(weight, bias, dtype=torch.float32, name="to_q", shared=SharedInput())
    assert not layer.needs_calibration
    x = torch.randn(2, 5, 64)
    expected = nn.functional.linear(fake_quantize(x), fake_quantize(weight), bias)
    torch.testing.assert_close(layer(x), expected)
    other = torch.randn(32, 64)
    layer.requantize_(other)
    torch.testing.assert_close(layer(x), nn.functional.linear(fake_quantize(x), fake_quantize(other), bias))
    assert prove([(layer, other)]).num_layers == 1


def test_a_refusing_machine_is_a_usage_error(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["transformer_engine.pytorch"], "is_nvfp4_available", lambda return_reason: (False, "old GPU")
    )
    with pytest.raises(UsageError, match=r"explore\.backend = te: old GPU"):
        transformer_engine()
