"""What a parameter store holds: tensors by name, in sets under one version each, and which part is whose to write."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime.transfer import Box


@dataclass(frozen=True)
class Spec:
    """One entry: bytes are bytes, so any dtype of torch will do."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class EntrySet:
    """Tensors under one version. ``shards[w]``: the box of each entry that writer w writes; all cover it once."""

    name: str
    entries: Mapping[str, Spec]
    shards: Sequence[Mapping[str, Box]]
    frozen: bool = False
    """Written once: one slot instead of two."""

    @classmethod
    def like(cls, name: str, tensors: Mapping[str, Tensor], *, frozen: bool = False, num_writers: int = 1) -> EntrySet:
        """Entries as ``tensors`` (of any device), whose rows are split evenly over the writers, as FSDP splits them."""
        entries = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
        return cls(name, entries, split_rows(entries, num_writers), frozen)

    @property
    def num_slots(self) -> int:
        return 1 if self.frozen else 2


def split_rows(entries: Mapping[str, Spec], num_writers: int) -> list[dict[str, Box]]:
    """For each writer the rows that are its own, ceil(rows / writers) of them; a scalar is the first one's."""
    shards: list[dict[str, Box]] = [{} for _ in range(num_writers)]
    for name, spec in entries.items():
        rows = spec.shape[0] if spec.shape else 1
        share = max(-(-rows // num_writers), 1)
        for writer, begin in enumerate(range(0, max(rows, 1), share)):
            first = ((begin, min(begin + share, rows)),) if spec.shape else ()
            shards[writer][name] = (*first, *((0, size) for size in spec.shape[1:]))
    return shards


def check(owner: str, expected: Mapping[str, Spec], tensors: Mapping[str, Tensor]) -> None:
    """Every tensor has a known name, the dtype and the shape."""
    for key, tensor in tensors.items():
        spec = expected.get(key)
        if spec is None:
            nearest = difflib.get_close_matches(key, expected, n=1, cutoff=0.0)
            raise SolrlError(f"{owner} has no entry {key}" + (f"; the nearest is {nearest[0]}" if nearest else ""))
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise SolrlError(f"{key} of {owner} is {spec}, got {Spec(tensor.dtype, tuple(tensor.shape))}")


def check_shards(found: EntrySet) -> None:
    """Raise unless the writers' boxes cover every entry of the set exactly once."""
    if not found.shards:
        raise SolrlError(f"{found.name} needs a writer")
    for writer, shard in enumerate(found.shards):
        for key, box in shard.items():
            spec = found.entries.get(key)
            inside = spec is not None and len(box) == len(spec.shape)
            if (
                spec is None
                or not inside
                or any(not 0 <= begin <= end <= size for (begin, end), size in zip(box, spec.shape, strict=True))
            ):
                raise SolrlError(
                    f"writer {writer} of {found.name} writes {box} of {key}, which is {spec or 'no entry'}"
                )
    for key, spec in found.entries.items():
        boxes = [shard[key] for shard in found.shards if key in shard]
        twice = any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, two, strict=True))
            for one, two in combinations(boxes, 2)
        )
        if twice or sum(prod(box_shape(box)) for box in boxes) != prod(spec.shape):
            how = "twice" if twice else "not at all"
            raise SolrlError(f"a part of {key} of {found.name} is written {how} by its {len(found.shards)} writers")


def box_shape(box: Box) -> tuple[int, ...]:
    """What is inside of it."""
    return tuple(end - begin for begin, end in box)


def set_to_json(found: EntrySet) -> dict[str, Any]:
    """Plain lists, texts and numbers."""
    entries = {key: [str(spec.dtype).removeprefix("torch."), spec.shape] for key, spec in found.entries.items()}
    return {"name": found.name, "entries": entries, "shards": [dict(s) for s in found.shards], "frozen": found.frozen}


def set_from_json(found: Mapping[str, Any]) -> EntrySet:
    """What ``set_to_json`` gave."""
    entries = {key: Spec(getattr(torch, dtype), tuple(shape)) for key, (dtype, shape) in found["entries"].items()}
    shards = [
        {key: tuple((int(begin), int(end)) for begin, end in box) for key, box in shard.items()}
        for shard in found["shards"]
    ]
    return EntrySet(found["name"], entries, shards, found["frozen"])
