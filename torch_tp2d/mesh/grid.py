"""The grid: a 2-D mesh as one rank sees it, and the token sizes that its styles go by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._tracing import in_graph, static
from ..comm import Axis, move
from ..runtime.context import Sizes, context_of
from .axes import Axes, check_mesh, flat_axis, names_of, on_mesh, part_of
from .extents import ask_extent, extent_told
from .handed import Handed, hand_out, said_of, tokens_told
from .layouts import (
    TP_COL,
    TP_ROW,
    Layout,
    contiguous_spec,
    describe_mesh,
    normalize,
    shards_dim,
)
from .routes import Route, Step, route

__all__ = ["Axes", "Grid", "Sizes", "check_mesh", "describe_mesh", "part_of"]


class Grid:
    """A grid of R x C = ``row.size`` x ``col.size`` ranks, seen from one of them.

    ``axes`` says which mesh axis is the grid's column axis. By default activations move along
    ``tp_col`` and weights along ``tp_row``. ``"tp_row"`` swaps the two; ``("tp_row", "tp_col")``
    flattens them into one line of N ranks, along which everything moves.
    """

    def __init__(self, mesh: DeviceMesh, axes: Axes = TP_COL) -> None:
        check_mesh(mesh)
        self.mesh = mesh
        self.axes: Axes = axes if isinstance(axes, str) or len(axes) > 1 else axes[0]
        self.context = context_of(mesh)
        if self.axes == TP_COL:
            self.row, self.col = Axis.of(mesh, 0), Axis.of(mesh, 1)
        elif self.axes == TP_ROW:
            self.col, self.row = Axis.of(mesh, 0), Axis.of(mesh, 1)
        elif self.axes == (TP_ROW, TP_COL):
            self.col = flat_axis(mesh)
            self.row = Axis("none", (1,), 0, "")
        else:
            raise ValueError(
                f'axes is "{TP_COL}", "{TP_ROW}" or ("{TP_ROW}", "{TP_COL}"), not {axes!r}'
            )
        sizes = dict(zip((TP_ROW, TP_COL), mesh.shape, strict=True))
        row, col = names_of(self.axes)
        self.several = (
            frozenset(name for name in row if sizes[name] > 1),
            frozenset(name for name in col if sizes[name] > 1),
        )
        """Along row and col, the names of the mesh's axes of several ranks."""
        # Made here, as Dynamo of torch 2.12 makes no copy of an axis.
        self.fused_col = replace(self.col, fuses=True)
        self.spec = lru_cache(16)(partial(contiguous_spec, mesh))
        """DTensor's spec of placements, a global shape and a dtype."""
        self.route = lru_cache(64)(route)
        """The route between two layouts, in eager."""

    def __deepcopy__(self, memo: Any) -> Grid:
        return self

    def __repr__(self) -> str:
        return f"Grid({describe_mesh(self.mesh)}, axes={self.axes!r})"

    def on_mesh(self, layout: Layout) -> Layout:
        """A ``(row, col)`` layout as one on ``(tp_row, tp_col)``, for messages and tables."""
        return on_mesh(layout, self.axes)

    def placements(self, layout: Layout) -> tuple[Placement, Placement]:
        """A ``(row, col)`` layout as DTensor placements on the mesh."""
        row, col = layout
        if self.axes == TP_COL:
            return row, col
        if self.axes == TP_ROW:
            if isinstance(row, Shard) and row == col:
                raise ValueError(
                    f"a DTensor placed {layout} has the shards of {TP_COL} inside those of "
                    f"{TP_ROW}, but a style on {TP_ROW} makes them the other way round: give it "
                    f"another layout, or use_local_output=True"
                )
            return col, row
        return col, col

    def layout(self, x: DTensor, row_dim: int) -> Layout:
        """The ``(row, col)`` layout of a DTensor on the mesh or on its ``tp_col`` sub-mesh.

        Raises:
            ValueError: if it is on any other mesh.
        """
        if x.device_mesh == self.mesh:
            first, second = x.placements
            if self.axes == TP_COL:
                return first, second
            if self.axes == TP_ROW:
                if isinstance(first, Shard) and first == second:
                    raise ValueError(
                        f"a DTensor placed {x.placements} has the shards of {TP_COL} inside those "
                        f"of {TP_ROW}, but a style on {TP_ROW} needs them the other way round: "
                        f"redistribute it first"
                    )
                return second, first
            if 1 in self.mesh.shape:
                # On an axis of one rank a placement says nothing.
                first = second = x.placements[0 if self.mesh.shape[1] == 1 else 1]
            if first != second:
                raise ValueError(
                    f"a style on {self.axes} takes a DTensor placed alike on both axes, but got "
                    f"{x.placements}: redistribute it first"
                )
            return Replicate(), first
        if x.device_mesh.ndim == 1 and x.device_mesh.mesh_dim_names == (self.col.name,):
            if x.device_mesh == self.mesh[self.col.name]:
                return Shard(static(row_dim)), x.placements[0]
        raise ValueError(
            f"the input is a DTensor on mesh {describe_mesh(x.device_mesh)}, but the style is on "
            f"{describe_mesh(self.mesh)}: put both on one mesh, or pass a local tensor"
        )

    def sizes_of(self, x: Tensor) -> Sizes | None:
        """Global sizes of all dims but the last of ``x``, if they are certain.

        They are for a DTensor, and for a local tensor that a style has handed out
        (:meth:`with_stand_in`); not for what the user's own code has made of such a tensor.
        """
        if isinstance(x, DTensor):
            sizes = tuple(x.shape[:-1]) if x.device_mesh == self.mesh else None
            return tuple(map(static, sizes)) if sizes and in_graph() else sizes
        return said_of(x).sizes

    def handed(self, x: Tensor) -> Layout | None:
        """The layout in which a style has handed out this very local tensor.

        None if no style has, or if one on other axes has, in a layout that cannot be expressed on
        this grid's axes.
        """
        _, layout, _, axes, *_ = said_of(x)
        if layout is None or axes is None or axes == self.axes:
            return layout
        row, col = on_mesh(normalize(layout, x.ndim), axes)
        if isinstance(row, Shard) and row == col and TP_ROW in (axes, self.axes):
            return None  # Which axis shards inside the other differs between them.
        if self.axes == TP_COL:
            return row, col
        if self.axes == TP_ROW:
            return col, row
        return (Replicate(), col) if row == col else None

    def tokens_of(self, x: Tensor) -> Sizes | None:
        """:meth:`sizes_of`, or else the sizes of the tokens under way, if ``x`` has as many dims.

        With two streams, an encoder's and a decoder's, the tokens under way are those embedded
        last. A tensor that the user's code has made of the other stream is recognised by the
        autograd graph, where there is one: by the sizes noted for the tensors it was made of.
        """
        return self.sizes_and_tokens(x)[1]

    def sizes_and_tokens(self, x: Tensor) -> tuple[Sizes | None, Sizes | None]:
        """:meth:`sizes_of` and :meth:`tokens_of`."""
        sizes = tokens = self.sizes_of(x)
        if sizes is None and self.context.tokens is not None:
            tokens = tokens_told(x) or self.context.tokens
        return sizes, tokens if tokens is not None and x.ndim == len(tokens) + 1 else None

    def begin(self, x: Tensor) -> None:
        """Take the tokens of ``x``, which a module of the user's is given, for those under way.

        Local tensors made in that module belong to the same tokens. Only where an embedding has
        written sizes: models without one (vision) may regroup their tokens between modules, so
        the sizes in one module do not hold after it.
        """
        sizes, known = self.tokens_of(x), self.context.tokens
        if sizes is not None and known is not None and len(sizes) == len(known):
            self.context.tokens = sizes

    def extent(
        self,
        x: Tensor,
        dim: int,
        layout: Layout,
        features: int | None = None,
        tokens: Sizes | None = None,
    ) -> int:
        """Global size of ``dim``, where ``x`` is this rank's shard under ``layout``.

        Args:
            features: the size of the last dim, which a style knows from its weight.
            tokens: the sizes of the tokens under way, where the caller has looked for them.

        Raises:
            ValueError: if the shard does not fit the sizes of the tokens under way.
        """
        known = self.tokens_of(x) if tokens is None else tokens
        return self._asked(x, dim, layout, features, known)()

    def shape_of(
        self, x: Tensor, layout: Layout, features: int | None = None
    ) -> Callable[[], tuple[int, ...]]:
        """The :meth:`extent` of every dim.

        If other ranks have to be asked, calling this starts to ask them; calling the function that
        it returns waits for their answers.
        """
        known = self.tokens_of(x)
        asked = [
            self._asked(x, dim, layout, features if dim == x.ndim - 1 else None, known)
            for dim in range(x.ndim)
        ]
        return lambda: tuple(extent() for extent in asked)

    def check_part(self, x: Tensor, way: Route, tokens: Sizes | None = None) -> None:
        """Refuse a shard of ``way.src`` whose sizes do not fit a redistribution to ``way.dst``.

        Raises:
            ValueError: if they do not, before anything is sent.
        """
        for dim in way.moved:
            if dim < x.ndim - 1:
                known = self.tokens_of(x) if tokens is None else tokens
                extent_told(x, dim, self.cuts(dim, way.src), way.src, known, self.mesh)

    def cuts(self, dim: int, layout: Layout) -> list[Axis]:
        """The axes that shard a dim, outermost first."""
        cuts = [a for a, p in zip((self.row, self.col), layout, strict=True) if shards_dim(p, dim)]
        return [axis for axis in cuts if axis.size > 1]

    def _asked(
        self,
        x: Tensor,
        dim: int,
        layout: Layout,
        features: int | None,
        known: Sizes | None,
    ) -> Callable[[], int]:
        cuts = self.cuts(dim, normalize(layout, x.ndim))
        if not cuts:
            return lambda: x.shape[dim]
        if features is not None and dim == x.ndim - 1:
            return lambda: features
        told = extent_told(x, dim, cuts, layout, known, self.mesh)
        return ask_extent(x, dim, cuts) if told is None else lambda: told

    def _empty_here(self, sizes: Sizes | None, ndim: int, layout: Layout, axis: Axis) -> int | None:
        """The dim that ``axis`` shards, if this rank holds none of its tokens; else None.

        None also if no token sizes are under way: a stand-in that comes back from the user's code,
        in a tensor of unknown origin, could not be told from real tokens then.
        """
        if sizes is None or self.context.tokens is None:
            return None
        row, col = normalize(layout, ndim)
        placement = row if axis is self.row else col
        if not isinstance(placement, Shard):
            return None
        if placement.dim >= len(sizes) or (row == col and axis is self.col):
            return None
        if part_of(sizes[placement.dim], [axis]) or not sizes[placement.dim]:
            return None
        return placement.dim

    def without_stand_in(self, x: Tensor, layout: Layout) -> Tensor:
        """Drop the token that stands in on a rank without any, see :meth:`with_stand_in`."""
        if self.context.tokens is None or _has_several(x):
            return x
        known, tokens = self.tokens_of(x), x
        for axis in (self.row, self.col):
            dim = self._empty_here(known, x.ndim, layout, axis)
            # Along the columns only a style that has these as its rows adds one: there may be none.
            if dim is not None and (axis is self.row or x.shape[dim] == 1):
                tokens = tokens.narrow(dim, 0, 0)
        if tokens is x:
            return x
        said = said_of(x)
        told = Handed(said.sizes, layout, x.ndim, self.axes, known, said.shares, by=said.by)
        return hand_out(tokens, told)

    def with_stand_in(
        self,
        x: Tensor,
        layout: Layout,
        sizes: Sizes | None,
        *,
        given: Tensor | None = None,
        shares: tuple[bool, bool] = (False, False),
        by: str = "",
        fused: bool = False,
        known: Sizes | None = None,
    ) -> Tensor:
        """Prepare a local tensor for the user's code between two styles.

        A mesh row without tokens is given one stand-in token of zeros, whose gradient is dropped: a
        batch of 3 leaves the last of 4 mesh rows without tokens, and code as ordinary as
        ``x.reshape(batch, sequence, -1)`` raises on empty tensors.

        Args:
            sizes: global sizes of all dims but the last, where they are certain. They are kept with
                the tensor, for a style that is given this very one.
            given: what ``x`` was made of. If that is local it may come from a style on other axes:
                then a stand-in may be due along the columns too, and a dim that is empty in
                ``given`` stays empty in ``x``.
            shares: along row and col, whether the gradient that it is given may be this rank's
                part, where it is whole.
            by: names who hands it out, for messages.
            fused: the features are those of several projections, of each a part.
            known: the sizes of the tokens under way, where the caller has looked for them.
        """
        if sizes is not None and len(sizes) != x.ndim - 1:
            sizes = None
        if sizes is not None:
            known = sizes
        elif known is None and self.context.tokens is not None:
            known = self.tokens_of(x)
        local = None if isinstance(given, DTensor) else given
        axes = (self.row,) if local is None else (self.row, self.col)
        for axis in () if self.context.tokens is None or _has_several(x) else axes:
            dim = self._empty_here(known, x.ndim, layout, axis)
            if dim is None or x.shape[dim]:
                continue
            if local is None or dim >= local.ndim or local.shape[dim]:
                shape = list(x.shape)
                shape[dim] = 1
                x = torch.cat([x, x.new_zeros(shape)], dim)
        row, col = names_of(self.axes) if any(shares) else ((), ())
        told = frozenset((*(row if shares[0] else ()), *(col if shares[1] else ())))
        return hand_out(
            x, Handed(sizes, layout, x.ndim, self.axes, known, told, by=by, fused=fused)
        )

    def redistribute(
        self,
        x: Tensor,
        src: Layout,
        dst: Layout,
        *,
        features: int | None = None,
        shape: Sequence[int] | None = None,
        partial_grad: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """Change the layout of a local shard, differentiably.

        Args:
            features: global size of the last dim, if it is sharded in ``src`` or ``dst``.
            shape: the global shape, where it is known.
            partial_grad: for each axis on which ``dst`` is replicated, whether the gradient of
                the result is partial.
        """
        way = (route if in_graph() else self.route)(src, dst, x.ndim)
        return self.follow(x, way, features=features, shape=shape, partial_grad=partial_grad)

    def follow(
        self,
        x: Tensor,
        way: Route,
        *,
        features: int | None = None,
        shape: Sequence[int] | None = None,
        partial_grad: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """:meth:`redistribute` from ``way.src`` to ``way.dst``."""
        if way.same and not any(partial_grad):
            return x
        extents: dict[int, int] = {}
        for dim in way.moved:
            known = None if shape is None else shape[dim]
            extents[dim] = self.extent(x, dim, way.src, features) if known is None else known
        for step in way.steps:
            axis = self.col if step.on_col else self.row
            if axis.size > 1:
                sizes: dict[int, Sequence[int]] = {
                    dim: self._wire_sizes(extent, dim, step) for dim, extent in extents.items()
                }
                summed = step.replicates and partial_grad[step.on_col]
                x = move(x, axis, step.src, step.dst, sizes, partial_grad=summed)
        return x

    def _wire_sizes(self, extent: int, dim: int, step: Step) -> tuple[int, ...]:
        axis, other = (self.col, self.row) if step.on_col else (self.row, self.col)
        if shards_dim(step.before[1 - step.on_col], dim):
            extent = other.split(extent)[other.index]
        return axis.split(extent)


def _has_several(x: Tensor) -> bool:
    """Whether each dim of tokens has several: then none of them stands in, nor does one have to."""
    return not in_graph() and min(x.shape[:-1], default=0) > 1
