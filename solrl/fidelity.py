"""How well the explorer's cheap scores order candidates as the full rollout would.

Two settings that must never be compared with each other:

- ``kept_*``: over the K kept candidates only, every step, free (they are scored twice anyway). The middle of the
  group was thrown away, so the range is restricted: correlations differ from those of the whole group.
- ``full_*``: over all N candidates of one audited group, regenerated whole. These are the definitions published
  tables can be read against.

Everything is pure: tensors in, tensors out, vectorised over leading dimensions. A statistic of a row without spread is
undefined: NaN from the functions of single statistics, left out of the dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solrl.intervals import student_quantile
from solrl.types import SolrlError


def ranks(values: Tensor) -> Tensor:
    """[..., N] values -> float64 [..., N] ranks, 1 = the largest; ties share the mean of the ranks they span."""
    greater = (values.unsqueeze(-2) > values.unsqueeze(-1)).sum(-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).sum(-1)
    return greater + (equal + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rho of [..., N] and [..., N] -> [...]: Pearson's correlation of the average ranks."""
    x, y = (r - r.mean(-1, keepdim=True) for r in (ranks(x), ranks(y)))
    return (x * y).sum(-1) / ((x * x).sum(-1) * (y * y).sum(-1)).sqrt()


def kendall(x: Tensor, y: Tensor) -> Tensor:
    """Kendall's tau-b of [..., N] and [..., N] -> [...].

    (concordant - discordant) / sqrt(pairs untied in x * pairs untied in y), over all pairs of candidates.
    """
    x, y = (torch.sign(v.double().unsqueeze(-1) - v.double().unsqueeze(-2)) for v in (x, y))
    untied_x, untied_y = ((sign * sign).sum((-1, -2)) for sign in (x, y))
    return (x * y).sum((-1, -2)) / (untied_x * untied_y).sqrt()


