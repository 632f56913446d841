"""Transfers of entire shards, in one piece: how activations move beside products, except on gloo.

The *evenly* functions are for compiled graphs, in the steps that torch's own collectives take; the
others bring every rank's shard as it lies in memory, in one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .._torch_compat.tensors import c10d_functional as _c10d
from .axis import Axis
from .pending import Pending, nothing

__all__ = ["gather_evenly", "gather_shards", "scatter_evenly", "scatter_shards"]


def gather_evenly(x: Tensor, dim: int, axis: Axis) -> Pending:
    """:func:`~torch_tp2d.comm.all_gather` of shards of one size, in the steps that torch takes.

    By these steps Inductor's async tensor parallelism recognises what it can fuse with a product.
    """
    start = partial(_c10d.all_gather_into_tensor.default, x.contiguous(), axis.size, axis.group)

    def finish(wires: list[Tensor]) -> Tensor:
        return wires[0] if dim == 0 else torch.cat(wires[0].chunk(axis.size), dim)

    return Pending(None, [start], finish)


def scatter_evenly(x: Tensor, dim: int, axis: Axis) -> Pending:
    """:func:`~torch_tp2d.comm.reduce_scatter` to shards of one size, like :func:`gather_evenly`."""
    sent = (x if dim == 0 else torch.cat(x.chunk(axis.size, dim))).contiguous()
    start = partial(_c10d.reduce_scatter_tensor.default, sent, "sum", axis.size, axis.group)
    return Pending(None, [start], lambda wires: wires[0])


def gather_shards(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Pending:
    """Gather every rank's shard as it lies in memory, in one buffer.

    Args:
        x: this rank's shard, ``sizes[axis.index]`` long in ``dim``.

    Returns:
        ``[ranks, *longest]`` with the shape of the longest shard; shorter ones are padded in
        ``dim``.
    """
    shape = [*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]]
    if math.prod(shape) == 0:
        return Pending(nothing(x, [axis.size, *shape]))
    if x.shape[dim] < max(sizes):
        sent = x.new_zeros(shape)
        sent.narrow(dim, 0, x.shape[dim]).copy_(x)
    else:
        # A copy: x may be changed in place, or freed, while it travels.
        sent = x.clone(memory_format=torch.contiguous_format)
    sent = sent.unsqueeze(0)
    start = partial(_c10d.all_gather_into_tensor.default, sent, axis.size, axis.group)
    return Pending(None, [start], lambda wires: wires[0])


def scatter_shards(x: Tensor, axis: Axis) -> Pending:
    """Sum over the axis what every rank holds for this one.

    Args:
        x: ``[ranks, *shard]``, contiguous; must not be written into afterwards.

    Returns:
        ``[*shard]``.
    """
    if x.numel() == 0:
        return Pending(nothing(x, x.shape[1:]))
    start = partial(_c10d.reduce_scatter_tensor.default, x, "sum", axis.size, axis.group)
    return Pending(None, [start], lambda wires: wires[0][0])
