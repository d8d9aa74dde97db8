"""``python -m benchmarks NAME [options]``; without a name, what there is. Exit codes: 1 failed, 2 bad usage."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from solrl.errors import SolrlError, UsageError

BENCHMARKS = {
    "alignment": "Sol-RL and its baselines trained alike: the paper's Tables 1, 2, 3, 6, Figures 1, 3(b), 4, ablations",
    "ranking_fidelity": "does the explorer order candidates as the full rollout does? beside the paper's Table 8",
    "extreme_value": "the reward range that survives cheap exploration, beside the bound of the paper's Appendix A",
    "host_overhead": "noise, copies, preprocessing, selection, ledger, images at the real geometry, without a model",
    "step_overhead": "the share of a training step that is not velocity, decode, scoring or backward",
    "iteration_breakdown": "seconds by phase of naive scaling, plain NFT and two stages, beside the paper's Table 5",
    "rollout_speed": "seconds of a rollout by change: compile, fewer steps, number format; beside the paper's Table 5",
    "quant_fidelity": "Inception Score and CLIP score of quantized rollouts, beside the paper's Table 4",
    "update_speed": "forwards, backward and reduction of an update: eager, compiled, v_old from merged weights",
    "peer_step": "a rollout and an update of DiffusionNFT beside the paper's own code, in turn, at equal geometry",
    "learning_curve": "held-out rewards of finished runs, before and after, and the curve between",
    "pictures": "what finished runs draw, row by row, beside the paper's Figures 1, 5 and 7 to 9",
    "convergence": "held-out reward in modes with roles and with stale samples, beside PivotRL's Figure 15",
    "explorer_formats": "held-out reward after training with explorers of several number formats, several seeds each",
    "fidelity_gate": "an explorer that takes too few steps, with and without explore.min_fidelity",
    "emulation_cost": "what emulating NVFP4 costs, against full precision",
    "quantizer_throughput": "quantizing a weight to NVFP4 on one CPU thread, beside torchao's quantizer",
    "requantize_cost": "bringing explorer and rollout tree to new weights, as a share of a step",
    "deployments": "SIMULATED: colocated, disaggregated, shared, shiftable beside PivotRL's Figures 9 and 10",
    "strategies": "SIMULATED: shift strategies and components beside PivotRL's Figure 11",
    "planner_time": "seconds of a plan for 16 to 1,024 GPUs beside PivotRL's Table 2",
    "store_bandwidth": "GB/s of the parameter store beside memcpy in one run; the time of a cached transfer plan",
    "faults": "a run under kill -9, exceptions, full mailboxes, damaged checkpoints beside the same run left alone",
    "shift_cost": "seconds of a shift by part and role on this CPU, beside PivotRL's Figures 12 and 13",
    "headroom": "SIMULATED: share of time below 20 % of a stage's peak beside PivotRL's Figure 3",
    "horizon": "SIMULATED: throughput and shifts over the planner's horizon beside PivotRL's Figure 14",
    "migration": "SIMULATED: what moving a job costs beside PivotRL's Table 3",
    "modes": "SIMULATED: seconds of a diffusion step in each runtime mode, by model, judge and staleness",
    "auto_regret": "SIMULATED: the regret of runtime.mode = auto over a grid of workloads",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the process's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    try:
        return _run(words[0], words[1:])
    except SolrlError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(name: str, words: list[str]) -> int:
    if name not in BENCHMARKS:
        nearest = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.0)[0]
        raise UsageError(f"no benchmark {name!r}; the nearest is {nearest} (python -m benchmarks lists them)")
    return int(importlib.import_module(f"benchmarks.{name}").main(words))


def _overview() -> str:
    lines = [f"  {name:19} {line}" for name, line in BENCHMARKS.items()]
    return "\n".join(["usage: python -m benchmarks NAME [options]   (NAME --help lists them)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
