"""The two copies of a transformer that rollouts are drawn with.

``rollout`` has the policy's precision, ``explorer`` is its quantized sibling. Neither contains a PEFT layer: an adapted
layer is one linear with the adapter merged into a weight of its own, refreshed in place by `requantize_`. All other
parameters are the frozen base's own storages, so a tree costs memory only for adapted (and, in the explorer, quantized)
layers. Modules are never shared: switching the policy's adapters or its train mode reaches no tree.

`requantize_` proves what it did before it returns, because a rollout tree that silently stays behind looks like a
policy that does not learn.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from solrl.distributed import World
from solrl.errors import SolrlError
from solrl.quant.backends import Backend
from solrl.quant.layers import (
    LayerFormat,
    Rules,
    counting_rows,
    default_rules,
    format_report,
    plan_layers,
    quantized_share,
)
from solrl.quant.linear import Place, QuantLinear, SharedInput
from solrl.quant.nvfp4 import BlockCounts, count_blocks
from solrl.quant.proof import Proof, prove
from solrl.sharding import fill_, local, shard_, share, whole
from solrl.types import LoraPair, Weights

HEADROOM = 16.0
"""Static activation scales allow for this many times the largest magnitude seen in calibration: free (see nvfp4.py)."""


@dataclass(frozen=True)
class SyncReport:
    """What `requantize_` did."""

    num_layers: int
    max_change: float
    """Largest change of a merged weight."""
    changed_bytes: int
    """In the rollout tree's weights and the explorer's packed weights and scales together."""


class RolloutTrees:
    """``rollout`` and ``explorer`` of a transformer with LoRA adapters; for full precision they are one module.

    They hold the base weights until the first `requantize_`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        backend: Backend,
        rules: Rules | None = None,
        *,
        is_dynamic: bool = False,
        has_adapters: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """``rules``: None for the architecture's own. ``is_dynamic``: inputs are scaled by their own amax.

        Without adapters (full fine-tuning) no storage is shared with the transformer. ``device``: where the explorer's
        layers are quantized and stay, one after another; None: where they are.
        """
        self._base = _base_layers(transformer) if has_adapters else {}
        self._rules, self._is_dynamic, self._device = rules, is_dynamic, device
        self.rollout: nn.Module = _without_adapters(transformer) if has_adapters else _frozen_copy(transformer, {})
        self._followed = [f"{name}.weight" for name in self._base] or [n for n, _ in self.rollout.named_parameters()]
        self.replace_explorer_(backend)

    def replace_explorer_(self, backend: Backend) -> None:
        """``explorer`` is a new module that computes with ``backend``, neither calibrated nor proved.

        Its adapted layers hold rollout's rounded weights until the next `requantize_`.
        """
        self.backend = backend
        self.explorer: nn.Module = self.rollout
        self.plan: list[LayerFormat] = []
        self._rows: dict[str, int] = {}
        if backend.number_format is not None:
            rules = default_rules(self.rollout) if self._rules is None else self._rules
            self.plan = plan_layers(self.rollout, rules, backend.number_format)
            self.explorer = _quantized_sibling(self.rollout, self.plan, backend, self._is_dynamic, self._device)
        self._is_apart = False  # whether the explorer has weights of its own for what is not quantized
        self._homes = self._storages()

    def shard_(self, world: World) -> None:
        """The rollout tree's weights are shares from now on; an explorer in another format stays whole."""
        shard_(self.rollout, world)
        self._is_apart = self.explorer is not self.rollout
        self._homes = self._storages()

    @property
    def adapted(self) -> list[str]:
        """Names of the layers that carry an adapter."""
        return list(self._base)

    def quant_layers(self) -> dict[str, QuantLinear]:
        """The explorer's quantized layers by name; none for precision "full"."""
        return {name: module for name, module in self.explorer.named_modules() if isinstance(module, QuantLinear)}

    def report(self) -> list[str]:
        """Which layers run in which format, as text; after a calibration also what share of the work is quantized."""
        lines = format_report(self.plan)
        if self._rows:
            lines.append(f"{quantized_share(self.plan, self._rows):.1%} of the linear layers' work is quantized")
        return lines

    @torch.no_grad()
    def requantize_(self, weights: Weights) -> SyncReport:
        """Put ``weights`` into both trees, in place; adapters are merged, what is sharded is gathered, one by one.

        Raises a SolrlError unless every buffer provably followed.
        """
        self._check_bound(weights)
        changes = [self._sync(name, self._wanted(name, weights)) for name in self._followed]
        if self._storages() != self._homes:
            raise SolrlError("a weight of a rollout tree was replaced instead of filled in place; build the trees anew")
        return SyncReport(len(changes), max(change for change, _ in changes), sum(count for _, count in changes))

    def num_products(self, *, calls: int) -> dict[str, int]:
        """Format -> products of matrices that ``calls`` forwards of the explorer make in it."""
        layers = [layer.number_format for layer in self.quant_layers().values()]
        return {name: calls * layers.count(name) for name in sorted(set(layers))}

    @torch.no_grad()
    def prove(self, weights: Weights) -> Proof | None:
        """Prove that each quantized layer holds the weight that ``weights`` give it and computes in its format.

        None for full precision. Raises a SolrlError that names the first layer that fails (solrl/quant/proof.py).
        """
        if self.explorer is self.rollout:
            return None
        layers = self.quant_layers().items()
        return prove((layer, self._wanted(f"{name}.weight", weights).flatten(1)) for name, layer in layers)

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Inside, quantized layers scale each input by its own amax and remember the largest.

        After, each also knows its place among those that read one tensor.
        """
        layers = self.quant_layers()
        for layer in layers.values():
            layer.start_observing()
        try:
            with counting_rows(self.explorer, self._rows), _watching_readers(layers):
                yield
        finally:
            for layer in layers.values():
                layer.stop_observing()

    def set_activation_scales_(self, over_ranks: Callable[[Tensor], Tensor] = lambda seen: seen) -> None:
        """Fix each layer's activation amax: what calibration saw, times HEADROOM, rounded up to a power of two.

        ``over_ranks`` turns what this rank saw, [layers], into the maximum over all ranks.
        """
        layers = self._calibrated_layers()
        largest = [torch.zeros(()) if layer.observed is None else layer.observed.cpu() for layer in layers.values()]
        everywhere = over_ranks(torch.stack(largest)).tolist() if largest else []
        for (name, layer), seen in zip(layers.items(), everywhere, strict=True):
            if not 0 < seen < math.inf:
                raise SolrlError(
                    f"{name} saw no usable input in calibration (largest magnitude {seen}); set "
                    f'explore.activation_scale = dynamic or put ("{name}", "full") first in explore.quantize'
                )
            layer.set_act_amax_(_power_of_two_above(seen * HEADROOM))

    def activation_scales(self) -> dict[str, Tensor]:
        """Activation amax by layer, for a checkpoint."""
        return {name: layer.act_amax.clone() for name, layer in self.quant_layers().items() if layer.is_calibrated}

    def load_activation_scales_(self, scales: Mapping[str, Tensor]) -> None:
        """Take over saved ``activation_scales``; layers must be exactly the quantized ones."""
        layers = self._calibrated_layers()
        _require_same("saved activation scales", set(scales), "layers with one", set(layers))
        for name, layer in layers.items():
            layer.set_act_amax_(float(scales[name]))

    @contextmanager
    def audit(self) -> Iterator[dict[str, BlockCounts]]:
        """Inside, counts by layer the activation blocks that clip or lose precision. As dear as quantizing twice."""
        counts: dict[str, BlockCounts] = {}

        def count(name: str, layer: QuantLinear, x: Tensor) -> None:
            new = count_blocks(x.movedim(1, -1) if layer.is_convolution else x, layer.act_amax)
            counts[name] = BlockCounts(*map(sum, zip(counts.get(name, (0, 0, 0)), new, strict=True)))

        handles = [
            layer.register_forward_pre_hook(lambda module, args, name=name: count(name, module, args[0]))
            for name, layer in self._calibrated_layers().items()
            if layer.number_format == "nvfp4"
        ]
        try:
            yield counts
        finally:
            for handle in handles:
                handle.remove()

    def _calibrated_layers(self) -> dict[str, QuantLinear]:
        """Quantized layers that compute with a static amax."""
        return {name: layer for name, layer in self.quant_layers().items() if layer.needs_calibration}

    def _wanted(self, name: str, weights: Weights) -> Tensor:
        """What ``weights`` make of a parameter, float32."""
        given = weights.get(name.removesuffix(".weight") if self._base else name)
        if isinstance(given, LoraPair):
            layer = name.removesuffix(".weight")
            return _merge(self._base[layer], given, layer)
        stored = _parameter(self.rollout, name)
        wanted = whole(stored if given is None else given).to(stored.device, torch.float32)
        if not bool(wanted.isfinite().all()):
            raise SolrlError(f"{name} holds non-finite values")
        return wanted

    def _check_bound(self, weights: Weights) -> None:
        """Layers that carry an adapter == layers given, and every number finite, before anything is written."""
        if not self._base:
            return _require_same("given weights", set(weights), "transformer's parameters", set(self._followed))
        _require_same("given adapters", set(weights), "adapted layers", set(self._base))
        for name, pair in weights.items():
            assert isinstance(pair, LoraPair)
            if not bool(pair.a.isfinite().all() & pair.b.isfinite().all()) or not math.isfinite(pair.scale):
                raise SolrlError(f"adapter of {name} holds non-finite values; the trees were left as they were")

    def _sync(self, name: str, wanted: Tensor) -> tuple[float, int]:
        """Bring one parameter of both trees to ``wanted``, float32; (largest change, changed bytes)."""
        weight = whole(_parameter(self.rollout, name))
        rounded = wanted.to(weight.dtype)
        change = (rounded.float() - weight.float()).abs_()
        changed = _changed_bytes(weight, rounded)
        fill_(_parameter(self.rollout, name), rounded)
        owner = name.removesuffix(".weight")
        layer = self.explorer.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, QuantLinear) and owner != name:
            matrix = wanted.flatten(1)
            before = [buffer.clone() for buffer in layer.stored()]
            layer.requantize_(matrix)
            requantized = sum(map(_changed_bytes, before, layer.stored()))
            if not requantized and bool((change.flatten(1) > layer.rounding()[1]).any()):
                raise SolrlError(
                    f"{owner}: the weight moved by more than a quantization step but no stored byte changed"
                )
            changed += requantized
            _require_agreement(owner, layer, matrix)
        elif self._is_apart:
            fill_(_parameter(self.explorer, name), rounded)
        stored = _parameter(self.rollout, name)
        if not torch.equal(local(stored), share(rounded, stored)):
            raise SolrlError(f"{owner}: the rollout tree's weight is not the merged one after it was written")
        return float(change.max()), changed

    def _storages(self) -> dict[str, int]:
        """The storage of every followed weight; it stays the same where its memory was released and filled again."""
        homes = {f"rollout {name}": _storage(_parameter(self.rollout, name)) for name in self._followed}
        for name in self._followed:
            owner, _, leaf = name.rpartition(".")
            layer = self.explorer.get_submodule(owner)
            stored = dict(layer.named_buffers()) if isinstance(layer, QuantLinear) else {leaf: getattr(layer, leaf)}
            homes |= {f"explorer {owner}.{key}": _storage(tensor) for key, tensor in stored.items()}
        return homes


def _base_layers(transformer: nn.Module) -> dict[str, nn.Linear]:
    """The frozen linear under each adapter, by the adapted layer's name."""
    layers: dict[str, nn.Linear] = {}
    for name, module in transformer.named_modules():
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            if not isinstance(base, nn.Linear):
                raise SolrlError(f"{name} is a {type(base).__name__}; only adapters on linear layers can be merged")
            if module.merged:
                raise SolrlError(f"an adapter is merged into {name}; unmerge it before rollout trees are built")
            layers[name] = base
    if not layers:
        raise SolrlError("the transformer has no LoRA layer; add adapters before rollout trees are built")
    return layers


