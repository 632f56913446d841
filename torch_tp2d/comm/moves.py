"""Differentiable collectives.

:func:`move` changes a tensor's layout along one axis, :func:`reshard_fused_grad` goes from a shard
of a fused weight to shards of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._once import once_differentiable
from .._torch_compat.tensors import unviewed
from .._tracing import apply_node, in_graph
from ..mesh.layouts import same_placement
from .axis import Axis
from .fused import reshard_fused
from .transfers import all_gather, all_reduce, all_to_all, reduce_scatter

__all__ = ["move", "reshard_fused_grad"]


class _Move(torch.autograd.Function):
    """Changes the layout along one axis; see :func:`move` for the table of pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        src: Placement,
        dst: Placement,
        src_grad: Placement,
        dst_grad: Placement,
        sizes: dict[int, Sequence[int]],
    ) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        ctx.grads = dst_grad, src_grad
        moved = _raw_move(x, axis, src, dst, sizes)
        # What has not moved is the giver's memory: of that autograd has to see what is written.
        return moved if in_graph() or same_placement(src, dst) else unviewed(moved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        have, want = ctx.grads
        return (_raw_move(grad, ctx.axis, have, want, ctx.sizes), *(None,) * 6)


def _raw_move(
    x: Tensor, axis: Axis, src: Placement, dst: Placement, sizes: dict[int, Sequence[int]]
) -> Tensor:
    if same_placement(src, dst):
        return x.view_as(x)
    match src, dst:
        case Shard(), Replicate():
            return all_gather(x, src.dim, sizes[src.dim], axis).wait().contiguous()
        case Shard(), Shard():
            return all_to_all(x, dst.dim, sizes[dst.dim], src.dim, sizes[src.dim], axis).wait()
        case Replicate(), Shard():
            # A copy: a view would keep the entire tensor alive.
            start = sum(sizes[dst.dim][: axis.index])
            return x.narrow(dst.dim, start, sizes[dst.dim][axis.index]).clone(
                memory_format=torch.contiguous_format
            )
        case Partial(), Shard():
            return reduce_scatter(x, dst.dim, sizes[dst.dim], axis).wait().contiguous()
        case Partial(), Replicate():
            return all_reduce(x, axis).wait()
    raise AssertionError(f"no move from {src} to {dst}")


def _grad_of(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def move(
    x: Tensor,
    axis: Axis,
    src: Placement,
    dst: Placement,
    sizes: dict[int, Sequence[int]],
    *,
    partial_grad: bool = False,
) -> Tensor:
    """Change the layout of ``x`` along one axis, differentiably.

    ============================  ==============  =======================================
    ``src -> dst``                forward         backward
    ============================  ==============  =======================================
    ``Shard -> Replicate``        all-gather      slice; reduce-scatter if ``partial_grad``
    ``Replicate -> Shard``        slice           all-gather
    ``Shard -> Shard``            all-to-all      all-to-all
    ``Partial -> Shard``          reduce-scatter  all-gather
    ``Partial -> Replicate``      all-reduce      nothing; all-reduce if ``partial_grad``
    ``Replicate -> Replicate``    nothing         nothing; all-reduce if ``partial_grad``
    ============================  ==============  =======================================

    Args:
        sizes: for each sharded dim, every rank's extent in it.
        partial_grad: each rank's gradient of the result is partial, so these are summed over the
            axis; otherwise every rank has the full gradient.
    """
    if axis.size == 1:
        return x
    if partial_grad and not isinstance(dst, Replicate):
        raise AssertionError(f"only a replicated result has a partial gradient, not {dst}")
    dst_grad: Placement = Partial() if partial_grad else _grad_of(dst)
    src_grad = _grad_of(src)
    if same_placement(src, dst) and same_placement(src_grad, dst_grad):
        return x
    return apply_node(_Move, x, axis, src, dst, src_grad, dst_grad, sizes)


class _ReshardFused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[int], axis: Axis, *shards: Tensor | int | None
    ) -> tuple[Tensor | None, ...]:
        ctx.parts, ctx.axis, ctx.dims = parts, axis, shards[1::2]
        dealt = _reshard_all(shards[::2], ctx.dims, parts, axis, back=False)
        if in_graph():
            return dealt
        return tuple(None if shard is None else unviewed(shard) for shard in dealt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dealt = _reshard_all(grads, ctx.dims, ctx.parts, ctx.axis, back=True)
        return (None, None, *(item for grad in dealt for item in (grad, None)))


def _reshard_all(
    shards: Sequence[Any], dims: Sequence[Any], parts: Sequence[int], axis: Axis, *, back: bool
) -> tuple[Tensor | None, ...]:
    moving = [
        None if shard is None else reshard_fused(shard, dim, parts, axis, back=back)
        for shard, dim in zip(shards, dims, strict=True)
    ]
    return tuple(None if one is None else one.wait().contiguous() for one in moving)


def reshard_fused_grad(
    weight: Tensor, dim: int, bias: Tensor | None, parts: Sequence[int], axis: Axis
) -> tuple[Tensor, Tensor | None]:
    """:func:`reshard_fused` of a weight's ``dim`` and of its bias, both at once, differentiably."""
    if axis.size == 1:
        return weight, bias
    return _ReshardFused.apply(parts, axis, weight, dim, bias, 0)
