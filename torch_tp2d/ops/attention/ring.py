"""Attention over a sharded sequence: keys and values go around the axis, or are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._once import once_differentiable
from ..._tracing import in_graph
from ...comm import Axis, Pending, move, shift
from .block import (
    attend,
    attend_backward,
    attend_to_all,
    largest_of,
    merge,
    of_little_range,
    repeat_heads,
    sum_repeated_heads,
    wide,
)
from .order import Order, Part

__all__ = ["Spec", "gathered", "ring"]

_SEQUENCE = 2


@dataclass(frozen=True, eq=False)
class Spec:
    """The parameters of an attention along an axis, apart from its tensors."""

    axis: Axis
    order: Order
    """The order of the queries, and of the keys too if ``keys`` is None."""
    keys: tuple[int, ...] | None
    """The number of keys on each rank, if they belong to another sequence."""
    causal: bool
    scale: float
    heads: tuple[int, ...] | None
    """The key head of every query head, if they are not one to one."""

    @property
    def key_sizes(self) -> tuple[int, ...]:
        return self.order.sizes if self.keys is None else self.keys


def ring(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: Spec) -> Tensor:
    """Attention of this rank's queries to all keys: each block is used, then passed on.

    A rank receives the other ranks' keys and values in forward, and these and as many gradients in
    backward. It holds only two blocks at a time. Under ``torch.compile`` it runs as
    :func:`gathered`: with a causal mask some ranks only pass a block on, and their graph would drop
    the transfer, for which others wait, because its result is not used.

    Args:
        query, key, value: ``[batch, heads, length, features]`` of this rank's positions, with the
            key heads that ``spec.heads`` refers to.
        mask: 4-dim, of this rank's queries and all keys in the order of the ranks, or broadcast;
            bool (True: attend) or added to the scores. It may need a gradient.

    Source: blockwise attention with a ring of keys (Liu et al., arXiv 2310.01889), merged by the
    lse (Dao et al., arXiv 2205.14135).
    """
    if in_graph():
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
        ctx.spec, ctx.exact = spec, ctx.needs_input_grad[3] or not of_little_range(mask)
        base = None
        if ctx.exact and mask is not None and mask.numel():
            base = largest_of(mask, query.dtype)
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
                above = _rows(base, part.q, part.queries)
                more, more_log = attend(*tensors, part.causal, spec.scale, ctx.exact, above)
                rows = slice(part.q, part.q + part.queries)
                merge(out[:, :, rows], log[:, :, rows], more, more_log)
            if coming is not None:
                held = coming.wait()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, base, out, log)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, base, out, log = ctx.saved_tensors
        spec, (grad,) = ctx.spec, grads
        axis, sizes, features = spec.axis, spec.key_sizes, key.shape[-1]
        mask_grad = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        query_grad = torch.zeros_like(query, dtype=wide(query.dtype))
        held = torch.cat([key, value], -1)
        # The gradient of this rank's block stays here; the others' follow their blocks around.
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
                    _rows(base, part.q, part.queries),
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
    """The queries and the keys of rank ``source``'s block ``held``: ``(part, (q, k, v, mask))``."""
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
    """The same as :func:`ring`, but with keys and values gathered first.

    Args:
        whole: they are gathered already, and their gradients are partial.
        drop: dropout of the attention weights.
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
