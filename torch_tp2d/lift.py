"""Stock parallel styles on a 2-D mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from .base import GridStyle, Runner
from .edges import gather_for_module, to_dtensor
from .grid import Axes, Grid
from .layouts import TP_COL, Layout, check_row_dim, normalize
from .recognise import describe_module
from .replicate import WholeRunner
from .styles import Colwise2D, Rowwise2D

__all__ = ["Lifted"]


class _LiftedColwise(Colwise2D):
    """ColwiseParallel along tp_col: the weight is whole on every row, the tokens are split."""

    shards_over_row = False


class _LiftedRowwise(Rowwise2D):
    """RowwiseParallel along tp_col: the weight is whole on every row, the tokens are split."""

    shards_over_row = False


class _LiftedSequence(GridStyle):
    """SequenceParallel along tp_col: whole parameters, tokens split over both axes."""

    def __init__(self, sequence_dim: int, use_local_output: bool, row_dim: int) -> None:
        super().__init__()
        self.row_dim = row_dim
        self.layout: Layout = Shard(row_dim), Shard(sequence_dim)
        self.use_local_output = use_local_output

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for owner in module.modules():
            for name, _ in owner.named_parameters(recurse=False):
                yield owner, name, (Replicate(), Replicate())

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return WholeRunner(
            "SequenceParallel",
            module,
            grid,
            self.row_dim,
            self.layout,
            None,
            self.use_local_output,
            enforce_input=True,
        )


class _LiftedPrepare(GridStyle):
    """PrepareModuleInput and PrepareModuleOutput along tp_col, as hooks on the module."""

    is_hook = True
    places_inside = False

    def __init__(
        self,
        inputs: PrepareModuleInput | None,
        outputs: PrepareModuleOutput | None,
        local_input: bool,
        local_output: bool,
        row_dim: int,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.local_input, self.local_output = local_input, local_output
        self.row_dim = row_dim

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Hooks fit any module."""

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        raise AssertionError("hooks run no module")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        grid = Grid(device_mesh, self.axes)
        if self.inputs is not None:
            module.register_forward_pre_hook(
                _InputHook(self.inputs, grid, self.row_dim, self.local_input), with_kwargs=True
            )
        if self.outputs is not None:
            module.register_forward_hook(
                _OutputHook(self.outputs, grid, self.row_dim, self.local_output)
            )
        return module


class _Hook:
    def __init__(self, grid: Grid, row_dim: int, use_local: bool) -> None:
        self.grid = grid
        self.row_dim = row_dim
        self.use_local = use_local

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def _prepare(self, value: Any, have: Placement | None, want: Placement | None) -> Any:
        """One tensor from layout ``have`` to ``want`` along tp_col; None leaves it alone."""
        if have is None:
            return value
        if not isinstance(value, Tensor):
            raise TypeError(f"a layout was given for an argument that is {type(value).__name__}")
        row = Shard(self.row_dim)
        if isinstance(value, DTensor):
            have_layout = normalize(self.grid.layout(value, self.row_dim), value.ndim)
            if value.device_mesh != self.grid.mesh:
                value = to_dtensor(value.to_local(), have_layout, self.grid)
        else:
            have_layout = normalize((row, have), value.ndim)
        want_layout = normalize((have_layout[0], have if want is None else want), value.ndim)
        if not self.use_local:
            if not isinstance(value, DTensor):
                value = to_dtensor(value, have_layout, self.grid)
            if value.shape[self.row_dim] < self.grid.row.size:
                raise ValueError(
                    f"a DTensor of shape {tuple(value.shape)} has fewer than "
                    f"{self.grid.row.size} elements in dim {self.row_dim} for "
                    f"{self.grid.row.name}={self.grid.row.size}, which DTensor's own operations "
                    f"do not keep apart: use a larger batch or fewer rows, or let the module work "
                    f"on local tensors (use_local_output=True)"
                )
            placements = self.grid.placements(want_layout)
            return (
                value
                if tuple(value.placements) == tuple(placements)
                else value.redistribute(placements=placements)
            )
        shape, sizes = None, self.grid.sizes_of(value)
        if isinstance(value, DTensor):
            shape, value = tuple(value.shape), value.to_local()
        else:
            value = self.grid.without_stand_in(value, have_layout)
        if isinstance(want_layout[1], Replicate) and isinstance(have_layout[1], Shard):
            return gather_for_module(value, have_layout, self.grid, shape)
        moved = self.grid.redistribute(value, have_layout, want_layout, shape=shape)
        return self.grid.with_stand_in(moved, want_layout, sizes)


def _pairs(layouts: Any, wanted: Any) -> Iterator[tuple[Placement | None, Placement | None]]:
    yield from zip(layouts, wanted, strict=True)


