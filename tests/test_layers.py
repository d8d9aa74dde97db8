"""Rules that give each linear layer its number format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from solrl.errors import UsageError
from solrl.quant.layers import (
    FLUX_RULES,
    counting_rows,
    format_report,
    plan_layers,
    quantized_share,
    resolve_formats,
)

torch.set_num_threads(1)


def model() -> nn.Module:
    """Names like a FLUX transformer's."""

    def block(width: int) -> nn.Module:
        return nn.ModuleDict(
            {
                "norm1": nn.ModuleDict({"linear": nn.Linear(32, 6 * width)}),
                "attn": nn.ModuleDict({"to_q": nn.Linear(width, width), "norm_q": nn.RMSNorm(width)}),
            }
        )

    return nn.ModuleDict(
        {
            "x_embedder": nn.Linear(20, 32),
            "transformer_blocks": nn.ModuleList([block(32), block(32)]),
            "single_transformer_blocks": nn.ModuleList([block(32)]),
            "norm_out": nn.ModuleDict({"linear": nn.Linear(32, 64)}),
            "proj_out": nn.Linear(32, 16),
        }
    )


def quantized(rules: list[tuple[str, str]]) -> list[str]:
    return [name for name, number_format in resolve_formats(model(), rules).items() if number_format == "nvfp4"]


def test_flux_quantizes_what_sees_tokens_and_nothing_else() -> None:
    assert quantized(list(FLUX_RULES)) == [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.to_q",
        "single_transformer_blocks.0.attn.to_q",
    ]


def test_the_first_matching_rule_wins_and_what_no_rule_matches_stays_full() -> None:
    assert quantized([("*blocks.0.attn*", "full"), ("*attn*", "nvfp4"), ("*", "full")]) == [
        "transformer_blocks.1.attn.to_q"
    ]
    assert quantized([("*", "full"), ("*attn*", "nvfp4")]) == []
    assert quantized([("proj_out", "nvfp4")]) == ["proj_out"]
    assert quantized([("transformer_blocks.?.attn*", "nvfp4")]) == [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.to_q",
    ]


def test_a_layer_that_cannot_be_quantized_is_named_with_the_way_out() -> None:
    with pytest.raises(
        UsageError,
        match=r'x_embedder has 20 inputs .*, NVFP4 needs multiples of 32 and 16; put \("x_embedder", "full"\)',
    ):
        plan_layers(model(), [("*", "nvfp4")])
    assert "x_embedder" not in quantized([("x_embedder", "full"), ("*", "nvfp4")])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("*attm*", "nvfp4"), "matches no linear layer"),
        (("*attn*", "fp4"), "format 'fp4' .* use nvfp4, fp8, full, auto"),
    ],
)
def test_a_rule_that_means_nothing_is_an_error(rule: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_layers(model(), [rule])


def test_the_report_says_shape_format_and_reason_once_for_equal_blocks() -> None:
    plan = plan_layers(model(), FLUX_RULES)
    assert (plan[0].name, plan[0].shape, plan[0].format, plan[0].reason) == ("x_embedder", (32, 20), "full", "no rule")
    lines = [line.split() for line in format_report(plan)]
    assert ["2", "x", "transformer_blocks.*.attn.to_q", "32", "x", "32", "nvfp4"] in [line[:7] for line in lines]
    assert len(lines) == 7


def test_the_quantized_share_counts_the_rows_each_layer_saw() -> None:
    tree, rows = model(), dict[str, int]()
    plan = plan_layers(tree, [("proj_out", "nvfp4")])
    with counting_rows(tree, rows):
        tree.get_submodule("proj_out")(torch.zeros(2, 5, 32))
        tree.get_submodule("x_embedder")(torch.zeros(4, 20))
    tree.get_submodule("proj_out")(torch.zeros(100, 32))
    assert rows == {"proj_out": 10, "x_embedder": 4}
    assert quantized_share(plan, rows) == pytest.approx(10 * 32 * 16 / (10 * 32 * 16 + 4 * 20 * 32))
    assert quantized_share(plan, {}) == 0
