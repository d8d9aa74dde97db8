"""How fast a replica works, as a function of what it holds, and how that is learned from profiled rounds.

A replica advances all its jobs by one token (or one denoising step) a round. PivotRL section 6.1 and Appendix A: a
round with n jobs of together t tokens takes A t + max(B, C n) + D seconds. A is the cost of reading a token's KV
cache, B the floor of loading the weights, C the arithmetic of a job, D everything else. Jobs without a growing state
have A = 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from solrl.errors import SolrlError, UsageError

Array = NDArray[np.float64]
NUM_KNEES = 33


@dataclass(frozen=True)
class Coefficients:
    """Seconds of a round: ``a`` a token, ``c`` a job but at least ``b``, and ``d``."""

    a: float
    b: float
    c: float
    d: float

    def __post_init__(self) -> None:
        values = (self.a, self.b, self.c, self.d)
        if not all(0 <= value < float("inf") for value in values) or max(self.b, self.c) + self.d <= 0:
            raise UsageError(f"coefficients {values}: none may be negative, and a round must take time")

    def latency(self, num_jobs: float, tokens: float) -> float:
        """Seconds of one round."""
        return self.a * tokens + max(self.b, self.c * num_jobs) + self.d

    def throughput(self, num_jobs: float, tokens: float) -> float:
        """Job-rounds a second (tokens a second, for an LLM); 0 without a job."""
        return num_jobs / self.latency(num_jobs, tokens) if num_jobs > 0 else 0.0

    def scaled(self, factor: float) -> Coefficients:
        """The same replica, ``factor`` times as slow."""
        return Coefficients(self.a * factor, self.b * factor, self.c * factor, self.d * factor)


BUSY_OR_NOT = Coefficients(a=0.0, b=1.0, c=1.0, d=1e-3)
"""No model at all (PivotRL section 8.4, vanilla): a replica's throughput is 1 with a job and 0 without. The small d
sends a job to the replica with the fewest."""


@dataclass(frozen=True)
class Round:
    """One profiled round."""

    num_jobs: int
    tokens: float
    seconds: float
    prefilled: bool = False
    """Whether a job was admitted in it; such a round says nothing about decoding."""


@dataclass(frozen=True)
class Fit:
    """Coefficients and how well they describe the rounds they were learned from."""

    coefficients: Coefficients
    error: float
    """Root mean square of the relative error."""
    num_rounds: int


def fit(rounds: Iterable[Round]) -> Fit:
    """Coefficients of the least relative squared error.

    The knee B / C is searched; given it the model is linear, with coefficients that may not be negative. Below the knee
    only B + D can be told from the rounds, which is all that predictions there need. Raises SolrlError for rounds that
    determine nothing.
    """
    used = [r for r in rounds if not r.prefilled and r.num_jobs > 0]
    if len(used) < 4 or len({(r.num_jobs, r.tokens) for r in used}) < 3:
        raise SolrlError(f"{len(used)} rounds of decoding cannot determine a throughput model; profile a grid of loads")
    n, tokens, seconds = _columns(used)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise SolrlError("a profiled round took no time, or no finite time; the clock that measured it is wrong")
    ones = np.ones_like(n)

    def of_knee(knee: float) -> tuple[float, Array]:
        matrix = np.stack([tokens, np.maximum(knee, n), ones], axis=1) / seconds[:, None]
        weights, error = _non_negative(matrix, ones)
        return error, weights

    knees = np.geomspace(1.0, max(float(n.max()), 2.0), NUM_KNEES)
    for _ in range(2):  # the second time between the neighbours of the best
        best = min(range(len(knees)), key=lambda place: of_knee(float(knees[place]))[0])
        knee = float(knees[best])
        knees = np.linspace(knees[max(best - 1, 0)], knees[min(best + 1, len(knees) - 1)], NUM_KNEES)
    error, weights = of_knee(knee)
    a, c, d = weights.tolist()
    return Fit(Coefficients(a, c * knee, c, d), float(np.sqrt(error / len(used))), len(used))


def refit(known: Coefficients, rounds: Sequence[Round], *, half_life: float = 64.0) -> Coefficients:
    """``known`` with A and D learned again from running rounds, oldest first; a round counts half of the one
    ``half_life`` after it. B and C stay: they belong to the model and the GPU, A and D also to the load and the
    host."""
    used = [r for r in rounds if not r.prefilled and r.num_jobs > 0 and r.seconds > 0]
    if len({r.tokens for r in used}) < 2:
        return known
    n, tokens, seconds = _columns(used)
    weight = np.sqrt(0.5 ** (np.arange(len(used))[::-1] / half_life))
    scale = (weight / seconds)[:, None]
    rest = seconds - np.maximum(known.b, known.c * n)
    (a, d), _ = _non_negative(np.stack([tokens, np.ones_like(n)], axis=1) * scale, rest * scale[:, 0])
    if max(known.b, known.c) + d <= 0:
        return known
    return replace(known, a=float(a), d=float(d))


def _columns(rounds: Sequence[Round]) -> tuple[Array, Array, Array]:
    rows = np.array([(r.num_jobs, r.tokens, r.seconds) for r in rounds], dtype=np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _non_negative(matrix: Array, target: Array) -> tuple[Array, float]:
    """(x >= 0 of the least |matrix x - target|^2, that square). With up to three unknowns every set of zeros is
    tried."""
    width = matrix.shape[1]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    best, least = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            part = scaled[:, columns]
            x = np.linalg.lstsq(part, target, rcond=None)[0]
            residual = part @ x - target
            square = float(residual @ residual)
            if (x >= 0).all() and square < least:
                best, least = np.zeros(width), square
                best[list(columns)] = x
    return best / scale, least
