"""`solrl plan`: what a config would take on GPUs that are not here. An estimate from shapes; no weight is loaded.

Memory is counted: bytes of every resident part, and the peak of what drawing, decoding and one training micro-batch
hold, by running them on the meta device (solrl/footprint.py). Seconds are floating-point operations over a share
``EFFICIENCY`` of the data sheet's peak, so they say how phases compare better than how long they take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solrl.config import Config
from solrl.display import WIDTH, duration, plan_lines
from solrl.errors import UsageError
from solrl.hardware import Gpu
from solrl.models.decoder import MEMORY_SHARE, largest_slice
from solrl.objectives.base import open_objective
from solrl.shapes import Shapes, number_format_of

GIB = 2.0**30
EFFICIENCY = 0.22
"""Share of the dense peak: what Sol-RL's 184 s for 4608 FLUX.1 samples of 10 BF16 steps on 8 B200 come to (Table 5)."""
RESERVED = 0.06
"""Share of a GPU's memory for the CUDA context and for what an allocator loses between blocks."""
BYTES_PER_TRAINED = 5 * 4 + 4 + 8
"""Five float32 copies (policy, old_policy, EMA, two moments), the gradient, and its 64-bit sum."""
BYTES_PER_UPDATED = 16
"""More of them for a moment, while gradients are summed."""
BYTES_PER_SHARDED, BYTES_PER_SHARDED_UPDATED = 6 * 4, 8
"""The same where the trained weights are sharded: torch sums their gradients, in float32."""
LABEL = 46
"""Columns of a line's name."""

REWARDS: dict[str, tuple[float, float]] = {
    "shapes": (0.0, 0.0),
    "remote": (0.0, 0.0),
    "ocr": (0.0, 0.0),
    "clip_score": (0.428, 0.16),
    "aesthetic": (0.428, 0.16),
    "pick_score": (0.986, 0.33),
    "hpsv2": (0.986, 0.33),
    "image_reward": (0.447, 0.15),
}
"""Reward -> (billions of float32 parameters, TFLOP an image) of its published model; ocr works on the CPU."""


@dataclass(frozen=True)
class Part:
    """Bytes on every GPU, and what for."""

    what: str
    bytes: float


@dataclass(frozen=True)
class Plan:
    """An estimate for one config on ``num_gpus`` of ``gpu``."""

    config: Config
    gpu: Gpu
    num_gpus: int
    precision: str
    resident: list[Part]
    working: list[Part]
    """Of these the largest is needed, one at a time."""
    seconds: dict[str, float]
    efficiency: float
    notes: list[str]

    @property
    def needed(self) -> float:
        """Bytes at the worst moment."""
        work = max(part.bytes for part in self.working)
        return sum(part.bytes for part in self.resident) + work + RESERVED * self.room

    @property
    def room(self) -> float:
        """Bytes that there are."""
        return self.gpu.memory_gib * GIB

    @property
    def fits(self) -> bool:
        """Whether the worst moment fits."""
        return self.needed <= self.room

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "is_estimate": True,
            "gpu": self.gpu.name,
            "num_gpus": self.num_gpus,
            "precision": self.precision,
            "resident_bytes": {part.what: round(part.bytes) for part in self.resident},
            "working_bytes": {part.what: round(part.bytes) for part in self.working},
            "needed_bytes": round(self.needed),
            "room_bytes": round(self.room),
            "fits": self.fits,
            "seconds": self.seconds,
            "efficiency": self.efficiency,
            "notes": self.notes,
        }


