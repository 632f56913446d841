"""What a plan says of the tensors around a module that no entry describes.

A local tensor that the user's code hands to a module has no known layout, but the gradients of
replicated parameters depend on it: they are summed along an axis that splits what the module sees,
and not along one whose ranks all see the same. So the layout is taken from the plan where the plan
tells it, and otherwise an error asks for it; the tensor's sizes only confirm it. All decisions here
use facts that every rank knows, so that all ranks decide alike.
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

__all__ = [
    "UNKNOWN",
    "Surroundings",
    "is_of_features",
    "layout_made_of",
    "splits_features",
    "tokens_by_sizes",
    "width_of",
]


def is_of_features(placement: Placement) -> bool:
    """Whether a placement shards the hidden dim, as Shard(-1) or as Shard(2) of three dims."""
    return placement in (Shard(-1), Shard(2))


def splits_features(placement: Placement, ndim: int, now: int) -> bool:
    """Whether a placement shards features or heads of an output of ``ndim`` dims.

    Args:
        now: the dims of what was made of it. Of four, dim 1 may be the heads, as attention has
            them; it is not the sequence, since no attention here is of a part of one.
    """
    if ndim == 4 and now == 4:
        return isinstance(placement, Shard) and placement.dim > 0
    return placement == Shard(ndim - 1) or (ndim == 4 and placement == Shard(2))


@dataclass(frozen=True)
class Surroundings:
    """What the plan says of the tensors that reach a module.

    Args:
        stream: how ``tp_col`` splits the tokens of the residual stream there, ``Shard(1)`` or
            ``Replicate()``; None if the plan does not tell, or gives different answers.
        widths: hidden sizes of the residual stream; None if they are not known.
        split: names of the Linears near the module whose local outputs are features, or heads,
            split over ``tp_col``, or have partial gradients.
        in_attention: whether an :class:`~torch_tp2d.Attention2D` runs a module around this one.
        axes: the axes on which the styles next to the module act.
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
        """Whether ``x`` is heads inside an attention module that the grid runs.

        They are mostly this column's. Heads that do not divide over the columns are replicated,
        but each rank uses them for its own queries, so their gradients are partial too.
        """
        # If checkpointing recomputes the module by itself, only the plan tells, not the context.
        inside = self.in_attention or grid.context.in_attention
        # width_of() is None for a module without a width, such as a scale or a norm of one feature.
        return inside and x.ndim == 4 and width_of(module) in (None, x.shape[-1])

    def check_features(self, owner: str, module: nn.Module, x: Tensor, grid: Grid) -> None:
        """Refuse a tensor unless the plan tells that ``tp_col`` does not split its features.

        Raises:
            ValueError: if ``tp_col`` may split it by features or heads.
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
        """The layout of a local activation whose features are not split.

        If the autograd graph shows the styles' outputs that it is made of, and all have one layout,
        it is that one; else it is that of the plan. Its sizes may tell the layout where the plan
        does not, and must not contradict the plan.

        Raises:
            ValueError: if nothing tells it, or the tensor's sizes contradict the plan.
        """
        self.check_axes(owner, x, grid)
        made = layout_made_of(x, grid)
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
        """Refuse a tensor next to styles that act on other axes.

        Raises:
            ValueError: if there are any, since tensors there are not split as around a 2-D style.
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
        """The layout of ``[n, features]``: one vector per sample, or all tokens in one dim."""
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
    """How ``tp_col`` splits the tokens of ``x``, ``[batch, sequence, features]``, by its sizes.

    ``Shard(1)`` or ``Replicate()``; None if the sizes do not tell.
    """
    known = grid.tokens_of(x) if x.ndim == 3 else None
    if known is None or len(known) != 2 or not _can_be_told(known, row_dim, grid):
        return None
    row: Placement = Shard(row_dim)
    placements: tuple[Placement, ...] = Shard(1), Replicate()
    told = [p for p in placements if tuple(x.shape[:2]) == _here(known, (row, p), grid)]
    return told[0] if len(told) == 1 else None


def layout_made_of(x: Tensor, grid: Grid) -> Layout | None:
    """The layout of the styles' outputs that ``x`` is made of; None if they differ or are unknown.

    None also if that layout splits features.
    """
    found = {
        normalize(layout, ndim)
        if layout is not None and (ndim, axes) == (x.ndim, grid.axes)
        else None
        for _, layout, ndim, axes, *_ in made_of(x)
    }
    one = found.pop() if len(found) == 1 else None
    return None if one is None or Shard(x.ndim - 1) in one else one


UNKNOWN = Surroundings()
"""For a style applied by torch's own ``parallelize_module``, which knows one style at a time."""


def _unclear(owner: str, x: Tensor, grid: Grid, why: str) -> ValueError:
    return ValueError(
        f"{owner} was given a local tensor of shape {tuple(x.shape)}, and the plan does not tell "
        f"its layout: {why}. Name the module in the plan with its input_layouts, those of "
        f"torch_tp2d.Replicate for one: Replicate() for what is whole on {grid.col.name}, Shard(1) "
        f"for tokens split over it, Shard(2) for heads [batch, sequence, heads, features], "
        f"Shard(-1) for features"
    )


def width_of(module: nn.Module) -> int | None:
    """The largest last dim of a module's parameters; None if that is 1 or there are none."""
    widths = {param.shape[-1] for param in module.parameters() if param.ndim}
    width = max(widths, default=1)
    return width if width > 1 else None


def _ranks(grid: Grid) -> list[tuple[int, int]]:
    return [(i, j) for i in range(grid.row.size) for j in range(grid.col.size)]


def _here(
    tokens: tuple[int, ...], layout: Layout, grid: Grid, i: int | None = None, j: int | None = None
) -> tuple[int, ...]:
    """Batch and sequence size of the tokens that rank (i, j), by default this one, holds.

    A row without tokens counts as holding one, its stand-in, see :meth:`Grid.with_stand_in`.
    """
    shape = list(tokens)
    at = (grid.row.index if i is None else i, grid.col.index if j is None else j)
    for axis, placement, index in zip((grid.row, grid.col), layout, at, strict=True):
        if isinstance(placement, Shard):
            part = axis.split(shape[placement.dim])[index]
            shape[placement.dim] = max(part, 1) if axis is grid.row else part
    return tuple(shape)


def _can_be_told(tokens: tuple[int, ...], row_dim: int, grid: Grid) -> bool:
    """Whether every rank can tell a split sequence from a replicated one by its sizes.

    A rank that holds the only token cannot, and then all ranks follow the plan.
    """
    row: Placement = Shard(row_dim)
    return all(
        _here(tokens, (row, Shard(1)), grid, *at) != _here(tokens, (row, Replicate()), grid, *at)
        for at in _ranks(grid)
    )


def _effect(layout: Layout, grid: Grid) -> tuple[bool, bool]:
    """Whether a layout has the gradients of replicated parameters summed, along row and col."""
    row, col = (
        isinstance(placement, Shard) and axis.size > 1
        for axis, placement in zip((grid.row, grid.col), layout, strict=True)
    )
    return row, col
