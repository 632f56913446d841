"""Refuses parameters of which some rank of the grid holds no element, where FSDP2 is used."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat.distributed import is_sharded_by_fsdp
from .._torch_compat.modules import parameters_of
from .._tracing import eager_only
from ..mesh.grid import describe_mesh
from .module_kinds import describe_module

__all__ = ["refuse_empty", "refuse_empty_under_fsdp"]


def refuse_empty(name: str, param: Any, mesh: DeviceMesh) -> None:
    """Refuse a parameter under FSDP2 if it requires grad and some rank holds no element of it.

    On that rank FSDP2 would raise in backward, and leave the other ranks waiting.

    Args:
        name: what the message calls it.
        param: a DTensor on the grid, or on a mesh with the grid's axes last.
        mesh: the grid.

    Raises:
        ValueError: on every rank alike, since it depends only on sizes that all ranks know.
    """
    if not isinstance(param, DTensor) or not param.requires_grad:
        return
    shape, placements = tuple(param.shape), param.placements[-2:]
    if _leaves_some_empty(shape, placements, mesh):
        raise ValueError(
            f"{name} of shape {shape}, placed {placements}, leaves some ranks of mesh "
            f"{describe_mesh(mesh)} without elements, which FSDP2 does not take: use a larger size "
            f"there, or fewer rows or columns"
        )


def _leaves_some_empty(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh
) -> bool:
    """Whether some rank holds no element of a tensor that is not itself empty."""
    smallest = list(shape)
    for placement, count in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            size = smallest[placement.dim]
            smallest[placement.dim] = max(0, size - (count - 1) * -(-size // count))
    return 0 in smallest and 0 not in shape


def refuse_empty_under_fsdp(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module refuse to run if FSDP2 shards it and some rank holds none of a parameter.

    This is for styles that torch's own ``parallelize_module`` applies, since no hook then checks
    the full model when it first runs. A module without such a parameter gets no hook.
    """

    @eager_only
    def refuse(module: nn.Module, args: Any) -> None:
        for owner in filter(is_sharded_by_fsdp, module.modules()):
            for name, param in parameters_of(owner).items():
                refuse_empty(f"{describe_module(module)}: its {name}", param, mesh)

    for param in module.parameters():
        if isinstance(param, DTensor) and _leaves_some_empty(
            tuple(param.shape), param.placements, mesh
        ):
            module.register_forward_pre_hook(refuse)
            return
