"""Weights in shares: every process holds 1/n of each tensor and has a block's weights whole only while it computes.

This is torch's ``fully_shard`` (FSDP2): a sharded parameter is a DTensor. Forward and backward are collectives, so all
processes have to make the same calls in the same order: ``World.in_step`` says that a run is of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from solrl.compute import repeated_blocks
from solrl.distributed import World


@torch.no_grad()
def shard_(
    transformer: nn.Module,
    world: World,
    *,
    replicated: Iterable[nn.Parameter] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Every parameter is a share on ``world.device``, but for ``replicated`` ones, which are whole there.

    Weights are gathered in ``dtype`` (None: their own); gradients are summed over processes, not averaged, in float32.
    Block by block, so that the device never holds more than a block and the shares.
    """
    whole_ones = set(replicated)
    for parameter in whole_ones:
        parameter.data = parameter.data.to(world.device)
    mesh = init_device_mesh(world.device.type, (world.size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in dict.fromkeys([*repeated_blocks(transformer), transformer]):
        # The root, too, gives its weights back after a forward: between two of them every parameter is a share.
        part = fully_shard(
            module, mesh=mesh, reshard_after_forward=True, ignored_params=whole_ones, mp_policy=precision
        )
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_sharded(transformer: nn.Module) -> bool:
    """Whether ``shard_`` was here."""
    return isinstance(transformer, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, put together on every process that asks, which all must; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's share of a sharded tensor, a view; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(value: Tensor, like: Tensor) -> Tensor:
    """What of a whole ``value`` (or of one that is sharded as ``like`` is) belongs where ``like`` has its share."""
    if isinstance(like, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return local(value)


@torch.no_grad()
def fill_(tensor: Tensor, value: Tensor) -> None:
    """``tensor`` holds ``value``: whole, or sharded as it is. In place; nothing is sent."""
    local(tensor).copy_(share(value, tensor))
