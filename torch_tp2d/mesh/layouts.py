"""The placement rules, as data. Nothing here communicates or touches a tensor's values.

A layout is a pair of placements, always written ``(on tp_row, on tp_col)``. For an activation
``[batch, sequence, hidden]`` on an R x C grid:

=================  ===========================  =========================================
name               layout                       a rank holds
=================  ===========================  =========================================
token layout       ``(Shard(0), Shard(1))``     batch/R, sequence/C, full hidden dim
feature layout     ``(Shard(0), Shard(-1))``    batch/R, full sequence, hidden/C
row layout         ``(Shard(0), Replicate())``  batch/R, full sequence, full hidden dim
transposed layout  ``(Shard(-1), Shard(1))``    full batch, sequence/C, hidden/R
=================  ===========================  =========================================

In the transposed layout, that of the weight-stationary dataflow, ``tp_col`` may shard the batch
or replicate the tokens instead: ``(Shard(-1), Shard(0))``, ``(Shard(-1), Replicate())``.

Shards have the sizes that :func:`torch.chunk` gives: ``ceil(size / parts)`` elements each, except
that trailing shards may be shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat.distributed import spec_for
from .._tracing import static

__all__ = [
    "BLOCK",
    "COLWISE",
    "ROWWISE",
    "STATIONARY",
    "TP_COL",
    "TP_ROW",
    "Layout",
    "MatmulRule",
    "as_layout",
    "check_row_dim",
    "chunk_sizes",
    "contiguous_spec",
    "contiguous_strides",
    "describe_mesh",
    "feature_layout",
    "is_pair",
    "nested_chunk_sizes",
    "normalize",
    "reduced",
    "row_layout",
    "same_layout",
    "same_placement",
    "shards_dim",
]

TP_ROW = "tp_row"
TP_COL = "tp_col"

STATIONARY = "weight_stationary"
"""The dataflow in which no weight moves."""

Layout = tuple[Placement, Placement]


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Extents of the ``parts`` shards that :func:`torch.chunk` makes of ``size`` elements.

    >>> chunk_sizes(13, 4)
    (4, 4, 4, 1)
    >>> chunk_sizes(3, 4)
    (1, 1, 1, 0)
    """
    size = static(size)
    full = -(-size // parts)
    if full * parts == size:
        return (full,) * parts
    return tuple(max(0, min(full, size - full * part)) for part in range(parts))


def nested_chunk_sizes(size: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Extents of the shards when several mesh axes shard one dim in turn, outermost first.

    These are the shards of a DTensor whose placements shard one dim twice; they differ from those
    of one flat chunk wherever the sizes do not divide.

    >>> nested_chunk_sizes(10, (2, 2)), chunk_sizes(10, 4)
    ((3, 2, 3, 2), (3, 3, 3, 1))
    """
    sizes = chunk_sizes(size, parts[0])
    for count in parts[1:]:
        sizes = tuple(inner for outer in sizes for inner in chunk_sizes(outer, count))
    return sizes


def feature_layout(row_dim: int = 0) -> Layout:
    """``(Shard(row_dim), Shard(-1))``: heads and FFN over ``tp_col``."""
    return Shard(row_dim), Shard(-1)


def row_layout(row_dim: int = 0) -> Layout:
    """``(Shard(row_dim), Replicate())``: each mesh row's tokens, replicated along ``tp_col``."""
    return Shard(row_dim), Replicate()


def describe_mesh(mesh: DeviceMesh) -> str:
    """``(tp_row=2, tp_col=3)``, for messages."""
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True)) + ")"


def as_layout(
    value: Placement | Sequence[Placement] | None, default: Layout, *, row: Placement
) -> Layout:
    """Read what a user gave for ``input_layouts`` or ``output_layouts``.

    A single placement is the ``tp_col`` layout and leaves ``tp_row`` at ``row``; a pair is
    ``(tp_row, tp_col)``; ``None`` is ``default``.

    Raises:
        TypeError: for anything else.
    """
    if value is None:
        return default
    if isinstance(value, Placement):
        return row, value
    pair = tuple(value) if isinstance(value, Iterable) else ()
    if len(pair) == 1 and isinstance(pair[0], Placement):
        return row, pair[0]
    if len(pair) != 2 or not all(isinstance(p, Placement) for p in pair):
        raise TypeError(
            f"a layout is one Placement (on {TP_COL}) or a pair ({TP_ROW}, {TP_COL}) of "
            f"Placements of torch.distributed.tensor, but got {value!r}"
        )
    return pair


