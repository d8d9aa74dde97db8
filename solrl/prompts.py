"""Prompt lists, and which prompts a step draws.

A list is a text file, one prompt a line, a JSON Lines file, or a column of a Hugging Face data set. A step's prompts
are a pure function of (run seed, step), so a resumed run needs no reader state.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from solrl.config import Config
from solrl.errors import UsageError
from solrl.groups import derive_seed

EMBEDDED = Path(__file__).parent / "assets" / "prompts"


def load_prompts(name_or_path: str | Path) -> list[str]:
    """The prompts of a file, an embedded list or a data set: stripped, in order, empty ones left out.

    A file ending in .jsonl holds one JSON object a line, whose "prompt" counts; any other holds one prompt a line.
    `hf:NAME_OR_FOLDER?split=train&column=prompt` is a Hugging Face data set (also `config=` and `revision=`).
    """
    source = str(name_or_path)
    lines = _dataset_column(source) if source.startswith("hf:") else _file_lines(_find(name_or_path))
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{source} holds no prompt: write one a line")
    return prompts


def _file_lines(file: Path) -> list[str]:
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read prompts from {file}: {error.strerror}") from None
    lines = text.split("\n")  # not splitlines, which also parts at characters that prompts and JSON may hold
    if file.suffix != ".jsonl":
        return lines
    return [json_prompt(line, f"{file}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]


def json_prompt(line: str, place: str) -> str:
    """The text under "prompt" of a JSON object; UsageError that names ``place`` where there is none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UsageError(f'{place} has no text under "prompt" (it has {keys or "nothing"})')
    return str(row["prompt"])


def _dataset_column(source: str) -> list[str]:
    """A text column of a Hugging Face data set, by hub id or local folder; nothing that a data set brings is run."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError(f'{source} needs the package {error.name}: pip install "solrl[data]"') from error
    name, _, query = source.removeprefix("hf:").partition("?")
    try:
        chosen = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as error:
        raise UsageError(f"{source}: {error}; write hf:NAME?split=train&column=prompt") from None
    split, column = chosen.pop("split", "train"), chosen.pop("column", "prompt")
    config, revision = chosen.pop("config", None), chosen.pop("revision", None)
    if chosen:
        raise UsageError(f"{source}: {next(iter(chosen))} is none of split, column, config, revision")
    saved = [Path(name) / file for file in ("dataset_dict.json", "state.json")]
    try:
        if any(file.is_file() for file in saved):  # as save_to_disk writes it
            found = datasets.load_from_disk(name)
            rows = found[split] if isinstance(found, dict) else found
        else:
            rows = datasets.load_dataset(name, config, split=split, revision=revision)
    except KeyError:
        raise UsageError(f"{source}: it has no split {split!r}; its splits are {', '.join(found)}") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{source} cannot be loaded: {reason}") from error
    if column not in rows.column_names:
        raise UsageError(f"{source} has no column {column!r}; set column= to one of {', '.join(rows.column_names)}")
    values = list(rows[column])
    if not all(isinstance(value, str) for value in values):
        raise UsageError(f"{source}: column {column!r} holds other things than texts")
    return values


def load_prompt_lists(config: Config) -> tuple[list[str], list[str]]:
    """(training prompts, held-out prompts to evaluate on), checked against each other and against the settings."""
    train = load_prompts(config.prompts.train)
    heldout = load_prompts(config.prompts.heldout)
    known = set(train)
    for prompt in heldout:
        if prompt in known:
            raise UsageError(
                f"prompt {prompt!r} is in both {config.prompts.train} and {config.prompts.heldout}: take it out of "
                "one, what is held out must not be trained on"
            )
    if config.prompts.per_step > len(train):
        raise UsageError(
            f"prompts.per_step = {config.prompts.per_step} but {config.prompts.train} holds {len(train)} prompts: "
            f"set prompts.per_step to at most {len(train)}"
        )
    if config.evaluate.num_prompts > len(heldout):
        raise UsageError(
            f"evaluate.num_prompts = {config.evaluate.num_prompts} but {config.prompts.heldout} holds {len(heldout)} "
            f"prompts: set evaluate.num_prompts to at most {len(heldout)}"
        )
    return train, heldout[: config.evaluate.num_prompts]


def step_prompts(prompts: list[str], run_seed: int, step: int, per_step: int) -> list[str]:
    """The ``per_step`` prompts of step ``step`` (steps count from 1): without replacement within a pass over the list.

    Each pass has its own order; a step may end one pass and begin the next.
    """
    orders: dict[int, list[int]] = {}
    drawn = []
    for position in range((step - 1) * per_step, step * per_step):
        number, place = divmod(position, len(prompts))
        if number not in orders:
            orders[number] = random_order(len(prompts), derive_seed(run_seed, f"prompts/{number}"))
        drawn.append(prompts[orders[number][place]])
    return drawn


def random_order(size: int, seed: int) -> list[int]:
    """The permutation of ``range(size)`` that a seed names. Sorting raw Philox words: numpy keeps those bits."""
    words = np.random.Philox(key=seed).random_raw(size)
    return [int(place) for place in np.argsort(words, kind="stable")]


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.is_file():
        return path
    embedded = {file.stem: file for file in sorted(EMBEDDED.glob("*.txt"))}
    name = str(name_or_path)
    if name in embedded:
        return embedded[name]
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a text file with one prompt a line")
    raise UsageError(f"no prompts {name!r}: neither a text file nor an embedded list ({', '.join(embedded)})")
