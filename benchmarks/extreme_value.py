"""The reward range that survives cheap exploration, beside the bound of arXiv 2604.06916, Appendix A.

An oracle that draws all N candidates in full gets the range W* = max R - min R. Sol-RL draws in full only what its
proxy called best and worst: it keeps W^ = R(proxy's best) - R(proxy's worst). Eq. 9 bounds W^ >= W* - 4 Delta where
Delta >= |proxy - R| for every candidate. Both are measured for pools of n <= N candidates as exact means over all
subsets of n, so that a curve has no more noise than its prompts give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import Candidates, add_options, obtain
from benchmarks.common import hardware, parse, parser, pyplot, save_figure, table, write_json

POOLS = (2, 4, 8, 16, 24, 32, 48, 64, 96)
QUANTILE = 0.95

EXPLANATION = """\
  oracle W*      mean over prompts of the range when all N are drawn in full; +- over prompts
  normal         range that N draws from a normal of the same sigma would have (exact expectation)
  asymptote      2 sigma sqrt(2 log N), Eq. 8. It lies above the exact value at every N, so Eq. 10
                 puts an upper bound where a lower bound needs the range itself. A bounded reward
                 bends below both.
  kept           W^ / W* at the largest N
  worth          candidates drawn in full that give the same range as the N explored ones
  4 Delta, max   Eq. 9 with Delta = the largest |proxy - R| measured. Below 0 it says nothing
                 (vacuous).
  per prompt     Eq. 9 for each prompt, after a constant is taken off its proxy scores (selection
                 does not see constants): Delta = half the spread of proxy - R. Still a bound.
  q95            with Delta = the 95 % quantile of |proxy - R|: NOT a bound, shown for scale."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for."""
    options_of = parser("extreme_value", __doc__.split("\n")[0])
    add_options(options_of)
    options_of.add_argument("--png", type=Path, metavar="FILE", help="draw the ranges over N")
    options = parse(options_of, argv)
    if options.png:
        pyplot()
    candidates = obtain(options)
    results = {reward: analyse(full, candidates.proxies[reward]) for reward, full in candidates.rewards.items()}
    print(report(candidates, results))
    write_json(options.json, {
        "benchmark": "extreme_value", "arguments": list(argv), "environment": candidates.about["environment"],
        "results": results,
    })  # fmt: skip
    if options.png:
        draw_png(next(iter(results.items())), options.png)
    return 0


def analyse(full: Tensor, proxies: dict[str, Tensor]) -> dict[str, Any]:
    """Everything about one reward: [P, N] full scores, and setting -> [P, N] proxy scores."""
    pools = [n for n in POOLS if n < full.shape[1]] + [full.shape[1]]
    sigma = float(full.var(1).mean().sqrt())
    oracle = [retained_range(full, full, n) for n in pools]
    return {
        "pools": pools,
        "sigma": sigma,
        "oracle": [_mean(values) for values in oracle],
        "normal": [sigma * normal_range(n) for n in pools],
        "asymptote": [2 * sigma * math.sqrt(2 * math.log(n)) for n in pools],
        "settings": {name: _setting(full, proxy, pools, oracle) for name, proxy in proxies.items()},
    }


def _setting(full: Tensor, proxy: Tensor, pools: Sequence[int], oracle: Sequence[Tensor]) -> dict[str, Any]:
    retained = [retained_range(full, proxy, n) for n in pools]
    error = proxy - full
    largest, high = float(error.abs().max()), float(torch.quantile(error.abs().flatten(), QUANTILE))
    half_spread = (error.amax(1) - error.amin(1)) / 2
    return {
        "retained": [_mean(values) for values in retained],
        "kept_share": float(retained[-1].mean() / oracle[-1].mean()),
        "worth": equal_pool(full, float(retained[-1].mean())),
        "delta_max": largest,
        "delta_per_prompt": float(half_spread.mean()),
        "delta_q95": high,
        "bound_max": [float(w.mean()) - 4 * largest for w in oracle],
        "bound_per_prompt": [float((w - 4 * half_spread).mean()) for w in oracle],
        "not_a_bound_q95": [float(w.mean()) - 4 * high for w in oracle],
    }


def retained_range(full: Tensor, proxy: Tensor, n: int) -> Tensor:
    """[P, N] and [P, N] -> [P]: mean of R(proxy's best) - R(proxy's worst) over all subsets of n of the N candidates.

    With ``proxy`` = ``full`` it is the oracle's range. The j-th of the proxy's order (from 0) is a subset's best
    in C(N - 1 - j, n - 1) of C(N, n) subsets. Ties are ordered as selection orders them.
    """
    pool = full.shape[1]
    weights = torch.tensor(
        [math.comb(pool - 1 - place, n - 1) / math.comb(pool, n) for place in range(pool)], dtype=torch.float64
    )
    ordered = full.double().gather(1, torch.argsort(proxy, dim=1, descending=True, stable=True))
    return ordered @ weights - ordered.flip(1) @ weights


def normal_range(n: int) -> float:
    """Expected range of n standard normal draws: the integral of 1 - Phi^n - (1 - Phi)^n."""
    x = torch.linspace(-10, 10, 8001, dtype=torch.float64)
    below = torch.special.ndtr(x)
    return float(torch.trapezoid(1 - below**n - (1 - below) ** n, x))


