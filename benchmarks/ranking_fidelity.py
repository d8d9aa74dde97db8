"""Does the explorer put a prompt's candidates in the order of the full rollout? Beside Table 8 of arXiv 2604.06916.

The same seeds are drawn by the full rollout and by each explorer setting, and both are scored. Statistics are taken
inside a prompt and averaged over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import MADE_BY, Candidates, add_options, obtain
from benchmarks.common import hardware, parse, parser, pyplot, save_figure, table, write_json
from solrl.fidelity import kendall, overlap, ranks, selected_rank, spearman
from solrl.groups import candidate_seed, noise

KS = (4, 8, 12)
PAPER_POOL = 96
SIMULATED_GROUPS = 300

PAPER = {  # Table 8: tau, rho, then top and bottom "match" in percent for k = 4, 8, 12
    "CLIPScore": (0.752, 0.900, (95.7, 93.9, 92.2), (4.5, 6.2, 8.2)),
    "HPSv2": (0.827, 0.943, (97.6, 95.5, 93.9), (3.4, 5.3, 7.1)),
    "ImageReward": (0.807, 0.932, (97.2, 95.1, 93.4), (3.9, 5.9, 7.6)),
    "PickScore": (0.806, 0.934, (97.1, 95.4, 93.6), (3.8, 5.6, 7.2)),
    "Overall": (0.798, 0.927, (96.9, 95.0, 93.3), (3.9, 5.7, 7.5)),
}
NORMAL = f"simulated normal, rho {PAPER['Overall'][1]}"

DEFINITIONS = """\
Definitions (one prompt's N candidates, then the mean +- standard error over prompts)
  Spearman      correlation of the ranks. Kendall: tau-b over all pairs.
  true rank     place in the order of the full rollout's rewards, 1 = best; mean over the k
                candidates that the explorer's proxy rewards put first (best k) or last (worst k).
  overlap       |proxy's k and the full rollout's k| / k, for the first k and for the last k.
  percentile    100 (N - true rank) / (N - 1), so 100 = best; mean over the selected k.
About the paper's columns
  Table 8 calls its columns "exact match rates", an intersection. They fall as k grows: 97, 95, 93
  %. A set overlap at its Spearman rises with k (line "simulated": a bivariate normal with that
  Spearman). Falling with k is how a mean percentile of the selected set behaves: perfect
  selection itself gives 98.4, 96.3, 94.2, and the simulation comes within 2 of the paper in all
  six columns. So the paper's columns stand in the percentile table; that is our reading, not its
  text. Its models and rewards are not ours either: FLUX.1, SANA and SD3.5-L, learned rewards, 6
  NVFP4 steps against 10 BF16 steps."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what the options ask for."""
    options_of = parser("ranking_fidelity", __doc__.split("\n")[0])
    add_options(options_of)
    options_of.add_argument("--png", type=Path, metavar="FILE", help="draw rank densities, as the paper's Figure 3(c)")
    options = parse(options_of, argv)
    if options.png:
        pyplot()  # a missing matplotlib is found before the drawing
    candidates = obtain(options)
    results = {name: summaries(candidates, name) for name in candidates.rewards}
    print(report(candidates, results))
    payload = {"benchmark": MADE_BY, "arguments": list(argv), "results": results, "candidates": candidates.dump()}
    write_json(options.json, payload)
    if options.png:
        draw_png(candidates, options.png)
    return 0


def statistics(proxy: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    """[P, N] and [P, N] -> name -> [p], of the p prompts whose scores have spread in both."""
    spread = (proxy.amax(1) > proxy.amin(1)) & (rewards.amax(1) > rewards.amin(1))
    proxy, rewards = proxy[spread], rewards[spread]
    found = {"spearman": spearman(proxy, rewards), "kendall": kendall(proxy, rewards)}
    for k in sizes(rewards.shape[1]):
        ends = ("best", "worst")
        found |= {f"overlap_{end}_{k}": value for end, value in zip(ends, overlap(proxy, rewards, k), strict=True)}
        for end, rank in zip(ends, selected_rank(proxy, rewards, k), strict=True):
            found |= {f"rank_{end}_{k}": rank, f"percentile_{end}_{k}": percentile(rank, rewards.shape[1])}
    return found


def sizes(pool: int) -> list[int]:
    """The k that a group of ``pool`` candidates allows."""
    return [k for k in KS if 2 * k <= pool]


def percentile(rank: Tensor, pool: int) -> Tensor:
    """True rank -> percentile, 100 = best."""
    return 100 * (pool - rank) / (pool - 1)


def perfect(pool: int, k: int) -> tuple[float, float]:
    """Mean true rank of the best and of the worst k when the proxy's order is the true one."""
    return (k + 1) / 2, pool - (k - 1) / 2


def summaries(candidates: Candidates, reward: str) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Setting -> statistic -> (mean, standard error, prompts that count)."""
    full = candidates.rewards[reward]
    return {
        setting: {name: _mean(values) for name, values in statistics(proxy, full).items()}
        for setting, proxy in candidates.proxies[reward].items()
    }


def _mean(values: Tensor) -> tuple[float, float, int]:
    count = len(values)
    error = float(values.std()) / math.sqrt(count) if count > 1 else math.nan
    return (float(values.mean()) if count else math.nan), error, count


def simulate(rho: float, pool: int) -> dict[str, tuple[float, float, int]]:
    """The same statistics of a bivariate normal whose Spearman correlation is ``rho``."""
    seeds = [candidate_seed(0, 0, group, 0, "benchmark") for group in range(SIMULATED_GROUPS)]
    pairs = noise(seeds, (2, pool)).double()
    pearson = 2 * math.sin(math.pi * rho / 6)
    proxy = pearson * pairs[:, 0] + math.sqrt(1 - pearson**2) * pairs[:, 1]
    return {name: _mean(values) for name, values in statistics(proxy, pairs[:, 0]).items()}


def report(candidates: Candidates, results: dict[str, dict[str, dict[str, tuple[float, float, int]]]]) -> str:
    """Everything as text, at most 100 columns."""
    about, pool = candidates.about, next(iter(candidates.rewards.values())).shape[1]
    full = about["full_rollout"]
    lines = [
        f"ranking_fidelity: {about['model']}, explorer ({about['explore_solver']}) against the full rollout "
        f"({full['num_steps']} steps, {full['solver']})",
        f"{len(candidates.prompts)} held-out prompts x {pool} candidates, seed {about['seed']}",
        hardware(about["environment"]),
    ]
    simulated = simulate(PAPER["Overall"][1], pool)
    for reward, settings in results.items():
        counts = {stat[2] for stats in settings.values() for stat in stats.values()}
        left_out = len(candidates.prompts) - min(counts)
        note = f"; up to {left_out} prompts without spread left out" if left_out else ""
        lines += ["", f"== reward {reward}{note}", "", _order_table(settings, pool), "",
                  "Overlap of the selected sets", _overlap_table(settings, pool, simulated), "",
                  "Mean percentile of the selected sets (our reading of the paper's Table 8)",
                  _percentile_table(settings, pool, simulated)]  # fmt: skip
    return "\n".join([*lines, "", DEFINITIONS])


def _order_table(settings: dict[str, dict[str, tuple[float, float, int]]], pool: int) -> str:
    k = sizes(pool)[-1]
    best, worst = perfect(pool, k)
    middle = f"{(pool + 1) / 2:.1f}"
    rows = [["perfect", "1", "1", f"{best:.1f}", f"{worst:.1f}"], ["chance", "0", "0", middle, middle]]
    for setting, stats in settings.items():
        rows.append([setting, *(_cell(stats[name], 3) for name in ("spearman", "kendall")),
                     *(_cell(stats[f"rank_{end}_{k}"], 1) for end in ("best", "worst"))])  # fmt: skip
    rows += [[f"paper, {name}", f"{rho:.3f}", f"{tau:.3f}", "", ""] for name, (tau, rho, _, _) in PAPER.items()]
    return table(["explorer", "Spearman", "Kendall", f"true rank: best {k}", f"worst {k}"], rows)


def _overlap_table(settings: dict[str, dict[str, tuple[float, float, int]]], pool: int, normal: Any) -> str:
    ks = sizes(pool)
    rows = [["perfect"] + ["1"] * (2 * len(ks)), ["chance", *(f"{k / pool:.2f}" for k in ks * 2)]]
    for setting, stats in settings.items():
        rows.append([setting, *(_cell(stats[f"overlap_{end}_{k}"], 2) for end in ("best", "worst") for k in ks)])
    rows.append([NORMAL, *(f"{normal[f'overlap_{end}_{k}'][0]:.2f}" for end in ("best", "worst") for k in ks)])
    return table(["explorer", *_ends(ks)], rows)


def _percentile_table(settings: dict[str, dict[str, tuple[float, float, int]]], pool: int, normal: Any) -> str:
    ks = sizes(pool)
    ideal = [percentile(torch.tensor(perfect(pool, k)), pool).tolist() for k in ks]
    rows = [["perfect", *(f"{ideal[i][end]:.1f}" for end in (0, 1) for i in range(len(ks)))],
            ["chance"] + ["50.0"] * (2 * len(ks))]  # fmt: skip
    for setting, stats in settings.items():
        rows.append([setting, *(_cell(stats[f"percentile_{end}_{k}"], 1) for end in ("best", "worst") for k in ks)])
    rows.append([NORMAL, *(f"{normal[f'percentile_{end}_{k}'][0]:.1f}" for end in ("best", "worst") for k in ks)])
    for name, (_, _, top, bottom) in PAPER.items() if pool == PAPER_POOL else ():
        cells = [dict(zip(KS, end, strict=True)) for end in (top, bottom)]
        rows.append([f'paper "match", {name}', *(f"{end[k]:.1f}" for end in cells for k in ks)])
    return table(["explorer", *_ends(ks)], rows)


def _ends(ks: Sequence[int]) -> list[str]:
    return [f"best {k}" for k in ks] + [f"worst {k}" for k in ks]


def _cell(stat: tuple[float, float, int], digits: int) -> str:
    mean, error, _ = stat
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f}+-{error:.{digits}f}"


def draw_png(candidates: Candidates, path: Path) -> None:
    """Rank densities of every setting, and where the selected candidates truly stand (first reward)."""
    from matplotlib.ticker import MultipleLocator

    reward = next(iter(candidates.rewards))
    full, settings = candidates.rewards[reward], candidates.proxies[reward]
    pool, k, plt = full.shape[1], sizes(full.shape[1])[-1], pyplot()
    figure, axes = plt.subplots(2, len(settings), figsize=(2.7 * len(settings) + 0.6, 5.2), sharex="all", sharey="row",
                                squeeze=False, layout="constrained")  # fmt: skip
    true = percentile(ranks(full), pool)
    densities = [density(true, percentile(ranks(proxy), pool)) for proxy in settings.values()]
    top = max(float(part.max()) for part in densities)
    for column, ((setting, proxy), part) in enumerate(zip(settings.items(), densities, strict=True)):
        upper, lower = axes[:, column]
        picture = upper.imshow(part.T.numpy(), origin="lower", extent=(0, 100, 0, 100), cmap="Blues", vmin=0, vmax=top,
                               aspect="auto")  # fmt: skip
        upper.plot([0, 100], [0, 100], color="#1c1e21", linewidth=0.8, linestyle=":")
        rho = float(spearman(proxy, full).nanmean())
        upper.set_title(f"{setting}\nSpearman {rho:.2f}", fontsize=9)
        order = torch.argsort(proxy, dim=1, descending=True, stable=True)
        bins = torch.linspace(0, 100, 17).tolist()
        for picked, label, colour in ((order[:, -k:], f"worst {k}", "#c8642b"), (order[:, :k], f"best {k}", "#2a6fbb")):
            lower.hist(true.gather(1, picked).flatten().tolist(), bins=bins, color=colour, alpha=0.8, label=label)
        lower.set_xlabel("true rank percentile")
        lower.xaxis.set_major_locator(MultipleLocator(25))
    axes[0, 0].set_ylabel("proxy rank percentile")
    axes[1, 0].set_ylabel("selected candidates")
    axes[1, 0].legend(frameon=False, fontsize=8, loc="upper center")
    figure.colorbar(picture, ax=axes[0, :].tolist(), label="density given the true rank", shrink=0.9)
    figure.suptitle(f"{reward}: {len(full)} prompts x {pool} candidates, 100 = best", fontsize=10)
    save_figure(figure, path)
    plt.close(figure)


def density(true: Tensor, proxy: Tensor, bins: int = 16) -> Tensor:
    """[P, N] percentiles -> [bins, bins], P(proxy's bin | true bin): rows sum to 1."""
    place = [(values / 100 * bins).long().clamp(max=bins - 1).flatten() for values in (true, proxy)]
    counts = torch.zeros(bins, bins, dtype=torch.float64)
    counts.index_put_((place[0], place[1]), torch.ones(len(place[0]), dtype=torch.float64), accumulate=True)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)
