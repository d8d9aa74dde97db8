"""The Global Parameter Storage on one node (PivotRL, Section 5.1): ``write(name, version, tensors)``, ``read``.

What changes together is an entry set with a version of its own: a frozen base, the LoRA beside it, a quantized copy.
A set is stored twice, in slots: writers fill the one that no reader is sent to, then one 64-bit word names it the
committed one. A reader copies and then looks whether its slot has been taken again meanwhile; if so it starts over
with the newer version. So a reader never returns a mix of two versions, never blocks a writer, and a process killed at
any moment leaves the last committed version as it was. A frozen set has one slot and is written once.

Ranks that each hold a part write it when they like (stage 1: from then on the rank may drop its copy); whoever is the
last commits (stage 2). Which part is whose is fixed and checked when the store is created.

Copies are made of all entries in one call, between the caller's buffers and memory that is mapped and touched once:
they run at the speed of a memcpy. A CUDA tensor on either side works by the same call, from pageable memory; that is
untested here. Nothing outlives its processes (see arena). Another node follows with a copy of its own (replication).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime.arena import Arena, pauses
from solrl.runtime.entries import EntrySet, Spec, box_shape, check, check_shards, set_from_json, set_to_json
from solrl.runtime.layouts import part

_ALIGN = 256
_PURPOSE = "parameter store"
_COMMITTED = 0  # words of a set: (version << 1 | slot) + 1 of what readers get, 0 for nothing yet; then its slots
_SEQUENCE, _PENDING, _WRITERS = 0, 1, 2  # words of a slot: times taken, version + 1 being written, then its writers
_IDLE, _WRITING, _WRITTEN = range(3)  # a writer: one of these, its process id, when that process started


@dataclass(frozen=True)
class Slot:
    """Where the committed version of a set lies, until the slot is taken again."""

    version: int
    index: int
    sequence: int
    """How often the slot had been taken."""


class Store:
    """Entry sets in shared memory. One object a process; its methods may be called from any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.sets = {found.name: found for found in map(set_from_json, arena.manifest["sets"])}
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
        return cls(Arena.create(_PURPOSE, {"sets": [set_to_json(found) for found in sets]}, size))

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
        check(f"writer {writer} of {name}", expected, tensors)
        missing = next((key for key in expected if key not in tensors), None)
        if missing is not None:
            raise SolrlError(f"writer {writer} of {name} must write {missing} too")
        with self._writing[name]:
            slot = self._take(found, version, writer)
            _copy(slots[slot], tensors)
            return self._announce(found, slot, version, writer)

    def read(self, name: str, out: Mapping[str, Tensor], *, timeout_s: float = 60.0) -> int:
        """The newest committed version is in ``out`` (some or all entries, in place), whole; returns its number.

        After an error what ``out`` holds is undefined.
        """
        found = self._set(name)
        check(name, found.entries, out)
        attempts = 0
        for _ in pauses(timeout_s):
            slot = self.committed(name)
            if slot is None:
                raise SolrlError(f"no version of {name} has been written yet: wait for one first")
            _copy(out, self._slots[name][slot.index])
            if self.is_intact(name, slot):
                return slot.version
            attempts += 1
        raise SolrlError(f"{name} was written over {attempts} times in {timeout_s:g} s, faster than it can be read")

    def version(self, name: str) -> int | None:
        """The committed version; None before the first."""
        slot = self.committed(name)
        return None if slot is None else slot.version

    def committed(self, name: str) -> Slot | None:
        """Where the committed version is; None before the first."""
        found = self._set(name)
        with self._arena.lock():
            current = self._current(name)
            if current is None:
                return None
            version, index = current
            sequence = self._words[name][self._at(found, index) + _SEQUENCE]
        return Slot(version, index, sequence)

    def is_intact(self, name: str, slot: Slot) -> bool:
        """Whether nobody has begun to write over ``slot``: what was copied from it before is whole."""
        found = self._set(name)
        with self._arena.lock():
            return self._words[name][self._at(found, slot.index) + _SEQUENCE] == slot.sequence

    def replace(self, name: str, version: int, fill: Callable[[Tensor], bool]) -> bool:
        """``fill`` puts all of ``version`` into the bytes of a slot; it is committed if that says True.

        For a set with one writer.
        """
        found = self._set(name)
        assert len(found.shards) == 1
        with self._writing[name]:
            slot = self._take(found, version, 0)
            return fill(self.slot_bytes(name, slot)) and self._announce(found, slot, version, 0)

    def slot_bytes(self, name: str, index: int) -> Tensor:
        """uint8, a slot as it lies in ``body``: the same bytes in every store with these entries."""
        layout = self._layouts[self._set(name).name]
        return self.body[layout.slots[index] :][: layout.slot_bytes]

    @property
    def body(self) -> Tensor:
        """uint8 [nbytes], the shared memory."""
        return self._arena.body

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
            expected = {key: Spec(found.entries[key].dtype, box_shape(box)) for key, box in shard.items()}
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
    slot_bytes: int


def _layouts(sets: Iterable[EntrySet]) -> tuple[dict[str, _Layout], int]:
    """(where each set lies, bytes in all): the words of every set first, then slots."""
    places, end = {}, 0
    for found in sets:
        num_words = 1 + found.num_slots * _slot_words(found)
        slot_bytes = sum(_aligned(spec.nbytes) for spec in found.entries.values())
        places[found.name] = _Layout(end, num_words, [], slot_bytes)
        end += 8 * num_words
    for found in sets:
        for _ in range(found.num_slots):
            places[found.name].slots.append(_aligned(end))
            end = _aligned(end) + places[found.name].slot_bytes
    return places, end


def _copy(to: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """All of ``to`` is as in ``source``. One call: one for each tensor costs a LoRA a tenth of its bandwidth."""
    if to:
        torch._foreach_copy_([*to.values()], [source[key] for key in to])


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
