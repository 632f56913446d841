"""Gathers an input along ``tp_col`` for a module of the user's, which may use it in any way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from .._once import once_differentiable
from .._tracing import in_graph
from ..mesh.grid import Grid
from ..mesh.layouts import Layout, normalize
from ..ops.matmul import Shards
from ..ops.matmul.inputs import Shared, gather
from ..runtime.deferred import Gathering, Transfer
from .boundary import shards_of
from .twins import keep_twin

__all__ = ["gather_for_module"]


class _Attach(torch.autograd.Function):
    """Makes a gathered value that of ``x`` in the graph, with a replicated gradient.

    Since every rank has the full gradient, backward only takes this rank's shard of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return Gathering(whole.transfer) if isinstance(whole, Gathering) else whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, sizes, axis = ctx.shards
        start = sum(sizes[: axis.index])
        return grads[0].narrow(dim, start, sizes[axis.index]).contiguous(), None, None


def gather_for_module(
    x: Tensor,
    declared: Layout,
    by: str,
    grid: Grid,
    shape: Sequence[int] | None,
    parts: tuple[bool, bool],
) -> Tensor:
    """Gather an input along ``tp_col`` for a module of the user's, as a local tensor.

    A 2-D style inside that is given this very tensor takes its twin instead
    (:mod:`~torch_tp2d.styles.twins`), whose gradients add up locally and go back in one
    reduce-scatter.

    Args:
        by: names the module, for messages.
        parts: along row and col, whether the maker of ``x`` sums its gradient.
    """
    declared = normalize(declared, x.ndim)
    wanted = declared[0], Replicate()
    sizes = grid.sizes_of(x) if shape is None else tuple(shape[:-1])
    if grid.col.size == 1 or not isinstance(declared[1], Shard):
        whole = grid.redistribute(x, declared, wanted, shape=shape)
        return grid.with_stand_in(whole, wanted, sizes, shares=parts, by=by)
    # Whether a Linear inside fuses its gather is not known here, but only whether any Linear does.
    shards = shards_of(x, declared, grid, None, shape, fuses=grid.context.fuses)
    if shards.dim == x.ndim - 1:
        return _gather_features_for_module(x, declared, by, grid, shards, shape, parts)
    if in_graph():
        # The graph waits for the twin where that is multiplied, and for this tensor only if the
        # module's own code reads it. Both come from the same gather.
        whole = Transfer(x, *shards).value(if_used=True)
    else:
        whole = Gathering(Transfer(x, *shards))
    learns = torch.is_grad_enabled() and x.requires_grad
    result = _Attach.apply(x, whole, shards) if learns else whole
    result = grid.with_stand_in(result, wanted, sizes, shares=parts, by=by)
    if in_graph():
        keep_twin(result, wanted, Shared(x, shards), grid.context)
    elif learns:
        keep_twin(result, wanted, gather(x, shards, grid.context, whole), grid.context)
    return result


def _gather_features_for_module(
    x: Tensor,
    declared: Layout,
    by: str,
    grid: Grid,
    shards: Shards,
    shape: Sequence[int] | None,
    parts: tuple[bool, bool],
) -> Tensor:
    """:func:`gather_for_module` for split features, which no product takes piece by piece."""
    wanted = declared[0], Replicate()
    if shape is None:
        features = sum(shards.sizes)
        shape = (*grid.shape_of(x, declared, features)()[:-1], features)
    twin = grid.redistribute(x, declared, wanted, shape=shape, partial_grad=(False, True))
    result = _Attach.apply(x, twin.detach(), shards)
    result = grid.with_stand_in(result, wanted, tuple(shape[:-1]), shares=parts, by=by)
    if twin.requires_grad:
        keep_twin(result, wanted, twin, grid.context)
    return result
