"""Products of operands that arrive, and products that are sent, piece by piece.

An arriving piece is multiplied while the next one is transferred; a product's piece is sent while
the next one is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..._torch_compat.tensors import fused_matmul_reduce_scatter
from ...comm import (
    Pending,
    all_reduce,
    moved,
    narrowed,
    only_own,
    reduce_from_others,
    reduce_scatter,
    scatter_evenly,
    scatter_shards,
    without_own,
)
from ...runtime.assembly import Assembly
from ...runtime.context import selective_region
from ...runtime.deferred import Transfer, rows_of
from .call import Shards

__all__ = ["ab_arriving", "abt_leaving", "atb_arriving"]


def ab_arriving(
    a: Tensor | Transfer, b: Tensor, bias: Tensor | None = None, also: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``a[..., P] b[P, Q] + bias -> c[..., Q]``, in rounds if ``a`` is still being gathered.

    Args:
        also: another operand ``d[..., K]``, for ``a^T d -> [P, K]``, the second result.
    """
    if isinstance(a, Transfer) and a.comes_whole:
        # The bias is added separately: no operator that gathers and multiplies takes one.
        c = a.multiply(b)
        second = None if also is None else a.value().flatten(0, -2).t() @ also.flatten(0, -2)
        return c if bias is None else c + bias, second
    if isinstance(a, Transfer) and a.brings_shards:
        return _ab_of_shards(a, b, bias, also)
    if isinstance(a, Transfer) and not a.pieces:
        a = a.value()
    if isinstance(a, Tensor):
        flat = a.flatten(0, -2)
        c = flat @ b if bias is None else torch.addmm(bias, flat, b)
        second = None if also is None else flat.t() @ also.flatten(0, -2)
        return c.view(*a.shape[:-1], b.shape[1]), second
    out = Assembly([*a.shape[:-1], b.shape[1]], a.dim, b if a.shard is None else a.shard)
    second = None if also is None else b.new_zeros(b.shape[0], also.shape[-1])
    for piece in a.arrivals():
        flat = piece.rows.flatten(0, -2)
        part = flat @ b if bias is None else torch.addmm(bias, flat, b)
        piece.put(part.view(*piece.rows.shape[:-1], b.shape[1]), out)
        if also is not None and second is not None:
            second.addmm_(flat.t(), piece.of(also))
    return out.value(), second


def atb_arriving(a: Transfer, c: Tensor) -> Tensor:
    """``a[..., P]^T c[..., Q] -> b[P, Q]``, in rounds: this mesh row's partial sum."""
    if not a.pieces:
        return a.value().flatten(0, -2).t() @ c.flatten(0, -2)
    b = c.new_zeros(a.shape[-1], c.shape[-1])
    for piece in a.arrivals():
        b.addmm_(piece.rows.flatten(0, -2).t(), piece.of(c))
    return b


def abt_leaving(
    terms: Sequence[tuple[Tensor, Tensor]],
    shards: Shards,
    bias: Tensor | None = None,
    others: Tensor | None = None,
) -> Pending:
    """Sum ``c[..., Q] b[P, Q]^T`` over terms and ranks, ``-> a[..., P]``, of which a shard is kept.

    Args:
        bias: ``[P]``, added to this rank's partial sum.
        others: ``[..., P]``, this rank's sum of further terms.
    """
    dim, sizes, axis = shards
    if axis.fuses_shards(sizes) and others is None:
        return _fused_leaving(terms, shards, bias)
    if axis.moves_evenly(sizes):
        return scatter_evenly(_sum_of(terms, bias, others), dim, axis)
    if not axis.transport.cuts and axis.own_apart and others is None:
        return _abt_to_shards(terms, shards, bias)
    c, b = terms[0]
    rest, features = [n for d, n in enumerate(c.shape[:-1]) if d != dim], b.shape[0]
    mine = [*c.shape[:dim], sizes[axis.index], *c.shape[dim + 1 : -1], features]
    offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
    sums: list[tuple[int, Pending]] = []

    def part(start: int, counts: Sequence[int], at: int = 0) -> Tensor:
        rows = rows_of(c, dim, offsets, start, counts, at)
        total = rows @ b.t() if bias is None else torch.addmm(bias, rows, b.t())
        # Not in place: selective checkpointing may save products, and refuses changed ones.
        for d, other in terms[1:]:
            total = torch.addmm(total, rows_of(d, dim, offsets, start, counts, at), other.t())
        if others is not None:
            total = total + rows_of(others, dim, offsets, start, counts, at)
        return total

    own_apart = axis.own_apart
    for start, counts in axis.rounds(sizes, math.prod(rest) * features, c.dtype):
        if own_apart:
            sent = without_own(counts, axis)
            terms_of_others = part(start, sent).view(sum(sent), *rest, features)
            sums.append((start, reduce_from_others(terms_of_others, counts, axis)))
        else:
            whole = part(start, counts).view(sum(counts), *rest, features)
            sums.append((start, reduce_scatter(whole, 0, counts, axis)))
    own = part(0, only_own(sizes, axis), dim).view(mine) if own_apart else None

    def finish(_: list[Tensor]) -> Tensor:
        total = Assembly(mine, dim, c)
        for start, pending in sums:
            rows = moved(pending.wait(), 0, dim)
            if own is not None:
                rows = narrowed(own, dim, start, rows.shape[dim]) + rows
            total.put(rows, start)
        return total.value()

    return Pending(None, (), finish)


