"""DiffusionNFT (arXiv 2509.16117) as the Sol-RL reference trains it.

The policy is pushed towards good samples and away from bad ones without any likelihood: v+ = beta v + (1 - beta) v_old
is fitted to samples of high advantage, its mirror image v- = (1 + beta) v_old - beta v to those of low advantage. With
v = v_old the gradient is the advantage times the gradient of the positive term.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from solrl.config import Config
from solrl.flow import clean_from_velocity, per_sample
from solrl.objectives.base import Batch, Objective, Point, noisings, velocity_distance


class NFT(Objective):
    """DiffusionNFT; its settings are those of ``train`` itself."""

    def points(self, batch: Batch, config: Config) -> Iterator[Point]:
        """See Objective."""
        train = config.train
        for latents, sigma, _ in noisings(batch, config.num_train_timesteps):
            loss = partial(
                nft_loss, noised=latents, clean=batch.clean, sigma=sigma, advantages=batch.advantages, beta=train.beta,
                advantage_clip=train.advantage_clip,
            )  # fmt: skip
            yield Point(latents, sigma, loss)


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    noised: Tensor,
    clean: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    *,
    reference_velocity: Tensor | None = None,
    beta: float = 1.0,
    advantage_clip: float = 5.0,
) -> tuple[Tensor, Tensor]:
    """One loss per sample: (policy [B], kl [B]), float32.

    ``velocity``, ``old_velocity``, ``reference_velocity``, ``noised``, ``clean`` are [B, ...]; ``sigma`` and
    ``advantages`` are [B]. policy = clip [ r L+ / beta + (1 - r) L- / beta ], r = clamp(A, +-clip) / (2 clip) + 1/2,
    L = mean((x0 - clean)^2 / w), w = mean |x0 - clean| without gradient, at least 1e-5, per sample and per sign.
    kl = mean((v - v_reference)^2), zeros without a reference.
    """
    velocity, old_velocity, noised, clean = (t.float() for t in (velocity, old_velocity.detach(), noised, clean))
    positive = beta * velocity + (1 - beta) * old_velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    good = advantages.float().clamp(-advantage_clip, advantage_clip) / (2 * advantage_clip) + 0.5
    fit_positive, fit_negative = (
        _normalised_error(clean_from_velocity(noised, v, sigma.float()), clean) for v in (positive, negative)
    )
    policy = advantage_clip * (good * fit_positive + (1 - good) * fit_negative) / beta
    return policy, velocity_distance(velocity, reference_velocity)


def _normalised_error(predicted: Tensor, clean: Tensor) -> Tensor:
    """[B, ...] -> [B]: mean squared error over the sample's own mean absolute error (a constant)."""
    error = predicted - clean
    weight = error.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
    return (error.square() / per_sample(weight, error)).flatten(1).mean(1).float()
