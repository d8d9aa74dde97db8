"""A gate on the explorer's fidelity: where audited groups show that it orders candidates badly, it climbs a ladder.

More steps first, then a higher precision. Only whole audited groups are asked (``fidelity/full_spearman``); the kept
ones' range is restricted. Everything here is a pure function of settings and recorded metrics, so every rank climbs at
the same step, and so does a resumed run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from solrl.config import Config
from solrl.fidelity import Interval, pooled_correlation
from solrl.quant.backends import Precision

STEPS = 2
"""Denoising steps that a rung adds."""

AUDITS = 8
"""Audits that are pooled at most: the newest, since the policy goes on changing."""

FEWEST = 3
"""Audits on a rung before it is left: a climb is never undone, and how much groups differ takes a few to see."""

HIGHER: Mapping[Precision, tuple[Precision, ...]] = {
    "nvfp4": ("fp8", "full"),
    "emulated_nvfp4": ("fp8", "full"),
    "fp8": ("full",),
    "full": (),
}


class Rung(NamedTuple):
    """How the explorer draws."""

    num_steps: int
    precision: Precision


def ladder(config: Config, precision: Precision) -> list[Rung]:
    """Rungs from what the run starts with: more steps up to ``regenerate.num_steps``, then higher precisions."""
    first, most = config.explore.num_steps, config.regenerate.num_steps
    steps = [*range(first, most, STEPS), max(first, most)]
    return [*(Rung(count, precision) for count in steps), *(Rung(steps[-1], higher) for higher in HIGHER[precision])]


def rung_of(row: Mapping[str, float]) -> int:
    """The rung that a recorded step explored on."""
    return int(row.get("explore/rung", 0))


def too_low(config: Config, rows: Sequence[Mapping[str, float]]) -> Interval | None:
    """The pooled correlation, if the last row is of an audit and its whole interval lies below the threshold."""
    key, limit = "fidelity/full_spearman", config.explore.min_fidelity
    if not limit or not rows or key not in rows[-1]:
        return None
    here = takewhile(lambda row: rung_of(row) == rung_of(rows[-1]), reversed(rows))
    audits = [row[key] for row in here if key in row][:AUDITS]
    if len(audits) < FEWEST:
        return None
    pooled = pooled_correlation(audits, config.explore.group_size)
    return pooled if pooled.high < limit else None