def overlap(proxy: Tensor, rewards: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Shares of the proxy's top k and bottom k of [..., N] that are in the rewards' top k and bottom k.

    |proxy's k and rewards' k| / k; 1 is perfect, k / N is chance. Where rewards tie across the border of their k, each
    tied candidate counts with the chance that a random order of the ties would let it in.
    """
    best, worst = _selected(proxy, k)
    top = _membership(rewards, k).gather(-1, best).mean(-1)
    bottom = _membership(-rewards, k).gather(-1, worst).mean(-1)
    return top, bottom


def selected_rank(proxy: Tensor, rewards: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mean true rank of the proxy's top k and of its bottom k of [..., N]; the true order is the rewards', best = 1.

    Perfect: (k + 1) / 2 and N - (k - 1) / 2, so 6.5 and 90.5 for 12 of 96. Chance: (N + 1) / 2 for both, 48.5.
    """
    best, worst = _selected(proxy, k)
    true = ranks(rewards)
    return true.gather(-1, best).mean(-1), true.gather(-1, worst).mean(-1)


def kept_fidelity(proxy: Tensor, rewards: Tensor, present: Tensor | None = None) -> dict[str, float]:
    """Means over groups of the kept candidates' statistics, ``fidelity/kept_*``; range-restricted.

    ``proxy`` and ``rewards`` are [G, K], the same candidates scored in both stages. ``top_rank`` and ``bottom_rank``
    are mean true ranks among the K of the half the proxy called best and worst (24 kept: 6.5 and 18.5 when perfect,
    12.5 by chance). A candidate not ``present`` [G, K] does not count; a group without spread is left out, and so is
    every key when no group has any.
    """
    _require_finite(proxy, rewards, present)
    if present is None or bool(present.all()):
        table = _statistics(proxy, rewards, proxy.shape[-1] // 2)
    else:
        rows = [(p[here], r[here]) for p, r, here in zip(proxy, rewards, present, strict=True) if int(here.sum()) > 1]
        tables = [_statistics(p.unsqueeze(0), r.unsqueeze(0), len(p) // 2) for p, r in rows]
        table = torch.cat(tables) if tables else torch.empty(0, 4)
    return _means("fidelity/kept_", ("spearman", "kendall", "top_rank", "bottom_rank"), table)


def full_fidelity(proxy: Tensor, rewards: Tensor, keep: int, present: Tensor | None = None) -> dict[str, float]:
    """Statistics of one group scored whole in both stages ([N] and [N]), ``fidelity/full_*``; empty without spread.

    ``top_rank``, ``bottom_rank`` and ``overlap_k`` (the mean of top and bottom) are those of the keep/2 candidates
    at each end, the ones training would keep.
    """
    _require_finite(proxy, rewards, present)
    if present is not None:
        proxy, rewards = proxy[present], rewards[present]
    if len(proxy) < keep:
        return {}
    proxy, rewards = proxy.unsqueeze(0), rewards.unsqueeze(0)
    both_ends = torch.stack(overlap(proxy, rewards, keep // 2)).mean(0)
    table = torch.cat([_statistics(proxy, rewards, keep // 2), both_ends.unsqueeze(-1)], dim=-1)
    return _means("fidelity/full_", ("spearman", "kendall", "top_rank", "bottom_rank", "overlap_k"), table)


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def pooled_correlation(values: Sequence[float], size: int) -> Interval:
    """Mean of Spearman correlations of different groups of ``size`` candidates, by Fisher's z.

    The error of one is sqrt(1.06 / (size - 3)) (Fieller, Hartley and Pearson 1957), or the scatter between groups, by
    Student's quantile, where that gives more. Of a single group nothing is known but the former: groups may differ by
    more. Raises ValueError for no value, or groups of three.
    """
    if not values or size < 4:
        raise ValueError(f"an interval takes correlations of groups of at least 4, got {len(values)} of {size}")
    z = torch.tensor(values, dtype=torch.float64).clamp(-1 + 1e-9, 1 - 1e-9).atanh()
    scatter = student_quantile(0.975, len(z) - 1) * float(z.std()) if len(z) > 1 else 0.0
    middle, reach = float(z.mean()), max(1.96 * math.sqrt(1.06 / (size - 3)), scatter) / math.sqrt(len(z))
    return Interval(math.tanh(middle), math.tanh(middle - reach), math.tanh(middle + reach))


def _selected(proxy: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices [..., k] of the best and of the worst by one stable order, as groups.select_contrastive takes them."""
    order = torch.argsort(proxy, dim=-1, descending=True, stable=True)
    return order[..., :k], order[..., order.shape[-1] - k :]


def _membership(values: Tensor, k: int) -> Tensor:
    """[..., N] -> chance of each to be among the k largest when ties are ordered at random."""
    greater = (values.unsqueeze(-2) > values.unsqueeze(-1)).sum(-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).sum(-1)
    return ((k - greater).double() / equal).clamp(0, 1)


def _statistics(proxy: Tensor, rewards: Tensor, k: int) -> Tensor:
    """[G, N] and [G, N] -> [G, 4]: spearman, kendall, mean true rank of the top k and of the bottom k."""
    return torch.stack([spearman(proxy, rewards), kendall(proxy, rewards), *selected_rank(proxy, rewards, k)], dim=-1)


def _means(prefix: str, names: tuple[str, ...], table: Tensor) -> dict[str, float]:
    """Column means over the rows that are defined; nothing when there is none."""
    defined = table[torch.isfinite(table).all(-1)]
    if len(defined) == 0:
        return {}
    return {prefix + name: value for name, value in zip(names, defined.mean(0).tolist(), strict=True)}


def _require_finite(proxy: Tensor, rewards: Tensor, present: Tensor | None) -> None:
    for name, values in (("proxy reward", proxy), ("reward", rewards)):
        if not bool(torch.isfinite(values if present is None else values[present]).all()):
            raise SolrlError(
                f"a {name} is NaN or infinite; a candidate that cannot be judged is marked missing instead"
            )
