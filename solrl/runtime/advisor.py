"""``runtime.mode = auto``: simulate the modes on profiled coefficients and pick one. "Stay colocated" is an answer.

Every mode is simulated with the same lengths and its split is searched; another mode than colocated must win by a
margin. What is profiled is not exact, so the coefficients may be taken as given and as they might be off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from solrl.runtime.simulator import Deployment, Result, simulate
from solrl.runtime.strategies import async_score, colocated, shiftable
from solrl.runtime.workload import Sample, Setting

MARGIN = 0.01
"""What another mode must win over colocated."""


@dataclass(frozen=True)
class Option:
    """A mode with its split, and what it would take."""

    mode: str
    split: tuple[int, ...]
    """async_score: GPUs of explore and score; shiftable: GPUs of train."""
    seconds_per_batch: float


@dataclass(frozen=True)
class Advice:
    """The mode to run, and everything it was weighed against."""

    mode: str
    split: tuple[int, ...]
    seconds_per_batch: float
    """Expected."""
    gain: float
    """Expected share of colocated's time that is saved; 0 for colocated."""
    options: tuple[Option, ...]

    def __str__(self) -> str:
        if self.mode == "colocated":
            rest = [option for option in self.options if option.mode != "colocated"]
            best = min(rest, key=lambda option: option.seconds_per_batch, default=None)
            beside = (
                f"; the best other mode, {best.mode}, is expected at {best.seconds_per_batch:.1f} s" if best else ""
            )
            return f"stay colocated: {self.seconds_per_batch:.1f} s a step expected{beside} (simulated)"
        parts = "+".join(str(part) for part in self.split)
        return (
            f"{self.mode} ({parts} GPUs): {self.seconds_per_batch:.1f} s a step expected, {self.gain:.1%} less than "
            "colocated (simulated)"
        )


def perturbed(setting: Setting, factors: dict[str, float]) -> Setting:
    """``setting`` with the speeds of explore, score and train off by ``factors``."""
    values: dict[str, Any] = {}
    for role in ("explore", "score"):
        replica = setting.explore if role == "explore" else setting.score
        factor = factors.get(role, 1.0)
        values |= {f"{role}.{name}": getattr(replica, name) * factor for name in ("a_s", "b_s", "c_s", "d_s")}
    factor = factors.get("train", 1.0)
    values |= {f"train.{name}": getattr(setting.train, name) * factor for name in ("gpu_s_per_token", "gpu_s_per_job")}
    return setting.with_values(values)


def modes(setting: Setting) -> dict[str, list[Callable[[Setting], Deployment]]]:
    """Mode -> its deployments, by rising split."""
    scored = any(one.score is not None for one in setting.passes)
    found: dict[str, list[Callable[[Setting], Deployment]]] = {"colocated": [colocated]}
    if scored or setting.batch.staleness:
        step = setting.score.gpus
        most = setting.cluster.gpus - setting.explore.gpus
        splits = range(step, most + 1, step) if scored else range(0, 1)
        found["async_score"] = [_async(score) for score in splits]
        found["shiftable"] = [lambda s: shiftable(s, s.cluster.gpus)]
    return found


def _async(score: int) -> Callable[[Setting], Deployment]:
    return lambda setting: async_score(setting, score)


def tune(deployments: Sequence[Callable[[Setting], Deployment]], seconds: Callable[[int], float]) -> tuple[int, float]:
    """(place, seconds) of the best of ``deployments`` by rising split: a search that takes the time to be unimodal.

    ``seconds`` of a place is asked for at most once.
    """
    known: dict[int, float] = {}

    def cost(place: int) -> float:
        if place not in known:
            known[place] = seconds(place)
        return known[place]

    low, high = 0, len(deployments) - 1
    while high - low > 2:
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        if cost(left) <= cost(right):
            high = right - 1 if right > left else left
        else:
            low = left + 1
    for place in range(low, high + 1):
        cost(place)
    best = min(known, key=lambda place: (known[place], place))
    return best, known[best]


def search(setting: Setting, samples: Sequence[Sample], cases: Sequence[Setting]) -> Iterator[Option]:
    """Every mode with its best split, by the mean over ``cases`` and ``samples``."""
    for mode, deployments in modes(setting).items():
        results: dict[int, Result] = {}

        def seconds(place: int, deployments: Any = deployments, results: dict[int, Result] = results) -> float:
            times = []
            for case in cases:
                for sample in samples:
                    results[place] = simulate(case, sample, deployments[place](case))
                    times.append(results[place].seconds_per_batch)
            return sum(times) / len(times)

        place, best = tune(deployments, seconds)
        yield Option(mode, results[place].split, best)


def advise(setting: Setting, samples: Sequence[Sample], *, uncertainty: float = 0.0, margin: float = MARGIN) -> Advice:
    """The mode to run ``setting`` in, by simulation with ``samples`` of lengths.

    With ``uncertainty`` the coefficients are also taken to be off by that share, scoring against the rest.
    """
    cases = [setting]
    if uncertainty:
        cases += [perturbed(setting, {"score": factor}) for factor in (1 - uncertainty, 1 + uncertainty)]
    options = list(search(setting, samples, cases))
    stay = options[0]
    best = min(options, key=lambda option: option.seconds_per_batch)
    if best.seconds_per_batch > stay.seconds_per_batch * (1 - margin):
        best = stay
    gain = 1 - best.seconds_per_batch / stay.seconds_per_batch
    return Advice(best.mode, best.split, best.seconds_per_batch, gain, tuple(options))
