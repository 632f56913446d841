"""How many elements a device receives for a Linear, by dataflow: pure arithmetic.

The Linear is ``Y[M, N] = X[M, K] @ W[N, K]^T`` on R x C = ``tp_row`` x ``tp_col``, with M the
tokens of the grid. In an all-gather or a reduce-scatter of a tensor along an axis of size A each
device receives ``(A-1)/A`` of its elements, in an all-reduce twice that. In the all-to-all that
moves it from one layout to another it is ``(A-1)/A`` of what each device holds.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..mesh.layouts import STATIONARY, Layout, MatmulRule, normalize
from ..mesh.routes import steps

__all__ = ["LinearTraffic", "Traffic", "layout_traffic", "linear_traffic"]


class Traffic(NamedTuple):
    """Numbers of elements that a device receives along each axis."""

    row: float = 0.0
    col: float = 0.0

    @property
    def total(self) -> float:
        return self.row + self.col


class LinearTraffic(NamedTuple):
    """The traffic of a Linear's forward and backward."""

    forward: Traffic
    backward: Traffic

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


def _received(before: Placement, after: Placement, held: float, size: int) -> tuple[float, float]:
    """Elements received when one axis changes its layout, in forward and in backward.

    Args:
        held: elements that a device has before.
    """
    if before == after or size == 1:
        return 0.0, 0.0
    others = held * (size - 1)
    if isinstance(before, Shard):
        moved = others if isinstance(after, Replicate) else others / size
        return moved, moved
    if isinstance(before, Partial):
        return (2 * others / size, 0.0) if isinstance(after, Replicate) else (others / size,) * 2
    return 0.0, others / size


def layout_traffic(
    src: Layout, dst: Layout, elements: int, rows: int, columns: int
) -> LinearTraffic:
    """Elements received per device when ``x[batch, sequence, features]`` changes its layout.

    Args:
        elements: those of the global tensor.
    """
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for before, after, on_col in steps(normalize(src, 3), normalize(dst, 3)):
        held = float(elements)
        for placement, size in zip(before, (rows, columns), strict=True):
            held = held / size if isinstance(placement, Shard) else held
        moved = _received(before[on_col], after[on_col], held, (rows, columns)[on_col])
        for backward, received in enumerate(moved):
            sums[backward][on_col] += received
    return LinearTraffic(Traffic(*sums[0]), Traffic(*sums[1]))


def linear_traffic(
    rule: MatmulRule,
    dataflow: str,
    *,
    takes: Layout,
    gives: Layout,
    tokens: int,
    in_features: int,
    out_features: int,
    rows: int,
    columns: int,
    keep_weight: bool = False,
) -> LinearTraffic:
    """Elements received per device by one Linear without a bias, in forward and in backward.

    The table is for the layouts that need no further change: on one side the residual stream
    ``(Shard(0), Shard(1))``, or for weight stationary its transposed ``(Shard(-1), Shard(1))``, on
    the other the feature layout ``(Shard(0), Shard(-1))``.

    ====================  =============================================================
    dataflow              forward
    ====================  =============================================================
    output stationary     ``(C-1)/C M/R K + (R-1)/R K N/C`` (Colwise2D, Block2DParallel)
    input stationary      ``(R-1)/R K N/C + (C-1)/C M/R N`` (Rowwise2D)
    weight stationary     ``(C-1)/C M K/R + (R-1)/R M N/C`` (Colwise2D, Block2DParallel),
                          ``(R-1)/R M K/C + (C-1)/C M N/R`` (Rowwise2D)
    ====================  =============================================================

    Backward moves as much for the tokens. A weight that moved in forward moves a second time,
    unless it was kept, and its gradient moves too; a stationary weight has a stationary gradient.
    From and to other layouts, tokens are redistributed as by
    :meth:`torch_tp2d.mesh.grid.Grid.redistribute`.

    The numbers are exact if the sizes divide; else shards are padded on the wire.

    Args:
        rule: the style's, :data:`torch_tp2d.mesh.layouts.COLWISE`, ``ROWWISE`` or ``BLOCK``.
        dataflow: the rule's own, or ``"weight_stationary"``.
        takes, gives: the layouts of X and of Y.
        tokens: M, batch times sequence, over the grid.
        in_features, out_features: K and N.
        rows, columns: R and C.
        keep_weight: the gathered weight is kept for backward (``reshard_after_forward=False``).

    Raises:
        ValueError: for a dataflow that the rule does not have.

    Example::

        >>> moved = linear_traffic(COLWISE, "weight_stationary", takes=(Shard(-1), Shard(1)),
        ...                        gives=(Shard(0), Shard(-1)), tokens=1, in_features=4096,
        ...                        out_features=4096, rows=2, columns=2)
        >>> moved.forward, moved.backward
        (Traffic(row=1024.0, col=1024.0), Traffic(row=1024.0, col=1024.0))
    """
    if dataflow not in (rule.dataflow, STATIONARY):
        raise ValueError(
            f'{rule.style} has dataflow "{rule.dataflow}" or "{STATIONARY}", not {dataflow!r}'
        )
    row = Shard(0)
    weight = 0.0
    operand, result = rule.stationary_input, rule.stationary_output
    if dataflow != STATIONARY:
        operand = row, Replicate() if rule.gathers_input else Shard(-1)
        result = row, Shard(-1) if rule.gathers_input else Partial()
        weight = (rows - 1) * in_features * out_features / (rows * columns)
    ways = (
        layout_traffic(takes, operand, tokens * in_features, rows, columns),
        layout_traffic(result, gives, tokens * out_features, rows, columns),
    )
    forward, backward = (
        Traffic(sum(way[part].row for way in ways), sum(way[part].col for way in ways))
        for part in (0, 1)
    )
    again = weight if keep_weight else 2 * weight
    return LinearTraffic(
        forward._replace(row=forward.row + weight), backward._replace(row=backward.row + again)
    )
