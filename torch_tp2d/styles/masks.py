"""Dropout masks on shards: the global indices of a shard's elements, and a key for all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch_compat.tensors import disable_current_modes
from .._tracing import in_graph, static
from ..comm import Axis, all_gather
from ..comm.groups import sends
from ..mesh.extents import ask_sizes
from ..mesh.grid import Grid, describe_mesh, part_of
from ..mesh.handed import made_of
from ..mesh.layouts import Layout, normalize
from ..ops.attention.block import attend_to_all
from ..ops.dropout import draw_key, dropout
from ..runtime.context import in_backward
from .base import AS_INPUT, AT_FIRST_FORWARD, Resolved
from .canonical import canonical
from .dtensors import to_dtensor
from .module_kinds import describe_module
from .surroundings import UNKNOWN, Surroundings, splits_features, tokens_by_sizes
from .widths import Widths

__all__ = ["Masks", "next_key"]


def next_key(grid: Grid) -> Tensor:
    """The key of the next dropout call on the grid, the same on all its ranks.

    The ranks compare their keys at the first draw and at every power of two after it: two transfers
    of a few bytes each, often enough to find a generator that has diverged, and seldom enough to
    cost nothing.

    Raises:
        ValueError: if the keys differ.
    """
    key = draw_key()
    if not sends(grid.mesh) or in_backward():
        # Recomputation by checkpointing repeats keys that were counted and checked in forward.
        return key
    count = grid.context.keys_drawn = grid.context.keys_drawn + 1
    if count & (count - 1) == 0:
        # Hidden from selective checkpointing, since the recomputation does not repeat it.
        with disable_current_modes():
            keys = key.view(1).to(grid.mesh.device_type)
            for axis in (grid.col, grid.row):
                keys = all_gather(keys, 0, (keys.numel(),) * axis.size, axis).wait()
            differ = bool((keys != keys[0]).any())
        if differ:
            raise ValueError(
                f"torch's random generators differ between the ranks of the mesh "
                f"{describe_mesh(grid.mesh)}, so copies of one token would get different dropout "
                f"masks: call torch.manual_seed(seed) with one seed on every rank of the mesh "
                f"before training, and draw the same random numbers on each. Data-parallel "
                f"replicas, each a mesh of its own, may have seeds of their own"
            )
    return key


class Masks:
    """Dropout of the tensors in one module. Finds out which global elements a shard holds."""

    def __init__(
        self,
        grid: Grid,
        row_dim: int,
        declared: Layout | None,
        beside: Sequence[tuple[int, Placement]],
        owner: nn.Module,
        surroundings: Surroundings = UNKNOWN,
        taking: Sequence[tuple[int, Placement]] = (),
    ) -> None:
        self.grid = grid
        self._surroundings = surroundings
        self.here = f"{describe_module(owner)} on mesh {describe_mesh(grid.mesh)}"
        self.row_dim = row_dim
        self.declared = declared
        self._given = Widths(grid.col, beside, surroundings.widths or ())
        self._taken = Widths(grid.col, taking)

    def resolved(self) -> Resolved:
        """What is known of the layout of the module's tensors before it runs."""
        if self.declared is not None:
            return Resolved(self.declared, AS_INPUT)
        told = None if self._given.split else self._surroundings.told(self.row_dim, self.grid)
        if told is None:
            return Resolved(AT_FIRST_FORWARD, AS_INPUT, told_by="sizes")
        return Resolved(told, AS_INPUT, told_by="plan")

    def drop(self, x: Tensor, p: float) -> Tensor:
        """``x``, a DTensor or a local shard, with some elements dropped and the others scaled."""
        key = next_key(self.grid)
        if isinstance(x, DTensor):
            x = canonical(x, sums=True)
            layout = normalize(self.grid.layout(x, self.row_dim), x.ndim)
            shape = x.shape if x.device_mesh == self.grid.mesh else None
            local = x.to_local()
            y = dropout(local, key, p, self._index(local, layout, None, shape))
            return _like(x, y)
        layout, features = self._layout(x)
        y = dropout(x, key, p, self._index(x, layout, features, None))
        return self.grid.with_stand_in(y, layout, self.grid.sizes_of(x))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` with dropout, of full sequences and this rank's heads.

        For dropout the attention weights are materialized, as torch itself does on a CPU:
        ``[batch, heads, queries, keys]`` of this rank's part of the batch and heads.
        """
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if isinstance(query, DTensor):
            here, on_key, on_value = map(_placements, (query, key, value))
            by_others = any(isinstance(p, Shard) and p.dim > 1 for p in here)
            if by_others or not here == on_key == on_value:
                raise ValueError(
                    f"{self.here}: dropout is for a "
                    f"query, key and value placed alike, split by batch and heads, but the query "
                    f"is placed {here}"
                )
            layout, shape = self.grid.layout(query, self.row_dim), tuple(query.shape)
            q, k, v = (x.to_local() for x in (query, key, value))  # type: ignore[attr-defined]
        elif self.declared is not None:
            layout, shape, q, k, v = normalize(self.declared, 4), None, query, key, value
        else:
            self._surroundings.check_axes(self.here, query, self.grid)
            if self.row_dim == 1 and self.grid.row.size > 1:
                raise ValueError(
                    f"{self.here}: dropout inside attention with row_dim=1 needs a style for the "
                    f"attention module: name it in the plan"
                )
            layout, shape = (Shard(0), self._heads(query)), None
            q, k, v = query, key, value
        if isinstance(attn_mask, DTensor):
            attn_mask = attn_mask.full_tensor()
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        # The weights have the query's dims but the last, which is that of the keys, all of them.
        index = self._index(q, layout, None, shape)[:-1]
        index.append(torch.arange(k.shape[-2], device=k.device))
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (q.ndim - attn_mask.ndim)]
            for dim in (0, 1):
                if attn_mask.shape[dim] not in (1, q.shape[dim]):
                    attn_mask = attn_mask.index_select(dim, index[dim])
        # Also drawn on ranks without heads or queries, to keep the generators in step.
        drawn = next_key(self.grid)

        def drop(weights: Tensor) -> Tensor:
            return dropout(weights, drawn, dropout_p, index)

        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = attend_to_all(q, k, v, attn_mask, is_causal, scale, drop)
        if shape is None:
            return y
        return to_dtensor(y, layout, self.grid, (*shape[:-1], y.shape[-1]))

    def _heads(self, query: Tensor) -> Placement:
        """How ``tp_col`` splits the heads of a local query.

        If the autograd graph shows the features that the query was made of, its heads are split as
        those. Else they are split as the input of a Linear inside that takes as many features.

        Raises:
            ValueError: if neither tells.
        """
        col = self.grid.col
        if col.size == 1:
            return Replicate()
        split = self._of_features(query)
        if not split:
            split = self._taken.told(query.shape[1] * query.shape[-1])
        if len(split) > 1:
            raise ValueError(
                f"{self.here}: the heads of a local query {tuple(query.shape)} may be all or this "
                f"rank's part of them: name the attention module in the plan, with Attention2D, or "
                f"have its projections hand on DTensors (use_local_output=False)"
            )
        return Shard(1) if split == {True} or (not split and self._given.split) else Replicate()

    def _of_features(self, x: Tensor) -> set[bool]:
        """Whether ``tp_col`` splits the features, or heads, of styles' outputs that made ``x``.

        One answer or both, or none if the graph shows no such output.
        """
        return {
            splits_features(normalize(layout, ndim)[1], ndim, x.ndim)
            for _, layout, ndim, axes, *_ in made_of(x)
            if layout is not None and axes == self.grid.axes
        }

    def _layout(self, x: Tensor) -> tuple[Layout, int | None]:
        """Layout of a local input, and its full feature count where that is split and known."""
        known_layout = self.grid.handed(x) if self.declared is None else self.declared
        if known_layout is not None:
            # No feature count: ranks with shards of different sizes might find different ones.
            return normalize(known_layout, x.ndim), None
        self._surroundings.check_axes(self.here, x, self.grid)
        row, col, known = self.grid.row, self.grid.col, self.grid.context.tokens
        if x.ndim < 2 and row.size * col.size > 1:
            raise ValueError(
                f"{self.here}: a local input {tuple(x.shape)} holds no tokens by which its layout "
                f"could be told: {_DECLARE}, with Dropout2D(input_layouts=(Replicate(), "
                f"Replicate())) for what every rank has all of"
            )
        if x.ndim in (2, 3):
            if col.size > 1 and self._is_part(x):
                on_row: Placement = Shard(static(self.row_dim))
                if x.ndim == 2:
                    on_row, _ = self._surroundings.layout(self.here, x, self.row_dim, self.grid)
                layout: Layout = (on_row, Shard(x.ndim - 1))
                self._check_batch(x, layout)
                return layout, self._given.whole_of(x.shape[-1])
            if col.size > 1 and True in self._of_features(x):
                raise self._unclear_part(x)
            layout = self._surroundings.layout(self.here, x, self.row_dim, self.grid)
            self._check_batch(x, layout)
            return layout, None
        on_row, on_col = Shard(0 if x.ndim > 3 else self.row_dim), Replicate()
        if x.ndim > 3 and (col.size > 1 or (row.size > 1 and self.row_dim == 1)):
            # Is it [batch, heads, queries, keys] of this rank's heads, as its projections give?
            one = known is not None and len(known) == 2 and self.row_dim == 0
            tokens = known[1] if known is not None and one else None
            if x.ndim == 4 and self._given.split and x.shape[2] == tokens:
                return (on_row, Shard(1)), None
            raise ValueError(
                f"{self.here}: the sizes {tuple(x.shape)} of a local input do not tell its "
                f"layout: {_DECLARE}, with Dropout2D(input_layouts=Shard(1)) where dim 1 is this "
                f"rank's heads, or Dropout2D(input_layouts=Replicate())"
            )
        return (on_row, on_col), None

    def _check_batch(self, x: Tensor, layout: Layout) -> None:
        """Refuse ``[batch, sequence, features]`` of another batch than that of the tokens.

        Where no axis splits the batch, nothing else looks at its size: attention weights with the
        batch and the heads in one dim would be taken for tokens that all columns have.

        Raises:
            ValueError: if it is another.
        """
        known = self.grid.tokens_of(x) if x.ndim == 3 and self.grid.col.size > 1 else None
        if known is None or self.grid.cuts(0, layout) or x.shape[0] == known[0]:
            return
        raise self._unclear_part(x)

    def _unclear_part(self, x: Tensor) -> ValueError:
        return ValueError(
            f"{self.here}: a local input {tuple(x.shape)} is made of features or heads that "
            f"{self.grid.col.name} splits, or has another batch than the tokens, and is no part of "
            f"the {self._given.split} features of modules beside it: {_DECLARE}, with the layout "
            f"that it has, Dropout2D(input_layouts=Replicate()) for tokens that every column has. "
            f"Attention weights of a batch and its heads in one dim have none: keep the heads in a "
            f"dim of their own, [batch, heads, queries, keys], with "
            f"Dropout2D(input_layouts=Shard(1))"
        )

    def _is_part(self, x: Tensor) -> bool:
        """Whether a local ``x`` of two or three dims is this rank's shard of split features.

        Only if it is as wide as such a shard. If the autograd graph shows what it was made of, that
        decides. Else it is a shard if no replicated output has that width on any rank; if one has,
        the sizes of its tokens decide, in a model whose stream splits tokens over ``tp_col``.

        Raises:
            ValueError: on every rank, if nothing tells.
        """
        told = self._given.told(x.shape[-1])
        if True not in told:
            return False
        made = self._of_features(x)
        told = made if len(made) == 1 else told
        if len(told) > 1:
            tokens = tokens_by_sizes(x, self.row_dim, self.grid)
            if tokens is None or self._surroundings.stream != Shard(1):
                raise self._unclear(x)
            return not isinstance(tokens, Shard)
        return told == {True}

    def _unclear(self, x: Tensor) -> ValueError:
        return ValueError(
            f"{self.here}: the last dim of a local input {tuple(x.shape)} may be this rank's part "
            f"of the {self._given.split} features of modules beside it, or a whole output, as wide "
            f"as a part is on some rank: {_DECLARE}, with Dropout2D(input_layouts=Shard(-1)) for "
            f"the part, Dropout2D(input_layouts=Replicate()) for the whole"
        )

    def _index(
        self, x: Tensor, layout: Layout, features: int | None, shape: Sequence[int] | None
    ) -> list[Tensor]:
        """For each dim of a local shard, the global indices of the elements that it holds."""
        index = []
        for dim, size in enumerate(x.shape):
            start = 0
            cuts = self.grid.cuts(dim, layout)
            if cuts:
                if shape is not None:
                    extent: int | None = shape[dim]
                elif features is not None and dim == x.ndim - 1:
                    extent = features
                else:
                    extent = self._extent(x, dim, cuts, layout)
                start = self._start(x, dim, cuts) if extent is None else _start_of(extent, cuts)
            index.append(torch.arange(start, start + size, device=x.device))
        return index

    def _extent(self, x: Tensor, dim: int, cuts: Sequence[Axis], layout: Layout) -> int | None:
        """Global size of a dim of a local input; None if the ranks have to ask each other.

        All ranks have to ask then, so what one rank holds must not decide whether they do.
        """
        sizes, known = self.grid.tokens_of(x), self.grid.context.tokens
        if sizes is not None and dim < len(sizes):
            # An empty shard may hold one stand-in element, see Grid.with_stand_in.
            mine = part_of(sizes[dim], cuts)
            here = x.shape[dim] in (mine, mine or 1)
            return sizes[dim] if here else self.grid.extent(x, dim, layout)
        if x.ndim == 3:
            return self.grid.extent(x, dim, layout)
        # Dim 0 is the batch, or has several of these a sample: windows of an image, say.
        whole = known[0] if known is not None and dim == 0 else 0
        parts = math.prod([axis.size for axis in cuts])
        if (whole and whole % parts == 0) or self._has_even_heads(x, dim, layout):
            return x.shape[dim] * parts
        if not in_graph():
            return None
        mine = part_of(whole, cuts)
        if whole and x.shape[dim] not in (mine, mine or 1):
            raise ValueError(
                f"{self.here}: in a compiled graph no rank can ask the others which of the "
                f"{whole} samples a local input {tuple(x.shape)} holds, and they do not divide by "
                f"{parts}: use a batch that does, or leave this module out of torch.compile"
            )
        return whole or x.shape[dim] * parts

    def _has_even_heads(self, x: Tensor, dim: int, layout: Layout) -> bool:
        """Whether a dim of ``x`` is heads, of which all columns have as many.

        They do if they are made of the features of Linears beside, all of which divide. What the
        graph shows to be made of something else, of the channels of a convolution say, may not.
        """
        counts = self._given.split
        if x.ndim < 4 or dim != 1 or layout[1] != Shard(1) or layout[0] == Shard(1) or not counts:
            return False
        even = all(count % self.grid.col.size == 0 for count in counts)
        return even and False not in self._of_features(x)

    def _start(self, x: Tensor, dim: int, cuts: Sequence[Axis]) -> int:
        """Global index at which this rank's part of a dim begins, by asking the other ranks."""
        start, size = 0, x.shape[dim]
        for axis in reversed(cuts):
            sizes = ask_sizes(size, axis, x.device).wait().tolist()
            start += sum(sizes[: axis.index])
            size = sum(sizes)
        return start


_DECLARE = "name the nn.Dropout in the plan (or put one in the place of F.dropout)"


def _start_of(extent: int, cuts: Sequence[Axis]) -> int:
    """Global index at which this rank's part of a dim of size ``extent`` begins."""
    start = 0
    for axis in cuts:
        sizes = axis.split(extent)
        start += sum(sizes[: axis.index])
        extent = sizes[axis.index]
    return start


def _like(x: DTensor, local: Tensor) -> DTensor:
    """A local result as a DTensor of the shape and placements of ``x``."""
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _placements(x: Any) -> list[Placement]:
    """Placements on the axes of more than one rank: on others they say nothing."""
    return [p for p, size in zip(x.placements, x.device_mesh.shape, strict=True) if size > 1]
