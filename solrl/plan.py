"""`solrl plan`: what a config would take on GPUs that are not here. An estimate from shapes; no weight is loaded.

Memory is counted: bytes of every resident part, and the peak of what drawing, decoding and one training micro-batch
hold, by running them on the meta device (solrl/footprint.py). Seconds are floating-point operations over a share
``EFFICIENCY`` of the data sheet's peak, so they say how phases compare better than how long they take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solrl.config import Config
from solrl.display import WIDTH, duration, plan_lines
from solrl.errors import UsageError
from solrl.footprint import peak_bytes
from solrl.hardware import Gpu
from solrl.models.base import DiffusersPolicy, load_policy, lora_parameters
from solrl.models.decoder import MEMORY_SHARE, largest_slice
from solrl.objectives.base import open_objective
from solrl.quant.backends import FULL
from solrl.quant.bounds import Work, measure_work
from solrl.quant.layers import default_rules, plan_layers
from solrl.quant.memory import TreeBytes, tree_bytes
from solrl.quant.trees import RolloutTrees
from solrl.types import Conditioning

META = torch.device("meta")
GIB = 2.0**30
EFFICIENCY = 0.22
"""Share of the dense peak: what Sol-RL's 184 s for 4608 FLUX.1 samples of 10 BF16 steps on 8 B200 come to (Table 5)."""
RESERVED = 0.06
"""Share of a GPU's memory for the CUDA context and for what an allocator loses between blocks."""
BYTES_PER_TRAINED = 5 * 4 + 4 + 8
"""Five float32 copies (policy, old_policy, EMA, two moments), the gradient, and its 64-bit sum."""
BYTES_PER_UPDATED = 16
"""More of them for a moment, while gradients are summed."""
CLIP_TOKENS = 77
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


