"""The most memory that a function holds at once, counted from the shapes of what it makes on the meta device.

Every tensor that an operation makes counts until nothing refers to it, as an allocator would see it without compile.
Attention is taken to be fused: it keeps its inputs, its output and one float32 a row, never a table of scores. What
kernels use besides, and what an allocator loses between blocks, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """The most bytes that ``run`` has alive at once beside ``held``, what it returns included."""
    meter = _Meter(held)
    with _fused_attention(), meter:
        kept = run()
    del kept
    return meter.peak


class _Meter(TorchDispatchMode):
    """Adds up the storages that operations make, until each is freed."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.known: set[int] = {tensor.untyped_storage()._cdata for tensor in held}
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                name, size = storage._cdata, storage.nbytes()
                if name not in self.known:
                    self.known.add(name)
                    self.live += size
                    weakref.finalize(storage, self._free, name, size)
        self.peak = max(self.peak, self.live)
        return made

    def _free(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.live -= size


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Inside, scaled_dot_product_attention is a stand-in: on meta tensors the true one makes a table of scores."""

    def fused(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Attention.apply(query, key, value)

    functions: Any = torch.nn.functional
    true = functions.scaled_dot_product_attention
    functions.scaled_dot_product_attention = fused  # a TorchFunctionMode would be off inside backward, which recomputes
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = true


class _Attention(torch.autograd.Function):
    """The shapes of fused attention, forward and backward; no arithmetic."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = context.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
