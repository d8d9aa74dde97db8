"""Encoded prompts on the disk: one small safetensors file each, shared by any number of processes and runs.

A file's name is the SHA-256 of what decides its bits: the prompt, and the identity of the encoders (their weights,
tokenizers, settings and arithmetic: solrl/models/encoders.py). So a hit is what encoding would give, bit for bit, and a
change of any of these is a miss, never a stale answer. Files are renamed into place, and carry a hash of their content.

Writers hold a lock, so the files together never take more than the bound; the least recently used go first. Readers
hold none: a file that is removed under them is a miss.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from solrl.errors import UsageError
from solrl.types import Conditioning

NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
"""Ours. Files of any other name are neither counted nor removed."""
HASH = "sha256"


def cache_folder() -> Path:
    """Where encoded prompts are kept, for all runs of this user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SOLRL_PROMPT_CACHE") or cache / "solrl" / "prompts")


class PromptCache:
    """Encoded prompts in ``folder``, at most ``max_bytes`` together; ``encoders`` is the identity of what encodes."""

    def __init__(self, folder: Path, max_bytes: int, encoders: str) -> None:
        self.folder, self.max_bytes, self.encoders = folder, max_bytes, encoders
        self._is_writable = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise UsageError(
                f"prompts.cache_gb: {folder}: {error.strerror}; "
                "set SOLRL_PROMPT_CACHE to another folder, or cache_gb to 0"
            ) from error

    def path(self, prompt: str) -> Path:
        """Where the encoding of ``prompt`` is, if it is there."""
        return self.folder / f"{hashlib.sha256(f'{self.encoders} {prompt}'.encode()).hexdigest()}.safetensors"

    def read(self, prompt: str) -> Conditioning | None:
        """The encoding, on the CPU, now the most recently used; None where there is none.

        A file that is not what was written under its name is named in a warning, and counts as none.
        """
        path = self.path(prompt)
        try:
            tensors = safetensors.torch.load(path.read_bytes())
            digest = tensors.pop(HASH)
            if bytes(digest.tolist()) != _digest(path, tensors):
                raise ValueError("its hash is another")
            found = Conditioning(**tensors)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            _warn(f"{path} is damaged or no encoded prompt ({reason}): encoding {prompt!r} again")
            return None
        with suppress(FileNotFoundError, PermissionError):  # removed just now, or another user's
            os.utime(path)
        return found

    def write(self, rows: Mapping[str, Conditioning]) -> None:
        """The encodings of prompts are there, or, where there is no room for one, were removed again.

        A disk that refuses is named once in a warning; then nothing more is written, and the run goes on.
        """
        if not self._is_writable:
            return
        try:
            with self._locked():
                files = self._files()
                total = sum(files.values())
                for prompt, row in rows.items():
                    data, path = _serialised(self.path(prompt), row), self.path(prompt)
                    total -= files.pop(path, 0)
                    while files and total + len(data) > self.max_bytes:
                        oldest = next(iter(files))
                        total -= files.pop(oldest)
                        oldest.unlink(missing_ok=True)
                    if total + len(data) > self.max_bytes:
                        path.unlink(missing_ok=True)
                        continue
                    temporary = self.folder / f".{path.name}.tmp"
                    temporary.write_bytes(data)
                    os.replace(temporary, path)
                    files[path] = len(data)
                    total += len(data)
        except OSError as error:
            self._is_writable = False
            _warn(f"prompts.cache_gb: {self.folder}: {error.strerror or error}; going on without writing to it")

    def _files(self) -> dict[Path, int]:
        """Path -> bytes, least recently used first. What a writer left that died is removed: we hold the lock."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # somebody cleans up by hand
                        found.append((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size))
                elif entry.name.endswith(".tmp") and NAME.fullmatch(entry.name[1 : -len(".tmp")]):
                    os.unlink(entry.path)
        return {self.folder / name: size for _, name, size in sorted(found)}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("a") as lock:  # closed, or the process dead: the kernel lets go
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _serialised(path: Path, row: Conditioning) -> bytes:
    tensors = {one.name: getattr(row, one.name) for one in fields(row)}
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    return safetensors.torch.save(held | {HASH: torch.tensor(list(_digest(path, held)), dtype=torch.uint8)})


def _digest(path: Path, tensors: Mapping[str, Tensor]) -> bytes:
    """Of a file's name and of its tensors: a file under another's name is foreign."""
    whole = hashlib.sha256(path.name.encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return whole.digest()


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
