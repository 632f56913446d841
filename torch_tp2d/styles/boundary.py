"""How tensors, DTensor or local, enter and leave a style, from one layout to another.

Two conventions meet here. Outside a style, a *local* tensor that is replicated along an axis has a
replicated gradient, as in the stock styles, so user code may do anything with it. Inside a style
the gradient of a gathered input stays a partial sum, so that it can go back in one reduce-scatter.
Several consumers of one tensor (q, k and v; w1 and w3) use one gather and one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from .._tracing import in_graph, static
from ..mesh.grid import Grid, Sizes, describe_mesh
from ..mesh.layouts import Layout, reduced, same_placement, shards_dim
from ..mesh.routes import Route, route
from ..ops.matmul import Shards
from ..ops.matmul.inputs import Shared, gather
from ..runtime.reductions import of_pass
from .canonical import canonical
from .compared_inputs import compare_over_ranks
from .dtensors import shard_of, to_dtensor
from .module_kinds import describe_module, needs_input
from .provenance import check_handed, parts_asked
from .twins import twin_of

__all__ = ["Entry", "Exit", "dims_needed", "shards_of"]


@dataclass(frozen=True, eq=False)
class Entry:
    """How a module's input enters its style: its layout outside, and the layout that the op takes.

    Args:
        declared: the layout of a local tensor; a DTensor knows its own.
        wanted: the op's layout. Where it replicates along an axis, the op's gradient for its input
            is a partial sum there.
        row_dim: the token dim that ``tp_row`` splits in a DTensor on the ``tp_col`` sub-mesh.
        features: global size of the last dim.
        whole_grad: the op's gradient is replicated, not partial, where ``wanted`` replicates.
        certain: the user declared the layout of a local input on both axes.
        given_to_all: the input comes from outside the model, as ids do, and is compared over the
            ranks that have to be given the same.
        fuses: the gather along ``tp_col`` and the product are one fused operator.
    """

    grid: Grid
    declared: Layout
    wanted: Layout
    row_dim: int = 0
    features: int | None = None
    whole_grad: bool = False
    certain: bool = False
    given_to_all: bool = False
    fuses: bool = False
    _routes: dict[tuple[int, Layout | None], Route] = field(default_factory=dict, repr=False)
    _here: dict[int, int | None] = field(default_factory=dict, repr=False)

    def route(self, ndim: int, given: Layout | None = None) -> Route:
        """From ``declared``, or the layout that is given, to ``wanted`` of an ``ndim``-dim input.

        Kept, as every call asks.
        """
        src = self.declared if given is None else given
        if in_graph():
            return route(src, self.wanted, ndim)
        key = ndim, given
        if key not in self._routes:
            self._routes[key] = route(src, self.wanted, ndim)
        return self._routes[key]

    def features_here(self, ndim: int) -> int | None:
        """How many features of a local ``ndim``-dim input this rank has; None if not known."""
        if ndim not in self._here:
            here, layout = self.features, self.route(ndim).src
            for axis, placement in zip((self.grid.row, self.grid.col), layout, strict=True):
                if here is not None and placement.is_shard(ndim - 1):
                    here = axis.split(here)[axis.index]
            self._here[ndim] = here
        return self._here[ndim]

    def shard(self, x: Tensor, module: nn.Module) -> Tensor:
        """An input as the local shard that the op takes.

        Args:
            x: a DTensor on the mesh or on its ``tp_col`` sub-mesh, or a local tensor.
            module: whose input it is, for messages.

        Raises:
            ValueError: for a local tensor that a style has handed out in another layout; for one
                from outside that is the same on every row though each should have its own; and,
                if ``given_to_all``, for one that differs where it should be the same.
        """
        shard: Tensor = self.arriving(x, module, pipelined=False)
        return shard

    def check(self, x: Tensor, module: nn.Module, tokens: Sizes | None) -> None:
        """Refuse an input that :meth:`arriving` would refuse, before the weight is gathered.

        Args:
            tokens: the sizes of the tokens under way.

        Raises:
            ValueError: for a DTensor on another mesh, and for a local tensor that a style has
                handed out in another layout or that is not this rank's part of the tokens.
        """
        grid = self.grid
        if isinstance(x, DTensor):
            grid.layout(x, self.row_dim)
            return
        way = self.route(x.ndim)
        self.check_local(x, way.src, module)
        if way.moved:
            grid.check_part(grid.without_stand_in(x, way.src), way, tokens)

    def check_local(self, x: Tensor, layout: Layout, module: nn.Module) -> None:
        """Refuse a local tensor that lies otherwise, or has other features than this rank's.

        Raises:
            ValueError: if it does, before anything is sent.
        """
        grid = self.grid
        check_handed(x, layout, module, grid, certain=self.certain)
        if in_graph():
            return
        size = self.features_here(x.ndim)
        if size is not None and x.shape[-1] != size:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} is given a local "
                f"tensor of shape {tuple(x.shape)}, but in layout {layout} this rank has {size} of "
                f"{self.features} features. Say by input_layouts how it lies, (Shard(0), "
                f"Replicate()) where features are whole and (Shard(0), Shard(-1)) where tp_col "
                f"splits them, or give it a DTensor, which knows (use_local_output=False)"
            )

    def arriving(
        self, x: Tensor, module: nn.Module, *, pipelined: bool, tokens: Sizes | None = None
    ) -> Any:
        """:meth:`shard`, or a stand-in that delivers it piece by piece to an op in rounds.

        The stand-in is a :class:`~torch_tp2d.runtime.deferred.Gathering` or, in a traced graph, a
        :class:`~torch_tp2d.ops.matmul.inputs.Shared`.

        Args:
            pipelined: the op takes its input piece by piece; in eager, :meth:`check` was called.
            tokens: the sizes of the tokens under way, where they were looked for.
        """
        result = _entered(x, self, module, pipelined, tokens)
        if (self.given_to_all or x.is_leaf) and not isinstance(x, DTensor):
            # Last, since it communicates: mistakes that this rank can find by itself come first.
            compare_over_ranks(
                x,
                self.declared,
                module,
                self.grid,
                certain=self.certain,
                to_all=self.given_to_all,
            )
        return result


def _entered(
    x: Tensor, entry: Entry, module: nn.Module, pipelined: bool, tokens: Sizes | None
) -> Tensor | Shared:
    grid = entry.grid
    features, whole_grad = entry.features, entry.whole_grad
    given, shape, own_account = x, None, (False, False)
    if isinstance(x, DTensor):
        x = canonical(x, sums=True)
        way = entry.route(x.ndim, grid.layout(x, entry.row_dim))
        declared, wanted = way.src, way.dst
        if x.device_mesh == grid.mesh:
            shape = tuple(x.shape)
        if x.device_mesh == grid.mesh and x.is_floating_point():
            # A DTensor can carry a partial gradient, so no collective is needed for it here.
            own_row, own_col = (
                have.is_replicate() and replicated and not whole_grad
                for have, replicated in zip(declared, way.replicates, strict=True)
            )
            own_account = own_row, own_col
            on_row, on_col = (
                Partial() if own else placement
                for own, placement in zip(own_account, reduced(declared), strict=True)
            )
            placements = grid.placements((on_row, on_col))
            moves = zip((grid.row, grid.col), declared, wanted, strict=True)
            kept = all(axis.size == 1 or same_placement(have, want) for axis, have, want in moves)
            needed = needs_input(module)
            x = shard_of(x, grid, grad_placements=placements, needed=needed, kept=kept)
        else:
            x = x.to_local()
    else:
        way = entry.route(x.ndim)
        declared, wanted = way.src, way.dst
        if not pipelined or in_graph():
            entry.check_local(x, declared, module)
        own_account = parts_asked(x, declared, module, grid)
        x = grid.without_stand_in(x, declared)
        if any(own_account):
            x, declared = _with_own_parts(x, way, entry, own_account, module)
            way = route(declared, wanted, x.ndim)
    if way.same:
        twin = twin_of(given, declared, grid.context)
        if twin is not None:
            return twin.value() if isinstance(twin, Shared) and not pipelined else twin
    summed = x.is_floating_point() and not whole_grad
    row_grad = summed and way.replicates[0] and not own_account[0]
    col_grad = summed and way.replicates[1] and not own_account[1]
    in_rounds = pipelined and way.splits_tokens and way.row_stays
    if in_graph() and in_rounds and col_grad and grid.col.size > 1:
        shards = shards_of(x, declared, grid, features, shape, tokens, fuses=entry.fuses)
        return Shared(x, shards)
    shares = (
        col_grad
        and (grid.col.size > 1 or not way.row_stays)
        and not in_graph()
        and not given.is_inference()
        # Not for a leaf: the kept result would refer back to it, and so keep it alive, through the
        # node that accumulates its gradient.
        and not (given.is_leaf and given.requires_grad)
        # A buffer may be refilled, in ways that torch does not see, after the model has run.
        and not (given.is_leaf and not of_pass(grid.context))
    )
    key = grid.col.group, declared, wanted
    if shares:
        # q, k and v, or w1 and w3, are given the same tensor: it crosses the wire once, and so
        # does its gradient.
        shared = grid.context.gathered.get(given, key)
        if shared is not None:
            return shared
    if in_rounds and shares:
        shards = shards_of(x, declared, grid, features, shape, tokens, fuses=entry.fuses)
        result = gather(x, shards, grid.context)
    else:
        sums = row_grad, col_grad
        result = grid.follow(x, way, features=features, shape=shape, partial_grad=sums)
    if shares:
        grid.context.gathered.put(given, key, result)
    return result


def shards_of(
    x: Tensor,
    layout: Layout,
    grid: Grid,
    features: int | None,
    shape: Sequence[int] | None,
    tokens: Sizes | None = None,
    *,
    fuses: bool,
) -> Shards:
    """How ``tp_col`` splits the dim of ``x`` that ``layout`` shards over it."""
    row, col = layout
    assert isinstance(col, Shard)
    if shape is None:
        extent = grid.extent(x, col.dim, layout, features, tokens)
    else:
        extent = shape[col.dim]
    if isinstance(row, Shard) and row.dim == col.dim:
        extent = grid.row.split(extent)[grid.row.index]
    return Shards(col.dim, grid.col.split(extent), grid.fused_col if fuses else grid.col)


def _with_own_parts(
    x: Tensor, way: Route, entry: Entry, parts: tuple[bool, bool], module: nn.Module
) -> tuple[Tensor, Layout]:
    """What the op takes of an input whose maker sums the ranks' parts of its gradient.

    Returns:
        This rank's part, where the op takes one, and the layout.

    Raises:
        ValueError: where the op gives a whole gradient, or splits a dim that is split already.
    """
    grid, declared, wanted = entry.grid, way.src, way.dst
    have = list(declared)
    for at, axis in enumerate((grid.row, grid.col)):
        want = wanted[at]
        if not parts[at]:
            continue
        if entry.whole_grad or (isinstance(want, Shard) and at == 0 and have[1] == want):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} is given a local "
                f"tensor of shape {tuple(x.shape)} in layout {declared}, whose gradient its maker "
                f"sums along {axis.name}: hand it on as a DTensor (use_local_output=False)"
            )
        if isinstance(want, Shard):
            sizes = axis.split(x.shape[want.dim])
            # Its gradient is zero elsewhere, and is not gathered.
            x = x.narrow(want.dim, sum(sizes[: axis.index]), sizes[axis.index])
            have[at] = want
    return x, (have[0], have[1])


@dataclass(frozen=True, eq=False)
class Exit:
    """How an op's result leaves its style: the result's layout, and that of the module's output.

    Args:
        have: the layout of the local result.
        wanted: the output's layout.
        features: global size of the last dim.
        use_local_output: hand on the local shard, else a DTensor of the global shape.
        grad_layouts: where this is Partial and ``wanted`` Replicate, the gradient of a local
            output is partial, and is summed.
        by: the module, for messages.
        fused: the features are those of several projections, of each a part.
    """

    grid: Grid
    have: Layout
    wanted: Layout
    features: int
    use_local_output: bool
    grad_layouts: Layout | None = None
    by: str = ""
    fused: bool = False
    shares: tuple[bool, bool] = field(init=False)
    """Along row and col, whether the gradient of a local output is partial, and is summed."""
    _routes: dict[tuple[int, int | None], Route] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        shares = False, False
        if self.use_local_output and self.grad_layouts is not None:
            row, col = (
                grad.is_partial() and wanted.is_replicate()
                for grad, wanted in zip(self.grad_layouts, self.wanted, strict=True)
            )
            shares = row, col
        object.__setattr__(self, "shares", shares)

    def route(self, ndim: int, scattered: int | None = None) -> Route:
        """From ``have`` to ``wanted`` of an ``ndim``-dim result.

        Args:
            scattered: the dim to whose shards along ``tp_col`` the result was reduced already.
        """
        if in_graph():
            return self._route(ndim, scattered)
        key = ndim, scattered
        if key not in self._routes:
            self._routes[key] = self._route(ndim, scattered)
        return self._routes[key]

    def _route(self, ndim: int, scattered: int | None) -> Route:
        have = self.have if scattered is None else (self.have[0], Shard(static(scattered)))
        return route(have, self.wanted, ndim)

    def output(
        self,
        y: Tensor,
        sizes: Sizes | None,
        scattered: int | None = None,
        tokens: Sizes | None = None,
    ) -> Tensor:
        """A local result as the module's output.

        Args:
            sizes: the global sizes of all dims but the last, where they are certain.
            scattered: as in :meth:`route`.
            tokens: the sizes of the tokens under way, where they were looked for.
        """
        grid, features, shares = self.grid, self.features, self.shares
        shape = None if sizes is None else (*sizes, features)
        way = self.route(y.ndim, scattered)
        y = grid.follow(y, way, features=features, shape=shape, partial_grad=shares)
        if self.use_local_output:
            return grid.with_stand_in(
                y, way.dst, sizes, shares=shares, by=self.by, fused=self.fused, known=tokens
            )
        return to_dtensor(y, way.dst, grid, shape, features)


def dims_needed(entry: Entry, exit: Exit) -> int:
    """The dims of an input of which ``tp_row`` splits a dim of tokens, and not the features."""
    layouts = (*entry.declared, *entry.wanted, *exit.have, *exit.wanted)
    splits = any(shards_dim(placement, entry.row_dim) for placement in layouts)
    return 2 + (entry.row_dim if splits else 0)
