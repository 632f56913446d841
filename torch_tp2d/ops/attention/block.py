"""Attention of some queries to one block of keys, and its gradient.

A block's output ``o`` and its lse ``l``, the logarithm of its sum of exponentials, can be merged
with another block's: ``exp(l1 - l) o1 + exp(l2 - l) o2`` with ``l = log(exp(l1) + exp(l2))``. Given
the output and ``l`` over all blocks, backward computes the gradients that come from each block. The
fused kernels have just this interface and are used where possible
(:mod:`torch_tp2d.ops.attention.kernels`).
Elsewhere, and where a mask needs a gradient, the scores of a block are materialised.

torch's own ring (``torch.distributed.tensor.experimental.context_parallel``) uses the same kernels,
but has no rule for the CPU's, supports neither masks nor uneven shards, and needs a mesh dim of its
own. Hence this module.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_compat.tensors import active_fake_mode, safe_softmax
from .kernels import Block, kernel_for

__all__ = [
    "Grads",
    "attend",
    "attend_backward",
    "attend_to_all",
    "largest_of",
    "merge",
    "of_little_range",
    "readable",
    "scores_of",
    "repeat_heads",
    "sum_repeated_heads",
]

_HALVES = (torch.bfloat16, torch.float16)


class Grads(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks are kept."""
    return torch.float32 if dtype in _HALVES else dtype


def repeat_heads(x: Tensor, heads: tuple[int, ...] | None) -> Tensor:
    """A key or value for each query head: ``x[:, heads]``."""
    if heads is None:
        return x
    # No index tensor: it would be copied to the device in each layer.
    shared = [x.narrow(1, head, 1).expand(-1, count, -1, -1) for head, count in _uses(heads)]
    return torch.cat(shared, 1) if shared else x.narrow(1, 0, 0)


def sum_repeated_heads(grad: Tensor, heads: tuple[int, ...] | None, count: int) -> Tensor:
    """The gradient of ``x``, of ``count`` heads, from that of ``repeat_heads(x, heads)``."""
    if heads is None:
        return grad
    total = grad.new_zeros(grad.shape[0], count, *grad.shape[2:])
    start = 0
    for head, used in _uses(heads):
        total[:, head] = grad.narrow(1, start, used).sum(1)
        start += used
    return total


def _uses(heads: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each key head, in ascending order, and the number of query heads that use it."""
    return [(head, len(list(uses))) for head, uses in groupby(heads)]


def scores_of(
    query: Tensor, key: Tensor, mask: Tensor | None, hidden: Tensor | None, scale: float
) -> Tensor:
    """``query key^T``, scaled and masked, in fp32 at least; ``hidden`` is True at masked keys."""
    dtype = wide(query.dtype)
    scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else scores + mask.to(dtype)
        )
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _behind(query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """True where a causal mask hides keys of a block with equal query and key positions."""
    if not causal:
        return None
    shape = query.shape[-2], key.shape[-2]
    return torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)


def _additive(mask: Tensor | None, query: Tensor, keys: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zeros = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zeros, -torch.inf)
    return mask.to(query.dtype).expand(*mask.shape[:-2], query.shape[-2], keys)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    exact: bool,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to one block of keys.

    Args:
        query, key, value: ``[batch, heads, length, features]``, of equally many heads.
        mask: 4-dim, broadcast; bool (True: attend) or added to the scores.
        causal: no query attends to later keys; queries and keys are then at the same positions.
        exact: do not use fused kernels.
        base: by :func:`largest_of`, what the lse is relative to; with ``exact`` only.

    Returns:
        The output, and the lse ``[batch, heads, queries]``, ``-inf`` for a query without keys.
    """
    kernel = None if exact else kernel_for(query, key, value, mask is not None)
    if kernel is not None:
        bias = _additive(mask, query, key.shape[-2])
        return kernel.forward(Block(query, key, value, bias, causal, scale))
    scores = _relative(scores_of(query, key, mask, _behind(query, key, causal), scale), base)
    log = scores.logsumexp(-1)
    weights = (scores - _finite(log)[..., None]).exp()
    return (weights @ value.to(weights.dtype)).to(query.dtype), log


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log: Tensor,
    causal: bool,
    scale: float,
    exact: bool,
    mask_grad: bool,
    base: Tensor | None = None,
) -> Grads:
    """The gradients that come from one block of keys.

    Args:
        grad, out, log: the output's gradient, the output and the lse over all blocks.
        base: as :func:`attend` was given it.
    """
    log = _finite(log)
    kernel = None if exact else kernel_for(query, key, value, mask is not None)
    if kernel is not None:
        bias = _additive(mask, query, key.shape[-2])
        block = Block(query, key, value, bias, causal, scale)
        return Grads(*kernel.backward(block, grad, out, log), None)
    scores = _relative(scores_of(query, key, mask, _behind(query, key, causal), scale), base)
    weights = (scores - log[..., None]).exp()
    wide_grad = grad.to(weights.dtype)
    total = (wide_grad * out).sum(-1, keepdim=True)
    share = weights * (wide_grad @ value.to(weights.dtype).mT - total)
    return Grads(
        (share @ key.to(share.dtype) * scale).to(query.dtype),
        (share.mT @ query.to(share.dtype) * scale).to(key.dtype),
        (weights.mT @ wide_grad).to(value.dtype),
        share if mask_grad else None,
    )


