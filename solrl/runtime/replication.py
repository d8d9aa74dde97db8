"""A parameter store on several machines: each has all of it, and readers read their own.

Where sets are written a ``Source`` hands them out. On every other machine one process keeps a ``Mirror``, whose store
the processes there read by its address. ``Mirror.pull`` copies the newest committed version into the slot that no
reader is sent to, then looks whether the source's slot has been taken again meanwhile, and only then commits. So on a
mirror, too, nobody reads a mix of versions or waits for a transfer, and a source that dies leaves its last whole
version everywhere. A mirror's store may have a source of its own, so that many machines need not all ask the first one.

Questions and answers go over TCP (network.py), parameters by gloo or NIXL (transports.py). Sets that several machines
write parts of are not spread by this: their shards have to come together on one machine first.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self, get_args

import torch.distributed as dist
from torch import Tensor

from solrl.errors import SolrlError, UsageError
from solrl.runtime.arena import pauses
from solrl.runtime.entries import set_from_json, set_to_json, split_rows
from solrl.runtime.network import Lines, Server, own_address
from solrl.runtime.store import Slot, Store
from solrl.runtime.transports import Gloo, GlooSender, Nixl, NixlMemory

Network = Literal["gloo", "nixl"]
CHUNK = 256 << 20
"""Bytes fetched at once: time-outs are for so many."""


class Source:
    """Hands out what is committed in ``store`` to mirrors that know the run's ``token``; its threads do."""

    def __init__(self, store: Store, token: str, *, host: str | None = None, timeout_s: float = 60.0) -> None:
        """``host``: under which other machines reach this one (network.own_address).

        A mirror that takes nothing for ``timeout_s`` is given up.
        """
        self._store, self._timeout_s, self._lock = store, timeout_s, threading.Lock()
        self._senders: list[GlooSender] = []
        self._rendezvous: Any = None
        self._memory: NixlMemory | None = None
        self._server = Server(own_address() if host is None else host, token, self._answer)

    @property
    def address(self) -> str:
        """What mirrors take, "host:port"."""
        return self._server.address

    def close(self) -> None:
        """Nothing is handed out any more. Before the store is closed; twice is harmless."""
        self._server.close()
        with self._lock:
            for sender in self._senders:
                sender.close()
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, request: dict[str, Any]) -> bytes:
        return json.dumps(self._reply(request)).encode()

    def _reply(self, request: dict[str, Any]) -> Any:
        match request:
            case {"do": "list"}:
                return [set_to_json(found) for found in self._store.sets.values()]
            case {"do": "find", "set": name}:
                slot = self._store.committed(name)
                return slot and asdict(slot)
            case {"do": "check", "set": name, "slot": slot}:
                return self._store.is_intact(name, Slot(**slot))
            case {"do": "join", "network": "gloo"}:
                return self._join_gloo()
            case {"do": "join", "network": "nixl"}:
                return self._join_nixl()
            case {"do": "serve", "reader": str(reader)} if self._memory is not None:
                return self._memory.serve(reader, self._timeout_s)
            case {"do": "rest", "reader": str(reader)} if self._memory is not None:
                return self._memory.rest(reader)
            case {"do": "send", "pair": int(pair), "set": name, "index": int(index), "bytes": [int(begin), int(end)]}:
                if not 0 <= pair < len(self._senders) or not self._senders[pair].is_open:
                    raise SolrlError("it has given this mirror up")
                self._senders[pair].send(self._store.slot_bytes(name, index)[begin:end])
                return None
        raise SolrlError(f"it does not know how to {request.get('do')}")

    def _join_gloo(self) -> dict[str, int]:
        with self._lock:
            if self._rendezvous is None:
                self._rendezvous = dist.TCPStore(  # type: ignore[attr-defined]
                    "127.0.0.1", 0, is_master=True, wait_for_workers=False
                )
            pair = len(self._senders)
            self._senders.append(GlooSender(_meeting(self._rendezvous, pair), self._timeout_s))
        return {"pair": pair, "port": self._rendezvous.port}

    def _join_nixl(self) -> dict[str, Any]:
        with self._lock:
            if self._memory is None:
                self._memory = NixlMemory(self._store.body)
        slots = {
            name: [self._store.slot_bytes(name, index).data_ptr() for index in range(found.num_slots)]
            for name, found in self._store.sets.items()
        }
        return {"metadata": base64.b64encode(self._memory.metadata).decode(), "slots": slots}