def equal_pool(full: Tensor, wanted: float) -> int:
    """The smallest number of candidates drawn in full whose mean range reaches ``wanted``."""
    pool = full.shape[1]
    return next((n for n in range(2, pool) if float(retained_range(full, full, n).mean()) >= wanted), pool)


def _mean(values: Tensor) -> tuple[float, float]:
    """(mean, standard error) over prompts."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def report(candidates: Candidates, results: dict[str, dict[str, Any]]) -> str:
    """Everything as text, at most 100 columns."""
    about, shape = candidates.about, next(iter(candidates.rewards.values())).shape
    full = about["full_rollout"]
    lines = [
        f"extreme_value: {about['model']}, full rollout {full['num_steps']} steps ({full['solver']}), "
        f"explorer {about['explore_solver']}",
        f"{shape[0]} held-out prompts x {shape[1]} candidates, seed {about['seed']}",
        hardware(about["environment"]),
    ]
    for reward, found in results.items():
        lines += ["", f"== reward {reward}, sigma within a prompt {found['sigma']:.3f}", "", _range_table(found), "",
                  *_setting_tables(found)]  # fmt: skip
    return "\n".join([*lines, "", EXPLANATION])


def _range_table(found: dict[str, Any]) -> str:
    rows = []
    for i, n in enumerate(found["pools"]):
        mean, error = found["oracle"][i]
        oracle = f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f}+-{error:.3f}"
        rows.append([str(n), oracle, f"{found['normal'][i]:.3f}", f"{found['asymptote'][i]:.3f}"])
    return table(["N", "oracle W*", "normal", "asymptote"], rows)


def _setting_tables(found: dict[str, Any]) -> list[str]:
    settings, pools = found["settings"], found["pools"]
    last = pools[-1]
    shown = [n for n in (2, 8, 24, 48, 96) if n in pools] if 96 in pools else pools[-5:]
    retained = [
        [name, *(f"{found_in['retained'][pools.index(n)][0]:.3f}" for n in shown),
         f"{100 * found_in['kept_share']:.0f} %", str(found_in["worth"])]
        for name, found_in in settings.items()
    ]  # fmt: skip
    oracle = ["oracle W*", *(f"{found['oracle'][pools.index(n)][0]:.3f}" for n in shown), "100 %", str(last)]
    deltas = ("delta_max", "delta_per_prompt", "delta_q95")
    bounds = [
        [name, f"{s['retained'][-1][0]:.3f}", *(f"{s[delta]:.3f}" for delta in deltas),
         *(_bound(s[bound][-1]) for bound in ("bound_max", "bound_per_prompt")), f"{s['not_a_bound_q95'][-1]:.3f}"]
        for name, s in settings.items()
    ]  # fmt: skip
    return [
        "Retained range W^ over N",
        table(["explorer", *(f"N={n}" for n in shown), "kept", "worth"], [oracle, *retained]),
        "",
        f"Delta, and W* - 4 Delta at N = {last}, to be compared with W^",
        table(["explorer", "W^", "max", "per prompt", "q95", "4 Delta, max", "per prompt", "q95, no bound"], bounds),
    ]


def _bound(value: float) -> str:
    return f"{value:.3f}" if value > 0 else f"{value:.2f} vac."


def draw_png(result: tuple[str, dict[str, Any]], path: Path) -> None:
    """Oracle, retained ranges and the bound over N."""
    reward, found = result
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    pools = found["pools"]
    means, errors = zip(*found["oracle"], strict=True)
    for axis in (left, right):
        axis.errorbar(pools, means, yerr=errors, color="#1c1e21", linewidth=1.8, capsize=2, label="oracle W*")
        axis.set_xscale("log", base=2)
        axis.set_xticks(pools, [str(n) for n in pools])
        axis.minorticks_off()
        axis.set_xlabel("candidates explored, N")
        axis.spines[["top", "right"]].set_visible(False)
    left.plot(pools, found["normal"], color="#6a7078", linestyle="--", linewidth=1, label="normal of the same sigma")
    left.plot(pools, found["asymptote"], color="#6a7078", linestyle=":", linewidth=1, label="2 sigma sqrt(2 log N)")
    colours = plt.get_cmap("viridis")
    settings = found["settings"]
    for number, (name, values) in enumerate(settings.items()):
        colour = colours(0.85 * number / max(len(settings) - 1, 1))
        left.plot(pools, [mean for mean, _ in values["retained"]], color=colour, marker="o", markersize=3.5, label=name)
        right.plot(pools, values["bound_per_prompt"], color=colour, marker="o", markersize=3.5)
        right.plot(pools, values["bound_max"], color=colour, linestyle=":", linewidth=1)
    right.axhline(0, color="#6a7078", linewidth=0.8)
    right.plot([], [], color="#6a7078", marker="o", markersize=3.5, label="Delta of each prompt (colours as left)")
    right.plot([], [], color="#6a7078", linestyle=":", linewidth=1, label="Delta = max over all prompts")
    left.set_ylabel(f"reward range ({reward})")
    left.set_title("retained by selection", fontsize=10)
    right.set_title("guaranteed by W* - 4 Delta (below 0: vacuous)", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="best")
    save_figure(figure, path)
    plt.close(figure)
