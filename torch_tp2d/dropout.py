"""Dropout on shards: a style for ``nn.Dropout``, and the key that all ranks of a grid share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .comm import Axis, all_gather
from .grid import Grid, describe_mesh
from .layouts import Layout, as_layout, check_row_dim, normalize
from .ops.dropout import draw_key, drop, dropped
from .recognise import describe_module
from .styles import GridStyle, LayoutLike, Runner

__all__ = ["OTHER_KINDS", "Dropout2D", "next_key"]

OTHER_KINDS = (
    nn.AlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)
"""torch's dropouts of whole channels, and those that keep mean and variance: not for shards."""

_TOKEN_DIMS: dict[int, dict[int, int]] = {2: {0: 0}, 3: {0: 0, 1: 1}, 4: {0: 0, 2: 1, 3: 1}}
"""By the number of dims: which of them are the batch (0) and the sequence (1)."""

_draws: WeakKeyDictionary[DeviceMesh, int] = WeakKeyDictionary()


def next_key(grid: Grid) -> Tensor:
    """The key of the next call of dropout on the grid, one and the same on all its ranks.

    That it is the same is checked when the first key is drawn, and at the second, fourth, eighth:
    two transfers of a few bytes each, often enough to meet a generator that has gone astray and
    too seldom to cost.

    Raises:
        ValueError: if it is not.
    """
    key = draw_key()
    if torch.compiler.is_compiling():
        return key
    count = _draws[grid.mesh] = _draws.get(grid.mesh, 0) + 1
    if count & (count - 1) == 0:
        keys = key.view(1).to(grid.mesh.device_type)
        for axis in (grid.col, grid.row):
            keys = all_gather(keys, 0, (keys.numel(),) * axis.size, axis).wait()
        if (keys != keys[0]).any():
            raise ValueError(
                f"torch's random generators differ between the ranks of the mesh "
                f"{describe_mesh(grid.mesh)}, so copies of one token would get different dropout "
                f"masks: call torch.manual_seed(seed) with one seed on every rank of the mesh "
                f"before training, and draw the same random numbers on each. Data-parallel "
                f"replicas, each a mesh of its own, may have seeds of their own"
            )
    return key


