"""What is compared: arms, each a few settings, and the tables that put arms side by side. Nothing here computes.

The papers' numbers are those of Sol-RL (arXiv 2604.06916).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Equal = Literal["compute", "gpu", "steps"]
"""What arms have in common where they are compared: velocity evaluations, modelled GPU time, or optimizer steps."""

TINY: dict[str, Any] = {
    "prompts.per_step": 4,
    "explore.group_size": 24,
    "explore.precision": "full",
    "train.num_steps": 8,
    "evaluate.every_steps": 8,
    "output.audit_every_steps": 0,
    "output.checkpoint_every_steps": 4,
}
"""Over the config of an embedded model: a run takes about two and a half minutes of one core."""


@dataclass(frozen=True)
class Method:
    """An arm."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What makes it: over the config's and the command's settings."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """What it needs to learn on an embedded model; the command's settings win."""
    equal: Literal["steps", "compute"] = "steps"
    """Trained for as many steps as the two-stage arm, or for as much compute."""
    steps: int | None = None
    """Trained for so many steps instead, where only before and after are compared."""
    explores_in_full: bool = False
    """Whether its explorer draws with the regeneration's steps and solver."""
    is_emulated: bool = False
    """Whether its explorer is emulated NVFP4 on an embedded model."""


ALONE = {"explore.enabled": False}
EULER = {"regenerate.solver": "euler"}
GRPO = ALONE | EULER
TINY_GRPO = {
    "prompts.per_step": 16,
    "train.timestep_fraction": 0.9,
    "train.kl_weight": 0.02,
    "train.learning_rate": 2e-4,
}
DANCE_NOISE = {"train.objective_options.noise_level": 1.2}
EXPLORED_GRPO = TINY_GRPO | {"explore.num_steps": 4}
CPS = {"train.objective_options.sde_type": "cps", "train.objective_options.noise_level": 0.8}