def make_plan(
    config: Config, gpu: Gpu, num_gpus: int, *, shapes: Shapes | None = None, efficiency: float = EFFICIENCY
) -> Plan:
    """The estimate. ``shapes`` of an earlier one serve a config that differs in batch sizes or precision."""
    shapes = Shapes(config) if shapes is None else shapes
    precision = gpu.cheapest if config.explore.precision == "auto" else config.explore.precision
    if precision in ("fp8", "nvfp4") and gpu.tflops(precision) is None:
        raise UsageError(f"explore.precision = {precision}: a {gpu.name} has no such arithmetic; use auto or full")
    size, own = config.replica_size, config.reward.process_gpus > 0
    if size and num_gpus % size:
        raise UsageError(
            f"reward.process_gpus = {size} processes score together: {num_gpus} GPUs are no multiple of that"
        )
    costs, notes = _reward_costs(config)
    if config.model.shard:
        notes.append("what sharding sends between GPUs takes time that is not counted")
    beside = {name: cost for name, cost in costs.items() if not own or name in config.evaluate.rewards}
    resident = _resident(config, shapes, precision if config.explore.enabled else "full", beside, num_gpus)
    notes += _judge_notes(config, resident) if own else []
    room = gpu.memory_gib * GIB * (1 - RESERVED) - sum(part.bytes for part in resident)
    return Plan(
        config=config,
        gpu=gpu,
        num_gpus=num_gpus,
        precision=precision,
        resident=resident,
        working=_working(config, shapes, room, num_gpus),
        seconds=_seconds(config, shapes, gpu, num_gpus, precision, sum(c[1] for c in costs.values()), efficiency),
        efficiency=efficiency,
        notes=notes,
    )


