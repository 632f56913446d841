"""The style of modules that run unchanged on local tensors, between two styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import Layout, as_layout, normalize, row_layout
from .base import GridStyle, LayoutLike, Resolved, Runner
from .boundary import to_dtensor
from .local_math import run_locally
from .masks import Masks
from .module_kinds import describe_module
from .own_dropout import OwnDropout
from .surroundings import UNKNOWN

__all__ = ["Local2D"]


class Local2D(GridStyle):
    """Run a module unchanged on this row's local tensors, with its own parameters on the mesh.

    It is for models that regroup tokens between modules, into windows of an image for instance, so
    that the first dim is not always the batch. Between the modules of such a model every tensor is
    local: this row's part of the batch, replicated along ``tp_col``. Only gradients move.

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    inputs, output   ``(Shard(0), Replicate())``     ``[B/R, ...]``, or ``[n B/R, ...]``
    parameters       ``(Replicate(), Replicate())``  full, or as ``params`` says
    ===============  ==============================  ==============================

    The module's own parameters are placed, not those of modules inside it. Each rank uses its
    shards of them as plain tensors; gradients are summed along ``tp_row``, whose ranks have
    different samples. Along ``tp_col`` all ranks compute the same with a replicated parameter,
    unless ``input_layouts`` say that they see different heads or features.

    A quantity that the user's code computes across samples from a local output covers this row's
    samples only. A mean over tokens is the row's mean, and a product of such means, such as a
    router's load-balancing loss, differs from one device's. Give a router
    ``use_local_output=False``: its logits are then a DTensor of the full batch, and so is the loss
    computed from them (``loss.full_tensor()`` before backward).

    Keyword Args:
        params: the placement on ``tp_col`` of parameters that are split there, by name: a table
            with a bias per head is ``Shard(1)`` if its dim 1 counts heads.
        input_layouts: layout of the first tensor, ``Replicate()`` on ``tp_col`` by default. If it
            is a Shard there, of heads for instance, gradients of replicated parameters are summed
            along ``tp_col`` too. ``(Replicate(), Replicate())`` says that the module's own
            parameters are applied to tensors that are replicated on every rank, such as a scale of
            the logits of all pairs in a batch: no gradient is summed.
        use_local_output: hand on a local tensor (True), or a DTensor of the global shape with the
            batch in dim 0 (False), which the last such module needs for the loss; by default a
            DTensor if an input is one.

    Raises:
        TypeError: for integer parameters.
        ValueError: for a name in ``params`` that is no parameter of the module, or a dim that the
            parameter does not have; in forward, for a DTensor that is laid out otherwise, and for
            replicated parameters beside a Linear whose local output is split, if ``input_layouts``
            are not given.

    Example::

        >>> plan = {"patches": Colwise2D(output_layouts=Replicate()),
        ...         "blocks.*.norm": Local2D(),
        ...         "blocks.*.attention.bias": Local2D(params={"table": Shard(1)}), ...}
    """

    places_inside = False

    def __init__(
        self,
        *,
        params: Mapping[str, Placement] | None = None,
        input_layouts: LayoutLike = None,
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__()
        self.params = dict(params or {})
        self.input_layouts = (
            None if input_layouts is None else as_layout(input_layouts, row_layout(), row=Shard(0))
        )
        self.use_local_output = use_local_output
        self.surroundings = UNKNOWN

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        own = dict(module.named_parameters(recurse=False))
        for name, placement in self.params.items():
            if name not in own:
                raise ValueError(
                    f"{describe_module(module)} has no parameter {name!r} of its own; it has "
                    f"{sorted(own)}"
                )
            if not isinstance(placement, Shard | dt.Replicate):
                raise ValueError(
                    f"{describe_module(module)}: {name} cannot be placed {placement}: use Shard "
                    f"or Replicate"
                )

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for name, _ in module.named_parameters(recurse=False):
            yield module, name, (dt.Replicate(), self.params.get(name, dt.Replicate()))

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _LocalRunner(self, module, grid)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(params={self.params}, input_layouts={self.input_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class _LocalRunner(Runner):
    style = "Local2D"

    def __init__(self, style: Local2D, module: nn.Module, grid: Grid) -> None:
        self.names = tuple(name for name, _ in module.named_parameters(recurse=False))
        self.here = f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}"
        self.grid = grid
        self.use_local_output = style.use_local_output
        self.declared, self.surroundings = style.input_layouts, style.surroundings
        self.sees_all = self.declared == (dt.Replicate(), dt.Replicate())
        # Each row has its own samples, unless every row has all of them.
        self.samples: Layout = (dt.Replicate(), dt.Replicate()) if self.sees_all else row_layout()
        declared = self.samples if self.declared is None else self.declared
        self.own = OwnDropout(module, Masks(grid, 0, declared, (), module))
        self.has_whole = any(not isinstance(style.params.get(n), Shard) for n in self.names)

    def resolved(self) -> Resolved:
        return Resolved(self.samples if self.declared is None else self.declared, self.samples)

    def run(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        batches = {x.shape[0] for x in values if isinstance(x, DTensor)}
        shares = not self.sees_all, self._sees_shares(module, values)
        args = tuple(self._local(module, x) for x in args)
        kwargs = {name: self._local(module, x) for name, x in kwargs.items()}
        params = [(module, name) for name in self.names]
        own = self.own.replacing(forward, module)
        y = run_locally(params, own, args, kwargs, self.grid, shares=shares)
        if self.sees_all:
            return y
        local = not batches if self.use_local_output is None else self.use_local_output
        return y if local else self._of_whole_batch(module, y, batches)

    def _sees_shares(self, module: nn.Module, values: Sequence[Any]) -> bool:
        """Whether the columns see different features or heads, so that gradients are partial."""
        if not self.has_whole or self.grid.col.size == 1:
            return False
        tensors = (x for x in values if isinstance(x, Tensor) and x.is_floating_point())
        x = next(tensors, None)
        if x is not None and self.grid.shares(x)[1]:
            return True
        if self.declared is not None:
            return isinstance(self.declared[1], Shard)
        if x is None or isinstance(x, DTensor):
            return False
        handed = self.grid.handed(x)
        if handed is not None:
            return isinstance(handed[1], Shard)
        if self.surroundings.sees_heads(module, x, self.grid):
            return True
        if self.surroundings.split:
            self.surroundings.check_features(self.here, module, x, self.grid)
        return False

    def _local(self, module: nn.Module, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if normalize(self.grid.layout(x, 0), x.ndim) != self.samples:
            of = "all samples" if self.sees_all else "this row's samples, whole along tp_col"
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)} runs on {of}, "
                f"but got a DTensor of shape {tuple(x.shape)} placed {x.placements}: redistribute "
                f"it to {self.samples}"
            )
        return x.to_local()

    def _of_whole_batch(self, module: nn.Module, y: Tensor, batches: set[int]) -> DTensor:
        known = self.grid.context.tokens
        if batches:
            batch = max(batches)
        elif known is not None and len(known) == 1:
            (batch,) = known
        else:
            batch = self.grid.extent(y, 0, row_layout())
        mine = self.grid.row.split(batch)[self.grid.row.index]
        # A row without samples holds one stand-in sample.
        if y.shape[0] not in (mine, mine or 1):
            raise ValueError(
                f"{describe_module(module)} gave {tuple(y.shape)}, but this row has {mine} of "
                f"{batch} samples: only what has the batch in dim 0 becomes a DTensor"
            )
        return to_dtensor(y.narrow(0, 0, mine), row_layout(), self.grid, (batch, *y.shape[1:]))