class Dropout2D(GridStyle):
    """``nn.Dropout`` on shards: the mask that one device would have, each rank its part of it.

    Whether an element is dropped depends on its index in the whole tensor and on a key that is
    drawn from torch's default CPU generator, which has to be in the same state on all ranks of
    the mesh: ``torch.manual_seed(seed)`` on each. So copies of a token agree, shards differ,
    activation checkpointing (which puts the generator back) repeats the mask, and the loss on any
    grid is the loss on a 1 x 1 grid with that seed. It is not what ``nn.Dropout`` draws from the
    same seed. The replicas of data parallelism may have seeds of their own, and should, unless
    each is to drop the same elements of its share.

    :func:`torch_tp2d.parallelize_module` gives this style to every ``nn.Dropout`` that stands
    beside modules which the plan names. With p = 0, and in eval, the module runs as it is.

    Keyword Args:
        input_layouts: layout of a local input, read as by :class:`Colwise2D`. A DTensor knows its
            own. By default it is told by the sizes: the token layout where the sequence is this
            rank's part of the tokens under way, the feature layout where the last dim is this
            rank's part of the features of a module beside it that hands on local features
            (as ``wi`` is in ``wo(dropout(act(wi(x))))``), else the row layout.
        row_dim: the token dim that ``tp_row`` splits.

    Raises:
        TypeError: for another kind of module.
        ValueError: for ``inplace=True``; in forward, for a local input of which the sizes do not
            tell the layout, and if the ranks' generators differ.

    Example::

        >>> plan = {"layers.*.attention.dropout": Dropout2D(input_layouts=Shard(1)), ...}
        >>> torch.manual_seed(0)   # the same on every rank
        >>> parallelize_module(model, mesh, plan)
    """

    def __init__(self, *, input_layouts: LayoutLike = None, row_dim: int = 0) -> None:
        super().__init__()
        check_row_dim(row_dim)
        self.row_dim = row_dim
        self.input_layouts = (
            None
            if input_layouts is None
            else as_layout(input_layouts, (Shard(row_dim), Replicate()), row=Shard(row_dim))
        )
        self.beside: list[tuple[int, Placement]] = []
        """Features and ``tp_col`` placement of what the modules beside it hand on."""
        self.by_default = False

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        if not isinstance(module, nn.Dropout) or type(module).forward is not nn.Dropout.forward:
            raise TypeError(f"Dropout2D is for nn.Dropout, not {describe_module(module)}")
        if module.inplace and module.p:
            raise ValueError(
                f"{describe_module(module)}: dropout on shards does not write into its input: "
                f"set inplace to False"
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _DropoutRunner(self, module, grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input_layouts={self.input_layouts}, row_dim={self.row_dim})"


class _DropoutRunner(Runner):
    def __init__(self, style: Dropout2D, module: nn.Module, grid: Grid) -> None:
        self.style = "Dropout2D"
        self.by_default = style.by_default
        self.grid = grid
        self.row_dim = style.row_dim
        self.declared = style.input_layouts
        whole = {features for features, p in style.beside if not _of_features(p)}
        self.widths = {
            grid.col.split(features)[grid.col.index]: (
                features,
                not whole.isdisjoint(grid.col.split(features)),
            )
            for features, p in style.beside
            if _of_features(p)
        }
        """Local width to the width of the whole, and whether another module's whole is as wide."""

    def run(self, module: Any, forward: Callable[..., Any], x: Tensor) -> Tensor:
        p = module.p
        if not module.training or p == 0.0:
            return forward(x)
        key = next_key(self.grid)
        if not isinstance(x, DTensor):
            layout, features = self._layout(module, x)
            return drop(x, dropped(key, p, self._index(x, layout, features, None)), p)
        layout = normalize(self.grid.layout(x, self.row_dim), x.ndim)
        shape = x.shape if x.device_mesh == self.grid.mesh else None
        local = x.to_local()
        y = drop(local, dropped(key, p, self._index(local, layout, None, shape)), p)
        return DTensor.from_local(
            y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    def _layout(self, module: nn.Module, x: Tensor) -> tuple[Layout, int | None]:
        """Layout of a local input, and its features where they are split and known."""
        features = self.widths.get(x.shape[-1])
        if self.declared is not None:
            layout = normalize(self.declared, x.ndim)
            return layout, features[0] if features and layout[1] == Shard(x.ndim - 1) else None
        on_row, on_col = self.grid.guess_layout(x, self.row_dim)
        if self.grid.col.size == 1 or isinstance(on_col, Shard):
            return (on_row, on_col), None
        if x.ndim > 3:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: the sizes "
                f"{tuple(x.shape)} of a local input do not tell its layout: name the module in "
                f"the plan, with Dropout2D(input_layouts=Shard(1)) where dim 1 is this rank's "
                f"heads, or Dropout2D(input_layouts=Replicate())"
            )
        if features is None:
            return (on_row, on_col), None
        width, also_whole = features
        if also_whole:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: the last dim "
                f"of a local input {tuple(x.shape)} is this rank's part of the {width} features "
                f"of a module beside it, and as wide as another's whole output: name it in the "
                f"plan, with Dropout2D(input_layouts=Shard(-1)) for the part, "
                f"Dropout2D(input_layouts=Replicate()) for the whole"
            )
        return (on_row, Shard(x.ndim - 1)), width

    def _index(
        self, x: Tensor, layout: Layout, features: int | None, shape: Sequence[int] | None
    ) -> list[Tensor]:
        """For each dim of a local shard, which elements of the whole are here."""
        index = []
        for dim, size in enumerate(x.shape):
            start = 0
            cuts = [
                axis
                for axis, p in zip((self.grid.row, self.grid.col), layout, strict=True)
                if isinstance(p, Shard) and p.dim == dim and axis.size > 1
            ]
            if cuts:
                if shape is not None:
                    extent = shape[dim]
                elif features is not None and dim == x.ndim - 1:
                    extent = features
                else:
                    extent = self._extent(x, dim, cuts, layout)
                for axis in cuts:
                    sizes = axis.split(extent)
                    start += sum(sizes[: axis.index])
                    extent = sizes[axis.index]
            index.append(torch.arange(start, start + size, device=x.device))
        return index

    def _extent(self, x: Tensor, dim: int, cuts: Sequence[Axis], layout: Layout) -> int:
        """Size of the whole of a dim of a local input."""
        known = self.grid.tokens.shape
        # [batch, hidden], [batch, sequence, hidden] or [batch, heads, queries, keys]
        size = _TOKEN_DIMS.get(x.ndim, {}).get(dim)
        if known is not None and size is not None:
            extent = known[size]
            for axis in cuts:
                extent = axis.split(extent)[axis.index]
            # One element stands in for none, see Grid.with_stand_in.
            if x.shape[dim] == (extent or 1):
                return known[size]
        if x.ndim == 3:
            return self.grid.extent(x, dim, layout)
        return x.shape[dim] * math.prod(axis.size for axis in cuts)


def _of_features(placement: Placement) -> bool:
    """Whether it is the placement of a hidden dim, in two, three or any number of dims."""
    return placement in (Shard(-1), Shard(2))