METHODS: dict[str, Method] = {
    "sol_rl": Method(),
    "nft": Method(ALONE, equal="compute"),
    "awm": Method(ALONE | {"train.objective": "awm"}, {"train.kl_weight": 0.02}, equal="compute"),
    "flow_grpo": Method(GRPO | {"train.objective": "flow_grpo"}, TINY_GRPO, equal="compute"),
    "dance_grpo": Method(GRPO | {"train.objective": "dance_grpo"}, TINY_GRPO | DANCE_NOISE, equal="compute"),
    "explored_awm": Method({"train.objective": "awm"}, {"train.kl_weight": 0.02}),
    "explored_flow_sde": Method(EULER | {"train.objective": "flow_grpo"}, EXPLORED_GRPO, steps=12),
    "explored_flow_cps": Method(EULER | {"train.objective": "flow_grpo"} | CPS, EXPLORED_GRPO, steps=24),
    "explored_dance": Method(
        EULER | {"train.objective": "dance_grpo"},
        EXPLORED_GRPO | DANCE_NOISE,
        steps=24,
    ),
    "explored_dpo": Method(
        {"train.objective": "dpo", "regenerate.group_size": 2},
        {"prompts.per_step": 12, "train.kl_weight": 0.0},
        steps=12,
    ),
    "naive": Method({"regenerate.enabled": False, "explore.precision": "full"}, explores_in_full=True),
    "naive_quantized": Method(
        {"regenerate.enabled": False, "explore.precision": "nvfp4"}, explores_in_full=True, is_emulated=True
    ),
    **{f"steps_{steps}": Method({"explore.num_steps": steps}) for steps in (2, 4, 6, 8)},
    **{f"pool_{size}": Method({"explore.group_size": size}) for size in (24, 48, 72, 96)},
    **{rule: Method({"regenerate.selection": rule}) for rule in ("extremes", "middle")},
    "explore_full": Method({"explore.precision": "full"}),
    "explore_nvfp4": Method({"explore.precision": "nvfp4"}, is_emulated=True),
    "explore_fp8": Method({"explore.precision": "fp8"}),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One arm in a table."""

    label: str
    arm: str
    paper: tuple[str, ...] = ()
    seeds: int = 3


@dataclass(frozen=True)
class Table:
    """Rows, and the arm that the others' paired differences are taken to."""

    title: str
    rows: tuple[Row, ...]
    against: str
    equal: Equal
    paper: tuple[str, ...] = ()
    """Names of the paper's columns."""
    rewards: Literal["first", "all"] = "first"
    note: str = ""


PAIRED = 8
HPS = ("paper, HPSv2",)

TABLES: dict[str, Table] = {
    "4": Table(
        "Figures 1 and 4: two stages against DiffusionNFT at equal compute",
        (Row("DiffusionNFT", "nft", (), PAIRED), Row("Sol-RL", "sol_rl", (), PAIRED)),
        "nft",
        "compute",
    ),
    "6": Table(
        "Table 6: naive scaling and two stages at equal steps",
        (Row("naive", "naive", ("0.3699", "0.3803", "0.3682"), PAIRED),
         Row("Sol-RL", "sol_rl", ("0.3688 (-0.29 %)", "0.3762 (-1.08 %)", "0.3686 (+0.11 %)"), PAIRED)),
        "naive",
        "steps",
        ("paper, HPSv2: FLUX.1", "SD3.5-Large", "SANA"),
    ),
    "3b": Table(
        "Figure 3(b): training on quantized samples, at equal steps",
        (Row("naive, full precision", "naive", (), PAIRED), Row("naive, NVFP4", "naive_quantized", (), PAIRED),
         Row("Sol-RL, NVFP4", "explore_nvfp4", (), PAIRED)),
        "naive",
        "steps",
        note="The paper shows curves without numbers: training on quantized samples degrades.",
    ),
    "4gpu": Table(
        "Figures 1 and 4 over modelled GPU time",
        (Row("DiffusionNFT", "nft", (), PAIRED), Row("Sol-RL, NVFP4", "explore_nvfp4", (), PAIRED)),
        "nft",
        "gpu",
    ),
    "1": Table(
        "Table 1: methods at equal compute",
        (
            Row("DanceGRPO", "dance_grpo", ("1.4937 +1.0387", "0.2898 +0.0268", "0.8807 +0.0711", "0.3552 +0.0986")),
            Row("FlowGRPO", "flow_grpo", ("1.5331 +1.0781", "0.2884 +0.0254", "0.8743 +0.0647", "0.3501 +0.0935")),
            Row("AWM", "awm", ("1.6693 +1.2143", "0.3039 +0.0409", "0.8842 +0.0746", "0.3664 +0.1098")),
            Row("DiffusionNFT", "nft", ("1.6707 +1.2157", "0.2991 +0.0361", "0.8852 +0.0756", "0.3613 +0.1047"),
                PAIRED),
            Row("Sol-RL", "sol_rl", ("1.7636 +1.3086", "0.3089 +0.0459", "0.8932 +0.0836", "0.3688 +0.1122"), 8),
        ),
        "nft",
        "compute",
        ("paper, ImageReward", "CLIPScore", "PickScore", "HPSv2"),
        rewards="all",
        note="The paper: FLUX.1, equal GPU hours; before training 0.455, 0.2630, 0.8096 and 0.2566.",
    ),
    "objectives": Table(
        "Objectives, all with two stages: does the held-out reward rise?",
        (
            Row("nft", "sol_rl"), Row("awm", "explored_awm"), Row("flow_grpo, sde", "explored_flow_sde"),
            Row("flow_grpo, cps", "explored_flow_cps"), Row("dance_grpo", "explored_dance"), Row("dpo", "explored_dpo"),
        ),
        "",
        "compute",
    ),
    "2": Table(
        "Table 2: steps of the explorer, at equal steps of training",
        tuple(Row(f"{steps} steps", f"steps_{steps}", (score,))
              for steps, score in ((2, "0.3587"), (4, "0.3650"), (6, "0.3686"), (8, "0.3659"))),
        "steps_6",
        "steps",
        HPS,
    ),
    "3": Table(
        "Table 3: candidates explored, at equal steps of training",
        tuple(Row(f"N = {size}", f"pool_{size}", (score,))
              for size, score in ((24, "0.3569"), (48, "0.3622"), (72, "0.3663"), (96, "0.3686"))),
        "pool_24",
        "steps",
        HPS,
    ),
    "selection": Table(
        "Which candidates are kept, at equal steps",
        (Row("best and worst", "sol_rl"), Row("furthest from the mean", "extremes"), Row("middle ranks", "middle"),
         Row("random", "nft")),
        "sol_rl",
        "steps",
        note="random: DiffusionNFT without exploration, which trains on the same samples (tests/test_alignment.py).",
    ),
    "formats": Table(
        "Number format of the explorer, at equal steps",
        (Row("full", "explore_full", (), PAIRED), Row("FP8", "explore_fp8", (), PAIRED),
         Row("NVFP4", "explore_nvfp4", (), PAIRED)),
        "explore_full",
        "steps",
    ),
}  # fmt: skip
"""In the order in which they are worth running: the most telling first."""
