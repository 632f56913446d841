"""How a module runs on a rank's own tensors, and what is known of those it hands on."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat.tensors import tree_leaves, tree_map_only
from .._tracing import in_graph
from ..mesh.axes import names_of
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import Handed, hand_out, said_of
from ..mesh.layouts import Layout, normalize, row_layout
from .base import AS_INPUT, Resolved, Runner
from .dtensors import to_dtensor
from .local_math import run_locally
from .masks import Masks
from .mixed_tokens import refusing_mixed
from .module_kinds import describe_module
from .own_dropout import OwnDropout
from .provenance import check_handed, parts_asked
from .surroundings import layout_made_of, tokens_by_sizes

if TYPE_CHECKING:
    from .local import Local2D

__all__ = ["LocalRunner"]

_NEITHER = False, False


class _Call(NamedTuple):
    """What is known of one call of the module."""

    x: Tensor | None
    """The tensor that the layouts describe, as it was given."""
    layout: Layout
    parts: tuple[bool, bool]
    """Along row and col, whether the maker of the tensor sums its gradient."""
    sees_shares: bool
    """Whether the columns see different tokens, features or heads."""
    batch: int | None
    """The global number of samples; None if other ranks have to be asked."""
    local: bool
    """Whether the output is handed on as local tensors."""


class LocalRunner(Runner):
    style = "Local2D"

    def __init__(self, style: Local2D, module: nn.Module, grid: Grid) -> None:
        self.names = tuple(name for name, _ in module.named_parameters(recurse=False))
        self.by, self.grid = describe_module(module), grid
        self.here = f"{self.by} on mesh {describe_mesh(grid.mesh)}"
        self.use_local_output = style.use_local_output
        self.declared, self.surroundings = style.input_layouts, style.surroundings
        self.certain = style.certain
        self.sees_all = self.declared == (dt.Replicate(), dt.Replicate())
        # Each row has its own samples, unless every row has all of them.
        self.samples: Layout = (dt.Replicate(), dt.Replicate()) if self.sees_all else row_layout()
        declared = self.samples if self.declared is None else self.declared
        self.own = OwnDropout(module, Masks(grid, 0, declared, (), module))
        self.looked_at = False
        placed = style.params.items()
        self.split = {name: p.dim for name, p in placed if isinstance(p, Shard)}
        self.has_whole = any(name not in self.split for name in self.names)
        self.partial = {n for n, p in style.params.items() if isinstance(p, dt.Partial)}

    def resolved(self) -> Resolved:
        if self.declared is None or self.declared == self.samples:
            return Resolved(self.samples, self.samples)
        return Resolved(self.declared, AS_INPUT)

    def run(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._call(module, (*args, *kwargs.values()))
        args = tuple(self._local(x) for x in args)
        kwargs = {name: self._local(x) for name, x in kwargs.items()}
        params = [(module, name) for name in self.names]
        own = self.own.replacing(forward, module)
        shares = not self.sees_all, self.has_whole and call.sees_shares
        if call.x is not None and not (self.looked_at or in_graph()):
            x, layout, misfit = call.x, call.layout, partial(self._misfit, call.x, call.layout)
            own = refusing_mixed(own, x, layout, self.grid, self.here, self._looked, misfit)
        y = run_locally(params, own, args, kwargs, self.grid, shares=shares, partial=self.partial)
        if self.sees_all:
            return tree_map_only(Tensor, self._of_all, y)
        if isinstance(y, Tensor):
            return self._output(y, call)
        if not call.local:
            self._check_outputs(y)
        return tree_map_only(Tensor, lambda one: self._output(one, call), y)

    def _looked(self) -> None:
        self.looked_at = True

    def _of_all(self, y: Tensor) -> Tensor:
        """An output that is the same on every rank, which its gradient has to be too."""
        if isinstance(y, DTensor) or not y.requires_grad:
            return y
        return hand_out(y, Handed(None, self.samples, y.ndim, self.grid.axes, by=self.by))

    def _call(self, module: nn.Module, values: tuple[Any, ...]) -> _Call:
        tensors = [x for x in values if isinstance(x, Tensor)]
        split = [x for x in tensors if x.ndim]
        x = next((x for x in split if x.is_floating_point()), next(iter(split), None))
        layout, parts, sees_shares = self._layout(module, x)
        on_mesh = [x for x in tensors if isinstance(x, DTensor)]
        local = not on_mesh if self.use_local_output is None else self.use_local_output
        # A DTensor on the sub-mesh of tp_col has the samples of one row.
        batches = [x.shape[0] for x in on_mesh if x.ndim and x.device_mesh == self.grid.mesh]
        batch, known = max(batches, default=None), self.grid.context.tokens
        if batch is None and x is not None and layout[0] == Shard(0):
            batch = next(iter(self.grid.tokens_of(x) or ()), None)
        if batch is None and known is not None and len(known) == 1:
            (batch,) = known
        return _Call(x, layout, parts, sees_shares, batch, local)

    def _layout(
        self, module: nn.Module, x: Tensor | None
    ) -> tuple[Layout, tuple[bool, bool], bool]:
        """The layout, parts and shares of a :class:`_Call` of ``x``.

        Raises:
            ValueError: for a local tensor that was handed out in another layout than is declared,
                or does not have its dims, for one that is the same on every row, and where the plan
                splits tokens over ``tp_col`` in some places and nothing tells whether it does here.
        """
        grid, declared = self.grid, self.declared
        if x is None or isinstance(x, DTensor):
            return self.samples, _NEITHER, declared is not None and isinstance(declared[1], Shard)
        if declared is not None:
            if any(isinstance(p, Shard) and not -x.ndim <= p.dim < x.ndim for p in declared):
                raise ValueError(
                    f"{self.here} was given a tensor of shape {tuple(x.shape)}, which does not "
                    f"have the dims of its input_layouts={declared}: declare those of its first "
                    f"tensor"
                )
            layout = declared
        elif grid.handed(x) is None and self.surroundings.sees_heads(module, x, grid):
            return self.samples, _NEITHER, True
        else:
            layout = self._found(module, x)
        layout = normalize(layout, x.ndim)
        fused = grid.context.watch is None or not self._has_each_feature(module, x, layout)
        check_handed(x, layout, module, grid, certain=self.certain, takes_fused=fused)
        parts = parts_asked(x, layout, module, grid)
        if declared is None and grid.row.size > 1 and layout[0].is_replicate() and not parts[0]:
            raise ValueError(
                f"{self.here} runs on this row's samples, but was given a local tensor of shape "
                f"{tuple(x.shape)} in layout {layout}, the same on every row: say so by "
                f"input_layouts=(Replicate(), Replicate()), or give the module before it "
                f"output_layouts={self.samples}"
            )
        return layout, parts, parts[1] or isinstance(layout[1], Shard)

    def _has_each_feature(self, module: nn.Module, x: Tensor, layout: Layout) -> bool:
        """Whether a parameter has a shard of as many entries as ``x`` has where it is split."""
        return isinstance(layout[1], Shard) and any(
            getattr(module, name).to_local().shape[dim] == x.shape[layout[1].dim]
            for name, dim in self.split.items()
        )

    def _found(self, module: nn.Module, x: Tensor) -> Layout:
        """The layout of a local input for which none is declared."""
        grid, told = self.grid, self.surroundings
        handed = grid.handed(x)
        if handed is not None:
            return handed
        if not x.is_floating_point():
            return self.samples
        if self.has_whole and told.split:
            told.check_features(self.here, module, x, grid)
        made, by_sizes = layout_made_of(x, grid), tokens_by_sizes(x, 0, grid)
        if made is not None and by_sizes in (None, made[1]):
            return made
        # Without an embedding or a Linear in it the plan splits no tokens.
        splits_none = not told.widths or told.stream == dt.Replicate()
        if grid.col.size == 1 or (splits_none and by_sizes is None):
            return self.samples
        return told.layout(self.here, x, 0, grid)

    def _local(self, x: Any) -> Any:
        """A DTensor's local shard, with a sample that stands in on a row without any.

        Raises:
            ValueError: for a DTensor that is laid out otherwise.
        """
        if not isinstance(x, DTensor):
            return x
        grid = self.grid
        layout = grid.layout(x, 0)
        axes = zip((grid.row, grid.col), normalize(layout, x.ndim), self.samples, strict=True)
        if any(have != want for axis, have, want in axes if axis.size > 1):
            of = "all samples" if self.sees_all else "this row's samples, whole along tp_col"
            raise ValueError(
                f"{self.here} runs on {of}, but got a DTensor of shape {tuple(x.shape)} placed "
                f"{x.placements}: redistribute it to {self.samples}"
            )
        local = x.to_local()
        if self.sees_all or not x.ndim or x.device_mesh != grid.mesh:
            return local
        if grid.context.tokens is None and 0 in grid.row.split(x.shape[0]):
            # The global sizes are not noted: no style inside could tell the stand-in from a sample.
            return local if local.shape[0] else torch.cat([local, local.new_zeros(1, *x.shape[1:])])
        return grid.with_stand_in(local, self.samples, grid.sizes_of(x))

    def _output(self, y: Tensor, call: _Call) -> Tensor:
        """An output of the module as it is handed on.

        Raises:
            ValueError: for one that does not have the tokens of an input that is split by tokens,
                and for one that is to become a DTensor, but whose layout is not known.
        """
        grid, x, layout = self.grid, call.x, call.layout
        if isinstance(y, DTensor) or (y is x and call.local):
            return y
        if x is None or isinstance(x, DTensor):
            return self._of_samples(y, call)
        dims = x.ndim if Shard(x.ndim - 1) in layout else x.ndim - 1
        alike = y.shape[:dims] == x.shape[:dims]
        # The user has said that the input is whole, whatever it is made of; so the output is.
        of_samples = self.certain and layout == self.samples and y.shape[:1] == x.shape[:1]
        apart = self._apart(layout)
        told = of_samples or (alike and (apart or said_of(x).layout is not None))
        if told and y.is_floating_point():
            y = hand_out(y, self._noted(y, x, call))
        if not apart:
            return self._of_samples(y, call)
        if call.local:
            by_tokens = dims < x.ndim <= 3 and any(isinstance(p, Shard) for p in layout)
            if alike or not by_tokens:
                return y
        elif alike and (grid.row.size == 1 or layout[0].is_shard()):
            if call.batch is None or layout[0] != Shard(0):
                return to_dtensor(y, layout, grid)
            others = [grid.extent(y, dim, layout) for dim in range(1, y.ndim)]
            y = y.narrow(0, 0, grid.row.split(call.batch)[grid.row.index])
            return to_dtensor(y, layout, grid, (call.batch, *others))
        raise self._misfit(x, layout, y)

    def _misfit(self, x: Tensor, layout: Layout, y: Tensor) -> ValueError:
        return ValueError(
            f"{self.here} was given a local tensor of shape {tuple(x.shape)} in layout {layout} "
            f"and gave one of shape {tuple(y.shape)}, whose layout that does not tell: split over "
            f"{' and '.join(self._apart(layout))} a module can only take tokens one by one, here "
            f"and on every other rank. Have the module before it hand on full samples, "
            f"output_layouts={self.samples}, or a DTensor (use_local_output=False) to "
            f"torch_tp2d.Replicate() in the place of Local2D"
        )

    def _apart(self, layout: Layout) -> list[str]:
        """The mesh axes on which ``layout`` is not that of this row's samples."""
        axes = zip((self.grid.row, self.grid.col), layout, self.samples, strict=True)
        return [axis.name for axis, have, of in axes if axis.size > 1 and have != of]

    def _noted(self, y: Tensor, x: Tensor, call: _Call) -> Handed:
        """What to note of an output with the tokens of the local input ``x``."""
        said, grid = said_of(x), self.grid
        if said.layout is None:
            named = (n for n, part in zip(names_of(grid.axes), call.parts, strict=True) if part)
            shares: frozenset[str] = frozenset().union(*named)
            known = grid.tokens_of(x)
            return Handed(None, call.layout, y.ndim, grid.axes, known, shares, by=self.by)
        if y.ndim == x.ndim:
            return said._replace(by=self.by)
        layout = normalize(said.layout, x.ndim)
        return said._replace(sizes=None, layout=layout, ndim=y.ndim, by=self.by)

    def _of_samples(self, y: Tensor, call: _Call) -> Tensor:
        """An output of this row's samples, of which nothing is split along ``tp_col``."""
        grid, batch = self.grid, call.batch
        if call.local:
            stood_in = isinstance(call.x, DTensor) and grid.context.tokens is None
            if not stood_in or batch is None or not y.ndim:
                return y
            # Without token sizes the user's code could not tell the stand-in from a sample.
            return y if grid.row.split(batch)[grid.row.index] else y.narrow(0, 0, 0)
        if batch is None:
            batch = grid.extent(y, 0, row_layout()) if y.ndim else 0
        mine = grid.row.split(batch)[grid.row.index]
        # A row without samples holds one stand-in sample.
        if not y.ndim or y.shape[0] not in (mine, mine or 1):
            raise ValueError(
                f"{self.here} gave {tuple(y.shape)}, but this row has {mine} of {batch} samples: "
                f"only what has the batch in dim 0 becomes a DTensor"
            )
        return to_dtensor(y.narrow(0, 0, mine), row_layout(), grid, (batch, *y.shape[1:]))

    def _check_outputs(self, y: Any) -> None:
        """Refuse several outputs in an object that torch's pytree does not look into.

        Raises:
            TypeError: for a dataclass that is not registered there.
        """
        for one in tree_leaves(y):
            if is_dataclass(one):
                raise TypeError(
                    f"{self.here} gave a {type(one).__name__}, whose tensors cannot be made "
                    f"DTensors: give it to torch.export.register_dataclass, or return a tuple"
                )
