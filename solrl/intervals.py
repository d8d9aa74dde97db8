"""Confidence intervals of a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """(mean, half width) of the two-sided Student interval of ``level``; NaN half width for a single value."""
    if len(values) < 2:
        return fmean(values), math.nan
    return fmean(values), student_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: int) -> float:
    """The t that Student's distribution with ``freedom`` degrees of freedom stays below with ``probability`` > 1/2.

    By bisection on the Simpson integral of the density, substituting t = sqrt(freedom) tan(angle), which makes the
    integrand cos(angle)^(freedom - 1) and the range finite.
    """
    log_constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        below = 0.5 + math.exp(log_constant) * _simpson(angle, freedom - 1)
        low, high = (angle, high) if below < probability else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _simpson(end: float, power: int, pieces: int = 200) -> float:
    """Integral of cos^power from 0 to ``end``."""
    values = [math.cos(end * i / pieces) ** power for i in range(pieces + 1)]
    return end / pieces / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