def is_pair(value: Any) -> bool:
    """Whether a user gave a layout in full, for both axes."""
    return not isinstance(value, Placement | None) and len(tuple(value)) == 2


def same_placement(a: Placement, b: Placement) -> bool:
    """``a == b``, for what every call of a module compares.

    torch 2.13 takes 3 us to tell placements of two kinds apart, and 0.15 us for one kind.
    """
    # Not by type(), as Dynamo of torch 2.12 compares no types.
    return a.is_replicate() == b.is_replicate() and a == b


def same_layout(a: Layout, b: Layout) -> bool:
    """``a == b``, by :func:`same_placement`."""
    return same_placement(a[0], b[0]) and same_placement(a[1], b[1])


def normalize(layout: Layout, ndim: int) -> Layout:
    """``layout`` with every shard dim counted from the front of an ``ndim``-dim tensor.

    Raises:
        ValueError: if a shard dim does not exist.
    """
    for placement in layout:
        # Every layout passes here, and an isinstance that fails takes ten times as long as this;
        # type() is not known to Dynamo of torch 2.12.
        if placement.is_replicate() or not isinstance(placement, Shard):
            continue
        if not 0 <= placement.dim < ndim:
            row, col = layout
            return _from_front(row, ndim, layout), _from_front(col, ndim, layout)
    return layout


def _from_front(placement: Placement, ndim: int, layout: Layout) -> Placement:
    if not isinstance(placement, Shard) or 0 <= placement.dim < ndim:
        return placement
    dim = placement.dim
    if not -ndim <= dim < 0:
        raise ValueError(f"layout {layout} shards dim {dim} of a {ndim}-dim tensor")
    return Shard(static(dim + ndim))


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether a placement, of dims counted from the front, shards ``dim``."""
    # An isinstance that fails takes ten times as long, and Dynamo of torch 2.12 compares no types.
    replicated = placement.is_replicate()
    return not replicated and isinstance(placement, Shard) and placement.dim == dim


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, on which DTensor's operators rely."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def contiguous_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> Any:
    """The spec of a DTensor that is contiguous as a whole."""
    return spec_for(mesh, placements, shape, contiguous_strides(shape), dtype)


def check_row_dim(row_dim: int) -> None:
    """Raise a ValueError for a dim that is not a token dim."""
    if row_dim not in (0, 1):
        raise ValueError(f"row_dim is the token dim that {TP_ROW} splits, 0 or 1, not {row_dim}")


def reduced(layout: Layout) -> Layout:
    """``layout`` with Partial replaced by Replicate: the layout of a gradient."""
    row, col = (Replicate() if p.is_partial() else p for p in layout)
    return row, col


@dataclass(frozen=True)
class MatmulRule:
    """How one style lays out ``Y[M, N] = X[M, K] @ W[N, K]^T``.

    ``gathers_input`` tells the two dataflows of forward apart: *move the input and the weight*
    (X is gathered along ``tp_col``) or *move the weight and the output* (Y is reduced along
    ``tp_col``). The backward of each consists of the other and of the weight's gradient. Every
    style also has a third, *weight stationary*: the tokens are not sharded along ``tp_row``, X is
    sharded by features as the weight is, and Y is a sum along the axis that shards X's features.
    """

    style: str
    gathers_input: bool
    weight_dims: tuple[int, int]
    """Dim of ``W[N, K]`` that ``tp_row`` and ``tp_col`` shard."""
    input_col: Placement
    output_col: Placement

    @property
    def dataflow(self) -> str:
        return "output_stationary" if self.gathers_input else "input_stationary"

    @property
    def stationary_input(self) -> Layout:
        """The layout of X in the weight-stationary dataflow."""
        return (Shard(-1), Replicate()) if self.gathers_input else (Replicate(), Shard(-1))

    @property
    def stationary_output(self) -> Layout:
        """The layout of Y in the weight-stationary dataflow, before its sum."""
        return (Partial(), Shard(-1)) if self.gathers_input else (Shard(-1), Partial())


COLWISE = MatmulRule("Colwise2D", True, (1, 0), Replicate(), Shard(-1))
ROWWISE = MatmulRule("Rowwise2D", False, (0, 1), Shard(-1), Replicate())
BLOCK = MatmulRule("Block2DParallel", True, (1, 0), Shard(-1), Shard(-1))
