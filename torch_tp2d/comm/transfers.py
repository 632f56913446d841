"""The raw collectives: each starts a transfer and returns a :class:`Pending`.

What is computed before its ``wait()`` overlaps with the transfer; the matmul algorithms are written
with these. They take uneven shards, which are padded on the wire only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .._torch_compat.tensors import c10d_functional as _c10d
from .._tracing import in_graph
from ..mesh.layouts import chunk_sizes
from .axis import Axis, without_own
from .pending import Pending, nothing
from .views import moved

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange",
    "gather_others",
    "reduce",
    "reduce_from_others",
    "reduce_scatter",
    "shift",
]


def all_gather(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Pending:
    """Concatenate every rank's shard along ``dim``.

    Args:
        x: this rank's shard, ``sizes[axis.index]`` long in ``dim``.
        sizes: every rank's extent in ``dim``.

    Returns:
        A tensor ``sum(sizes)`` long in ``dim``, whose memory is laid out with ``dim`` outermost.
    """
    if axis.size == 1:
        return Pending(x)
    shard = moved(x, dim, 0)
    rest = shard.shape[1:]
    longest = max(sizes)
    if longest * math.prod(rest) == 0:
        return Pending(moved(nothing(shard, (sum(sizes), *rest)), 0, dim))
    if shard.shape[0] < longest:
        # In a graph it depends on the shard: two gathers of empty shards would become one node, on
        # this rank alone.
        padding = shard.sum(dtype=shard.dtype) if in_graph() else shard.new_zeros(())
        padding = padding.expand(longest - shard.shape[0], *rest)
        shard = torch.cat([shard, padding])
    else:
        # A copy: x may be changed in place, or freed, while it travels.
        shard = shard.clone(memory_format=torch.contiguous_format)
    flat = shard.view(-1)
    count = axis.pieces(flat.numel(), x.dtype)
    sent = [flat] if count == 1 else flat.split(chunk_sizes(flat.numel(), count))
    gather = _c10d.all_gather_into_tensor.default
    pieces = [partial(gather, piece, axis.size, axis.group) for piece in sent]
    even = len(set(sizes)) == 1

    def finish(wires: list[Tensor]) -> Tensor:
        if len(wires) == 1:
            whole = wires[0]
        else:
            whole = torch.cat([wire.view(axis.size, -1) for wire in wires], 1)
        if even:
            return moved(whole.view(axis.size * longest, *rest), 0, dim)
        blocks = whole.view(axis.size, longest, *rest).unbind()
        kept = [block[:size] for block, size in zip(blocks, sizes, strict=True)]
        return moved(torch.cat(kept), 0, dim)

    return Pending(None, pieces, finish)


def exchange(
    flat: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    axis: Axis,
    largest: int,
    finish: Callable[[list[list[Tensor]]], Tensor],
) -> Pending:
    """All-to-all of one flat tensor, split into pieces.

    Args:
        sends, receives: the number of elements to and from each rank.
        largest: the most elements that any two ranks of the axis exchange, the same on every rank.
        finish: takes, for each piece, what each rank sent.
    """
    count = axis.pieces(largest, flat.dtype, exchanged=True)
    if count == 1:
        sent, cuts = [flat], [(list(sends), list(receives))]
    else:
        to = [chunk_sizes(size, count) for size in sends]
        cuts = [
            ([sizes[k] for sizes in to], [chunk_sizes(size, count)[k] for size in receives])
            for k in range(count)
        ]
        parts = [part.split(sizes) for part, sizes in zip(flat.split(list(sends)), to, strict=True)]
        sent = [torch.cat([part[k] for part in parts]) for k in range(count)]
    pieces = [
        partial(_c10d.all_to_all_single.default, piece, cut[1], cut[0], axis.group)
        for piece, cut in zip(sent, cuts, strict=True)
    ]

    def split(wires: list[Tensor]) -> Tensor:
        # Not split(), whose Python takes as long as the copy of a small tensor.
        parts = zip(wires, cuts, strict=True)
        return finish([list(wire.split_with_sizes(cut[1])) for wire, cut in parts])

    return Pending(None, pieces, split)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total = total + part
    return total


def reduce_scatter(x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> Pending:
    """Sum over the axis, and keep this rank's shard of ``dim``.

    Args:
        x: a partial sum, ``sum(sizes)`` long in ``dim``.
        sizes: every rank's extent in ``dim`` of the result.
    """
    if axis.size == 1:
        return Pending(x)
    whole = moved(x, dim, 0)
    rest = whole.shape[1:]
    width = math.prod(rest)
    mine = sizes[axis.index]
    longest = max(sizes)
    if longest * width == 0:
        return Pending(moved(nothing(whole, (mine, *rest)), 0, dim))
    if axis.transport.exchanges_sums:

        def finish(pieces: list[list[Tensor]]) -> Tensor:
            sums = [_sum(piece) for piece in pieces]
            total = sums[0] if len(sums) == 1 else torch.cat(sums)
            return moved(total.view(mine, *rest), 0, dim)

        return exchange(
            whole.contiguous().view(-1),
            [size * width for size in sizes],
            [mine * width] * axis.size,
            axis,
            longest * width,
            finish,
        )
    if len(set(sizes)) > 1:
        whole = torch.cat(
            [
                torch.cat([piece, piece.new_zeros((longest - piece.shape[0], *rest))])
                for piece in whole.split(list(sizes))
            ]
        )
    whole = whole.contiguous()
    start = partial(_c10d.reduce_scatter_tensor.default, whole, "sum", axis.size, axis.group)
    return Pending(None, [start], lambda wires: moved(wires[0][:mine], 0, dim))


def gather_others(x: Tensor, counts: Sequence[int], axis: Axis) -> Pending:
    """:func:`all_gather` along the first dim without this rank's own rows, in one piece.

    Args:
        x: this rank's rows, ``counts[axis.index]`` of them.

    Returns:
        The others' rows, ``[sum(without_own(counts, axis)), ...]``.
    """
    rest = x.shape[1:]
    there = [sum(without_own(counts, axis)), *rest]
    if max(counts) * math.prod(rest) == 0:
        return Pending(nothing(x, there))
    # A copy, as in all_gather.
    sent = x.clone(memory_format=torch.contiguous_format).view(-1)
    sends = without_own([sent.numel()] * axis.size, axis)
    receives = [count * math.prod(rest) for count in without_own(counts, axis)]
    sent = sent if axis.size == 2 else sent.repeat(axis.size - 1)
    start = partial(_c10d.all_to_all_single.default, sent, receives, sends, axis.group)
    return Pending(None, [start], lambda wires: wires[0].view(there))


def reduce_from_others(x: Tensor, counts: Sequence[int], axis: Axis) -> Pending:
    """:func:`reduce_scatter` of the first dim without this rank's own term, in one piece.

    Args:
        x: this rank's terms of the others' sums, ``[sum(without_own(counts, axis)), ...]``.

    Returns:
        The sum of the others' terms, ``[counts[axis.index], ...]``.
    """
    rest = x.shape[1:]
    mine = counts[axis.index]
    if max(counts) * math.prod(rest) == 0:
        return Pending(nothing(x, [mine, *rest]))
    sends = [count * math.prod(rest) for count in without_own(counts, axis)]
    receives = without_own([mine * math.prod(rest)] * axis.size, axis)
    sent = x.contiguous().view(-1)
    start = partial(_c10d.all_to_all_single.default, sent, receives, sends, axis.group)

    def finish(wires: list[Tensor]) -> Tensor:
        terms = wires[0].view(axis.size - 1, mine, *rest)
        return terms[0] if axis.size == 2 else terms.sum(0)

    return Pending(None, [start], finish)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Reduce over the axis (``"sum"`` or ``"max"``); the result is replicated.

    A small tensor is copied to all others at once where a ring takes longer
    (:meth:`~torch_tp2d.comm.Axis.copies_terms`).
    """
    if axis.size == 1 or x.numel() == 0:
        return Pending(x)
    if axis.copies_terms(x.numel(), x.dtype):
        return _all_reduce_of_copies(x, axis, op)
    return Pending(None, [partial(_c10d.all_reduce.default, x.contiguous(), op, axis.group)], _only)


