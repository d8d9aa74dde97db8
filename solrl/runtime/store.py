"""The Global Parameter Storage on one node (PivotRL, Section 5.1): ``write(name, version, tensors)``, ``read``.

What changes together is an entry set with a version of its own: a frozen base, the LoRA beside it, a quantized copy.
A set is stored twice, in slots: writers fill the one that no reader is sent to, then one 64-bit word names it the
committed one. A reader copies and then looks whether its slot has been taken again meanwhile; if so it starts over
with the newer version. So a reader never returns a mix of two versions, never blocks a writer, and a process killed at
any moment leaves the last committed version as it was. A frozen set has one slot and is written once.

Ranks that each hold a part write it when they like (stage 1: from then on the rank may drop its copy); whoever is the
last commits (stage 2). Which part is whose is fixed and checked when the store is created.

Copies are ``Tensor.copy_`` between the caller's buffers and memory that is mapped and touched once: they run at the
speed of a memcpy. A CUDA tensor on either side works by the same call, from pageable memory; that is untested here.
Nothing outlives its processes (see arena).
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime.arena import Arena, pauses
from solrl.runtime.layouts import part
from solrl.runtime.transfer import Box

_ALIGN = 256
_PURPOSE = "parameter store"
_COMMITTED = 0  # words of a set: (version << 1 | slot) + 1 of what readers get, 0 for nothing yet; then its slots
_SEQUENCE, _PENDING, _WRITERS = 0, 1, 2  # words of a slot: times taken, version + 1 being written, then its writers
_IDLE, _WRITING, _WRITTEN = range(3)  # a writer: one of these, its process id, when that process started


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


class Store:
    """Entry sets in shared memory. One object a process; its methods may be called from any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.sets = {found.name: found for found in map(_set_from_json, arena.manifest["sets"])}
        self._layouts, _ = _layouts(self.sets.values())
        self._slots = {
            name: [_views(found, arena.body, begin) for begin in self._layouts[name].slots]
            for name, found in self.sets.items()
        }
        self._words = {name: arena.words(layout.words, layout.num_words) for name, layout in self._layouts.items()}
        self._shards: dict[tuple[str, int], tuple[dict[str, Spec], list[dict[str, Tensor]]]] = {}
        self._writing = {name: threading.Lock() for name in self.sets}

    @classmethod
    def create(cls, sets: Sequence[EntrySet]) -> Self:
        """An empty store with room for every set. Too little memory is an error that names the sizes."""
        names = [found.name for found in sets]
        if not sets or len(set(names)) < len(names):
            raise SolrlError(f"a parameter store needs sets of different names, got {names}")
        for found in sets:
            check_shards(found)
        _, size = _layouts(sets)
        return cls(Arena.create(_PURPOSE, {"sets": [_set_to_json(found) for found in sets]}, size))

    @classmethod
    def attach(cls, address: str) -> Self:
        """The store that another process of this node created."""
        return cls(Arena.attach(_PURPOSE, address))

    @property
    def address(self) -> str:
        """What ``attach`` takes; good while this process lives and keeps the store open."""
        return self._arena.address

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, both slots included."""
        return self._arena.body.nbytes

    def write(self, name: str, version: int, tensors: Mapping[str, Tensor], *, writer: int = 0) -> bool:
        """The writer's shard of ``version`` is stored; True when it was the last one, so that readers now get it.

        ``tensors`` are all entries that the writer has a part of, each of the part's shape. A version must be higher
        than the committed one. What a killed process left half written is written over.
        """
        found = self._set(name)
        if not 0 <= writer < len(found.shards):
            raise SolrlError(f"{name} has writers 0 to {len(found.shards) - 1}, got {writer}")
        expected, slots = self._shard(found, writer)
        _check(f"writer {writer} of {name}", expected, tensors)
        missing = next((key for key in expected if key not in tensors), None)
        if missing is not None:
            raise SolrlError(f"writer {writer} of {name} must write {missing} too")
        with self._writing[name]:
            slot = self._take(found, version, writer)
            for key, tensor in tensors.items():
                slots[slot][key].copy_(tensor)
            return self._announce(found, slot, version, writer)

    def read(self, name: str, out: Mapping[str, Tensor], *, timeout_s: float = 60.0) -> int:
        """The newest committed version is in ``out`` (some or all entries, in place), whole; returns its number.

        After an error what ``out`` holds is undefined.
        """
        found = self._set(name)
        _check(name, found.entries, out)
        words, attempts = self._words[name], 0
        for _ in pauses(timeout_s):
            with self._arena.lock():
                current = self._current(name)
                if current is None:
                    raise SolrlError(f"no version of {name} has been written yet: wait for one first")
                version, slot = current
                before = words[self._at(found, slot) + _SEQUENCE]
            for key, tensor in out.items():
                tensor.copy_(self._slots[name][slot][key])
            with self._arena.lock():
                if words[self._at(found, slot) + _SEQUENCE] == before:
                    return version
            attempts += 1
        raise SolrlError(f"{name} was written over {attempts} times in {timeout_s:g} s, faster than it can be read")

    def version(self, name: str) -> int | None:
        """The committed version; None before the first."""
        self._set(name)
        with self._arena.lock():
            current = self._current(name)
        return None if current is None else current[0]

    def wait(self, name: str, version: int, timeout_s: float) -> int:
        """``version`` or a newer one is committed; returns which. The time-out names the writers that are missing."""
        for _ in pauses(timeout_s):
            found = self.version(name)
            if found is not None and found >= version:
                return found
        late = ", ".join(map(str, self._missing(self.sets[name], version)))
        raise SolrlError(
            f"version {version} of {name} did not come in {timeout_s:g} s; not yet written by writer {late}"
        )

    def close(self) -> None:
        """This process holds nothing of the store any more. Twice is harmless."""
        self._slots.clear()
        self._shards.clear()
        for words in self._words.values():
            words.release()
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, name: str) -> EntrySet:
        if not self._slots:
            raise SolrlError(f"the {_PURPOSE} is closed")
        if name not in self.sets:
            raise SolrlError(f"the parameter store has no {name!r}; it has {', '.join(self.sets)}")
        return self.sets[name]

    def _shard(self, found: EntrySet, writer: int) -> tuple[dict[str, Spec], list[dict[str, Tensor]]]:
        """(what a writer writes, where it lies in each slot)."""
        if (found.name, writer) not in self._shards:
            shard = found.shards[writer]
            expected = {key: Spec(found.entries[key].dtype, _shape(box)) for key, box in shard.items()}
            slots = [{key: part(views[key], box) for key, box in shard.items()} for views in self._slots[found.name]]
            self._shards[found.name, writer] = expected, slots
        return self._shards[found.name, writer]

    def _current(self, name: str) -> tuple[int, int] | None:
        """(committed version, its slot), under the lock."""
        word = self._words[name][_COMMITTED]
        return ((word - 1) >> 1, (word - 1) & 1) if word else None

    def _at(self, found: EntrySet, slot: int) -> int:
        """Where the words of a slot begin."""
        return 1 + slot * _slot_words(found)

    def _take(self, found: EntrySet, version: int, writer: int) -> int:
        """The slot to write ``version`` into. Readers that are still in it will notice."""
        name, words = found.name, self._words[found.name]
        with self._arena.lock():
            current = self._current(name)
            if current is not None and found.frozen:
                raise SolrlError(f"{name} is frozen: it was written once, as version {current[0]}")
            if version < 0 or (current is not None and version <= current[0]):
                known = "none" if current is None else current[0]
                raise SolrlError(f"version {version} of {name} is not new: {known} is committed")
            slot = 1 - current[1] if current is not None else 0
            at = self._at(found, slot)
            pending = words[at + _PENDING]
            states = [tuple(words[at + _WRITERS + 3 * w :][:3]) for w in range(len(found.shards))]
            rivals = [writer] if pending == version + 1 else range(len(states))
            busy = [rival for rival in rivals if _is_writing(*states[rival])]
            if busy:
                raise SolrlError(f"version {pending - 1} of {name} is being written by writer {busy[0]}: wait for it")
            if version + 1 < pending and any(_started(pid) == started for state, pid, started in states if state):
                raise SolrlError(f"version {version} of {name} is not new: {pending - 1} is being written")
            if pending != version + 1:
                words[at + _PENDING] = 0
                words[at + _SEQUENCE] += 1
                for other in range(len(found.shards)):
                    words[at + _WRITERS + 3 * other] = _IDLE
                words[at + _PENDING] = version + 1
            mine = at + _WRITERS + 3 * writer
            words[mine + 1], words[mine + 2] = os.getpid(), _started(os.getpid())
            words[mine] = _WRITING
        return slot

    def _announce(self, found: EntrySet, slot: int, version: int, writer: int) -> bool:
        """The writer is done; the last one commits."""
        at, words = self._at(found, slot), self._words[found.name]
        with self._arena.lock():
            words[at + _WRITERS + 3 * writer] = _WRITTEN
            whole = all(words[at + _WRITERS + 3 * other] == _WRITTEN for other in range(len(found.shards)))
            if whole:
                words[_COMMITTED] = (version << 1 | slot) + 1
        return whole

    def _missing(self, found: EntrySet, version: int) -> list[int]:
        words = self._words[found.name]
        with self._arena.lock():
            for slot in range(found.num_slots):
                at = self._at(found, slot)
                if words[at + _PENDING] == version + 1:
                    return [w for w in range(len(found.shards)) if words[at + _WRITERS + 3 * w] != _WRITTEN]
        return list(range(len(found.shards)))


@dataclass(frozen=True)
class _Layout:
    """Byte offsets in the arena's body."""

    words: int
    num_words: int
    slots: list[int]


