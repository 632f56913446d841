"""Tools to try a model out: a mesh without processes, its lists of layers, FSDP2 outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .._torch_compat.distributed import fake_world
from ..mesh.layouts import TP_COL, TP_ROW

__all__ = [
    "AXES",
    "blocks_of",
    "dtype_of",
    "fake_mesh",
    "is_sharded_over_data",
    "lists_of_equals",
    "mesh_of",
    "recompute_blocks",
    "reshard",
    "shard_over_data",
    "shorten",
]

AXES: Mapping[int, tuple[str, ...]] = {
    2: (TP_ROW, TP_COL),
    3: ("dp", TP_ROW, TP_COL),
    4: ("replicate", "shard", TP_ROW, TP_COL),
}
"""The names of a mesh's axes, by how many there are. FSDP2 has those of data parallelism."""

_TRANSPORT = "TP2D_TRANSPORT"


@contextmanager
def fake_mesh(shape: Sequence[int], rank: int, transport: str) -> Iterator[DeviceMesh]:
    """A mesh that needs no process group and touches none.

    Args:
        shape: ``(R, C)``, or with the axes of data parallelism before it.
        rank: the rank of the mesh that this process plays.
        transport: ``"nccl"`` or ``"gloo"``, the transport that is imitated.
    """
    ranks = torch.Size(shape).numel()
    before = os.environ.get(_TRANSPORT)
    with fake_world(ranks, rank) as first:
        os.environ[_TRANSPORT] = transport
        try:
            with torch.device("cpu"):
                numbers = torch.arange(first, first + ranks).view(*shape)
            yield DeviceMesh("cpu", numbers, mesh_dim_names=AXES[len(shape)])
        finally:
            if before is None:
                del os.environ[_TRANSPORT]
            else:
                os.environ[_TRANSPORT] = before


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first floating-point parameter.

    Raises:
        ValueError: if there is none.
    """
    for param in model.parameters():
        if param.is_floating_point():
            return param.dtype
    raise ValueError(
        f"{type(model).__name__} has no floating-point parameters, so that it has nothing to "
        f"train: give the model as it is trained, before it is quantized"
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in a model's outermost lists: its layers, which FSDP2 shards one by one."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += child
        else:
            found += blocks_of(child)
    return found


def lists_of_equals(model: nn.Module, prefix: str = "") -> dict[str, nn.ModuleList]:
    """By name, the lists of equal layers among a model's outermost lists."""
    found: dict[str, nn.ModuleList] = {}
    for name, child in model.named_children():
        if not isinstance(child, nn.ModuleList):
            found |= lists_of_equals(child, f"{prefix}{name}.")
        elif len({_form(layer) for layer in child}) == 1:
            found[prefix + name] = child
    return found


def shorten(model: nn.Module, layers: int | Mapping[str, int]) -> None:
    """Keep only the first layers of each list of equal layers.

    Args:
        layers: how many are kept, of all lists; or of each list, by its name.
    """
    for name, found in lists_of_equals(model).items():
        kept = layers if isinstance(layers, int) else layers.get(name, len(found))
        del found[kept:]


def _form(layer: nn.Module) -> tuple[Any, ...]:
    """The classes and parameters of a layer; they are the same for layers that do the same."""
    kinds = tuple(type(module) for module in layer.modules())
    params = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )
    return kinds, params


def recompute_blocks(model: nn.Module) -> None:
    """Apply activation checkpointing to each layer."""
    for block in blocks_of(model):
        # There is no random state to preserve, since fake tensors draw no random numbers.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard_over_data(model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """Apply FSDP2 outside, as its documentation says: block by block, then to the root.

    Args:
        mesh: if it has no axis of data parallelism, nothing is done.
        reshard: whether gathered weights are freed after forward.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    data = names[:-2]
    if not data or all(mesh[name].size() == 1 for name in data):
        return
    over = mesh[data] if len(data) > 1 else mesh[data[0]]
    for block in blocks_of(model):
        fully_shard(block, mesh=over, reshard_after_forward=reshard)
    # None is FSDP2's default: the root keeps what it gathers, which backward needs first.
    fully_shard(model, mesh=over, reshard_after_forward=None if reshard else False)


def reshard(model: nn.Module) -> None:
    """Make FSDP2 free the weights that it gathered in a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded_over_data(model: nn.Module) -> bool:
    """Whether FSDP2 was applied to a model, which then cannot be copied."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh on which a plan was applied to a model.

    Raises:
        ValueError: if no plan was applied.
    """
    for param in model.parameters():
        if isinstance(param, DTensor):
            return param.device_mesh
    raise ValueError(
        f"no plan was applied to {type(model).__name__}: give a mesh, (2, 2) say, and a plan if "
        f"it is none of the models that torch_tp2d.plan_for knows"
    )
