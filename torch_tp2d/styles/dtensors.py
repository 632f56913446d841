"""From DTensors to local shards and back, as autograd nodes without the checks of DTensor's own.

Those take longer than a small product. In a traced graph, where they cost nothing, they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .._once import once_differentiable
from .._torch_compat.distributed import dtensor_of, spec_of
from .._torch_compat.tensors import local_tensor
from .._tracing import apply_node, in_graph
from ..comm import nothing
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import Layout, contiguous_strides, normalize, reduced
from ..runtime.deferred import undeferred
from ..runtime.versions import versions

__all__ = ["local_shards", "shard_of", "to_dtensor", "values_of"]


class _LocalShards(torch.autograd.Function):
    """``to_local()`` of parameters. Backward waits here for gradients that arrive deferred."""

    @staticmethod
    def forward(ctx: Any, *params: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs, ctx.strides, views = [], [], []
        for param in params:
            shard = local_tensor(param)
            ctx.specs.append(spec_of(param))
            ctx.strides.append(shard.stride())
            views.append(shard.view_as(shard))
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(map(_placed_like, grads, ctx.specs, ctx.strides))


def _placed_like(grad: Tensor | None, spec: Any, strides: tuple[int, ...]) -> Tensor | None:
    """A shard's gradient as a DTensor of the parameter's ``spec``."""
    if grad is None:
        return None
    grad = undeferred(grad)
    if spec is None:
        return grad
    if grad.stride() == strides:
        return dtensor_of(grad, spec)
    return DTensor.from_local(
        grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def local_shards(*params: Any) -> tuple[Any, ...]:
    """The local shards of parameters. Their gradients become DTensors placed like the parameters.

    Args:
        params: DTensors, or plain tensors, which are returned as they are; None stays None.
    """
    if in_graph() or not torch.is_grad_enabled():
        return tuple(map(_shard, params))
    learning = [param for param in params if param is not None and param.requires_grad]
    shards: tuple[Any, ...] = apply_node(_LocalShards, *learning) if learning else ()
    if len(learning) == len(params):
        return shards
    left = iter(shards)
    return tuple(
        _shard(param) if param is None or not param.requires_grad else next(left)
        for param in params
    )


def _shard(param: Any) -> Any:
    return param.to_local() if isinstance(param, DTensor) else param


def values_of(param: Any) -> Tensor:
    """A detached view of this rank's part of a parameter, which follows changes of its values."""
    return local_tensor(param).detach()


class _ToLocal(torch.autograd.Function):
    """``to_local()`` of a contiguous DTensor; ``spec`` is that of its gradient.

    Where the shard is kept for backward, so is the DTensor, by which torch tells whether it was
    changed: an operation in place counts as a change of that alone.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, spec: Any, kept: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        if kept:
            ctx.save_for_backward(x)
        shard: Tensor = local_tensor(x)
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        _ = ctx.saved_tensors  # Unpacking compares versions.
        (grad,) = grads
        if grad is None:
            return None, None, None
        return dtensor_of(undeferred(grad).contiguous(), ctx.spec), None, None


class _FromLocal(torch.autograd.Function):
    """``from_local()``: a contiguous local shard as the DTensor of ``spec``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Any) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placements = reduced(spec.placements)
        return dtensor_of(x.detach(), spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        grad = grads[0]
        if grad is not None and tuple(grad.placements) != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return local_tensor(grad), None


class _FromNothing(torch.autograd.Function):
    """``from_local()`` in a graph of a shard without elements.

    Where a whole gradient is split, DTensor gives a rank that gets nothing new zeros. They depend
    on nothing of backward, so the sums that follow would come into that rank's graph of forward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: Any, placements: Any, shape: Any, stride: Any
    ) -> DTensor:
        ctx.placements = reduced(placements)
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        there = grad.redistribute(placements=ctx.placements).to_local()
        return nothing(grad.to_local(), there.shape) + there, None, None, None, None


def shard_of(
    x: DTensor,
    grid: Grid,
    *,
    grad_placements: Sequence[Placement] | None = None,
    needed: bool = True,
    kept: bool = False,
) -> Tensor:
    """``x.to_local(grad_placements=grad_placements)`` of a DTensor on the grid's mesh.

    Args:
        needed: the backward of what takes the shard needs its values, or those gathered of it.
        kept: it keeps the shard itself.

    Raises:
        RuntimeError: if ``x`` was written into since it was taken before, in the same forward. Of a
            shard that backward needs torch does not tell.
    """
    if in_graph() or not (torch.is_grad_enabled() and x.requires_grad):
        return x.to_local(grad_placements=grad_placements)
    now, taken = versions(x), grid.context.taken
    # Where nothing tells a forward from the next, a leaf may be filled anew in between.
    again = x.is_leaf and grid.context.running is None
    if needed and (again or x not in taken):
        taken[x] = now
    if taken.get(x, now) != now:
        raise RuntimeError(
            f"a DTensor of shape {tuple(x.shape)} on mesh {describe_mesh(grid.mesh)} has been "
            f"modified by an inplace operation since a module of the plan took it, whose backward "
            f"needs it as it was: write x = x + y in the place of x += y"
        )
    local, spec = local_tensor(x), spec_of(x)
    if not local.is_contiguous() or spec.mesh != grid.mesh:
        return x.to_local(grad_placements=grad_placements)
    placements = reduced(spec.placements) if grad_placements is None else tuple(grad_placements)
    to = grid.spec(placements, spec.shape, x.dtype)
    return apply_node(_ToLocal, x, to, needed and kept)


def to_dtensor(
    x: Tensor,
    layout: Layout,
    grid: Grid,
    shape: Sequence[int] | None = None,
    features: int | None = None,
) -> DTensor:
    """A local shard as a DTensor on the mesh.

    Args:
        shape: the global shape; by default it follows from the sizes of the current tokens.
    """
    layout = normalize(layout, x.ndim)
    if shape is None:
        x = grid.without_stand_in(x, layout)
        shape = grid.shape_of(x, layout, features)()
    x, shape, placements = x.contiguous(), torch.Size(shape), grid.placements(layout)
    if in_graph():
        stride = contiguous_strides(shape)
        if not x.numel():
            return _FromNothing.apply(x, grid.mesh, placements, shape, stride)
        return DTensor.from_local(
            x, grid.mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return apply_node(_FromLocal, x, grid.spec(placements, shape, x.dtype))