def _without_adapters(transformer: nn.Module) -> nn.Module:
    """A frozen copy: plain linears with weights of their own for adapted layers, the original's storages elsewhere."""
    memo = _aliases(transformer)
    for module in transformer.modules():
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            memo[id(module)] = _linear(base.weight.detach().clone(), base.bias)
    tree: Any = _frozen_copy(transformer, memo)
    if "peft_config" in vars(tree):  # diffusers' note that there are adapters
        del tree.peft_config
        tree._hf_peft_config_loaded = False
    return tree


def _frozen_copy(transformer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy that only draws; what ``memo`` names it takes from there."""
    tree: Any = copy.deepcopy(transformer, memo)
    for module in tree.modules():
        if "gradient_checkpointing" in vars(module):
            module.gradient_checkpointing = False
    return tree.requires_grad_(False).eval()


def _quantized_sibling(
    rollout: nn.Module, plan: list[LayerFormat], backend: Backend, is_dynamic: bool, device: torch.device | None
) -> nn.Module:
    """A copy of the rollout tree on its storages, or on ``device`` if that is another; planned layers quantized."""
    memo = _aliases(rollout)
    shared = SharedInput()
    for layer in plan:
        if layer.format != "full":
            full: Any = rollout.get_submodule(layer.name)
            weight = full.weight.flatten(1).to(device)
            bias = None if full.bias is None else full.bias.detach().to(device)
            quantized = backend.layers[layer.format](
                weight, bias, dtype=weight.dtype, name=layer.name,
                shared=shared, is_dynamic=is_dynamic, is_convolution=isinstance(full, nn.Conv2d),
            )  # fmt: skip
            _require_agreement(layer.name, quantized, weight.float())
            memo[id(full)] = quantized
    return copy.deepcopy(rollout, memo).eval().to(device)


@contextmanager
def _watching_readers(layers: Mapping[str, QuantLinear]) -> Iterator[None]:
    """After, each layer has the ``place`` it took among those that read one tensor one after another."""
    last: tuple[QuantLinear, weakref.ref[Tensor]] | None = None

    def watch(layer: QuantLinear, x: Tensor) -> None:
        nonlocal last
        follows = last is not None and last[1]() is x and last[0].number_format == layer.number_format
        if last is not None:
            last[0].place = last[0].place._replace(is_last=not follows)
        layer.place = Place(is_first=not follows, is_last=True)
        last = (layer, weakref.ref(x))

    handles = [
        layer.register_forward_pre_hook(lambda module, args: watch(module, args[0])) for layer in layers.values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _aliases(module: nn.Module) -> dict[int, Any]:
    """A memo that makes deepcopy give every parameter and buffer a new tensor on the old storage."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    return memo | {id(buffer): buffer.detach() for buffer in module.buffers()}


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def _parameter(tree: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(tree.get_submodule(owner), leaf)
    return tensor


def _storage(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


def _merge(base: nn.Linear, pair: LoraPair, name: str) -> Tensor:
    """W + scale * b @ a in float32."""
    if (pair.b.shape[0], pair.a.shape[1]) != tuple(base.weight.shape):
        raise SolrlError(
            f"adapter of {name} makes a {pair.b.shape[0]} x {pair.a.shape[1]} matrix, "
            f"the layer's weight is {base.weight.shape[0]} x {base.weight.shape[1]}"
        )
    merged = whole(base.weight).float() + pair.scale * (pair.b.float() @ pair.a.float())
    if not bool(merged.isfinite().all()):
        raise SolrlError(f"merged weight of {name} holds non-finite values")
    return merged


def _require_agreement(name: str, layer: QuantLinear, merged: Tensor) -> None:
    """Every quantized weight is as close to ``merged`` as its format's rounding allows."""
    allowed, _ = layer.rounding()
    if not bool(((layer.weight_values() - merged).abs_() <= allowed).all()):
        raise SolrlError(
            f"{name}: the explorer's weight is further from the merged one than {layer.number_format.upper()}'s "
            "rounding explains"
        )


def _changed_bytes(old: Tensor, new: Tensor) -> int:
    return int((old.reshape(-1).view(torch.uint8) != new.reshape(-1).view(torch.uint8)).sum())


def _require_same(what: str, given: set[str], whose: str, wanted: set[str]) -> None:
    missing, extra = sorted(wanted - given), sorted(given - wanted)
    if missing or extra:
        example = f"missing {missing[0]}" if missing else f"unknown {extra[0]}"
        raise SolrlError(f"{what} do not match the {whose}: {len(missing)} missing, {len(extra)} unknown ({example})")


def _power_of_two_above(x: float) -> float:
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
