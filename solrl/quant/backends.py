"""Which number format the explorer runs in on this machine, and why."""

from __future__ import annotations

import torch

from solrl.config import ExploreConfig


def choose_precision(explore: ExploreConfig, device: torch.device) -> tuple[str, str]:
    """("full" or "emulated_nvfp4", one line for the user).

    ``auto`` takes the cheapest format that the machine computes natively. Emulation gives NVFP4's numbers at more than
    the price of full precision, so only its name selects it; nothing requested is ever replaced by something else.
    """
    if explore.precision == "emulated_nvfp4":
        return "emulated_nvfp4", (
            f"emulated NVFP4, {explore.num_steps} steps: FP4's numbers at up to 1.5 times the cost of full precision; "
            "for studying fidelity, not for speed"
        )
    chosen = "" if explore.precision == "full" else "auto: this version has no FP4 or FP8 kernels; "
    cost = "emulated_nvfp4 would cost up to 1.5 times as much a step"
    return "full", f"full precision, {explore.num_steps} steps ({chosen}{cost})"
