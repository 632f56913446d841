"""What a plan says of the tensors around a module that no entry describes.

A local tensor that a user's code hands to a module is of unknown layout, and the gradients of whole
parameters depend on it: they are summed along an axis that splits what the module sees, and not
along one whose ranks all see the same. So the layout is told by the plan where the plan tells it,
and asked for where it does not; the tensor's sizes only confirm it. All that is decided here is
known to every rank alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..mesh.grid import Axes, Grid
from ..mesh.handed import made_of
from ..mesh.layouts import TP_COL, Layout, normalize

__all__ = ["UNKNOWN", "Surroundings", "is_of_features", "tokens_by_sizes", "width_of"]


def is_of_features(placement: Placement) -> bool:
    """Whether it is the placement of a hidden dim, in two, three or any number of dims."""
    return placement in (Shard(-1), Shard(2))


@dataclass(frozen=True)
class Surroundings:
    """What the plan says of the tensors that reach a module.

    Args:
        stream: how ``tp_col`` splits the tokens of the residual stream there, ``Shard(1)`` or
            ``Replicate()``; None where the plan does not tell, or tells several ways.
        widths: of the residual stream; None where they are not known.
        split: the Linears beside the module that hand on local features, or heads, split over
            ``tp_col``, or shares of a gradient.
        in_attention: whether an :class:`~torch_tp2d.Attention2D` runs the module around.
        axes: those on which the styles next to it act.
    """

    stream: Placement | None = None
    widths: frozenset[int] | None = None
    split: tuple[str, ...] = ()
    in_attention: bool = False
    axes: frozenset[Axes] = frozenset()

    def told(self, row_dim: int, grid: Grid) -> Layout | None:
        """The layout of the tokens there as far as the plan alone tells it."""
        if self.axes - {TP_COL} and grid.row.size * grid.col.size > 1:
            return None
        if self.stream is None and grid.col.size > 1:
            return None
        return Shard(row_dim), Replicate() if self.stream is None else self.stream

    def sees_heads(self, module: nn.Module, x: Tensor, grid: Grid) -> bool:
        """Whether ``x`` is this column's heads inside an attention that the grid runs.

        Those that are whole on every rank, as they do not divide, are used by each rank for queries
        of its own: what comes back of them are shares too.
        """
        # Of a module that is run again by itself, by checkpointing, only the plan tells.
        inside = self.in_attention or grid.context.in_attention
        # A scale, or a norm of one feature, has no width to go by.
        return inside and x.ndim == 4 and width_of(module) in (None, x.shape[-1])

    def check_features(self, owner: str, module: nn.Module, x: Tensor, grid: Grid) -> None:
        """Refuse a tensor of which the plan does not tell that its features are whole.

        Raises:
            ValueError: if it may be split by features or heads over ``tp_col``.
        """
        if grid.col.size == 1 or (not self.split and self.widths is not None):
            return
        width = width_of(module)
        of_stream = self.widths is None or width in self.widths
        if x.ndim in (2, 3) and x.shape[-1] == width and of_stream:
            return
        beside = f", as {list(self.split[:3])} beside it do" if self.split else ""
        raise _unclear(
            owner,
            x,
            grid,
            f"features or heads may be split over {grid.col.name} there{beside}, and then the "
            f"gradients of its parameters have to be summed along it",
        )

    def layout(self, owner: str, x: Tensor, row_dim: int, grid: Grid) -> Layout:
        """The layout of a local activation with whole features.

        That of the styles' outputs that it is made of, where the graph shows them and all have
        one; else that of the plan. Its sizes may tell it, and may not say otherwise.

        Raises:
            ValueError: if nothing tells it, or the tensor's sizes say otherwise.
        """
        self.check_axes(owner, x, grid)
        made = _layout_made_of(x, grid)
        if made is not None and tokens_by_sizes(x, row_dim, grid) in (None, made[1]):
            return made
        if x.ndim == 2:
            return self._of_vectors(owner, x, row_dim, grid)
        row: Placement = Shard(row_dim)
        known = grid.tokens_of(x) if x.ndim == 3 else None
        if known is not None and len(known) == 2 and grid.col.size == 1:
            return row, Replicate() if self.stream is None else self.stream
        told = tokens_by_sizes(x, row_dim, grid)
        if told is None:
            return row, self._stream(owner, x, grid)
        if self.stream is not None and told != self.stream:
            raise _unclear(
                owner,
                x,
                grid,
                f"by the plan its tokens are {self.stream} on {grid.col.name}, by its sizes, of "
                f"tokens {known}, {told}",
            )
        return row, told

    def check_axes(self, owner: str, x: Tensor, grid: Grid) -> None:
        """Refuse a tensor between styles that act on other axes.

        Raises:
            ValueError: if some do: what lies there is not split as it is around a 2-D style.
        """
        others = sorted(map(str, self.axes - {TP_COL}))
        if others and grid.row.size * grid.col.size > 1:
            raise _unclear(owner, x, grid, f"styles next to it act on {', '.join(others)}")

    def _stream(self, owner: str, x: Tensor, grid: Grid) -> Placement:
        if self.stream is not None and (x.ndim == 3 or not isinstance(self.stream, Shard)):
            return self.stream
        if grid.col.size == 1:
            return Replicate()
        raise _unclear(
            owner, x, grid, f"its tokens may be split over {grid.col.name} there, or whole"
        )

    def _of_vectors(self, owner: str, x: Tensor, row_dim: int, grid: Grid) -> Layout:
        """Of ``[tokens, features]``: one for each sample, or all of a batch in one dim."""
        known = grid.context.tokens
        if known is None or len(known) != 2:
            if row_dim == 0:
                return Shard(0), self._stream(owner, x, grid)
            known = (0, 0)
        row: Placement = Shard(row_dim)
        samples: Layout = (Shard(0) if row_dim == 0 else Replicate()), Replicate()
        rows, tokens = (
            tuple(math.prod(_here(known, (row, p), grid, *at)) for at in _ranks(grid))
            for p in (Replicate(), Shard(1))
        )
        found: list[tuple[Layout, tuple[int, ...]]] = [
            (samples, tuple(_here(known, samples, grid, *at)[0] for at in _ranks(grid))),
            ((Replicate(), Replicate()), (known[0],) * len(_ranks(grid))),
            ((Shard(0), Replicate()), rows),
            ((Shard(0), Shard(0)), tokens),
        ]
        mine = _ranks(grid).index((grid.row.index, grid.col.index))
        fitting = {
            _effect(layout, grid): layout for layout, counts in found if counts[mine] == x.shape[0]
        }
        others = [
            (_effect(a, grid), _effect(b, grid))
            for a, of_a in found
            for b, of_b in found
            if any(m == n for m, n in zip(of_a, of_b, strict=True))
        ]
        effect, *more = fitting or (None,)
        if effect is None or more or any(a != b and effect in (a, b) for a, b in others):
            raise _unclear(
                owner,
                x,
                grid,
                f"its {x.shape[0]} vectors may be any of several parts of the tokens "
                f"{known} under way",
            )
        return fitting[effect]


def tokens_by_sizes(x: Tensor, row_dim: int, grid: Grid) -> Placement | None:
    """How ``tp_col`` splits the tokens ``[batch, sequence, ...]`` of ``x``, by its sizes.

    None if they do not tell: ``Shard(1)`` or ``Replicate()``.
    """
    known = grid.tokens_of(x) if x.ndim == 3 else None
    if known is None or len(known) != 2 or not _can_be_told(known, row_dim, grid):
        return None
    row: Placement = Shard(row_dim)
    placements: tuple[Placement, ...] = Shard(1), Replicate()
    told = [p for p in placements if tuple(x.shape[:2]) == _here(known, (row, p), grid)]
    return told[0] if len(told) == 1 else None


def _layout_made_of(x: Tensor, grid: Grid) -> Layout | None:
    """The one layout of all outputs of styles that ``x`` is made of, if its features are whole."""
    found = {
        normalize(layout, ndim)
        if layout is not None and (ndim, axes) == (x.ndim, grid.axes)
        else None
        for _, layout, ndim, axes, *_ in made_of(x)
    }
    one = found.pop() if len(found) == 1 else None
    return None if one is None or Shard(x.ndim - 1) in one else one


UNKNOWN = Surroundings()
"""Of a style that torch's own ``parallelize_module`` applies, which tells it of no other."""


