"""Shared memory of one node that cannot leak: an anonymous file (memfd, mode 0600) that processes map.

It has no name in any file system, so the kernel frees it when the last process that maps it is gone, however that
ended. A process joins by ``address``, which leads through /proc/<pid>/fd of the creator: same node, same user, and the
creator still alive. Sealed against resizing, so that no process can make another one fault.

A memfd does not count against the size of /dev/shm (a container's 64 MB are no limit); what binds it is the memory of
the machine and of the control groups around the process, and both are looked at before anything is taken.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solrl.errors import SolrlError

_MAGIC = b"solrlmem"
_HEADER = struct.Struct("<8s16sQQ")  # magic, token, pid of who holds the lock, bytes of the manifest
_HOLDER = 24 // 8  # the header's third field, as a word
_PAGE = 4096
_ADDRESS = re.compile(r"(/proc/(?:self|\d{1,10})/fd/\d{1,7})#([0-9a-f]{32})")
LOCK_TIMEOUT_S = 30.0
"""A holder needs microseconds; one that is stopped (SIGSTOP, a debugger) is named after so long."""


class Arena:
    """One mapping. ``manifest``: what the creator says is inside; ``body``: uint8 [size], 4 KiB aligned, zeros first.

    An arena belongs to the process that made or attached it; a forked child attaches by itself.
    """

    def __init__(self, fd: int, purpose: str) -> None:
        self.purpose = purpose
        self._fd, self._pid = fd, os.getpid()
        self._threads = threading.Lock()
        size = os.fstat(fd).st_size
        # populated: no process pays page faults inside a copy
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self._map).cast("Q")
        magic, token, _, length = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise SolrlError(f"the address of the {purpose} leads to something else: its creator has ended")
        self.address = f"/proc/{self._pid}/fd/{fd}#{token.hex()}"
        self.manifest: dict[str, Any] = json.loads(self._map[_HEADER.size : _HEADER.size + length])
        self._begin = _body_begin(length)
        self.body: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[self._begin :]

    @classmethod
    def create(cls, purpose: str, manifest: Mapping[str, Any], size: int) -> Arena:
        """``size`` bytes of zeros, allocated and touched; ``purpose`` names them in errors."""
        described = json.dumps(manifest).encode()
        total = _body_begin(len(described)) + size
        check_memory(total, purpose)
        fd = os.memfd_create("solrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, total)
            os.posix_fallocate(fd, 0, total)  # refused here rather than by a SIGBUS later
            header = _HEADER.pack(_MAGIC, secrets.token_bytes(16), 0, len(described))
            os.pwrite(fd, header + described, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, purpose)
        except OSError as error:
            os.close(fd)
            raise SolrlError(
                f"cannot take {readable(total)} of shared memory for the {purpose}: {error.strerror}"
            ) from error

    @classmethod
    def attach(cls, purpose: str, address: str) -> Arena:
        """The arena that a process of this node and user created."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise SolrlError(f"{address!r} is no address of a {purpose}")
        path, token = match.groups()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # its own open file, so that its lock is its own
        except OSError as error:
            raise SolrlError(
                f"cannot join the {purpose} at {path}: {error.strerror}; its creator must be alive, on this node, "
                "and of the same user"
            ) from error
        try:
            found = os.fstat(fd)
            known = stat.S_ISREG(found.st_mode) and found.st_size > _PAGE and os.pread(fd, 24, 0)[8:].hex() == token
            if not known:
                raise SolrlError(f"the address of the {purpose} leads to something else: its creator has ended")
            return cls(fd, purpose)
        except BaseException:
            os.close(fd)
            raise

    def words(self, offset: int, count: int) -> memoryview:
        """``count`` unsigned 64-bit words of the body from byte ``offset`` (a multiple of 8); one store is whole."""
        first = (self._begin + offset) // 8
        return self._words[first : first + count]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Alone among all threads and processes; a process that dies lets go. For bookkeeping, never around a copy.

        What one holder wrote anywhere before it let go, the next holder sees: on every architecture.
        """
        if os.getpid() != self._pid:
            raise SolrlError(f"a forked process must attach the {self.purpose} by its address")
        with self._threads:
            if self._fd < 0:
                raise SolrlError(f"the {self.purpose} is closed")
            for _ in pauses(LOCK_TIMEOUT_S):
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    continue
            else:
                holder = self._words[_HOLDER]
                raise SolrlError(
                    f"process {holder} has held the {self.purpose} for {LOCK_TIMEOUT_S:.0f} s: is it stopped?"
                )
            self._words[_HOLDER] = self._pid
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """This process no longer holds it; memory goes back once no tensor of ``body`` is left. Twice is harmless."""
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self.body = torch.empty(0, dtype=torch.uint8)
                self._words.release()
                del self._map


def pauses(timeout_s: float) -> Iterator[None]:
    """Look, sleep (50 us at first, 5 ms at most), look again; ends when ``timeout_s`` have passed."""
    deadline, pause = time.monotonic() + timeout_s, 5e-5
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)


def readable(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def check_memory(needed: int, purpose: str, root: Path = Path("/")) -> None:
    """Raise unless the machine and every control group around this process has ``needed`` bytes free."""
    free, total, limit = min(_limits(root))
    if needed > free:
        raise SolrlError(
            f"the {purpose} needs {readable(needed)} and {limit} has {readable(max(free, 0))} free of "
            f"{readable(total)}: free or raise it, or ask for less"
        )


def _limits(root: Path) -> Iterator[tuple[int, int, str]]:
    """(bytes free, bytes in all, name) of the machine's memory and of each control group's."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    machine = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    yield machine["MemAvailable"], machine["MemTotal"], "the machine's memory"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, cache = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # inside a container the path may be the host's: then only the mount itself exists
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (group / limit).exists():
                total = (group / limit).read_text().strip()
                if total != "max" and int(total) < machine["MemTotal"]:
                    statistics = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    used = int((group / usage).read_text()) - int(statistics.get(cache, 0))  # that cache is given up
                    yield int(total) - used, int(total), f"the control group {group}"


def _body_begin(manifest_bytes: int) -> int:
    return -(-(_HEADER.size + manifest_bytes) // _PAGE) * _PAGE
