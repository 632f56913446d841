"""Checks of a mesh, its axes as :class:`~torch_tp2d.comm.Axis`, and a rank's extent of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.tensors import disable_current_modes
from ..comm import Axis, link_of, transport_of
from ..comm.groups import ASKING, own_group
from .layouts import TP_COL, TP_ROW, Layout, describe_mesh

__all__ = ["Axes", "check_mesh", "flat_axis", "names_of", "on_mesh", "part_of"]

Axes = str | tuple[str, ...]

_MESH_MEND = (
    f'make it with init_device_mesh(device, (R, C), mesh_dim_names=("{TP_ROW}", "{TP_COL}")), or '
    f'slice a larger one: mesh["{TP_ROW}", "{TP_COL}"]'
)


def check_mesh(mesh: Any) -> None:
    """Refuse anything but a 2-D mesh named ``("tp_row", "tp_col")`` that holds this rank.

    Raises:
        TypeError: if ``mesh`` is not a DeviceMesh.
        ValueError: for other dims or names, or if this rank is not on it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, but got {type(mesh).__name__}: {_MESH_MEND}")
    if mesh.ndim != 2:
        raise ValueError(
            f"a 2-D style needs a 2-D mesh, but this one is {describe_mesh(mesh)}: {_MESH_MEND}"
        )
    if mesh.mesh_dim_names != (TP_ROW, TP_COL):
        raise ValueError(
            f'a 2-D style needs mesh dims named ("{TP_ROW}", "{TP_COL}") in this order, but this '
            f"mesh is {describe_mesh(mesh)}: {_MESH_MEND}"
        )
    # Needs real values even while a forward is traced with fake tensors.
    with disable_current_modes():
        ranks = mesh.mesh
        descends = any((ranks.diff(dim=dim) < 0).any() for dim in (0, 1))
    if descends:
        raise ValueError(
            f"the ranks of the mesh {describe_mesh(mesh)} are {mesh.mesh.tolist()}, but a process "
            f"group puts its own in ascending order, so they have to ascend along each axis: "
            f"{_MESH_MEND}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not on the mesh {describe_mesh(mesh)} of ranks "
            f"{mesh.mesh.flatten().tolist()}: apply the plan only on ranks that are on it"
        )


def flat_axis(mesh: DeviceMesh) -> Axis:
    """Both axes as one line of N ranks, in row-major order.

    It has a process group of our own rather than that of ``mesh._flatten()``: once a flat mesh is
    registered, torch 2.13 gathers DTensors that shard one dim over both axes as if one flat chunk
    had sharded them, which misplaces elements wherever the sizes do not divide.

    Raises:
        ValueError: if the ranks of the mesh do not ascend row by row.
    """
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"a style on both axes needs the ranks of the mesh in ascending order, row by row, but "
            f"those of {describe_mesh(mesh)} are {mesh.mesh.tolist()}: {_MESH_MEND}"
        )
    transport = transport_of(mesh)
    group = own_group(ranks, mesh.device_type, transport.own_groups)
    asking = ""
    if transport.own_groups is not None:
        asking = own_group(ranks, mesh.device_type, transport.own_groups, ASKING).group_name
    return Axis(
        name=f"{TP_ROW}_{TP_COL}",
        parts=tuple(mesh.shape),
        index=ranks.index(dist.get_rank()),
        group=group.group_name,
        transport=transport,
        link=link_of(group),
        asking_group=asking,
    )


def on_mesh(layout: Layout, axes: Axes) -> Layout:
    """Translate a ``(row, col)`` layout under ``axes`` into one on ``(tp_row, tp_col)``."""
    row, col = layout
    if axes == TP_ROW:
        return col, row
    return (row, col) if axes == TP_COL else (col, col)


def names_of(axes: Axes) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the mesh axes that act as the row and as the column under ``axes``."""
    row, col = frozenset((TP_ROW,)), frozenset((TP_COL,))
    if axes == TP_ROW:
        return col, row
    return (row, col) if axes == TP_COL else (frozenset(), row | col)


def part_of(extent: int, cuts: Sequence[Axis]) -> int:
    """This rank's extent of a dim that the axes shard one inside the other, outermost first."""
    for axis in cuts:
        extent = axis.split(extent)[axis.index]
    return extent