class Shapes:
    """A config's models on the meta device, and what one sample of each job takes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        model = config.model.model_copy(update={"cfg_scale": 1.0, "init_lora": None, "gradient_checkpointing": False})
        policy = load_policy(config.model_copy(update={"model": model}), META)
        if not isinstance(policy, DiffusersPolicy):
            raise UsageError(f"model.family {config.model.family} is your own: its shapes are not known to a plan")
        policy.to(META)  # peft leaves adapters on the CPU
        self.policy = policy
        self.num_trained = sum(p.numel() for p in lora_parameters(policy.transformer, "default"))
        self.targets = config.lora.targets or policy.lora_targets
        self.plain = RolloutTrees(policy.transformer, FULL).rollout
        dtype = next(p for p in policy.transformer.parameters() if not p.requires_grad).dtype
        nn.Module.to(policy.transformer, dtype)  # autocast computes adapters in it
        self.frozen = {name: _bytes(part) for name, part in policy.named_children() if name != "transformer"}
        self.text_bytes = sum(size for name, size in self.frozen.items() if name.startswith("text_encoder"))
        self.text_flops = sum(
            2.0 * sum(p.numel() for p in part.parameters())
            for name, part in policy.named_children()
            if name.startswith("text_encoder")
        )

    def conditioning(self, samples: int) -> Conditioning:
        """Encoded prompts, without having encoded any."""
        architecture: Any = self.policy.transformer.config
        tokens = self.config.model.max_text_tokens
        dtype = next(self.plain.parameters()).dtype
        width = architecture.get("joint_attention_dim") or architecture.caption_channels
        if "pooled_projection_dim" not in architecture:
            mask = torch.ones(samples, tokens, dtype=torch.int64, device=META)
            return Conditioning(torch.empty(samples, tokens, width, dtype=dtype, device=META), mask=mask)
        tokens += CLIP_TOKENS if "text_encoder_3" in self.frozen else 0  # SD3.5 appends T5's tokens to CLIP's
        pooled = torch.empty(samples, architecture.pooled_projection_dim, dtype=dtype, device=META)
        return Conditioning(torch.empty(samples, tokens, width, dtype=dtype, device=META), pooled)

    def latents(self, samples: int) -> Tensor:
        """Of ``samples``."""
        return torch.empty(samples, *self.policy.latent_shape, device=META)

    def velocity(self, samples: int = 1) -> Tensor:
        """One velocity call."""
        sigma = torch.ones(samples, device=META)
        return self.policy.velocity(self.latents(samples), sigma, self.conditioning(samples))

    def trees(self, precision: str) -> TreeBytes:
        """What base, rollout tree and explorer take."""
        return tree_bytes(self.plain, self.targets, precision, self.config.explore.quantize)

    @functools.cache  # noqa: B019
    def work(self, precision: str) -> Work:
        """Floating-point operations of a sample; scoring is counted elsewhere."""
        drawing = self.policy.sibling(self.plain)
        sigma, prompt = torch.ones(1, device=META), self.conditioning(1)
        rules = self.config.explore.quantize or (() if precision == "full" else default_rules(self.plain))
        plan = [] if precision == "full" else plan_layers(self.plain, rules, _number_format(precision))
        return measure_work(
            self.plain,
            plan,
            velocity=lambda: drawing.velocity(self.latents(1), sigma, prompt),
            decode=lambda: drawing.decode(self.latents(1)),
            score=lambda: None,
        )

    @functools.cached_property
    def drawing_bytes(self) -> int:
        """Peak of a velocity call, a sample."""
        with torch.no_grad():
            return peak_bytes(self.velocity, self._held)

    @functools.cached_property
    def decoding_bytes(self) -> int:
        """Peak of a decode, a sample."""
        with torch.no_grad():
            return peak_bytes(lambda: self.policy.decode(self.latents(1)), self._held)

    @functools.cache  # noqa: B019
    def training_bytes(self, checkpointing: bool) -> int:
        """Peak of a forward and backward, a sample."""
        transformer: Any = self.policy.transformer
        (transformer.enable_gradient_checkpointing if checkpointing else transformer.disable_gradient_checkpointing)()
        peak = peak_bytes(lambda: torch.autograd.backward(self.velocity().square().sum()), self._held)
        transformer.zero_grad()
        return peak

    @property
    def _held(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self.policy.buffers()]


def make_plan(
    config: Config, gpu: Gpu, num_gpus: int, *, shapes: Shapes | None = None, efficiency: float = EFFICIENCY
) -> Plan:
    """The estimate. ``shapes`` of an earlier one serve a config that differs in batch sizes or precision."""
    shapes = Shapes(config) if shapes is None else shapes
    precision = gpu.cheapest if config.explore.precision == "auto" else config.explore.precision
    if precision in ("fp8", "nvfp4") and gpu.tflops(precision) is None:
        raise UsageError(f"explore.precision = {precision}: a {gpu.name} has no such arithmetic; use auto or full")
    costs, notes = _reward_costs(config)
    resident = _resident(config, shapes, precision if config.explore.enabled else "full", costs)
    room = gpu.memory_gib * GIB * (1 - RESERVED) - sum(part.bytes for part in resident)
    return Plan(
        config=config,
        gpu=gpu,
        num_gpus=num_gpus,
        precision=precision,
        resident=resident,
        working=_working(config, shapes, room),
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
    policy = f"{config.model.path}, {config.model.width}x{config.model.height}, LoRA rank {config.lora.rank}"
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
        found.append("  No setting makes it fit; a larger GPU does (a base model is not sharded).")
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


def _resident(config: Config, shapes: Shapes, precision: str, costs: Mapping[str, tuple[float, float]]) -> list[Part]:
    trees, text = shapes.trees(precision), shapes.text_bytes
    prompts = shapes.conditioning(config.prompts.per_step)
    tensors = [tensor for tensor in (prompts.embeds, prompts.pooled, prompts.mask) if tensor is not None]
    parts = [
        Part("transformer, frozen", trees.base),
        Part("rollout tree: merged weights of adapted layers", trees.rollout),
        Part(f"explorer: weights in {precision}", trees.explorer),
        Part("text encoders", 0.0 if config.model.offload_encoders else text),
        Part("autoencoder", sum(shapes.frozen.values()) - text),
        Part("adapters, optimizer, averages, gradients", shapes.num_trained * BYTES_PER_TRAINED),
        Part("encoded prompts of a step", sum(t.numel() * t.element_size() for t in tensors)),
        *(Part(f"reward {name}"[:LABEL], 4e9 * billions) for name, (billions, _) in costs.items()),
    ]
    return [part for part in parts if part.bytes]


def _working(config: Config, shapes: Shapes, room: float) -> list[Part]:
    batch, both = config.batch, 2 if config.model.cfg_scale > 1 else 1
    one = shapes.decoding_bytes
    size = batch.decode or largest_slice(one, 2 * one, int(room * MEMORY_SHARE), batch.rollout)
    size = min(size, batch.rollout)
    checkpointing = config.model.gradient_checkpointing
    training = batch.train * both * shapes.training_bytes(checkpointing) + shapes.num_trained * BYTES_PER_UPDATED
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
    number_format = _number_format(precision)
    work, batch, both = shapes.work(precision), config.batch, 2 if config.model.cfg_scale > 1 else 1
    speed = gpu.bf16_tflops * 1e12 * efficiency
    full = both * work.velocity / speed
    quantized = sum(work.quantized.values())
    quick = full if number_format == "full" else both * (work.velocity - quantized) / speed
    for name, operations in work.quantized.items():
        quick += both * operations / (speed * (gpu.tflops(name) or gpu.bf16_tflops) / gpu.bf16_tflops)
    rest = work.decode / speed + reward_tflop * 1e12 / speed

    def share(samples: int) -> int:
        return math.ceil(math.ceil(samples / batch.rollout) / num_gpus) * batch.rollout

    explore, regenerate, train = config.explore, config.regenerate, config.train
    groups = config.prompts.per_step
    tokens = groups * config.model.max_text_tokens
    seconds = {"encode prompts (every GPU does)": shapes.text_flops * tokens / speed}
    if explore.enabled:
        seconds["explore, decode, score"] = share(groups * explore.group_size) * (explore.num_steps * quick + rest)
    if regenerate.enabled:
        drawn = share(groups * regenerate.group_size)
        seconds["regenerate, decode, score"] = drawn * (regenerate.num_steps * full + rest)
    needs_reference = train.kl_weight > 0 or open_objective(config).needs_reference
    passes = 2 + (not config.is_on_policy) + needs_reference + config.model.gradient_checkpointing
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
    if config.reward.name not in ("remote", "shapes", "ocr"):
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


def _number_format(precision: str) -> str:
    return precision.removeprefix("emulated_")


def _bytes(part: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*part.parameters(), *part.buffers()))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