def _layouts(sets: Iterable[EntrySet]) -> tuple[dict[str, _Layout], int]:
    """(where each set lies, bytes in all): the words of every set first, then slots."""
    places, end = {}, 0
    for found in sets:
        num_words = 1 + found.num_slots * _slot_words(found)
        places[found.name] = _Layout(end, num_words, [])
        end += 8 * num_words
    for found in sets:
        for _ in range(found.num_slots):
            places[found.name].slots.append(_aligned(end))
            end = _aligned(end) + sum(_aligned(spec.nbytes) for spec in found.entries.values())
    return places, end


def _slot_words(found: EntrySet) -> int:
    return _WRITERS + 3 * len(found.shards)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _views(found: EntrySet, body: Tensor, begin: int) -> dict[str, Tensor]:
    """The entries of one slot."""
    views = {}
    for key, spec in found.entries.items():
        views[key] = body[begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)
        begin += _aligned(spec.nbytes)
    return views


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def _check(owner: str, expected: Mapping[str, Spec], tensors: Mapping[str, Tensor]) -> None:
    """Every tensor has a known name, the dtype and the shape."""
    for key, tensor in tensors.items():
        if key not in expected:
            nearest = difflib.get_close_matches(key, expected, n=1, cutoff=0.0)
            raise SolrlError(f"{owner} has no entry {key}" + (f"; the nearest is {nearest[0]}" if nearest else ""))
        got = Spec(tensor.dtype, tuple(tensor.shape))
        if got != expected[key]:
            raise SolrlError(f"{key} of {owner} is {expected[key]}, got {got}")


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
        if twice or sum(prod(_shape(box)) for box in boxes) != prod(spec.shape):
            how = "twice" if twice else "not at all"
            raise SolrlError(f"a part of {key} of {found.name} is written {how} by its {len(found.shards)} writers")


def _is_writing(state: int, pid: int, started: int) -> bool:
    """In a process other than this one that is alive."""
    return state == _WRITING and pid != os.getpid() and _started(pid) == started


def _started(pid: int) -> int:
    """When a living process began, in clock ticks since boot, so that a reused process id is no mistake; 0: dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _set_to_json(found: EntrySet) -> dict[str, Any]:
    entries = {key: [str(spec.dtype).removeprefix("torch."), spec.shape] for key, spec in found.entries.items()}
    return {"name": found.name, "entries": entries, "shards": [dict(s) for s in found.shards], "frozen": found.frozen}


def _set_from_json(found: Mapping[str, Any]) -> EntrySet:
    entries = {key: Spec(getattr(torch, dtype), tuple(shape)) for key, (dtype, shape) in found["entries"].items()}
    shards = [
        {key: tuple((int(begin), int(end)) for begin, end in box) for key, box in shard.items()}
        for shard in found["shards"]
    ]
    return EntrySet(found["name"], entries, shards, found["frozen"])
