"""Latents and images on their way between the processes of a run: ``put``, ``get``, ``acknowledge``.

Every process owns a ring of shared memory for what it sends. A blob is a few named tensors that travel and are freed
together; its reference is small and goes by message to whoever shall fetch it. A blob stays as it is until somebody
acknowledges it, in whatever order that happens and however often it is fetched before, so that a job whose worker died
is handed to another one with the same reference. Room is reused in the order of sending: a full ring makes its owner
wait, and the time-out says which ranks fetched without acknowledging. Contents are checked against a CRC-32.

A process of another machine gets a copy over TCP (network.py), by the same calls.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime.arena import Arena, pauses, readable
from solrl.runtime.network import Lines, Server

_ALIGN = 64
_FREE = 0  # a row of the ring's table: number of the blob + 1 or _FREE, rank that fetched it last + 1 or 0


@dataclass(frozen=True)
class BlobRef:
    """Where a blob lies and what it is. ``to_json`` fits a message."""

    rank: int
    address: str
    number: int
    offset: int
    nbytes: int
    checksum: int
    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, dtype, shape) of each tensor, in the order of their bytes."""
    machine: int = 0
    server: str = ""
    """"host:port" for other machines."""

    def to_json(self) -> dict[str, Any]:
        """Plain lists, texts and numbers."""
        return vars(self) | {"entries": [[name, dtype, [*shape]] for name, dtype, shape in self.entries]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """What ``to_json`` gave. What is not of that form is a SolrlError."""
        try:
            keys = ("rank", "number", "offset", "nbytes", "checksum", "machine")
            numbers = {key: int(found[key]) for key in keys}
            entries = tuple(
                (str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in found["entries"]
            )
            made = cls(**numbers, address=str(found["address"]), server=str(found["server"]), entries=entries)
            needed = sum(_aligned(math.prod(shape) * _dtype(dtype).itemsize) for _, dtype, shape in entries)
        except (KeyError, TypeError, ValueError) as error:
            raise SolrlError(f"no reference of a blob: {error}") from None
        if needed != made.nbytes or min(numbers.values()) < 0 or any(size < 0 for e in entries for size in e[2]):
            raise SolrlError(f"the reference of blob {made.number} of rank {made.rank} contradicts itself")
        return made


class Blobs:
    """The ring of this process, and those of others that references lead to. For any number of threads."""

    def __init__(
        self,
        rank: int,
        capacity_bytes: int,
        *,
        max_blobs: int = 4096,
        machine: int = 0,
        host: str = "",
        token: str = "",
    ) -> None:
        """A ring of ``capacity_bytes`` for at most ``max_blobs`` blobs at a time.

        With ``host``, an address of this machine, also for processes on others that know the run's ``token``.
        """
        self.rank, self.capacity = rank, _aligned(capacity_bytes)
        self._arena = Arena.create(
            f"blob ring of rank {rank}", {"rank": rank, "max_blobs": max_blobs}, _table(max_blobs) + self.capacity
        )
        self._rings = {self._arena.address: self._arena}
        self._sent: deque[BlobRef] = deque()  # from the oldest: what lies in the ring
        self._next = 0  # number of the next blob
        self.machine, self._lines = machine, Lines(token)
        self._server = Server(host, token, self._answer) if host else None

    @property
    def num_waiting(self) -> int:
        """Blobs of this process that nobody has acknowledged."""
        with self._arena.lock():
            return sum(self._rows(self._arena, ref.number)[0] != _FREE for ref in self._sent)

    def put(self, tensors: Mapping[str, Tensor], *, timeout_s: float = 60.0) -> BlobRef:
        """A copy of ``tensors`` (of any device) is in the ring. Waits for room; the time-out names who keeps it."""
        entries = tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())
        size = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        if not 0 < size <= self.capacity:
            holds = readable(self.capacity)
            raise SolrlError(f"rank {self.rank} cannot send {readable(size)}: its blob ring holds {holds}; raise it")
        for _ in pauses(timeout_s):
            with self._arena.lock():
                offset = self._room(size)
                if offset is not None:
                    number, self._next = self._next, self._next + 1
                    row = self._rows(self._arena, number)
                    row[0], row[1] = number + 1, 0
                    server = self._server.address if self._server else ""
                    ref = BlobRef(
                        self.rank, self._arena.address, number, offset, size, 0, entries, self.machine, server
                    )
                    self._sent.append(ref)  # from here on the room is taken
                    break
        else:
            raise SolrlError(self._full(size, timeout_s))
        data = _data(self._arena, ref)
        try:
            for name, view in _views(data, ref).items():
                view.copy_(tensors[name])
        except BaseException:
            self.acknowledge(ref)
            raise
        return replace(ref, checksum=_checksum(data))

    def get(self, ref: BlobRef) -> dict[str, Tensor]:
        """New tensors with what was put; the blob stays. One that was freed, or whose bytes changed, is an error."""
        if ref.machine != self.machine:
            data = torch.empty(ref.nbytes, dtype=torch.uint8)
            self._ask(ref, "get", data.numpy().data)
        else:
            ring = self._ring(ref)
            self._mark_fetched(ring, ref, self.rank)
            data = _data(ring, ref).clone()
        if _checksum(data) != ref.checksum:
            if ref.machine == self.machine:
                self._mark_fetched(ring, ref, self.rank)  # says so if it was acknowledged and written over meanwhile
            raise SolrlError(f"blob {ref.number} of rank {ref.rank} is corrupt: its {readable(ref.nbytes)} changed")
        return _views(data, ref)

    def acknowledge(self, ref: BlobRef) -> None:
        """The blob is not needed any more: its owner may use the room again. Twice is harmless."""
        if ref.machine != self.machine:
            return self._ask(ref, "acknowledge")
        ring = self._ring(ref)
        with ring.lock():
            row = self._rows(ring, ref.number)
            if row[0] == ref.number + 1:
                row[0] = _FREE

    def close(self) -> None:
        """This process holds no ring any more; what it sent stays readable for those who fetched from it before."""
        if self._server is not None:
            self._server.close()
        self._lines.close()
        for ring in self._rings.values():
            ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ref: BlobRef, do: str, into: memoryview | None = None) -> None:
        request = {"do": do, "rank": self.rank, "ref": ref.to_json()}
        self._lines.ask(ref.rank, ref.server, request, into)

    def _answer(self, request: dict[str, Any]) -> memoryview | bytes:
        """To a process of another machine: the bytes of a blob of this one."""
        ref = BlobRef.from_json(request["ref"])
        if ref.address != self._arena.address:
            raise SolrlError(f"rank {self.rank} has no ring at {ref.address}")
        if request["do"] == "acknowledge":
            self.acknowledge(ref)
            return b""
        self._mark_fetched(self._arena, ref, int(request["rank"]))
        return _data(self._arena, ref).numpy().data

    def _ring(self, ref: BlobRef) -> Arena:
        ring = self._rings.get(ref.address)
        if ring is None:
            ring = Arena.attach(f"blob ring of rank {ref.rank}", ref.address)
            ring = self._rings.setdefault(ref.address, ring)
        return ring

    def _mark_fetched(self, ring: Arena, ref: BlobRef, by: int) -> None:
        with ring.lock():
            row = self._rows(ring, ref.number)
            if row[0] != ref.number + 1 or ref.offset + ref.nbytes > self._capacity(ring):
                raise SolrlError(f"blob {ref.number} of rank {ref.rank} is gone: it was acknowledged before")
            row[1] = by + 1

    @staticmethod
    def _capacity(ring: Arena) -> int:
        return ring.body.nbytes - _table(ring.manifest["max_blobs"])

    @staticmethod
    def _rows(ring: Arena, number: int) -> memoryview:
        return ring.words(16 * (number % ring.manifest["max_blobs"]), 2)

    def _room(self, size: int) -> int | None:
        """Where ``size`` bytes fit, under the lock; frees what was acknowledged, from the oldest on."""
        while self._sent and self._rows(self._arena, self._sent[0].number)[0] == _FREE:
            self._sent.popleft()
        if not self._sent:
            return 0
        if len(self._sent) == self._arena.manifest["max_blobs"]:
            return None
        begin, end = self._sent[0].offset, self._sent[-1].offset + self._sent[-1].nbytes
        if end > begin:  # the free room is behind the newest and before the oldest
            return end if end + size <= self.capacity else 0 if size <= begin else None
        return end if end + size <= begin else None

    def _full(self, size: int, timeout_s: float) -> str:
        with self._arena.lock():
            rows = [tuple(self._rows(self._arena, ref.number)) for ref in self._sent]
        fetched = Counter(by - 1 for number, by in rows if number != _FREE and by)
        never = sum(number != _FREE and not by for number, by in rows)
        held = [f"{count} fetched by rank {rank}" for rank, count in sorted(fetched.items())]
        held += [f"{never} never fetched"] if never else []
        return (
            f"rank {self.rank} waited {timeout_s:g} s for room for {readable(size)} in its blob ring of "
            f"{readable(self.capacity)}; not acknowledged: {', '.join(held)}"
        )


def _table(max_blobs: int) -> int:
    return _aligned(16 * max_blobs)


def _data(ring: Arena, ref: BlobRef) -> Tensor:
    """uint8 [nbytes], in shared memory."""
    begin = _table(ring.manifest["max_blobs"]) + ref.offset
    return ring.body[begin : begin + ref.nbytes]


def _views(data: Tensor, ref: BlobRef) -> dict[str, Tensor]:
    views, begin = {}, 0
    for name, dtype, shape in ref.entries:
        kind = _dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        views[name] = data[begin : begin + size].view(kind).view(shape)
        begin += _aligned(size)
    return views


def _checksum(data: Tensor) -> int:
    return zlib.crc32(data.numpy().data)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
