"""Cross entropy of logits whose vocabulary is split: the logits are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import Axis, all_reduce

__all__ = ["token_losses"]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        vocab_start: int,
        vocab: int,
        smoothing: float,
        ignore_index: int,
        axes: Sequence[Axis],
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        columns = wide.shape[-1]
        if columns:
            top = wide.amax(-1)
        else:
            top = wide.new_full(wide.shape[:-1], -torch.inf)
        for axis in axes:
            top = all_reduce(top, axis, "max").wait()
        shifted = wide - top.unsqueeze(-1)
        exp = shifted.exp()

        local = target - vocab_start
        mine = (local >= 0) & (local < columns)
        local = local.masked_fill(~mine, 0)
        if columns:
            picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        else:
            picked = torch.zeros_like(top)
        sums = [exp.sum(-1), picked]
        if smoothing:
            sums.append(shifted.sum(-1))
        totals = torch.stack(sums)
        for axis in axes:
            totals = all_reduce(totals, axis).wait()
        log_sum = totals[0].log()
        losses = (1 - smoothing) * (log_sum - totals[1])
        if smoothing:
            losses = losses + smoothing * (log_sum - totals[2] / vocab)
        counts = target != ignore_index
        ctx.vocab, ctx.smoothing = vocab, smoothing
        ctx.save_for_backward(exp / totals[0].unsqueeze(-1), local, mine & counts, counts)
        ctx.dtype = logits.dtype
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        softmax, local, mine, counts = ctx.saved_tensors
        smoothing = ctx.smoothing
        dlogits = softmax - smoothing / ctx.vocab
        if dlogits.shape[-1]:
            hit = mine.to(softmax.dtype).mul(smoothing - 1).unsqueeze(-1)
            dlogits = dlogits.scatter_add(-1, local.unsqueeze(-1), hit)
        dlogits = dlogits * (grad * counts).unsqueeze(-1)
        return dlogits.to(ctx.dtype), *(None,) * 6


def token_losses(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int,
    vocab: int,
    label_smoothing: float,
    ignore_index: int,
    axes: Sequence[Axis],
) -> Tensor:
    """The loss of each token, 0 where ``target`` is ``ignore_index``.

    Args:
        logits: ``[*, Vj]``, the columns of the vocabulary from ``vocab_start`` on.
        target: ``[*]``, global class ids.
        axes: the axes along which the vocabulary is split; one maximum and two or three sums per
            token cross each of them in forward, nothing in backward.
    """
    return _TokenLosses.apply(
        logits, target, vocab_start, vocab, label_smoothing, ignore_index, tuple(axes)
    )
