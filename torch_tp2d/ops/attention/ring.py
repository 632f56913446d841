"""Attention over a sequence that an axis splits: keys and values travel around it, or to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._once import once_differentiable
from ...comm import Axis, Pending, move, shift
from .block import (
    attend,
    attend_backward,
    attend_to_all,
    merge,
    repeat_heads,
    sum_repeated_heads,
    wide,
)
from .order import Order, Part

__all__ = ["Spec", "gathered", "ring"]

_SEQUENCE = 2


@dataclass(frozen=True, eq=False)
class Spec:
    """What an attention along an axis is, but for the tensors."""

    axis: Axis
    order: Order
    """Of the queries, and of the keys if ``keys`` says nothing else."""
    keys: tuple[int, ...] | None
    """How many keys each rank holds, if they are those of another sequence."""
    causal: bool
    scale: float
    heads: tuple[int, ...] | None
    """The key head of every query head, if they are not one to one."""

    @property
    def key_sizes(self) -> tuple[int, ...]:
        return self.order.sizes if self.keys is None else self.keys


def ring(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: Spec) -> Tensor:
    """Attention of this rank's queries to the keys of all: each block is used, and handed on.

    Received per rank: forward the other ranks' keys and values, backward these and as much of
    their gradients. Nothing but two blocks is held at a time. Under ``torch.compile`` it runs as
    :func:`gathered`: a rank that only hands a block on, as a causal mask makes of some, has no use
    for it, and its graph would drop the transfer that others wait for.

    Args:
        query, key, value: ``[batch, heads, length, features]`` of this rank's positions; as many
            heads of keys as ``spec.heads`` speaks of.
        mask: 4-dim, of this rank's queries and all keys in the order of the ranks, or broadcast;
            bool or added to the scores. It may need a gradient.

    Source: blockwise attention with a ring of keys (Liu et al., arXiv 2310.01889), merged by the
    logarithms of the sums (Dao et al., arXiv 2205.14135).
    """
    if torch.compiler.is_compiling():
        return gathered(query, key, value, mask, spec)
    return _Ring.apply(query, key, value, mask, spec)


def _columns(mask: Tensor | None, start: int, count: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else mask.narrow(-1, start, count)


def _rows(mask: Tensor | None, start: int, count: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask.narrow(-2, start, count)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: Spec
    ) -> Tensor:
        ctx.spec, ctx.exact = spec, ctx.needs_input_grad[3]
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.zeros(shape, dtype=wide(query.dtype), device=query.device)
        log = torch.full_like(out[..., 0], -torch.inf)
        axis, sizes = spec.axis, spec.key_sizes
        held = torch.cat([key, value], -1)
        for step in range(axis.size):
            source = (axis.index + step) % axis.size
            last = step + 1 == axis.size
            coming = None if last else shift(held, 1, axis, _SEQUENCE, sizes, source)
            for part, tensors in _parts(query, held, mask, key.shape[-1], source, spec):
                more, more_log = attend(*tensors, part.causal, spec.scale, ctx.exact)
                rows = slice(part.q, part.q + part.queries)
                merge(out[:, :, rows], log[:, :, rows], more, more_log)
            if coming is not None:
                held = coming.wait()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, log)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, log = ctx.saved_tensors
        spec, (grad,) = ctx.spec, grads
        axis, sizes, features = spec.axis, spec.key_sizes, key.shape[-1]
        mask_grad = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        query_grad = torch.zeros_like(query, dtype=wide(query.dtype))
        held = torch.cat([key, value], -1)
        # The gradient of the own block stays; those of the others go round behind the blocks.
        own = travelling = torch.zeros_like(held)
        returning: Pending | None = None
        for step in range(axis.size):
            source = (axis.index + step) % axis.size
            last = step + 1 == axis.size
            coming = None if last else shift(held, 1, axis, _SEQUENCE, sizes, source)
            part_grad = torch.zeros_like(held)
            for part, tensors in _parts(query, held, mask, features, source, spec):
                rows = slice(part.q, part.q + part.queries)
                columns = slice(part.k, part.k + part.keys)
                share = attend_backward(
                    grad[:, :, rows],
                    *tensors,
                    out[:, :, rows],
                    log[:, :, rows],
                    part.causal,
                    spec.scale,
                    ctx.exact,
                    mask_grad is not None,
                )
                query_grad[:, :, rows] += share.query
                both = torch.cat([share.key, share.value], -1)
                part_grad[:, :, columns] += sum_repeated_heads(both, spec.heads, key.shape[1])
                if mask_grad is not None and share.mask is not None:
                    start = sum(sizes[:source]) + part.k
                    target = _rows(_columns(mask_grad, start, part.keys), part.q, part.queries)
                    assert target is not None
                    target += share.mask.sum_to_size(target.shape)
            if step == 0:
                own = part_grad
            else:
                travelling = part_grad if returning is None else returning.wait() + part_grad
                returning = shift(travelling, 1, axis, _SEQUENCE, sizes, source)
            if coming is not None:
                held = coming.wait()
        if returning is not None:
            own = own + returning.wait()
        key_grad, value_grad = own.split([features, value.shape[-1]], -1)
        return query_grad.to(query.dtype), key_grad, value_grad, mask_grad, None


def _parts(
    query: Tensor, held: Tensor, mask: Tensor | None, features: int, source: int, spec: Spec
) -> Iterator[tuple[Part, tuple[Tensor, Tensor, Tensor, Tensor | None]]]:
    """What rank ``source``'s block, ``held``, is attended to by: ``(part, (q, k, v, mask))``."""
    start = sum(spec.key_sizes[:source])
    for part in spec.order.parts(spec.axis.index, source, spec.causal, spec.keys):
        block = repeat_heads(held.narrow(_SEQUENCE, part.k, part.keys), spec.heads)
        key, value = block.split([features, block.shape[-1] - features], -1)
        masked = _rows(_columns(mask, start + part.k, part.keys), part.q, part.queries)
        yield part, (query.narrow(_SEQUENCE, part.q, part.queries), key, value, masked)


def gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: Spec,
    *,
    whole: bool = False,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The same as :func:`ring`, of keys and values that are gathered first.

    Args:
        whole: they are there already, and their gradients are shares.
        drop: dropout of the weights.
    """
    if not whole:
        sizes: dict[int, Sequence[int]] = {_SEQUENCE: spec.key_sizes}
        key, value = (
            move(x, spec.axis, Shard(_SEQUENCE), Replicate(), sizes, partial_grad=True)
            for x in (key, value)
        )
    if spec.causal:
        at = spec.order.positions(spec.axis.index, query.device)
        mask = at[:, None] >= spec.order.positions(None, query.device)
    key, value = (repeat_heads(x, spec.heads) for x in (key, value))
    return attend_to_all(query, key, value, mask, False, spec.scale, drop)