def attend_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` whose result has a graph even if it is empty.

    A rank may have no heads or no queries. The result of torch's function then has no graph, and
    the backward of the keys, whose collectives other ranks wait for, would not run.

    Args:
        drop: dropout of the weights ``[batch, heads, queries, keys]``, which are materialised for
            it, as torch itself does on a CPU.
    """
    if drop is not None and query.numel():
        scores = scores_of(query, key, mask, _behind(query, key, causal), scale)
        # Zeros for queries without keys. Backward keeps only the weights of these intermediates.
        weights = safe_softmax(scores, -1, wide(scores.dtype))
        return (drop(weights) @ value.to(weights.dtype)).to(query.dtype)
    if query.numel():
        return F.scaled_dot_product_attention(
            query, key, value, readable(mask, query), is_causal=causal, scale=scale
        )
    scores = query @ key.mT
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    return scores.softmax(-1) @ value


def readable(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask in a dtype that ``scaled_dot_product_attention`` reads right beside ``query``.

    torch 2.13's kernel for the CPU reads one in single precision wrong beside queries in double, if
    it has two or four dims.
    """
    if mask is not None and mask.is_floating_point() and query.dtype == torch.float64:
        return mask.to(query.dtype)
    return mask


_LITTLE = 64.0
"""Of a number of this size little is rounded away beside a score."""


def of_little_range(mask: Tensor | None) -> bool:
    """Whether the lse of scores with this mask is exact enough to merge blocks by.

    Where a row of an added mask is one huge number, as a query that sees nothing is given by
    ``torch.finfo(dtype).min``, that number rounds the scores away, and the weights are equal. It
    rounds away the logarithm of the number of keys in an lse, too, and merged outputs of blocks
    would be summed instead of averaged. Then the lse has to be relative to :func:`largest_of`.
    """
    if mask is None or mask.dtype == torch.bool or not mask.numel():
        return True
    if mask.device.type != "cpu":
        # To look at it, the host would have to wait for the device.
        return False
    if active_fake_mode() is not None:
        # There are no values; a mask without such rows is what is usual.
        return True
    largest = mask.amax(-1)
    return not bool((largest.isfinite() & (largest.abs() > _LITTLE)).any())


def largest_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest of each row of an added mask, ``[..., queries, 1]``; 0 for ``-inf``."""
    return _finite(mask.detach().to(wide(dtype)).amax(-1, keepdim=True))


def _relative(scores: Tensor, base: Tensor | None) -> Tensor:
    return scores if base is None else scores - base


def _finite(log: Tensor) -> Tensor:
    """``log`` with 0 for ``-inf``: scores of ``-inf`` stay so, where ``-inf - -inf`` is nan."""
    return log.masked_fill(log == -torch.inf, 0.0)


def merge(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> None:
    """Merge another block's result into ``out`` and ``log``, in place."""
    total = torch.logaddexp(log, more_log)
    base = _finite(total)
    out.mul_((log - base).exp()[..., None])
    out.add_(more.to(out.dtype) * (more_log - base).exp()[..., None])
    log.copy_(total)
