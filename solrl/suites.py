"""Prompt files that papers train and evaluate on, made from their public sources.

A source is a file of a public repository at a fixed revision, and its content is known by git's own hash of it; so what
comes from a network, a mirror or a local copy is the same file or is said not to be. Beside the prompts a sidecar says
where they came from and what was left out.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from solrl import __version__
from solrl.errors import SolrlError, UsageError
from solrl.files import saving, write_atomic
from solrl.groups import derive_seed
from solrl.prompts import json_prompt, random_order

HOST = "https://raw.githubusercontent.com"
TIMEOUT_S = 60.0
MAX_BYTES = 1 << 28
"""More than ten times the largest source."""

FLOW_GRPO = ("yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd")
DIFFUSION_NFT = ("NVlabs/DiffusionNFT", "24af5554898d85e93efa492f42b5e9cdf4156e9b")
GENEVAL = ("djghosh13/geneval", "af4902f24d3ca90ebbb446dd9891a59e0f82725f")


@dataclass(frozen=True)
class Source:
    """A file of a public repository."""

    repository: str
    revision: str
    path: str
    blob: str
    """git's hash of the content at that revision."""
    about: str

    @property
    def is_jsonl(self) -> bool:
        """Whether rows are JSON objects; else lines are prompts."""
        return self.path.endswith(".jsonl")


SUITES = {
    "pickscore_train": Source(
        *FLOW_GRPO, "dataset/pickscore/train.txt", "a437bd921c03fbc00c4e7ce148ae2d28fcd6e49b",
        "25432 prompts of people; some are not safe for work",
    ),
    "pickscore_test": Source(
        *FLOW_GRPO, "dataset/pickscore/test.txt", "45f05231b969fb5f74c8debd606b22cd3be27f8e",
        "2048 prompts of people; some are not safe for work",
    ),
    "ocr_train": Source(
        *FLOW_GRPO, "dataset/ocr/train.txt", "3ce0521b77b0a9031191d66ecc36ebaaf27a3922",
        "prompts with a text in double quotes, for the reward ocr",
    ),
    "ocr_test": Source(
        *FLOW_GRPO, "dataset/ocr/test.txt", "8deb4f8d8f2e863f45353354243669b3c991a6a2",
        "1018 prompts with a text in double quotes",
    ),
    "geneval_train": Source(
        *FLOW_GRPO, "dataset/geneval/train_metadata.jsonl", "0b97e8a6802c08fc7537cd00c76ae79c851bddcb",
        "GenEval-style rows: prompt, tag, include, exclude",
    ),
    "geneval_test": Source(
        *GENEVAL, "prompts/evaluation_metadata.jsonl", "efc21c7e639cd45554a1e44fac87157211f16d51",
        "GenEval's 553 rows: prompt, tag, include, exclude",
    ),
    "drawbench": Source(
        *DIFFUSION_NFT, "dataset/drawbench/test.txt", "8d96e7cf7017ce6ce299a6eec96e21467a2ac7aa",
        "200 prompts (the source repeats each five times)",
    ),
}  # fmt: skip


def fetch_prompts(
    name: str,
    *,
    out: Path | None = None,
    local_copy: Path | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
    host: str = HOST,
    report: Callable[[str], None] = print,
) -> Path:
    """The prompt file of a suite and its sidecar are written; returns the file's path.

    Repeated prompts are left out. ``num_prompts`` of them are drawn by ``seed``, in the source's order. What is
    downloaded must be the known content; a local copy that is not is taken, and said to be another.
    """
    if name not in SUITES:
        raise UsageError(f"no prompt suite {name!r}; there are {', '.join(SUITES)}")
    source = SUITES[name]
    path = Path(f"{name}{'.jsonl' if source.is_jsonl else '.txt'}") if out is None else out
    if source.is_jsonl != (path.suffix == ".jsonl"):
        raise UsageError(f"--out {path}: {name} is written as {'.jsonl' if source.is_jsonl else 'text, not .jsonl'}")
    sidecar = path.with_name(f"{path.name}.source.json")
    for file in (path, sidecar):
        if file.exists():
            raise UsageError(f"{file} exists already; choose another file with --out, or remove it")
    address = f"{host.rstrip('/')}/{source.repository}/{source.revision}/{source.path}"
    data = _download(address) if local_copy is None else _read(local_copy)
    is_known = git_blob(data) == source.blob
    if not is_known and local_copy is None:
        raise SolrlError(f"{address} is not what it was when solrl {__version__} was written; nothing was saved")
    rows = _rows(data, source, str(local_copy or address))
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(_prompt(row, source), row)
    unique = list(first.values())
    chosen = _draw(unique, name, num_prompts, seed)
    written = "".join(f"{row}\n" for row in chosen).encode()
    facts: dict[str, Any] = {
        "suite": name,
        "source": {
            "address": address,
            "repository": source.repository,
            "revision": source.revision,
            "path": source.path,
            "local_copy": None if local_copy is None else str(local_copy),
            "is_that_revision": is_known,
            "sha256": hashlib.sha256(data).hexdigest(),
            "num_rows": len(rows),
        },
        "num_repeated": len(rows) - len(unique),
        "num_prompts": len(chosen),
        "seed": None if num_prompts is None else seed,
        "sha256": hashlib.sha256(written).hexdigest(),
        "solrl": __version__,
    }
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(sidecar, (json.dumps(facts, indent=2) + "\n").encode())
    write_atomic(path, written)
    if not is_known:
        report(f"{local_copy} is not {source.path} of {source.repository} at {source.revision[:12]}: taken as it is")
    report(f"{path}: {len(chosen)} prompts ({len(rows) - len(unique)} repeated ones left out); source in {sidecar}")
    return path


def git_blob(data: bytes) -> str:
    """git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _rows(data: bytes, source: Source, place: str) -> list[str]:
    """The lines that hold something, stripped; each was checked to be a prompt."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SolrlError(f"{place} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    rows = [line.strip() for line in text.split("\n") if line.strip()]
    if not rows:
        raise SolrlError(f"{place} holds no prompt")
    for number, row in enumerate(rows, start=1):
        if source.is_jsonl:
            json_prompt(row, f"{place}, row {number}")
    return rows


def _prompt(row: str, source: Source) -> str:
    return json_prompt(row, source.path).strip() if source.is_jsonl else row


def _draw(rows: list[str], name: str, num_prompts: int | None, seed: int) -> list[str]:
    if num_prompts is None:
        return rows
    if not 0 < num_prompts <= len(rows):
        raise UsageError(f"--num-prompts {num_prompts}: {name} has {len(rows)} prompts")
    places = random_order(len(rows), derive_seed(seed, f"suite/{name}"))[:num_prompts]
    return [rows[place] for place in sorted(places)]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def _download(address: str) -> bytes:
    if not address.startswith(("https://", "http://")):
        raise UsageError(f"--host: {address} is no http address")
    request = urllib.request.Request(address, headers={"User-Agent": f"solrl/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        cause = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
        reason = str(cause) or type(cause).__name__
        raise SolrlError(f"{address} cannot be downloaded ({reason}); give a local copy with --from FILE") from error
    if len(data) > MAX_BYTES:
        raise SolrlError(f"{address} is larger than {MAX_BYTES >> 20} MiB: that is not the prompt file")
    return data
