"""Prompt lists, and which prompts a step draws.

A list is a text file, one prompt a line. A step's prompts are a pure function of (run seed, step), so a resumed run
needs no reader state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from solrl.config import Config
from solrl.errors import UsageError
from solrl.groups import derive_seed

EMBEDDED = Path(__file__).parent / "assets" / "prompts"


def load_prompts(name_or_path: str | Path) -> list[str]:
    """The prompts of a text file or an embedded list: stripped, in order, blank lines left out."""
    file = _find(name_or_path)
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read prompts from {file}: {error.strerror}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{file} holds no prompt: write one a line")
    return prompts


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
            orders[number] = _order(len(prompts), run_seed, number)
        drawn.append(prompts[orders[number][place]])
    return drawn


def _order(size: int, run_seed: int, number: int) -> list[int]:
    """A permutation keyed by (run seed, pass). Sorting raw Philox words: numpy keeps those bits in every version."""
    words = np.random.Philox(key=derive_seed(run_seed, f"prompts/{number}")).random_raw(size)
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
