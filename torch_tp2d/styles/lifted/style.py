"""``Lifted``: which 2-D style each of torch's own styles becomes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ...mesh.grid import Axes, Grid
from ...mesh.layouts import TP_COL, Layout, check_row_dim
from ..base import GridStyle, Runner
from ..linear import Colwise2D, Rowwise2D
from .prepare import LiftedPrepare
from .sequence import LiftedSequence

__all__ = ["Lifted"]


class _LiftedColwise(Colwise2D):
    """ColwiseParallel along tp_col: tp_row replicates the weight and splits the tokens."""

    shards_over_row = False


class _LiftedRowwise(Rowwise2D):
    """RowwiseParallel along tp_col: tp_row replicates the weight and splits the tokens."""

    shards_over_row = False


def _matmul(kind: type[Colwise2D] | type[Rowwise2D]) -> Callable[..., GridStyle]:
    def lift(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
        return kind(
            input_layouts=style.input_layouts[0],
            output_layouts=style.output_layouts[0],
            use_local_output=style.use_local_output if use_local is None else use_local,
            row_dim=row_dim,
        )

    return lift


def _sequence(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    (sharding,) = style.sequence_sharding
    local = style.use_local_output if use_local is None else use_local
    return LiftedSequence(sharding.dim, local, row_dim)


def _prepare_input(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    return LiftedPrepare(style, None, _asked(style, use_local), True, row_dim)


def _asked(style: PrepareModuleInput, use_local: bool | None) -> bool | None:
    """The ``use_local_output`` that the user asked for, or None: stock's default does not count."""
    return True if use_local is None and style.use_local_output else use_local


def _prepare_output(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    local = style.use_local_output if use_local is None else use_local
    return LiftedPrepare(None, style, True, local, row_dim)


def _prepare_both(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    outputs = style.prepare_module_output
    local = outputs.use_local_output if use_local is None else use_local
    inputs = style.prepare_module_input
    return LiftedPrepare(inputs, outputs, _asked(inputs, use_local), local, row_dim)


_LIFTS: Mapping[type[ParallelStyle], Callable[[Any, bool | None, int], GridStyle]] = {
    ColwiseParallel: _matmul(_LiftedColwise),
    RowwiseParallel: _matmul(_LiftedRowwise),
    SequenceParallel: _sequence,
    PrepareModuleInput: _prepare_input,
    PrepareModuleOutput: _prepare_output,
    PrepareModuleInputOutput: _prepare_both,
}


class Lifted(GridStyle):
    """A stock style on the 2-D mesh. :func:`torch_tp2d.parallelize_module` wraps stock styles so.

    The style acts along ``tp_col`` with its tokens split over ``tp_row``, so that its layouts
    match its 2-D namesake's and the two are interchangeable, layer by layer: wherever the stock
    style says ``p``, the layout is ``(Shard(row_dim), p)``. Weights are DTensors on the 2-D mesh:
    sharded over ``tp_col``, 1/C on each rank, and replicated along ``tp_row``, along which their
    gradients are summed.

    ``PrepareModuleInput`` hands its module DTensors of the global shape if a Colwise module inside
    hands on DTensors (``use_local_output=False``), since the module's own code then works on them.
    Otherwise it hands on local tensors of this row's tokens, since a DTensor would show the code
    the full batch. Stock's default, ``use_local_output=False``, does not override this choice, as
    most plans do not set it; ``use_local_output=True`` does, and so does
    ``Lifted(style, use_local_output=...)``. ``SequenceParallel`` gives a DTensor, as in stock.

    Inputs of ``PrepareModuleInput`` that are sharded hold tokens, ``(Shard(row_dim), p)``, and so
    does the first input. Any other that is declared ``Replicate()``, a table of positions or a
    mask, is the same on every row: ``(Replicate(), Replicate())``. Before such inputs first become
    DTensors, the ranks compare them. ``PrepareModuleInput`` and ``PrepareModuleOutput`` also take a
    pair ``(tp_row, tp_col)`` in place of a placement, which gives one tensor's layout on both axes:
    ``input_layouts=(Shard(1), (Shard(0), Replicate()))`` for a mask of this row's samples.

    Args:
        style: an instance of one of torch's own style classes.
        axes: ``"tp_col"``; ``"tp_row"`` to swap the roles of the two axes; or
            ``("tp_row", "tp_col")`` to act on both, flattened into one axis of N ranks, where no
            other axis splits the tokens.
        use_local_output: overrides the style's own (for PrepareModuleInputOutput, of both).
        row_dim: the token dim that the other axis splits.

    Raises:
        TypeError: for a style that is not one of torch's own.
        ValueError: when applied, if inputs become DTensors and it is unclear which of those
            declared ``Replicate()`` hold tokens; in the first forward, if an input that holds none
            is not the same on every rank.

    Example::

        >>> plan = {"attn": Lifted(PrepareModuleInput(input_layouts=Shard(1),
        ...                                           desired_input_layouts=Replicate()),
        ...                        use_local_output=False)}
    """

    def __init__(
        self,
        style: ParallelStyle,
        *,
        axes: Axes = TP_COL,
        use_local_output: bool | None = None,
        row_dim: int = 0,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        lift = _LIFTS.get(type(style))
        if lift is None:
            raise TypeError(
                f"{type(style).__name__} is not one of {[kind.__name__ for kind in _LIFTS]}, so "
                f"what it does on a 2-D mesh is not known: use a 2-D style, or derive it from "
                f"torch_tp2d.GridStyle"
            )
        self.style = style
        self.axes = axes
        self.use_local_output = use_local_output
        self.row_dim = row_dim
        self.lifted = lift(style, use_local_output, row_dim)
        self.lifted.axes = axes
        self.is_hook = self.lifted.is_hook
        self.places_inside = self.lifted.places_inside

    def check(self, module: nn.Module, grid: Grid) -> None:
        self.lifted.check(module, grid)

    def beside(self, giving: Collection[int]) -> Lifted:
        """This style, for a plan in which the modules of the ids ``giving`` hand on DTensors."""
        if not isinstance(self.lifted, LiftedPrepare):
            return self
        told = copy.copy(self)
        told.lifted = copy.copy(self.lifted)
        told.lifted.giving = giving
        return told

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        return self.lifted.param_layouts(module)

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return self.lifted.runner(module, grid)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.lifted.src_data_rank = self.src_data_rank
        return self.lifted._apply(module, device_mesh)

    def __repr__(self) -> str:
        rows = f", row_dim={self.row_dim}" if self.row_dim else ""
        local = self.use_local_output
        handed = "" if local is None else f", use_local_output={local}"
        return f"Lifted({self.style!r}, axes={self.axes!r}{handed}{rows})"