class Mirror:
    """A store of this machine that follows the one behind a source: ``store``, which other processes here attach."""

    def __init__(
        self, rank: int, address: str, token: str, *, network: Network = "gloo", timeout_s: float = 60.0
    ) -> None:
        """A mirror of the source of process ``rank`` at ``address``, still without any version.

        A source that is silent for ``timeout_s`` is an error that names the process, whatever is going on.
        """
        if network not in get_args(Network):
            raise UsageError(f"the network of a mirror is gloo or nixl, got {network!r}")
        self.network, self._rank, self._address, self._timeout_s = network, rank, address, timeout_s
        self._lock, self._failure = threading.Lock(), ""
        self._lines = Lines(token, "parameters", timeout_s)
        with ExitStack() as undo:
            undo.callback(self._lines.close)
            sets = [set_from_json(found) for found in self._ask("list")]
            self.store = Store.create([replace(found, shards=split_rows(found.entries, 1)) for found in sets])
            undo.callback(self.store.close)
            with self._naming():
                self._way: Gloo | Nixl = self._join()
            undo.pop_all()

    def pull(self, name: str, version: int = 0, *, timeout_s: float = 60.0) -> int:
        """The source's newest version, at least ``version``, which is waited for, is committed here; which it is."""
        overtaken = 0
        with self._lock:
            for _ in pauses(timeout_s):
                found = self._ask("find", set=name)
                if found is None or found["version"] < version:
                    continue
                slot, have = Slot(**found), self.store.version(name)
                if have is not None and have >= slot.version:
                    return have
                if self.store.replace(name, slot.version, partial(self._fill, name, slot)):
                    return slot.version
                overtaken += 1
        if overtaken:
            why = f"was written over {overtaken} times in {timeout_s:g} s, faster than it can be fetched"
        else:
            why = f"has no version {version} or newer after {timeout_s:g} s"
        raise SolrlError(f"{name} of process {self._rank} on another machine {why}")

    def close(self) -> None:
        """Nothing follows any more and this process holds nothing of the store. Twice is harmless."""
        self._lines.close()
        self._way.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, name: str, slot: Slot, data: Tensor) -> bool:
        if self._failure:
            raise SolrlError(f"{self._failure}; that was before, and this mirror gets nothing any more")
        with self._naming():
            for begin in range(0, data.nbytes, CHUNK):
                self._way.fetch(name, slot.index, begin, data[begin : begin + CHUNK])
        return bool(self._ask("check", set=name, slot=asdict(slot)))

    def _join(self) -> Gloo | Nixl:
        if self.network == "nixl":
            found = self._ask("join", network="nixl")
            metadata = base64.b64decode(found["metadata"])
            tell = partial(self._ask, reader=secrets.token_hex(8))
            return Nixl(self.store.body, metadata, found["slots"], tell, self._timeout_s)
        found = self._ask("join", network="gloo")
        host = self._address.rpartition(":")[0]
        rendezvous = dist.TCPStore(  # type: ignore[attr-defined]
            host, found["port"], is_master=False, timeout=timedelta(seconds=self._timeout_s)
        )
        return Gloo(_meeting(rendezvous, found["pair"]), partial(self._have_sent, found["pair"]), self._timeout_s)

    def _have_sent(self, pair: int, name: str, index: int, begin: int, nbytes: int) -> None:
        self._ask("send", pair=pair, set=name, index=index, bytes=[begin, begin + nbytes])

    def _ask(self, do: str, **what: Any) -> Any:
        return json.loads(bytes(self._lines.ask(self._rank, self._address, {"do": do, **what})))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except SolrlError as error:  # what was asked for may still come, and is not what is asked for next
            self._failure = str(error)
            raise
        except (OSError, dist.DistError) as error:
            why = str(error).splitlines()[0]
            self._failure = f"process {self._rank} on another machine does not hand over parameters: {why}"
            raise SolrlError(self._failure) from error


def _meeting(store: Any, pair: int) -> Any:
    return dist.PrefixStore(f"pair {pair}", store)  # type: ignore[attr-defined]
