"""Cross entropy of logits sharded by vocabulary, which are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable
from ..comm import Axis, all_reduce

__all__ = ["token_losses"]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
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
        own_weight = None
        if weight is not None:
            weight = weight.to(wide.dtype)
            own_weight = weight.narrow(0, vocab_start, columns)
        sums = [exp.sum(-1), picked]
        if smoothing:
            sums.append((shifted if own_weight is None else shifted * own_weight).sum(-1))
        totals = torch.stack(sums)
        for axis in axes:
            totals = all_reduce(totals, axis).wait()
        log_sum = totals[0].log()
        losses = (1 - smoothing) * (log_sum - totals[1])
        target_weight, total_weight = None, None
        if weight is not None:
            target_weight = weight[target.clamp(0, vocab - 1)]
            losses = losses * target_weight
            total_weight = weight.sum()
        if smoothing:
            times = vocab if total_weight is None else total_weight
            losses = losses + smoothing / vocab * (times * log_sum - totals[2])
        counts = target != ignore_index
        ctx.vocab, ctx.smoothing, ctx.dtype = vocab, smoothing, logits.dtype
        # For an unknown class torch raises an IndexError, or fails an assertion on the device. Here
        # a rank that raised alone would leave the others waiting, so all of them get nan.
        unknown = counts & ((target < 0) | (target >= vocab))
        ctx.save_for_backward(
            exp / totals[0].unsqueeze(-1),
            local,
            mine & counts,
            counts,
            unknown,
            own_weight,
            target_weight,
            total_weight,
        )
        return losses.masked_fill(~counts, 0).masked_fill(unknown, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        softmax, local, mine, counts, unknown, *weights = ctx.saved_tensors
        own_weight, target_weight, total_weight = weights
        smooth = ctx.smoothing / ctx.vocab
        hit = mine.to(softmax.dtype).mul(ctx.smoothing - 1)
        if own_weight is None:
            dlogits = softmax - smooth
        else:
            hit = hit * target_weight
            pull = (1 - ctx.smoothing) * target_weight + smooth * total_weight
            dlogits = softmax * pull.unsqueeze(-1) - smooth * own_weight
        if dlogits.shape[-1]:
            dlogits = dlogits.scatter_add(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        dlogits = dlogits * (grad * counts).masked_fill(unknown, torch.nan).unsqueeze(-1)
        return dlogits.to(ctx.dtype), *(None,) * 7


def token_losses(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    vocab_start: int,
    vocab: int,
    label_smoothing: float,
    ignore_index: int,
    axes: Sequence[Axis],
) -> Tensor:
    """The loss of each token: 0 where ``target`` is ``ignore_index``, nan for an unknown class.

    Args:
        logits: ``[*, Vj]``, this rank's shard of the vocabulary, from ``vocab_start`` on.
        target: ``[*]``, global class ids.
        weight: ``[V]``, the weights of all classes, or ``None``.
        axes: the axes that shard the vocabulary; one maximum and two or three sums per token are
            transferred along each of them in forward, nothing in backward.
    """
    return _TokenLosses.apply(
        logits, target, weight, vocab_start, vocab, label_smoothing, ignore_index, tuple(axes)
    )
