"""The paper's attention: blocks of the scores on the grid, with their softmax across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._once import once_differentiable
from ...comm import Axis, all_reduce
from .block import repeat_heads, scores_of, sum_repeated_heads

__all__ = ["two_phase"]


def two_phase(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    heads: tuple[int, ...] | None,
    axis: Axis,
) -> Tensor:
    """Attention of the queries of mesh row i to the keys of mesh column j, on rank (i, j).

    Args:
        query: ``[batch, heads, queries of row i, features]``.
        key, value: ``[batch, heads, keys of column j, features]``.
        mask: this block's, 4-dim, broadcast; bool (True: attend) or added to the scores.
        hidden: True at the keys that are not attended to, broadcast.
        heads: the key head of every query head, if they are not one to one.
        axis: the axis along which the softmax's maxima and sums are reduced.

    Returns:
        The output of the queries of row i, a partial sum along ``axis``.
    """
    return _TwoPhase.apply(query, key, value, mask, hidden, scale, heads, axis)


class _TwoPhase(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        hidden: Tensor | None,
        scale: float,
        heads: tuple[int, ...] | None,
        axis: Axis,
    ) -> Tensor:
        scores = scores_of(query, repeat_heads(key, heads), mask, hidden, scale)
        if scores.shape[-1]:
            largest = scores.amax(-1, keepdim=True)
        else:
            largest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        largest = all_reduce(largest, axis, "max").wait()
        # A query that sees no key has scores of -inf only: subtract 0 there, not -inf.
        weights = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
        total = all_reduce(weights.sum(-1, keepdim=True), axis).wait()
        weights = weights / total.masked_fill(total == 0, 1.0)
        ctx.save_for_backward(query, key, value, mask, weights)
        ctx.scale, ctx.heads, ctx.axis = scale, heads, axis
        out = weights @ repeat_heads(value, heads).to(weights.dtype)
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, weights = ctx.saved_tensors
        heads, dtype = ctx.heads, weights.dtype
        grad = grads[0].to(dtype)
        value_grad = sum_repeated_heads(weights.mT @ grad, heads, key.shape[1])
        share = grad @ repeat_heads(value, heads).to(dtype).mT
        total = all_reduce((weights * share).sum(-1, keepdim=True), ctx.axis).wait()
        share = weights * (share - total)
        query_grad = share @ repeat_heads(key, heads).to(dtype) * ctx.scale
        key_grad = sum_repeated_heads(share.mT @ query.to(dtype), heads, key.shape[1]) * ctx.scale
        return (
            query_grad.to(query.dtype),
            key_grad.to(key.dtype),
            value_grad.to(value.dtype),
            share.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[3] else None,
            *(None,) * 4,
        )