def changes_that_fit(plan: Plan, shapes: Shapes) -> dict[str, Any] | None:
    """Settings with which the plan fits, fewest first of what costs least; None where none does."""
    config, changes = plan.config, {}
    while not plan.fits:
        change = _next_change(plan, config)
        if change is None:
            return None
        key, value = change
        changes[key] = value
        section, name = key.split(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
        plan = make_plan(config, plan.gpu, plan.num_gpus, shapes=shapes)
    return changes


def lines(plan: Plan, changes: Mapping[str, Any] | None) -> list[str]:
    """The plan as text of at most WIDTH columns; ``changes`` as changes_that_fit says."""
    config, gpu = plan.config, plan.gpu
    trained = f"LoRA rank {config.lora.rank}" if config.lora.enabled else "full fine-tuning"
    policy = f"{config.model.path}, {config.model.width}x{config.model.height}, {trained}"
    policy += f", sharded over {plan.num_gpus}" if config.model.shard and plan.num_gpus > 1 else ""
    explorer = f"{plan.precision}, to be proved on the machine"
    device = f"{gpu.name}, {gpu.memory_gib:.3g} GiB"
    found = ["An estimate from shapes and a data sheet: nothing here was measured.", ""]
    found += plan_lines(config, device=device, world_size=plan.num_gpus, policy=policy, explorer=explorer)
    found += ["", f"{'memory per GPU':{LABEL + 5}} GiB"]
    found += [f"  {part.what:{LABEL}} {part.bytes / GIB:6.1f}" for part in plan.resident]
    largest = max(plan.working, key=lambda part: part.bytes)
    for part in plan.working:
        mark = "  <- counts" if part is largest else ""
        found.append(f"  {'while: ' + part.what:{LABEL}} {part.bytes / GIB:6.1f}{mark}")
    found.append(f"  {f'reserved, {RESERVED:.0%} (CUDA context, fragments)':{LABEL}} {RESERVED * gpu.memory_gib:6.1f}")
    needed = f"  {'needed':{LABEL}} {plan.needed / GIB:6.1f} of {gpu.memory_gib:.3g}"
    found.append(f"{needed}: {'fits' if plan.fits else 'DOES NOT FIT'}")
    if not plan.fits and changes is None:
        found.append("  No setting makes it fit; larger GPUs do, or with model.shard more of them.")
    elif not plan.fits:
        found += ["  It would fit with", *(f"    --{key} {_word(value)}" for key, value in (changes or {}).items())]
    total = sum(plan.seconds.values())
    found += ["", f"{f'a step, at {plan.efficiency:.0%} of the peak':{LABEL + 5}} seconds"]
    found += [f"  {name:{LABEL}} {seconds:8.1f}" for name, seconds in plan.seconds.items()]
    steps = config.train.num_steps
    found.append(f"  {'together':{LABEL}} {total:8.1f}")
    found.append(f"  {steps} steps without evaluation: {duration(total * steps)}")
    found += [f"note: {note}" for note in plan.notes]
    assert all(len(line) <= WIDTH for line in found), found
    return found


def _resident(
    config: Config, shapes: Shapes, precision: str, costs: Mapping[str, tuple[float, float]], num_gpus: int
) -> list[Part]:
    text = shapes.text_bytes
    prompts = shapes.conditioning(config.prompts.per_step)
    tensors = [tensor for tensor in (prompts.embeds, prompts.pooled, prompts.mask) if tensor is not None]
    parts = [
        *_transformers(config, shapes, precision, num_gpus),
        Part("text encoders", 0.0 if config.model.offload_encoders else text),
        Part("autoencoder", sum(shapes.frozen.values()) - text),
        Part("encoded prompts of a step", sum(t.numel() * t.element_size() for t in tensors)),
        *(Part(f"reward {name}"[:LABEL], 4e9 * billions) for name, (billions, _) in costs.items()),
    ]
    return [part for part in parts if part.bytes]


def _transformers(config: Config, shapes: Shapes, precision: str, num_gpus: int) -> list[Part]:
    """Policy, reference, trees and what is trained: shares where ``model.shard`` says so."""
    trees, trained = shapes.trees(precision), shapes.num_trained
    is_sharded = config.model.shard and num_gpus > 1
    n = num_gpus if is_sharded else 1
    share = f"1/{n} of " if is_sharded else ""
    rollout = Part(f"{share}rollout tree", trees.base / n)
    if shapes.is_full:
        per_weight = BYTES_PER_SHARDED if is_sharded else BYTES_PER_TRAINED
        parts = [Part(f"{share}weights, averages, optimizer, gradients", trained * per_weight / n), rollout]
        if config.train.kl_weight > 0 or open_objective(config).needs_reference:
            parts.append(Part(f"{share}reference_policy", trees.base / n))
    else:
        merged = Part("rollout tree: merged weights of adapted layers", trees.rollout)
        parts = [Part(f"{share}transformer, frozen", trees.base / n), rollout if is_sharded else merged]
        parts.append(Part("adapters, optimizer, averages, gradients", trained * BYTES_PER_TRAINED))
    parts.append(Part(f"explorer: weights in {precision}", trees.explorer + trees.unquantized * is_sharded))
    if is_sharded:
        block, rest = shapes.block
        parts.append(Part("gathered: two blocks, and what is in none", (2 * block + rest) * shapes.weight_bytes))
    return parts


def _working(config: Config, shapes: Shapes, room: float, num_gpus: int) -> list[Part]:
    batch, both = config.batch, 2 if config.model.cfg_scale > 1 else 1
    one = shapes.decoding_bytes
    size = batch.decode or largest_slice(one, 2 * one, int(room * MEMORY_SHARE), batch.rollout)
    size = min(size, batch.rollout)
    checkpointing = config.model.gradient_checkpointing
    training = batch.train * both * shapes.training_bytes(checkpointing)
    if shapes.is_full and config.model.shard and num_gpus > 1:  # a block's gradients, and as they are sent
        training += shapes.block[0] * (shapes.weight_bytes + 4)
        training += shapes.num_trained * BYTES_PER_SHARDED_UPDATED // num_gpus
    else:
        training += shapes.num_trained * BYTES_PER_UPDATED
    with_checkpoints = ", checkpointed" if checkpointing else ""
    encoding = [Part("encoding prompts: text encoders", shapes.text_bytes)] if config.model.offload_encoders else []
    return [
        *encoding,
        Part(f"drawing {batch.rollout} samples", batch.rollout * both * shapes.drawing_bytes),
        Part(f"decoding {size} samples", size * one),
        Part(f"updating on {batch.train} samples{with_checkpoints}", training),
    ]


def _seconds(
    config: Config, shapes: Shapes, gpu: Gpu, num_gpus: int, precision: str, reward_tflop: float, efficiency: float
) -> dict[str, float]:
    """Phase -> seconds of a step; padding included."""
    number_format = number_format_of(precision)
    work, small = shapes.work(precision), shapes.work(precision, config.explore.downscale)
    batch, both = config.batch, 2 if config.model.cfg_scale > 1 else 1
    speed = gpu.bf16_tflops * 1e12 * efficiency
    full, quick = both * work.velocity / speed, both * small.velocity / speed
    if number_format != "full":
        quick -= both * sum(small.quantized.values()) / speed
        for name, operations in small.quantized.items():
            quick += both * operations / (speed * (gpu.tflops(name) or gpu.bf16_tflops) / gpu.bf16_tflops)
    rest, small_rest = ((each.decode + reward_tflop * 1e12) / speed for each in (work, small))

    def share(samples: int) -> int:
        return math.ceil(math.ceil(samples / batch.rollout) / num_gpus) * batch.rollout

    explore, regenerate, train = config.explore, config.regenerate, config.train
    groups = config.prompts.per_step
    tokens = groups * config.model.max_text_tokens
    seconds = {"encode prompts (every GPU does)": shapes.text_flops * tokens / speed}
    if explore.enabled:
        seconds["explore, decode, score"] = share(groups * explore.group_size) * (
            explore.num_steps * quick + small_rest
        )
    if regenerate.enabled:
        drawn = share(groups * regenerate.group_size)
        seconds["regenerate, decode, score"] = drawn * (regenerate.num_steps * full + rest)
    needs_reference = train.kl_weight > 0 or open_objective(config).needs_reference
    passes = 2 + shapes.is_full + (not config.is_on_policy) + needs_reference + config.model.gradient_checkpointing
    trained = share(groups * regenerate.group_size)
    seconds["update"] = trained * config.num_train_timesteps * passes * full
    return seconds


def _next_change(plan: Plan, config: Config) -> tuple[str, Any] | None:
    """The change that most likely helps the worst moment and costs least."""
    if not config.model.offload_encoders:
        return "model.offload_encoders", True
    batch = config.batch
    worst = max(plan.working, key=lambda part: part.bytes).what
    if sum(part.bytes for part in plan.resident) + RESERVED * plan.room < plan.room:
        if worst.startswith("updating"):
            if not config.model.gradient_checkpointing:
                return "model.gradient_checkpointing", True
            smaller = [size for size in range(1, batch.train) if batch.rollout % size == 0]
            if smaller:
                return "batch.train", smaller[-1]
        elif worst.startswith("decoding") and batch.decode != 1:
            return "batch.decode", 0 if batch.decode else 1
        smaller = list(range(batch.train, batch.rollout, batch.train))
        if smaller:
            return "batch.rollout", smaller[-1]
    helps = plan.num_gpus > 2 or not config.lora.enabled  # a sharded rollout tree is a copy of the base
    if plan.num_gpus > 1 and helps and not config.model.shard and config.runtime.mode == "colocated":
        return "model.shard", True
    if config.reward.name not in ("remote", "shapes", "ocr") and not config.reward.process_gpus:
        return "reward.name", "remote"
    if plan.precision != "full":
        return "explore.precision", "full"
    return None


def _reward_costs(config: Config) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """(reward -> cost, what is not known)."""
    options = config.reward.options
    sums = ("weighted_sum", "normalized_sum")
    parts = dict(options.get("weights", {})) if config.reward.name in sums else {config.reward.name: 1.0}
    costs, notes = {}, []
    for name in [*parts, *config.evaluate.rewards]:
        is_embedded = name == "clip_score" and "model" not in options and "options" not in options
        if is_embedded:  # the tiny CLIP that ships with the package
            costs[name] = (0.0, 0.0)
        elif name in REWARDS:
            costs[name] = REWARDS[name]
        else:
            notes.append(f"what the reward {name} takes is not known and not counted"[: WIDTH - 6])
    return costs, notes


def _judge_notes(config: Config, resident: list[Part]) -> list[str]:
    """Where a trained reward that is on none of the counted parts is."""
    gpus = config.reward.process_gpus
    if not config.replica_size:
        return [f"each process's reward has {gpus} GPU{'s' * (gpus > 1)} of its own, which are not counted"]
    gib = sum(part.bytes for part in resident) / GIB
    return [
        f"the judge has GPUs of {gpus} process{'es' * (gpus > 1)} to itself; what it takes is not counted",
        f"{gib:.1f} GiB of each process wait in host memory then; moving is not counted",
    ]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
