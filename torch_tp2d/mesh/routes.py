"""The way from one layout to another, as data: what moves in which order, found out once.

To compare placements takes longer than a small product, so a call of a module asks its route.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .layouts import Layout, normalize, same_placement, shards_dim

__all__ = ["Route", "Step", "route", "steps"]


class Step(NamedTuple):
    """One step of a :class:`Route`: from one placement to another, along one axis."""

    before: Layout
    """The layout before the step."""
    on_col: int
    """Whether it is along ``tp_col``."""
    src: Placement
    dst: Placement
    replicates: bool
    """Whether it leaves the tensor replicated along the axis, for good."""


class Route(NamedTuple):
    """From one layout to another, with shard dims counted from the front."""

    src: Layout
    dst: Layout
    same: bool
    row_stays: bool
    """Whether both place alike along ``tp_row``."""
    replicates: tuple[bool, bool]
    """Along row and col, whether ``dst`` replicates."""
    splits_tokens: bool
    """Whether ``tp_col`` shards a dim of tokens in ``src``."""
    moved: tuple[int, ...]
    """The dims that some axis starts or stops sharding."""
    steps: tuple[Step, ...]


def route(src: Layout, dst: Layout, ndim: int) -> Route:
    """The way from ``src`` to ``dst`` of an ``ndim``-dim tensor.

    Raises:
        ValueError: if a shard dim does not exist.
    """
    src, dst = normalize(src, ndim), normalize(dst, ndim)
    row_stays = same_placement(src[0], dst[0])
    dims = {p.dim for p in (*src, *dst) if isinstance(p, Shard)}
    return Route(
        src,
        dst,
        row_stays and same_placement(src[1], dst[1]),
        row_stays,
        (dst[0].is_replicate(), dst[1].is_replicate()),
        isinstance(src[1], Shard) and src[1].dim < ndim - 1,
        tuple([dim for dim in sorted(dims) if _moves_dim(dim, src, dst)]),
        tuple([_step(*step, dst) for step in steps(src, dst)]),
    )


def _step(before: Layout, after: Layout, on_col: int, dst: Layout) -> Step:
    there = after[on_col]
    replicates = there.is_replicate() and dst[on_col].is_replicate()
    return Step(before, on_col, before[on_col], there, replicates)


def steps(src: Layout, dst: Layout) -> list[tuple[Layout, Layout, int]]:
    """The steps from ``src`` to ``dst``, one axis each: ``(before, after, whether on tp_col)``.

    Partial sums are reduced first and ``tp_col`` gathers last, since both make the transfer on the
    other axis smaller. Where both axes shard one dim the shards of ``tp_col`` lie inside those of
    ``tp_row``, so ``tp_row`` may only change while ``tp_col`` does not shard that dim.
    """
    row_changes = not same_placement(src[0], dst[0])
    gathers_col = src[1].is_shard() and dst[1].is_replicate()
    row_dims = {p.dim for p in (src[0], dst[0]) if isinstance(p, Shard)} if row_changes else set()
    taken: list[tuple[Layout, Layout, int]] = []
    now = src

    def step(to: Layout, on_col: int) -> None:
        nonlocal now
        taken.append((now, to, on_col))
        now = to

    inside_now = isinstance(now[1], Shard) and now[1].dim in row_dims
    inside_then = isinstance(dst[1], Shard) and dst[1].dim in row_dims
    if inside_now:
        step((now[0], Replicate() if inside_then else dst[1]), 1)
        step((dst[0], now[1]), 0)
        if inside_then:
            step(dst, 1)
    elif inside_then or src[0].is_partial() or (row_changes and gathers_col):
        step((dst[0], now[1]), 0)
        step(dst, 1)
    else:
        step((now[0], dst[1]), 1)
        step(dst, 0)
    return taken


def _moves_dim(dim: int, src: Layout, dst: Layout) -> bool:
    """Whether some axis starts or stops sharding ``dim``."""
    return any(shards_dim(a, dim) != shards_dim(b, dim) for a, b in zip(src, dst, strict=True))
