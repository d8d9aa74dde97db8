"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solrl.errors import SolrlError

_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space or raise the quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "make it writable or choose another output.dir",
    errno.EPERM: "make it writable or choose another output.dir",
    errno.EROFS: "choose another output.dir",
    errno.ENOTDIR: "choose another output.dir",
}


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write ``path`` into one line with the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk or choose another output.dir")
        raise SolrlError(
            f"cannot write {path}: {error.strerror or error}; {remedy}. Everything saved before is intact"
        ) from error


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """``path`` holds ``data``; a crash or a full disk leaves the old content, never a part of the new.

    Without ``sync`` that is true of a killed process, and of a power cut only once ``sync_paths`` has been called.
    """
    temporary = temporary_of(path)
    with saving(path):
        try:
            temporary.write_bytes(data)
            if sync:
                sync_paths(temporary)
            os.replace(temporary, path)
            if sync:
                sync_paths(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)  # on a full disk this also frees what the attempt took
            raise


def sync_paths(*paths: Path) -> None:
    """The files, or the entries of the folders, are on the disk and not only in its cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """Where ``path`` is written before it is renamed into place; a leftover means an interrupted write."""
    return path.with_name(f".{path.name}.tmp")