class _InputHook(_Hook):
    def __init__(self, style: PrepareModuleInput, grid: Grid, row_dim: int, use_local: bool):
        super().__init__(grid, row_dim, use_local)
        self.args = style.input_layouts, style.desired_input_layouts
        self.kwargs = style.input_kwarg_layouts, style.desired_input_kwarg_layouts

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        have, want = self.args
        handed = []
        if have is not None:
            if len(args) != len(have):
                raise ValueError(
                    f"{describe_module(module)}: got {len(args)} inputs, but input_layouts has "
                    f"{len(have)}"
                )
            args = tuple(
                self._prepare(value, *pair)
                for value, pair in zip(args, _pairs(have, want), strict=True)
            )
            handed = [value for value, layout in zip(args, have, strict=True) if layout is not None]
        have_kw, want_kw = self.kwargs
        kwargs = {
            name: self._prepare(value, have_kw.get(name), want_kw.get(name))
            for name, value in kwargs.items()
        }
        handed += [kwargs[name] for name in have_kw if name in kwargs]
        if handed:
            self.grid.begin(handed[0])
        return args, kwargs


class _OutputHook(_Hook):
    def __init__(self, style: PrepareModuleOutput, grid: Grid, row_dim: int, use_local: bool):
        super().__init__(grid, row_dim, use_local)
        self.layouts = style.output_layouts, style.desired_output_layouts

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        several = isinstance(outputs, tuple)
        values: Sequence[Any] = outputs if several else (outputs,)
        have, want = self.layouts
        if len(values) != len(have):
            raise ValueError(
                f"{describe_module(module)}: gave {len(values)} outputs, but output_layouts has "
                f"{len(have)}"
            )
        prepared = tuple(
            self._prepare(value, *pair)
            for value, pair in zip(values, _pairs(have, want), strict=True)
        )
        return prepared if several else prepared[0]


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
    return _LiftedSequence(sharding.dim, local, row_dim)


def _prepare_input(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    return _LiftedPrepare(style, None, use_local is not False, True, row_dim)


def _prepare_output(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    local = style.use_local_output if use_local is None else use_local
    return _LiftedPrepare(None, style, True, local, row_dim)


def _prepare_both(style: Any, use_local: bool | None, row_dim: int) -> GridStyle:
    outputs = style.prepare_module_output
    local = outputs.use_local_output if use_local is None else use_local
    return _LiftedPrepare(
        style.prepare_module_input, outputs, use_local is not False, local, row_dim
    )


_LIFTS: dict[type[ParallelStyle], Callable[[Any, bool | None, int], GridStyle]] = {
    ColwiseParallel: _matmul(_LiftedColwise),
    RowwiseParallel: _matmul(_LiftedRowwise),
    SequenceParallel: _sequence,
    PrepareModuleInput: _prepare_input,
    PrepareModuleOutput: _prepare_output,
    PrepareModuleInputOutput: _prepare_both,
}


class Lifted(GridStyle):
    """A stock style on the 2-D mesh. :func:`torch_tp2d.parallelize_module` makes it by itself.

    The style acts along ``tp_col`` with its tokens split over ``tp_row``, so that its layouts
    line up with its 2-D namesake's and the two are interchangeable, layer by layer: wherever the
    stock style says ``p``, the layout is ``(Shard(row_dim), p)``. Weights are 1/C on a rank, whole
    along ``tp_row``, as DTensors on the 2-D mesh; their gradients are summed along ``tp_row``.

    ``PrepareModuleInput`` hands its module the local tensor of this row's tokens, whatever its
    own ``use_local_output`` says, since a DTensor would show the module the whole batch;
    ``Lifted(style, use_local_output=False)`` hands it a DTensor. ``SequenceParallel`` gives a
    DTensor, as in stock.

    Args:
        style: an instance of one of torch's own style classes.
        axes: ``"tp_col"``; ``"tp_row"`` to swap the two axes' parts; or
            ``("tp_row", "tp_col")`` to act on both flattened into one line of N ranks, where
            tokens are not split beforehand.
        use_local_output: overrides the style's own (for PrepareModuleInputOutput, of both).
        row_dim: the token dim that the other axis splits.

    Raises:
        TypeError: for a style that is not one of torch's own.

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

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        return self.lifted.param_layouts(module)

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return self.lifted.runner(module, grid)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.lifted.src_data_rank = self.src_data_rank
        return self.lifted._apply(module, device_mesh)

    def __repr__(self) -> str:
        rows = f", row_dim={self.row_dim}" if self.row_dim else ""
        return f"Lifted({self.style!r}, axes={self.axes!r}{rows})"