def _unclear(owner: str, x: Tensor, grid: Grid, why: str) -> ValueError:
    return ValueError(
        f"{owner} was given a local tensor of shape {tuple(x.shape)}, and the plan does not tell "
        f"its layout: {why}. Name the module in the plan with its input_layouts, those of "
        f"torch_tp2d.Replicate for one: Replicate() for what is whole on {grid.col.name}, Shard(1) "
        f"for tokens split over it, Shard(2) for heads [batch, sequence, heads, features], "
        f"Shard(-1) for features"
    )


def width_of(module: nn.Module) -> int | None:
    """The size of the last dim of a module's parameters, if that tells anything."""
    widths = {param.shape[-1] for param in module.parameters() if param.ndim}
    width = max(widths, default=1)
    return width if width > 1 else None


def _ranks(grid: Grid) -> list[tuple[int, int]]:
    return [(i, j) for i in range(grid.row.size) for j in range(grid.col.size)]


def _here(
    tokens: tuple[int, ...], layout: Layout, grid: Grid, i: int | None = None, j: int | None = None
) -> tuple[int, ...]:
    """Batch and sequence that rank (i, j), by default this one, holds of the tokens.

    A row that holds none is given one that stands in, see :meth:`Grid.with_stand_in`.
    """
    shape = list(tokens)
    at = (grid.row.index if i is None else i, grid.col.index if j is None else j)
    for axis, placement, index in zip((grid.row, grid.col), layout, at, strict=True):
        if isinstance(placement, Shard):
            part = axis.split(shape[placement.dim])[index]
            shape[placement.dim] = max(part, 1) if axis is grid.row else part
    return tuple(shape)


def _can_be_told(tokens: tuple[int, ...], row_dim: int, grid: Grid) -> bool:
    """Whether every rank can tell split from whole sequences by their sizes.

    A rank that holds the only token cannot, and then all go by the plan.
    """
    row: Placement = Shard(row_dim)
    return all(
        _here(tokens, (row, Shard(1)), grid, *at) != _here(tokens, (row, Replicate()), grid, *at)
        for at in _ranks(grid)
    )


def _effect(layout: Layout, grid: Grid) -> tuple[bool, bool]:
    """Along which axes a layout has gradients of whole parameters summed."""
    row, col = (
        isinstance(placement, Shard) and axis.size > 1
        for axis, placement in zip((grid.row, grid.col), layout, strict=True)
    )
    return row, col