def _ab_of_shards(
    a: Transfer, b: Tensor, bias: Tensor | None, also: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """:func:`ab_arriving` by entire shards, each product written to its place in the result."""
    c = b.new_empty([*a.shape[:-1], b.shape[1]])
    for piece in a.arrivals():
        # This rank may have no tokens.
        if any(piece.counts) and c.shape[-1]:
            _write([(piece.rows, b)], bias, piece.place_in(c), a.dim)
    second = None if also is None else a.value().flatten(0, -2).t() @ also.flatten(0, -2)
    return c, second


def _abt_to_shards(
    terms: Sequence[tuple[Tensor, Tensor]], shards: Shards, bias: Tensor | None
) -> Pending:
    """:func:`abt_leaving` shard by shard, each product written into the buffer that is sent."""
    dim, sizes, axis = shards
    (c, b), *_ = terms
    shape = [*c.shape[:dim], max(sizes), *c.shape[dim + 1 : -1], b.shape[0]]
    offsets = [0, *accumulate(sizes)]

    def multiply(rank: int, place: Tensor) -> None:
        place = place.narrow(dim, 0, sizes[rank])
        if place.numel():
            rows = [(x.narrow(dim, offsets[rank], sizes[rank]), w.t()) for x, w in terms]
            _write(rows, bias, place, dim)

    # Zeros are sent in place of this rank's own part, which is computed during the transfer.
    even = min(sizes) == max(sizes)
    sent = c.new_empty([axis.size, *shape]) if even else c.new_zeros([axis.size, *shape])
    for rank, place in enumerate(sent.unbind()):
        if rank != axis.index:
            multiply(rank, place)
        elif even:
            place.zero_()
    coming = scatter_shards(sent, axis)
    own = c.new_empty(shape)
    multiply(axis.index, own)
    mine = sizes[axis.index]
    # Not in place: selective checkpointing may save the operands.
    return Pending(
        None, (), lambda _: own.narrow(dim, 0, mine) + coming.wait().narrow(dim, 0, mine)
    )


def _write(
    terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, place: Tensor, dim: int
) -> None:
    """Write the sum of ``a[..., P] b[P, Q]`` and bias to ``place[..., Q]``, a block of ``dim``."""
    if selective_region() is not None:
        # It may be told to save products, by operator, and never saves those of out= variants.
        total = _sum_of([(a, b.t()) for a, b in terms], bias, None)
        place.copy_(total)
        return
    batch, out = math.prod(place.shape[:dim]), _matrices(place, dim)
    for at, (a, b) in enumerate(terms):
        x, addend = _matrices(a, dim), bias if at == 0 else out
        if batch != 1:
            w = b.expand(batch, *b.shape)
            torch.bmm(x, w, out=out) if addend is None else torch.baddbmm(addend, x, w, out=out)
        elif addend is None:
            torch.mm(x[0], b, out=out[0])
        else:
            torch.addmm(addend if at == 0 else out[0], x[0], b, out=out[0])


def _matrices(x: Tensor, dim: int) -> Tensor:
    """``x[..., P]`` as ``[batch, tokens, P]``: the dims before ``dim``, and those from it on."""
    if dim == 1 and x.ndim == 3:
        return x
    *tokens, features = x.shape
    return x.reshape(math.prod(tokens[:dim]), math.prod(tokens[dim:]), features)


def _sum_of(
    terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, others: Tensor | None
) -> Tensor:
    """This rank's partial sum, in the order of the tokens."""
    (c, b), *more = terms
    total = c @ b.t()
    for c, b in more:
        total = total + c @ b.t()
    for addend in (bias, others):
        total = total if addend is None else total + addend
    return total


def _fused_leaving(
    terms: Sequence[tuple[Tensor, Tensor]], shards: Shards, bias: Tensor | None
) -> Pending:
    """:func:`abt_leaving` by one fused operator, on the concatenated terms."""
    dim, _, axis = shards
    adding = None if bias is None else all_reduce(bias, axis)
    (c, b), *more = terms
    if more:
        c = torch.cat([c for c, _ in terms], -1)
        b = torch.cat([b for _, b in terms], -1)
    total = fused_matmul_reduce_scatter(c, b.t(), "sum", dim, axis.group)
    return Pending(total if adding is None else total + adding.wait())
