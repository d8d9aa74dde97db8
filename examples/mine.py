"""A model family and an objective of your own. Save it where Python finds it, and name both in the config.

    PYTHONPATH=examples solrl train tiny_flux --lora.targets None --model.family mine:QueriesAndValues \
        --train.objective mine:WeightedMatching --train.objective_options.strength 0.5
"""

from functools import partial

from solrl.models.flux import FluxPolicy
from solrl.objectives.base import Objective, Point, noisings, velocity_distance


class QueriesAndValues(FluxPolicy):
    """FLUX, adapted in less than its attention where `lora.targets` is unset."""

    lora_targets = ("to_q", "to_v")


class WeightedMatching(Objective):
    """Flow matching towards good samples and away from bad ones."""

    strength: float = 1.0  # a setting: --train.objective_options.strength

    def points(self, batch, config):
        """Where velocities are asked for, and the loss there: [B] for the policy, [B] for the KL term."""
        for latents, sigma, noise in noisings(batch, config.num_train_timesteps):
            yield Point(latents, sigma, partial(self.loss, target=noise - batch.clean, advantages=batch.advantages))

    def loss(self, velocity, old_velocity, *, target, advantages, reference_velocity=None):
        """Samples above their group's mean are fitted, those below are pushed away."""
        error = (velocity.float() - target).square().flatten(1).mean(1)
        return self.strength * advantages * error, velocity_distance(velocity, reference_velocity)
