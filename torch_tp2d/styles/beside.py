"""Tensors that a replicated module is given beside its input, and changes of the input in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._torch_compat.tensors import local_tensor, version
from .._tracing import eager_only, in_graph
from ..comm.groups import sends
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import made_of
from ..mesh.layouts import Layout, normalize
from .compared_inputs import facts_of_all
from .dtensors import to_dtensor
from .module_kinds import describe_module
from .provenance import check_made_of, parts_kept

__all__ = ["WrittenInto", "beside"]


def beside(
    value: Any, given: Tensor, x: DTensor, module: nn.Module, grid: Grid, layout: Layout
) -> Any:
    """A further argument of a module that runs on DTensors: a local tensor as a DTensor.

    It is in the layout in which a style has handed it out. Otherwise it is laid out as the input,
    if it holds the same tokens, and is the same on every rank if not. Sizes do not tell which,
    since a table may have as many rows as a rank has samples. The graph does, if the tensor was
    made of what styles have handed out. Without a graph the ranks compare what they hold: what is
    equal on all of them is replicated, unless it is a constant. What one rank's shapes tell is not
    what another's do, where these differ: then the ranks compare that, too.

    Args:
        given: the input as the module was given it.
        x: the input as a DTensor, in ``layout``.

    Raises:
        ValueError: on every rank, for a tensor that is neither; and for one whose gradient is
            partial, as that of positions is.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    here = f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}"
    handed = grid.handed(value)
    if handed is not None:
        _check_gradient(value, handed, module, grid)
        return to_dtensor(value, handed, grid)
    mine = tuple((given if not isinstance(given, DTensor) else local_tensor(x)).shape)
    layout = normalize(layout, x.ndim)
    by_features = Shard(x.ndim - 1) in layout
    # Where the input's features are split, those of a tensor of another width may not be.
    alike = value.shape[:-1] == mine[:-1] and (value.shape == mine or not by_features)
    fits = alike or tuple(value.shape) == mine[:-1]
    made = bool(made_of(value))
    if isinstance(module, nn.MultiheadAttention):
        # Its arguments say by their names what they are (whole_samples.py).
        whole, tokens = False, alike
    elif in_graph() or not sends(grid.mesh) or (made and _even(x, layout, grid)):
        whole, tokens = False, fits
    else:
        # The second is a note of whether it fits, so that all ranks know it of all.
        note = torch.full((1,), int(fits), device=value.device)
        value_facts, notes = facts_of_all([note if made else value, note], grid).unbind(2)
        same = torch.equal(value_facts, value_facts[:1, :1].expand_as(value_facts))
        fitting = notes[..., 1] != 0
        tokens = bool(fitting.all())
        varied = bool((value_facts[..., -1] != 0).any())
        whole = not made and same and (varied or not tokens)
        if not whole and not tokens and (not made or bool(fitting.any())):
            told = "may be the same on every rank" if made else "is not the same on every rank"
            raise ValueError(
                f"{here} is given a local tensor of shape {tuple(value.shape)} beside its input of "
                f"{mine}: it {told}, and does not hold the input's tokens on every one: pass a "
                f"DTensor, which says how it is split (distribute_tensor, use_local_output=False)"
            )
    if whole:
        return to_dtensor(value, (Replicate(), Replicate()), grid, value.shape)
    if not tokens:
        return value
    _check_gradient(value, layout, module, grid)
    value = grid.without_stand_in(value, layout)
    if not alike:
        row, col = (Replicate() if p == Shard(x.ndim - 1) else p for p in layout)
        return to_dtensor(value, (row, col), grid, x.shape[:-1])
    width = x.shape[-1] if value.shape[-1] == mine[-1] else value.shape[-1]
    return to_dtensor(value, layout, grid, (*x.shape[:-1], width))


def _even(x: DTensor, layout: Layout, grid: Grid) -> bool:
    """Whether the parts of ``x`` are of one shape, so that what fits one rank's fits all."""
    for dim in range(x.ndim):
        parts = {x.shape[dim]}
        for axis in grid.cuts(dim, layout):
            parts = {size for part in parts for size in axis.split(part)}
        if len(parts) > 1:
            return False
    return True


def _check_gradient(value: Tensor, layout: Layout, module: nn.Module, grid: Grid) -> None:
    """Refuse a local tensor whose gradient a DTensor made of it would not be.

    Raises:
        ValueError: on every rank.
    """
    layout = normalize(layout, value.ndim)
    check_made_of([value], layout, module, grid)
    parts_kept(value, layout, None, module, grid)


class WrittenInto:
    """Notices that a module has changed its local input in place.

    The module is given a DTensor that shares the input's memory. The change is in the input too,
    but not in its graph, so that whoever uses the input afterwards gets wrong gradients.

    Args:
        given: the input.
        x: the DTensor.
    """

    def __init__(self, given: Tensor, x: DTensor) -> None:
        watched = not in_graph() and given.requires_grad and not isinstance(given, DTensor)
        self._x, self._version = x, version(x) if watched else None

    @eager_only
    def check(self, here: str) -> None:
        """Refuse the change.

        Raises:
            ValueError: on every rank, as all run the same code.
        """
        if self._version is not None and version(self._x) != self._version:
            raise ValueError(
                f"{here} changes its input of shape {tuple(self._x.shape)} in place (add_, mul_, "
                f"inplace=True), which the graph of a local tensor does not record: let it make a "
                f"new tensor, or give it a DTensor (use_local_output=False before it)"
            )
