"""Tensors whose value is still to come: gathers under way, products not yet multiplied.

With them a transfer and the matmul that overlaps with it can be written separately, in different
autograd nodes. An operation that knows of them uses the tensor piece by piece as it arrives; any
other, such as user code between two styles, gets an ordinary tensor, because every operation on a
:class:`Deferred` waits for its value first. ``torch.compile`` never sees one, only a
:class:`Transfer` that begins and ends in one autograd node.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_compat.tensors import (
    disabled_torch_function_impl,
    fused_all_gather_matmul,
    is_mutable,
    make_wrapper_subclass,
    tree_map_only,
)
from .._tracing import in_graph
from ..comm import (
    Axis,
    Pending,
    all_gather,
    gather_evenly,
    gather_others,
    gather_shards,
    moved,
    narrowed,
    only_own,
    without_own,
)
from .assembly import Assembly
from .versions import VersionGuard

__all__ = [
    "Again",
    "Deferred",
    "Gathering",
    "LazyResult",
    "Piece",
    "Products",
    "Transfer",
    "rows_of",
    "undeferred",
]


class Deferred(Tensor):
    """A tensor of known shape whose :meth:`value` is computed, or awaited, at first use."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor) -> Any:
        return make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)

    def value(self) -> Tensor:
        """The tensor itself."""
        raise NotImplementedError

    def own_value(self) -> Tensor:
        """The tensor itself, for an operation that may write into it or keep a view of it."""
        return self.value()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shares = func.is_view or is_mutable(func)
        args, kwargs = tree_map_only(
            Deferred, lambda x: x.own_value() if shares else x.value(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def undeferred(x: Tensor) -> Tensor:
    """``x``, or its value if it is deferred."""
    return x.value() if isinstance(x, Deferred) else x


class _Arriving(NamedTuple):
    """A :class:`Piece` that is still under way."""

    start: int
    counts: tuple[int, ...]
    at: int
    rows: Pending


class Transfer:
    """``x`` gathered along an axis, in pieces of rows.

    It starts at once, except along an axis that fuses: there the first product gathers
    (:meth:`multiply`), unless the value is asked for before.

    Args:
        x: this rank's shard, ``sizes[axis.index]`` long in ``dim``.
    """

    shard: Tensor | None
    """``x``; set to None when the gathered tensor is kept for backward instead."""

    def __init__(self, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> None:
        # Detached, as x's graph may refer to the gathered tensor.
        self.shard = x = x.detach()
        self.again = Again(dim, sizes, axis)
        self.dim = dim
        self.offsets = [0, *accumulate(sizes)][:-1]
        self.pieces: deque[_Arriving] = deque()
        # In eager x itself would be kept alive for nothing.
        like = x if in_graph() else x.new_empty(())
        self.whole = Assembly([*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]], dim, like)
        self.shape = self.whole.shape
        self.waits_for_product = axis.fuses_shards(sizes)
        self.comes_whole = self.waits_for_product or axis.moves_evenly(sizes)
        """Whether it arrives in one piece, for :meth:`multiply`."""
        self._in_shards = not (axis.transport.cuts or self.comes_whole) and axis.own_apart
        self._coming: Pending | None = None
        if not self.waits_for_product:
            self._start(x)

    @property
    def brings_shards(self) -> bool:
        """Whether its pieces, not yet taken, are of entire shards, this rank's first."""
        return self._in_shards and self._coming is not None

    def _start(self, x: Tensor) -> None:
        dim, sizes, axis = self.again.along
        if axis.moves_evenly(sizes):
            self._coming = gather_evenly(x, dim, axis)
            return
        if self._in_shards:
            self._coming = gather_shards(x, dim, sizes, axis)
            return
        rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
        own_apart = axis.own_apart
        width = math.prod(rest)
        for start, counts in axis.rounds(sizes, width, x.dtype, exchanged=own_apart):
            rows = moved(narrowed(x, dim, start, counts[axis.index]), dim, 0)
            if own_apart:
                others = gather_others(rows, counts, axis)
                self.pieces.append(_Arriving(start, without_own(counts, axis), 0, others))
            else:
                self.pieces.append(_Arriving(start, counts, 0, all_gather(rows, 0, counts, axis)))
        if own_apart:
            self.pieces.appendleft(_Arriving(0, only_own(sizes, axis), dim, Pending(x)))

    def multiply(self, b: Tensor) -> Tensor:
        """``a[..., P] b[P, Q]`` of the gathered ``a``; on a fusing axis the first call gathers."""
        if not self.waits_for_product:
            return self.value() @ b
        dim, _, axis = self.again.along
        assert self.shard is not None
        self.waits_for_product = False
        whole, (product,) = fused_all_gather_matmul(self.shard, [b], dim, axis.group)
        self.whole.give(whole)
        return product

    def arrivals(self, *, if_used: bool = False) -> Iterator[Piece]:
        """The pieces not taken so far, each as it arrives, this rank's own first."""
        if self.waits_for_product:
            assert self.shard is not None
            self.waits_for_product = False
            self._start(self.shard)
        if self._coming is not None:
            coming, self._coming = self._coming, None
            if self._in_shards:
                yield from self._shards(coming)
            else:
                self.whole.give(coming.wait(if_used=if_used))
        while self.pieces:
            start, counts, at, pending = self.pieces.popleft()
            rows = pending.wait(if_used=if_used)
            piece = Piece(self.dim, self.offsets, start, counts, rows, at)
            piece.put(rows, self.whole)
            yield piece

    def _shards(self, coming: Pending) -> Iterator[Piece]:
        dim, sizes, axis = self.again.along
        assert self.shard is not None
        yield Piece(dim, self.offsets, 0, only_own(sizes, axis), self.shard, dim)
        there = coming.wait()
        if len(set(sizes)) == 1:
            whole = there.movedim(0, dim).flatten(dim, dim + 1)
        else:
            pairs = zip(there.unbind(), sizes, strict=True)
            whole = torch.cat([shard.narrow(dim, 0, size) for shard, size in pairs], dim)
        self.whole.give(whole)
        # The ranks before this one, and those after it, in one product each.
        for first, last in ((0, axis.index), (axis.index + 1, axis.size)):
            counts = tuple(n if first <= at < last else 0 for at, n in enumerate(sizes))
            if any(counts):
                rows = whole.narrow(dim, self.offsets[first], sum(counts))
                yield Piece(dim, self.offsets, 0, counts, rows, dim)

    def value(self, *, if_used: bool = False) -> Tensor:
        """Wait for all pieces and return the gathered tensor."""
        for _ in self.arrivals(if_used=if_used):
            pass
        return self.whole.value()


class Again:
    """Repeats a transfer for backward, once for all modules that ask before it is :meth:`done`."""

    def __init__(self, dim: int, sizes: Sequence[int], axis: Axis) -> None:
        self.along = dim, sizes, axis
        self._current: Transfer | None = None

    def transfer(self, shard: Tensor) -> Transfer:
        """The repeated transfer of ``shard``, started if it is not under way."""
        if self._current is None:
            self._current = Transfer(shard, *self.along)
        return self._current

    def done(self) -> None:
        """Forget the transfer, as no module will ask for it any more."""
        self._current = None


@dataclass(frozen=True)
class Piece:
    """Some rows of the ranks' shards: ``counts[r]`` of rank ``r``'s, from its ``start`` on.

    A row is one index of the gathered ``dim``, which is dim ``at`` of ``rows``, ``sum(counts)``
    long.
    """

    dim: int
    offsets: Sequence[int]
    start: int
    counts: tuple[int, ...]
    rows: Tensor
    at: int

    def of(self, other: Tensor) -> Tensor:
        """The same rows of another tensor of the same length in ``dim``, ``[tokens, features]``."""
        return rows_of(other, self.dim, self.offsets, self.start, self.counts, self.at)

    def place_in(self, out: Tensor) -> Tensor:
        """The view of ``out`` for the result of a piece of entire shards, of ranks in a row."""
        starts = zip(self.offsets, self.counts, strict=True)
        first = next((offset for offset, count in starts if count), 0)
        return out.narrow(self.dim, first, sum(self.counts))

    def put(self, rows: Tensor, out: Assembly) -> None:
        """Write the result computed from the piece's rows to its places in ``out``."""
        done = 0
        for offset, count in zip(self.offsets, self.counts, strict=True):
            if count:
                block = narrowed(rows, self.at, done, count)
                out.put(moved(block, self.at, self.dim), offset + self.start)
                done += count


def rows_of(
    x: Tensor, dim: int, offsets: Sequence[int], start: int, counts: Sequence[int], at: int = 0
) -> Tensor:
    """``counts`` rows of the shards at ``offsets``, from ``start`` on, as ``[tokens, features]``.

    The tokens are in the order of a tensor that has ``dim`` moved to ``at``.
    """
    blocks = [
        moved(narrowed(x, dim, offset + start, count), dim, at)
        for offset, count in zip(offsets, counts, strict=True)
        if count
    ]
    if not blocks:
        return x.narrow(dim, 0, 0).reshape(0, x.shape[-1])
    rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks, at)
    # Not reshape(-1, ...), which fails on a rank without features.
    return rows.reshape(math.prod(rows.shape[:-1]), x.shape[-1])


class Gathering(Deferred):
    """A tensor that a :class:`Transfer` brings. Several may have the same transfer.

    Views and operations that write get a copy, so that the styles that have the same transfer are
    not affected.
    """

    transfer: Transfer
    _own: Tensor | None = None

    @staticmethod
    def __new__(cls, transfer: Transfer) -> Any:
        self = super().__new__(cls, transfer.shape, transfer.whole.like)
        self.transfer = transfer
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def value(self) -> Tensor:
        return self.transfer.value() if self._own is None else self._own

    def own_value(self) -> Tensor:
        if self._own is None:
            self._own = self.transfer.value().clone()
        return self._own

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'Tensor' object has no attribute {name!r}: a module that PrepareModuleInput prepares "
            f"is given a local tensor here, this row's tokens; for a DTensor of the global shape "
            f"use torch_tp2d.Lifted(PrepareModuleInput(...), use_local_output=False)"
        )


