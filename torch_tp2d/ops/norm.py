"""LayerNorm and RMSNorm over a hidden dim that is sharded along an axis.

Only the statistics are transferred, in fp32 at least: one or two numbers per token in forward, and
as many in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable
from ..comm import Axis, all_reduce
from ..runtime.context import Context
from ..runtime.reductions import summed

__all__ = ["norm2d"]


class _Norm2D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        hidden: int,
        eps: float,
        centered: bool,
        hidden_axis: Axis,
        token_axis: Axis | None,
        context: Context,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if centered:
            # Two passes, as E[x^2] - E[x]^2 loses digits to cancellation where the mean is large.
            mean = all_reduce(wide.sum(-1, keepdim=True), hidden_axis).wait() / hidden
            wide = wide - mean
        square = all_reduce(wide.square().sum(-1, keepdim=True), hidden_axis).wait() / hidden
        rstd = torch.rsqrt(square + eps)
        normal = wide * rstd
        y = normal if weight is None else normal * weight
        if bias is not None:
            y = y + bias
        ctx.hidden, ctx.centered = hidden, centered
        ctx.hidden_axis, ctx.token_axis, ctx.context = hidden_axis, token_axis, context
        ctx.has_bias = bias is not None
        ctx.save_for_backward(normal.to(x.dtype), rstd, weight)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        normal, rstd, weight = ctx.saved_tensors
        hidden = ctx.hidden
        grad, normal = grad.to(rstd.dtype), normal.to(rstd.dtype)
        tokens = tuple(range(grad.ndim - 1))
        learns = [
            None if weight is None else (grad * normal).sum(tokens),
            grad.sum(tokens) if ctx.has_bias else None,
        ]
        axes = [] if ctx.token_axis is None else [ctx.token_axis]
        dnormal = grad if weight is None else grad * weight
        sums = [(dnormal * normal).sum(-1, keepdim=True)]
        if ctx.centered:
            sums.append(dnormal.sum(-1, keepdim=True))
        totals = all_reduce(torch.cat(sums, -1), ctx.hidden_axis).wait() / hidden
        dx = dnormal - normal * totals[..., :1]
        if ctx.centered:
            dx = dx - totals[..., 1:]
        return (
            (dx * rstd).to(grads[0].dtype),
            *summed(learns, axes, ctx.context, like=weight),
            *(None,) * 6,
        )


def norm2d(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    hidden: int,
    eps: float,
    centered: bool,
    hidden_axis: Axis,
    token_axis: Axis | None,
    context: Context,
) -> Tensor:
    """Normalise over the last dim, of ``hidden`` elements globally; ``x`` is this rank's shard.

    Args:
        weight, bias: this rank's shards along the hidden dim.
        centered: subtract the mean (LayerNorm) or not (RMSNorm).
        hidden_axis: the axis that shards the hidden dim; the statistics are summed along it.
        token_axis: the axis that shards the tokens, along which the gradients of ``weight`` and
            ``bias`` are summed; None if every rank has all tokens.
        context: the mesh's context.
    """
    return _Norm2D.apply(x, weight, bias, hidden, eps, centered, hidden_axis, token_axis, context)
