"""Two ways for the bytes of a parameter store from one machine to another: gloo, and NIXL where it is asked for.

gloo is torch's own and runs over any TCP network; GLOO_SOCKET_IFNAME chooses the interface, as for torch. The machine
that has the bytes takes part: a thread there sends what it is asked for.

NIXL (package nixl-cu13 or nixl-cu12, the extra "nixl") reads the other machine's memory over whatever UCX finds, RDMA
first; UCX's variables (UCX_TLS, UCX_NET_DEVICES) hold. Memory is registered once, when it joins: with RDMA that costs
more than a transfer. It is for different machines only; within one a store is read as it is.

Each has an end where the bytes are (``GlooSender``, ``NixlMemory``) and one that fetches (``Gloo``, ``Nixl``). A fetch
that the other end does not serve within its time-out is an OSError, after which that end is of no more use.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from solrl.errors import UsageError

_PAUSE_S = 2e-5
"""Between two looks at a transfer of NIXL's: what UCX has to do in software is done then."""


class GlooSender:
    """The end of a pair that has the bytes; a thread joins the other end and sends."""

    def __init__(self, rendezvous: Any, timeout_s: float) -> None:
        self._queue: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(rendezvous, timeout_s), name="sender", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the other end may still be there."""
        return self._thread.is_alive()

    def send(self, data: Tensor) -> None:
        """``data`` (uint8) goes to the other end, after what was given before."""
        self._queue.put(data)

    def close(self) -> None:
        """Nothing is sent after what was given before."""
        self._queue.put(None)

    def _run(self, rendezvous: Any, timeout_s: float) -> None:
        try:
            pair = _pair(rendezvous, 0, timeout_s)
            while (data := self._queue.get()) is not None:
                pair.send([data], 1, 0).wait()
        except RuntimeError:  # the other end is gone or too slow: it says so there
            return


class Gloo:
    """The end of a pair that fetches. ``ask(name, index, offset, nbytes)`` has the other end send."""

    def __init__(self, rendezvous: Any, ask: Callable[[str, int, int, int], object], timeout_s: float) -> None:
        self._ask, self._timeout_s = ask, timeout_s
        with _as_os_error():
            self._pair = _pair(rendezvous, 1, timeout_s)

    def fetch(self, name: str, index: int, offset: int, into: Tensor) -> None:
        """``into`` (uint8) is what lies in slot ``index`` of set ``name`` from byte ``offset`` on."""
        self._ask(name, index, offset, into.nbytes)
        with _as_os_error():
            self._pair.recv([into], 0, 0).wait(timedelta(seconds=self._timeout_s))

    def close(self) -> None:
        """The pair is parted."""
        del self._pair


class NixlMemory:
    """Memory registered with NIXL: to be read by others, or into.

    NIXL's own progress thread would keep a core busy for good. So a thread here drives transfers, only while there are
    some, and sleeps otherwise.
    """

    def __init__(self, body: Tensor) -> None:
        self.nixl = _load_nixl()
        self.agent = self.nixl.nixl_agent(
            f"solrl-{secrets.token_hex(8)}",
            self.nixl.nixl_agent_config(
                enable_prog_thread=False, sync_mode=self.nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            ),
        )
        self._registered = self.agent.register_memory([(body.data_ptr(), body.nbytes, 0, "")], "DRAM")
        self.metadata: bytes = self.agent.get_agent_metadata()
        self._reading: dict[str, float] = {}  # until when who may be reading
        self._changed = threading.Condition()
        self._driver: threading.Thread | None = None
        self._is_open = True

    def serve(self, reader: str, timeout_s: float) -> None:
        """``reader`` is served until it rests, or ``timeout_s`` have passed."""
        with self._changed:
            self._reading[reader] = time.monotonic() + timeout_s
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="nixl", daemon=True)
                self._driver.start()
            self._changed.notify()

    def rest(self, reader: str) -> None:
        """``reader`` reads nothing at present."""
        with self._changed:
            self._reading.pop(reader, None)

    def close(self) -> None:
        """Not registered any more; only after that may it be unmapped."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        if self._driver is not None:
            self._driver.join()
        self.agent.deregister_memory(self._registered)
        del self.agent

    def _drive(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                self._reading = {reader: end for reader, end in self._reading.items() if end > now}
                self._changed.wait_for(lambda: self._reading or not self._is_open)
                if not self._is_open:
                    return
            self.agent.get_new_notifs()
            time.sleep(_PAUSE_S)


class Nixl:
    """Reads memory that another process registered. ``addresses``: of each slot of each set, there.

    ``ask("serve" or "rest")`` tells the other process when it has to do with it.
    """

    def __init__(
        self,
        body: Tensor,
        metadata: bytes,
        addresses: dict[str, list[int]],
        ask: Callable[[str], object],
        timeout_s: float,
    ) -> None:
        self._memory, self._addresses = NixlMemory(body), addresses
        self._ask, self._timeout_s = ask, timeout_s
        with _as_os_error(self._memory.nixl):
            self._remote = self._memory.agent.add_remote_agent(metadata)

    def fetch(self, name: str, index: int, offset: int, into: Tensor) -> None:
        """``into`` (uint8, a part of the body) is what lies in slot ``index`` of set ``name`` from byte ``offset``."""
        self._ask("serve")
        self._read(self._addresses[name][index] + offset, into)
        self._ask("rest")

    def close(self) -> None:
        """The memory is no longer registered."""
        self._memory.close()

    def _read(self, address: int, into: Tensor) -> None:
        agent, deadline = self._memory.agent, time.monotonic() + self._timeout_s
        with _as_os_error(self._memory.nixl):
            reading = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(into.data_ptr(), into.nbytes, 0)], "DRAM"),
                agent.get_xfer_descs([(address, into.nbytes, 0)], "DRAM"),
                self._remote,
            )
            state = agent.transfer(reading)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                state = agent.check_xfer_state(reading)
            agent.release_xfer_handle(reading)
        if state != "DONE":
            raise OSError(f"nothing came in {self._timeout_s:g} s" if state == "PROC" else "NIXL's transfer failed")


def _pair(rendezvous: Any, rank: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(rendezvous, rank, 2, timeout=timedelta(seconds=timeout_s))


def _load_nixl() -> ModuleType:
    """Either build will do: no byte of a store is on a GPU."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in ("nixl_cu13", "nixl_cu12"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise UsageError("the network nixl needs NIXL: pip install 'solrl[nixl]', or take gloo")


@contextmanager
def _as_os_error(nixl: ModuleType | None = None) -> Iterator[None]:
    """Inside, what gloo or NIXL raise when the other end does not answer is an OSError."""
    kinds: tuple[type[Exception], ...] = (RuntimeError,)
    if nixl is not None:
        found = vars(import_module(f"{nixl.__name__}._bindings"))
        kinds += tuple(found[name] for name in found if name.startswith("nixl") and name.endswith("Error"))
    try:
        yield
    except kinds as error:
        raise OSError(str(error).splitlines()[0]) from error
