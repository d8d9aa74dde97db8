"""The regression head that ImageReward and the aesthetic predictor share."""

from torch import nn


def regression_head(width: int) -> nn.Sequential:
    """[B, width] -> [B, 1]: linear layers without activations; the gaps in their numbers were dropout."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.Identity(),
        nn.Linear(1024, 128), nn.Identity(),
        nn.Linear(128, 64), nn.Identity(),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )  # fmt: skip