def _all_reduce_of_copies(x: Tensor, axis: Axis, op: str) -> Pending:
    size = x.numel()
    sent = x.reshape(-1).repeat(axis.size - 1)
    counts = without_own([size] * axis.size, axis)
    start = partial(_c10d.all_to_all_single.default, sent, counts, counts, axis.group)

    def finish(wires: list[Tensor]) -> Tensor:
        terms = list(wires[0].split(size))
        # In the order of the ranks: every rank has to have the same result to the last bit.
        terms.insert(axis.index, sent[:size])
        total = functools.reduce(torch.maximum if op == "max" else torch.add, terms)
        return total.view(x.shape)

    return Pending(None, [start], finish)


def _only(wires: list[Tensor]) -> Tensor:
    return wires[0]


def all_to_all(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    cat_dim: int,
    cat_sizes: Sequence[int],
    axis: Axis,
) -> Pending:
    """Go from a shard of ``cat_dim`` to a shard of ``split_dim``.

    Args:
        x: ``sum(split_sizes)`` long in ``split_dim``, ``cat_sizes[axis.index]`` in ``cat_dim``.

    Returns:
        A tensor ``split_sizes[axis.index]`` long in ``split_dim``, ``sum(cat_sizes)`` in
        ``cat_dim``.
    """
    if axis.size == 1:
        return Pending(x)

    def block(split: int, cat: int) -> list[int]:
        shape = list(x.shape)
        shape[split_dim], shape[cat_dim] = split, cat
        return shape

    received = [block(split_sizes[axis.index], extent) for extent in cat_sizes]

    def finish(pieces: list[list[Tensor]]) -> Tensor:
        blocks = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
        return torch.cat(
            [flat.view(shape) for flat, shape in zip(blocks, received, strict=True)], cat_dim
        )

    blocks = x.split(list(split_sizes), split_dim)
    return exchange(
        torch.cat([piece.reshape(-1) for piece in blocks]),
        [piece.numel() for piece in blocks],
        [math.prod(shape) for shape in received],
        axis,
        math.prod(block(max(split_sizes), max(cat_sizes))),
        finish,
    )


