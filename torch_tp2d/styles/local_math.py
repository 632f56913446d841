"""Runs a module's own math on local tensors, and sums the gradients of replicated parameters.

On ranks with different tokens a replicated parameter gets different terms of its gradient. Where
the module runs on local tensors, :func:`sum_grads` sums them. Where it runs on DTensors,
:func:`settle_after_backward` brings the gradient that DTensor leaves into the parameter's
placements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._once import once_differentiable
from .._torch_compat.modules import parameters_of
from .._torch_compat.tensors import hooks_again, tree_leaves
from .._tracing import in_graph
from ..comm import Axis
from ..mesh.axes import names_of
from ..mesh.grid import Grid
from ..mesh.handed import Handed, hand_out
from ..runtime.context import Context
from ..runtime.reductions import backward_of, summed
from ..runtime.versions import guard_in_backward
from .dtensors import local_shards
from .module_kinds import forward_of, is_conv1d

__all__ = [
    "local_math",
    "on_a_token",
    "parameters_inside",
    "run_locally",
    "settle_after_backward",
    "sum_grads",
]


def run_locally(
    params: Sequence[tuple[nn.Module, str]],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grid: Grid,
    *,
    shares: tuple[bool, bool] = (True, True),
    partial: Collection[str] = (),
) -> Any:
    """Run a module's own forward on local tensors, with plain tensors as its parameters.

    Args:
        params: owner and name of each parameter that is on the mesh.
        shares: along row and col, whether the gradients of replicated parameters are partial.
        partial: names of those whose gradients are partial along col, whatever ``shares`` says.
    """
    row = [grid.row] if grid.row.size > 1 and shares[0] else []
    on_mesh: list[Any] = [parameters_of(owner)[name] for owner, name in params]
    shards = local_shards(*on_mesh)
    split = [isinstance(param.placements[1], Shard) for param in on_mesh]
    on_col = [
        grid.col.size > 1 and not is_split and (shares[1] or name in partial)
        for (_, name), is_split in zip(params, split, strict=True)
    ]
    summed = {
        along_col: iter(
            sum_grads(
                [one for one, other in zip(shards, on_col, strict=True) if other is along_col],
                [*row, grid.col] if along_col else row,
                grid.context,
            )
        )
        for along_col in (False, True)
    }
    local = [next(summed[along_col]) for along_col in on_col]
    if in_graph():
        return _run_in_graph(params, on_mesh, local, forward, args, kwargs)
    of_row, of_col = names_of(grid.axes)
    for (_, name), tensor, is_split, along_col in zip(params, local, split, on_col, strict=True):
        if tensor.grad_fn is not None:
            sums = of_col if is_split or along_col else frozenset()
            hand_out(tensor, Handed(sums=sums | of_row if row else sums, parameter=name))
    _put_in_place(params, local)
    try:
        y = forward(*args, **kwargs)
    finally:
        for owner, name in params:
            del owner.__dict__[name]
    _put_in_place_in_backward(params, local, y, grid.context)
    for output in tree_leaves(y):
        if isinstance(output, Tensor):
            guard_in_backward(output, on_mesh)
    return y


def _run_in_graph(
    params: Sequence[tuple[nn.Module, str]],
    on_mesh: Sequence[Any],
    local: Sequence[Any],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """A forward on ``local`` in the place of parameters, as ``functional_call`` has it in a graph.

    An instance attribute that is deleted again is, for torch 2.12's Dynamo, the parameter deleted.
    """
    for (owner, name), tensor in zip(params, local, strict=True):
        parameters_of(owner)[name] = tensor
    try:
        return forward(*args, **kwargs)
    finally:
        for (owner, name), param in zip(params, on_mesh, strict=True):
            parameters_of(owner)[name] = param


def _put_in_place(params: Sequence[tuple[nn.Module, str]], local: Sequence[Tensor]) -> None:
    for (owner, name), tensor in zip(params, local, strict=True):
        # An instance attribute is found before the registered parameter, which stays in place.
        owner.__dict__[name] = tensor


def _put_in_place_in_backward(
    params: Sequence[tuple[nn.Module, str]], local: Sequence[Tensor], y: Any, context: Context
) -> None:
    """Have the local tensors in place again while backward runs through the module.

    If the module uses torch.utils.checkpoint inside, its code runs again then, on local tensors.
    """

    def removed() -> None:
        for (owner, name), tensor in zip(params, local, strict=True):
            if owner.__dict__.get(name) is tensor:
                del owner.__dict__[name]

    def begins(grads: Any) -> None:
        _put_in_place(params, local)
        backward_of(context).at_end.append(removed)

    outputs = (x for x in tree_leaves(y) if isinstance(x, Tensor)) if params else ()
    for node in {x.grad_fn for x in outputs if x.grad_fn is not None}:
        # Not a hook on the tensor, which would have the next style take its gradient by itself.
        node.register_prehook(begins)


def parameters_inside(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of each parameter of a module and of the modules inside it."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, param in parameters_of(owner).items()
        if param is not None
    ]


_LocalMath = Callable[..., Tensor]


def _layer_norm(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _rms_norm(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, weight, module.eps)


def _linear(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight
    return y if bias is None else y + bias


def local_math(module: nn.Module) -> _LocalMath | None:
    """The forward of a Linear, Conv1D, LayerNorm or RMSNorm, which take tokens one by one.

    None for any other module.
    """
    own = forward_of(module)
    if own is nn.Linear.forward:
        return _linear
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1:
        if own is nn.LayerNorm.forward:
            return _layer_norm
        if own is nn.RMSNorm.forward:
            return _rms_norm
    return _conv1d if is_conv1d(module) else None


def on_a_token(math: Callable[..., Tensor], x: Tensor, *params: Tensor | None) -> Tensor:
    """``math(x, *params)``, in a graph with a token that stands in where ``x`` has none.

    The gradients that torch's decompositions give for no tokens are constants. Their sums over the
    ranks, which do not depend on backward then, would be in this rank's graph of forward, and in
    that of backward on the others.
    """
    if not in_graph() or x.numel():
        return math(x, *params)
    token = torch.cat([x.flatten(0, -2), x.new_zeros(1, x.shape[-1])])
    y = math(token, *params)
    return y[:0].view(*x.shape[:-1], y.shape[-1])


def sum_grads(
    params: Sequence[Tensor | None], axes: Sequence[Axis], context: Context
) -> Sequence[Any]:
    """Replicated parameters used on different tokens, whose gradients are summed over ``axes``.

    In one transfer for all of them.
    """
    learns = any(param is not None and param.requires_grad for param in params)
    # Also because Dynamo, where no argument learns, takes a forward of as many arguments as names
    # for one without a context, though the last name be a *params.
    if not (axes and learns and torch.is_grad_enabled()):
        return params
    summed: Sequence[Any] = _SumGrads.apply(axes, context, *params)
    return summed


class _SumGrads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axes: Sequence[Axis], context: Context, *params: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.axes, ctx.context = axes, context
        return tuple(None if p is None else p.view_as(p) for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *summed(grads, ctx.axes, ctx.context)


def settle_after_backward(param: DTensor) -> None:
    if not hooks_again(param, _settle_grad):
        param.register_post_accumulate_grad_hook(_settle_grad)


def _settle_grad(param: DTensor) -> None:
    """Redistribute a gradient to its parameter's placements, once and not in each op that reads it.

    DTensor leaves it partial, or split along the dim by which an earlier operation was split.
    """
    grad = param.grad
    if isinstance(grad, DTensor) and tuple(grad.placements) != tuple(param.placements):
        grid = Grid(param.device_mesh)
        (row, col), (wanted_row, wanted_col) = grad.placements, param.placements
        local = grid.redistribute(
            grad.to_local(), (row, col), (wanted_row, wanted_col), shape=grad.shape
        )
        param.grad = DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=grad.shape,
            stride=param.stride(),
        )
