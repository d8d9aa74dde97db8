"""What the parts of solrl hand to each other.

Letters used for shapes everywhere: G groups (prompts), N candidates explored per group, K candidates kept per group,
B samples in a micro-batch, T trained timesteps per sample, C/H/W image channels, height, width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from solrl.errors import Interrupted as Interrupted
from solrl.errors import RewardFailed as RewardFailed
from solrl.errors import SolrlError as SolrlError
from solrl.errors import UsageError as UsageError

Seeds: TypeAlias = list[list[int]]
"""One 128-bit seed per candidate: ``seeds[group][candidate]``."""

VelocityFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(latents [B, ...], sigma [B]) -> velocity [B, ...]."""


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row a prompt. What a family does not use is None."""

    embeds: Tensor  # [B, tokens, width]
    pooled: Tensor | None = None  # [B, width]
    mask: Tensor | None = None  # [B, tokens], 1 = a real token

    def rows(self, index: Sequence[int] | Tensor) -> Conditioning:
        """The rows named by ``index``, in its order; repeats are allowed, and none."""
        picked = torch.as_tensor(index, device=self.embeds.device).long()
        return Conditioning(*(None if t is None else t[picked] for t in (self.embeds, self.pooled, self.mask)))  # type: ignore[arg-type]

    @staticmethod
    def stack(parts: Sequence[Conditioning]) -> Conditioning:
        """The rows of all parts, one part after the other."""
        columns = zip(*((part.embeds, part.pooled, part.mask) for part in parts), strict=True)
        return Conditioning(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Conditioning:
        """The same rows on ``device``."""
        return Conditioning(*(None if t is None else t.to(device) for t in (self.embeds, self.pooled, self.mask)))  # type: ignore[arg-type]


class Policy(nn.Module, ABC):
    """A flow-matching text-to-image model: velocity = noise - clean, sigma in [0, 1], 1 = noise.

    ``transformer`` may carry adapters; text encoders and the decoder are frozen and never adapted.
    """

    transformer: nn.Module
    lora_targets: tuple[str, ...] = ()
    """What is adapted where `lora.targets` is unset, as peft matches names."""
    latent_shape: tuple[int, ...]
    """Shape of one sample's latents as the transformer takes them, without the batch dimension."""
    vae: Any
    """The autoencoder whose ``decoder`` ``decode`` runs; the explorer may be given another one."""

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompts -> conditioning, one row a prompt. No gradient. Called from another thread while this one draws."""

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """latents [B, ...], sigma [B] -> velocity [B, ...] in the latents' shape."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents [B, ...] -> images [B, 3, H, W], float32 in [0, 1]. No gradient."""

    @abstractmethod
    def sigmas(self, num_steps: int) -> Tensor:
        """The family's sampling grid: float64 [num_steps + 1], falling from 1 to 0."""

    @abstractmethod
    def sibling(self, transformer: nn.Module) -> Self:
        """The same policy around another transformer; encoders and decoder are shared, not copied."""

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of one sample's noise; that of the latents, but where ``smaller`` made them so."""
        return self.latent_shape

    def start(self, noise: Tensor) -> Tensor:
        """The latents [B, *latent_shape] that samples of the noise [B, *noise_shape] start from."""
        return noise

    def smaller(self, factor: int) -> Self:
        """The same policy, drawing ``factor`` times smaller images, which ``decode`` enlarges.

        Latents start from means over blocks of the full-size noise, scaled to unit variance.
        """
        raise UsageError(f"explore.downscale: {type(self).__name__} draws images of one size only; set it to 1")

    @property
    def device(self) -> torch.device:
        """Where the transformer's parameters live."""
        return next(self.transformer.parameters()).device


@runtime_checkable
class Reward(Protocol):
    """A scorer of images. It raises when it cannot score; it never makes a value up.

    A candidate it cannot judge (an unreadable reply of a generative judge, say) is *missing*: return the pair
    ``(values, is_present)`` with ``is_present`` a bool tensor [B]. NaN and inf are failures, never "missing".
    With an attribute ``part_weights``, R numbers, it returns R rewards an image, [B, R]; training standardizes each
    within its group before the weighted sum, and all else sees the plain weighted sum.
    """

    name: str
    range: tuple[float, float]
    description: str

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor | tuple[Tensor, Tensor]:
        """images [B, 3, H, W] float in [0, 1] and B prompts -> float tensor [B]."""
        ...


@dataclass(frozen=True)
class LoraPair:
    """One layer's adapter: the layer's weight becomes W + scale * b @ a."""

    a: Tensor  # [rank, in] float32
    b: Tensor  # [out, rank] float32
    scale: float


Weights: TypeAlias = Mapping[str, LoraPair | Tensor]
"""What is trained: adapters by the layer's name; in full fine-tuning all the transformer's parameters by theirs.

The latter may be sharded (solrl/sharding.py).
"""


@dataclass(frozen=True)
class Trajectory:
    """The way samples were drawn, for a loss that needs the likelihood of each step. Rows are samples."""

    latents: Tensor  # [B, num_steps + 1, ...] float32: noise first, clean last
    log_probs: Tensor  # [B, num_steps] float32: of each step under the policy that drew it; 0 in steps without noise
    trained: Tensor  # [B, num_steps] bool on the CPU: the steps trained on, equally many in every row

    def rows(self, index: slice | int) -> Trajectory:
        """The samples named by ``index``; an int gives one sample's, without the batch dimension."""
        return Trajectory(self.latents[index], self.log_probs[index], self.trained[index])

    @staticmethod
    def stack(single: Sequence[Trajectory]) -> Trajectory:
        """Samples without a batch dimension -> one row each."""
        fields = ((one.latents, one.log_probs, one.trained) for one in single)
        return Trajectory(*(torch.stack(tensors) for tensors in zip(*fields, strict=True)))


PathSampler: TypeAlias = Callable[[VelocityFn, Tensor, Tensor, Sequence[int]], Trajectory]
"""(velocity, noise [B, ...], sigmas [num_steps + 1], seeds of the B samples) -> how they were drawn."""


@dataclass(frozen=True)
class Rollouts:
    """One micro-batch of finished samples, padding removed."""

    index: Tensor  # [b] int64 on the CPU: flat position (group * candidates + candidate) of each sample
    prompts: list[str]  # b prompts
    clean: Tensor  # [b, ...] float32, the sampler's last latents
    images: Tensor  # [b, 3, H, W] float32 in [0, 1]
    trajectory: Trajectory | None = None  # where a PathSampler drew them


@dataclass(frozen=True)
class Scores:
    """Rewards of a whole stage, equal on every rank."""

    values: Tensor  # [G, N] float64 on the CPU; 0 where missing
    present: Tensor  # [G, N] bool on the CPU
    clean: dict[int, Tensor]  # flat position -> clean latents, only of the samples this rank drew
    standardized: Tensor | None = None  # [G, N] float64, for a reward of several parts (groups.standardized_sum)
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # as ``clean``, where they were kept

    @property
    def signal(self) -> Tensor:
        """[G, N] what training goes by."""
        return self.values if self.standardized is None else self.standardized

    def rows(self) -> list[list[float | None]]:
        """The values as numbers, group by group; None: missing."""
        rows = zip(self.values.tolist(), self.present.tolist(), strict=True)
        return [[value if there else None for value, there in zip(*row, strict=True)] for row in rows]