class Products(Deferred):
    """The gradient of a gathered input: a sum of products ``c[..., Q] b[P, Q]^T`` of its users.

    It is left unmultiplied so that each piece can be computed while the pieces before it travel
    back. Sums of such gradients, as q, k and v make, stay unmultiplied.
    """

    _terms: tuple[tuple[Tensor, Tensor], ...]
    _guards: tuple[VersionGuard, ...]

    @staticmethod
    def __new__(
        cls, terms: tuple[tuple[Tensor, Tensor], ...], guards: tuple[VersionGuard, ...] = ()
    ) -> Any:
        (c, b), *_ = terms
        self = super().__new__(cls, (*c.shape[:-1], b.shape[0]), c)
        self._terms, self._guards = terms, guards
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @property
    def terms(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The operands ``c`` and ``b`` of each product.

        Raises:
            RuntimeError: if a ``b`` that is a parameter's own shard was changed meanwhile.
        """
        for guard in self._guards:
            guard.check()
        return self._terms

    def value(self) -> Tensor:
        (c, b), *others = self.terms
        total = c @ b.t()
        for c, b in others:
            total += c @ b.t()
        return total

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs and len(args) == 2:
            a, b = args
            if isinstance(a, Products) and isinstance(b, Products):
                return Products(a.terms + b.terms, a._guards + b._guards)
        return super().__torch_dispatch__(func, types, args, kwargs)


class LazyResult(Deferred):
    """A tensor that ``make`` computes when it is first used.

    Args:
        shape: the tensor's shape.
        like: a tensor of its dtype and device.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, make: Callable[[], Tensor]) -> Any:
        self = super().__new__(cls, shape, like)
        self._make, self._result = make, None
        return self

    _make: Callable[[], Tensor] | None
    _result: Tensor | None

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def value(self) -> Tensor:
        if self._make is not None:
            self._result, self._make = self._make(), None
        assert self._result is not None
        return self._result
