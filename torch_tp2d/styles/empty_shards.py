"""Parameters of which some rank of the grid holds nothing, which FSDP2 does not take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat import is_sharded_by_fsdp, parameters_of
from ..mesh.grid import describe_mesh
from .module_kinds import describe_module

__all__ = ["refuse_empty", "refuse_empty_under_fsdp"]


def refuse_empty(name: str, param: Any, mesh: DeviceMesh) -> None:
    """Refuse a parameter that FSDP2 is to reduce the gradient of, if some rank holds none of it.

    FSDP2 raises there, in backward, and leaves the other ranks waiting.

    Args:
        name: what the message calls it.
        param: a DTensor on the grid, or on a mesh with the grid's axes last.
        mesh: the grid.

    Raises:
        ValueError: on every rank alike, by sizes that all of them know.
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
    """Whether some rank holds nothing of a tensor that is not empty itself."""
    smallest = list(shape)
    for placement, count in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            size = smallest[placement.dim]
            smallest[placement.dim] = max(0, size - (count - 1) * -(-size // count))
    return 0 in smallest and 0 not in shape


def refuse_empty_under_fsdp(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have a module refuse to run with such a parameter inside once FSDP2 shards it.

    For a style that torch's own ``parallelize_module`` applies, where nothing looks at the whole
    model when it first runs. A module without such a parameter runs as before.
    """

    def refuse(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for owner in filter(is_sharded_by_fsdp, module.modules()):
            for name, param in parameters_of(owner).items():
                refuse_empty(f"{describe_module(module)}: its {name}", param, mesh)

    for param in module.parameters():
        if isinstance(param, DTensor) and _leaves_some_empty(
            tuple(param.shape), param.placements, mesh
        ):
            module.register_forward_pre_hook(refuse)
            return