def broadcast(
    x: Tensor, block: tuple[int, int, int] | None, shape: Sequence[int], src: int, axis: Axis
) -> Pending:
    """Send a block of rank ``src``'s ``x`` to all ranks of the axis.

    Args:
        x: on ``src``, the tensor that contains the block; elsewhere it gives dtype and device.
        block: ``(dim, start, length)``, or None for all of ``x``.
        shape: the block's.
    """
    if axis.index == src:
        sent = (x if block is None else x.narrow(*block)).contiguous()
        assert tuple(sent.shape) == tuple(shape)
    elif in_graph():
        # Two broadcasts of one block become one node in the source's graph. They have to become one
        # in the other ranks' graphs too, or the ranks would run different numbers of collectives:
        # hence a buffer that depends on the same tensor and block, not an empty one.
        start = 0 if block is None else block[1]
        sent = (x.flatten()[:1].sum() + start).expand(shape).contiguous()
    else:
        sent = x.new_empty(shape)
    if axis.size == 1 or math.prod(shape) == 0:
        return Pending(sent)
    return Pending(None, [partial(_c10d.broadcast.default, sent, src, axis.group)], _only)


def reduce(x: Tensor, dst: int, axis: Axis) -> Pending:
    """Sum ``x`` over the axis onto rank ``dst``; elsewhere the result is empty (zero rows)."""
    if axis.size == 1 or x.numel() == 0:
        return Pending(x if axis.index == dst else x[:0])
    counts = [0] * axis.size
    counts[dst] = x.numel()

    def finish(pieces: list[list[Tensor]]) -> Tensor:
        if axis.index != dst:
            return x[:0]
        sums = [_sum(piece) for piece in pieces]
        return torch.cat(sums).view_as(x)

    return exchange(
        x.contiguous().view(-1), counts, [counts[axis.index]] * axis.size, axis, x.numel(), finish
    )


def shift(
    x: Tensor, steps: int, axis: Axis, dim: int, sizes: Sequence[int], held: int | None = None
) -> Pending:
    """Roll blocks around the axis: receive what rank ``index + steps`` holds.

    Args:
        x: block ``held`` of ``dim``, by default this rank's own, ``sizes[held]`` long in it.
        sizes: every block's extent in ``dim``.

    Returns:
        Block ``held + steps``.
    """
    steps %= axis.size
    if steps == 0:
        return Pending(x)
    held = axis.index if held is None else held
    shape = list(x.shape)
    shape[dim] = sizes[(held + steps) % axis.size]
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.index - steps) % axis.size] = x.numel()
    source = (axis.index + steps) % axis.size
    receive[source] = math.prod(shape)
    shape_of_largest = [*shape[:dim], max(sizes), *shape[dim + 1 :]]

    def finish(pieces: list[list[Tensor]]) -> Tensor:
        parts = [piece[source] for piece in pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)

    return exchange(
        x.contiguous().view(-1), send, receive, axis, math.prod(shape_of_largest), finish
    )
