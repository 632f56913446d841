"""``PrepareModuleInput`` and ``PrepareModuleOutput`` on a grid: hooks that redistribute tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

from ..._tracing import eager_only
from ...comm.groups import sends
from ...mesh.grid import Grid, describe_mesh
from ...mesh.layouts import Layout, as_layout, normalize, same_layout, same_placement
from ..base import GridStyle, Resolved, Runner
from ..canonical import canonical
from ..compared_inputs import facts_of_all
from ..dtensors import shard_of, to_dtensor
from ..gathered_inputs import gather_for_module
from ..linear import Colwise2D
from ..module_kinds import describe_module
from ..provenance import check_handed, parts_kept

__all__ = ["LiftedPrepare"]


class LiftedPrepare(GridStyle):
    """PrepareModuleInput and PrepareModuleOutput along tp_col, as hooks on the module."""

    is_hook = True
    places_inside = False

    def __init__(
        self,
        inputs: PrepareModuleInput | None,
        outputs: PrepareModuleOutput | None,
        local_input: bool | None,
        local_output: bool,
        row_dim: int,
    ) -> None:
        super().__init__()
        self.inputs = None if inputs is None else _Inputs.of(inputs, row_dim)
        self.outputs = outputs
        self.local_input, self.local_output = local_input, local_output
        self.row_dim = row_dim
        self.giving: Collection[int] = ()

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Refuse only inputs of which it is unclear whether they hold tokens."""
        if self.inputs is not None and not _local_input(self.local_input, module, self.giving):
            self.inputs.check(module, grid)

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        raise AssertionError("hooks run no module")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        grid = Grid(device_mesh, self.axes)
        if self.inputs is not None:
            hook = _InputHook(self.inputs, grid, self.row_dim, self.local_input, module)
            hook.settle(module, self.giving)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        if self.outputs is not None:
            module.register_forward_hook(
                _OutputHook(self.outputs, grid, self.row_dim, self.local_output, module)
            )
        return module


def _local_input(asked: bool | None, module: nn.Module, giving: Collection[int]) -> bool:
    """Whether a prepared module is handed local tensors.

    By default a module with a Colwise module inside that hands on DTensors is handed DTensors of
    the global shape, and any other module local tensors of this row's tokens.

    Args:
        asked: what the user asked for; None for the default.
        giving: ids of modules that are about to get a Colwise style that hands on DTensors.
    """
    if asked is not None:
        return asked
    return not any(id(inner) in giving or _gives_dtensors(inner) for inner in module.modules())


def _gives_dtensors(module: nn.Module) -> bool:
    runner = module.__dict__.get("_tp2d")
    if runner is None or runner.style != Colwise2D.rule.style or runner.exit is None:
        return False
    return not runner.exit.use_local_output


class _Input(NamedTuple):
    """The layouts, (tp_row, tp_col), of one tensor before and after it is prepared."""

    have: Layout
    want: Layout
    ambiguous: bool = False
    """Whether it is unclear if it holds this row's tokens or is the same on every row."""

    @property
    def is_same(self) -> bool:
        """Whether it is declared the same on every row: a table of positions, a mask."""
        return isinstance(self.have[0], Replicate)


class _Inputs:
    """What the layouts of a PrepareModuleInput mean on a grid.

    Inputs that are sharded along tp_col hold tokens, and so does the first input. Any other that is
    declared ``Replicate()`` is the same on every row, as it is on every rank of a 1-D mesh. A pair
    in place of a placement gives an input's layout on both axes.
    """

    def __init__(
        self,
        args: tuple[_Input | None, ...] | None,
        kwargs: Mapping[str, _Input],
    ) -> None:
        self.args, self.kwargs = args, kwargs

    @classmethod
    def of(cls, style: PrepareModuleInput, row_dim: int) -> _Inputs:
        have: dict[int | str, Any] = dict(enumerate(style.input_layouts or ()))
        want: dict[int | str, Any] = dict(enumerate(style.desired_input_layouts or ()))
        have.update(style.input_kwarg_layouts)
        want.update(style.desired_input_kwarg_layouts)
        declared = [key for key, layout in have.items() if layout is not None]
        plain = [key for key in declared if isinstance(have[key], Replicate)]
        tokens = any(isinstance(have[key], Shard) for key in declared)
        first = next((key for key in declared if isinstance(key, int) or len(declared) == 1), None)
        found: dict[int | str, _Input] = {}
        for key in declared:
            # The first input holds tokens, but a replicated one is ambiguous if another is sharded.
            # Several keywords have no first: all are ambiguous if none of them is sharded.
            ambiguous = key in plain and (tokens if key == first else not tokens and first is None)
            same = key in plain and key != first and not ambiguous
            row = Replicate() if same else Shard(row_dim)
            layout = as_layout(have[key], (row, row), row=row)
            wanted = as_layout(want.get(key), layout, row=layout[0])
            found[key] = _Input(layout, wanted, ambiguous)
        args = None
        if style.input_layouts is not None:
            args = tuple(map(found.get, range(len(style.input_layouts))))
        return cls(args, {key: found[key] for key in found if isinstance(key, str)})

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Refuse layouts from which the global shape of a DTensor does not follow."""
        named = {f"input {index}": given for index, given in enumerate(self.args or ())}
        named |= self.kwargs
        unclear = [name for name, given in named.items() if given is not None and given.ambiguous]
        if unclear and grid.row.size > 1:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} is handed DTensors, "
                f"and {unclear} declared Replicate() may hold this row's tokens or be the same on "
                f"every row: say which, (Shard(0), Replicate()) or (Replicate(), Replicate()), in "
                f"place of Replicate()"
            )


class _Hook:
    def __init__(self, grid: Grid, row_dim: int, module: nn.Module) -> None:
        self.grid, self.by = grid, describe_module(module)
        self.row_dim = row_dim
        self.styles_inside = True
        """Whether a style inside may take a prepared tensor, maybe piece by piece as it arrives."""

    def _prepare(self, module: nn.Module, value: Any, given: _Input | None, use_local: bool) -> Any:
        """Redistribute one tensor as ``given`` says; None leaves it alone."""
        if given is None:
            return value
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: the layouts "
                f"{given.have} and {given.want} are for a tensor, but it is {type(value).__name__} "
                f"in their place: give None as its layout, or prepare the tensors inside by "
                f"entries of the modules that take them"
            )
        have_layout, want_layout = (
            normalize(layout, value.ndim) for layout in (given.have, given.want)
        )
        if isinstance(value, DTensor):
            on_row = self.grid.layout(value, self.row_dim)[0]
            value = canonical(value, sums=True)
            known = normalize(self.grid.layout(value, self.row_dim), value.ndim)
            stays = same_placement(given.have[0], given.want[0]) and type(on_row) is type(known[0])
            stays &= not known[0].is_partial()
            if value.device_mesh != self.grid.mesh:
                if given.is_same:
                    known = have_layout[0], known[1]
                value = to_dtensor(value.to_local(), known, self.grid)
            # A DTensor knows how tp_row splits it, and that is kept.
            want_layout = (known[0], want_layout[1]) if stays else want_layout
            have_layout = known
        elif given.is_same and same_layout(have_layout, want_layout) and use_local:
            return value
        parts = False, False
        if not isinstance(value, DTensor):
            to = want_layout if use_local else None
            parts = parts_kept(value, have_layout, to, module, self.grid)
        if not use_local:
            return self._as_dtensor(value, have_layout, want_layout)
        shape, sizes = None, self.grid.sizes_of(value)
        if isinstance(value, DTensor):
            shape, value = tuple(value.shape), shard_of(value, self.grid)
        else:
            value = self.grid.without_stand_in(value, have_layout)
        gathers = want_layout[1].is_replicate() and have_layout[1].is_shard()
        row_stays = same_placement(have_layout[0], want_layout[0])
        if gathers and row_stays and self.styles_inside:
            return gather_for_module(value, have_layout, self.by, self.grid, shape, parts)
        moved = self.grid.redistribute(value, have_layout, want_layout, shape=shape)
        return self.grid.with_stand_in(moved, want_layout, sizes, shares=parts, by=self.by)

    def _as_dtensor(self, value: Tensor, have: Layout, want: Layout) -> DTensor:
        if not isinstance(value, DTensor):
            shape = tuple(value.shape) if have == (Replicate(), Replicate()) else None
            value = to_dtensor(value, have, self.grid, shape)
        row = want[0]
        if isinstance(row, Shard) and value.shape[row.dim] < self.grid.row.size:
            raise ValueError(
                f"a DTensor of shape {tuple(value.shape)} has fewer than "
                f"{self.grid.row.size} elements in dim {row.dim} for "
                f"{self.grid.row.name}={self.grid.row.size}, which DTensor's own operations "
                f"do not keep apart: use a larger batch or fewer rows, or let the module work "
                f"on local tensors (use_local_output=True)"
            )
        placements = self.grid.placements(want)
        if tuple(value.placements) == tuple(placements):
            return value
        return value.redistribute(placements=placements)


def _prepares(given: Sequence[_Input | None]) -> Resolved:
    """The layouts of the first tensor that is prepared, for the layout table."""
    first = next((one for one in given if one is not None), None)
    if first is None:
        return Resolved(runs_parameters=False)
    return Resolved(first.have, first.want, runs_parameters=False)


class _InputHook(_Hook):
    style = "PrepareModuleInput"

    def __init__(
        self,
        inputs: _Inputs,
        grid: Grid,
        row_dim: int,
        asked: bool | None,
        module: nn.Module,
    ) -> None:
        super().__init__(grid, row_dim, module)
        self.inputs = inputs
        self.asked = asked
        self.use_local = asked is not False
        self.is_first = True

    def __deepcopy__(self, memo: Any) -> _InputHook:
        return copy.copy(self)

    def resolved(self) -> Resolved:
        return _prepares([*(self.inputs.args or ()), *self.inputs.kwargs.values()])

    def settle(self, module: nn.Module, giving: Collection[int] = ()) -> None:
        """Decide whether the module is handed local tensors, by the styles inside it."""
        self.use_local = _local_input(self.asked, module, giving)
        if not self.use_local:
            self.inputs.check(module, self.grid)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layouts, named = self.inputs.args, self.inputs.kwargs
        if layouts is not None and len(args) != len(layouts):
            raise ValueError(
                f"{describe_module(module)}: got {len(args)} inputs, but input_layouts has "
                f"{len(layouts)}"
            )
        layouts = (None,) * len(args) if layouts is None else layouts
        handed = [*zip(layouts, args, strict=True)]
        handed += [(named[name], kwargs[name]) for name in named if name in kwargs]
        if self.is_first:
            self._run_first(module, [value for given, value in handed if given and given.is_same])
        for given, value in handed:
            if given is not None and not given.is_same and isinstance(value, Tensor):
                check_handed(value, normalize(given.have, value.ndim), module, self.grid)
        args = tuple(
            self._prepare(module, value, given, self.use_local)
            for given, value in zip(layouts, args, strict=True)
        )
        kwargs = {
            name: self._prepare(module, value, named.get(name), self.use_local)
            for name, value in kwargs.items()
        }
        tokens = [x for given, x in zip(layouts, args, strict=True) if given and not given.is_same]
        tokens += [kwargs[name] for name in named if name in kwargs and not named[name].is_same]
        if tokens:
            self.grid.begin(tokens[0])
        return args, kwargs

    @eager_only
    def _run_first(self, module: nn.Module, same: Sequence[Any]) -> None:
        """At the first call: look inside the module, and compare inputs declared the same."""
        # By now all modules inside have their styles, whatever the order of application.
        self.is_first = False
        self.styles_inside = any("_tp2d" in inner.__dict__ for inner in module.modules())
        self.settle(module)
        self._compare(module, same)

    def _compare(self, module: nn.Module, values: Sequence[Any]) -> None:
        """Refuse local tensors that are declared the same on every row but are not.

        DTensors made of them would have one row's shape and another row's values.

        Raises:
            ValueError: on every rank alike.
        """
        values = [x for x in values if isinstance(x, Tensor) and not isinstance(x, DTensor)]
        if self.use_local or self.grid.row.size == 1 or not values or not sends(self.grid.mesh):
            return
        first, *others = facts_of_all(values, self.grid).flatten(0, 1).unbind()
        for index, value in enumerate(values):
            if any(not torch.equal(other[index], first[index]) for other in others):
                raise ValueError(
                    f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)}: an input "
                    f"of shape {tuple(value.shape)} is declared Replicate(), which is the same on "
                    f"every rank, but the ranks hold different ones: if it holds this row's tokens "
                    f"or samples, declare it (Shard(0), Replicate()) in place of Replicate()"
                )


class _OutputHook(_Hook):
    style = "PrepareModuleOutput"

    def __init__(
        self,
        style: PrepareModuleOutput,
        grid: Grid,
        row_dim: int,
        use_local: bool,
        module: nn.Module,
    ) -> None:
        super().__init__(grid, row_dim, module)
        self.use_local = use_local
        row = Shard(row_dim)
        self.outputs: list[_Input | None] = []
        for have, want in zip(style.output_layouts, style.desired_output_layouts, strict=True):
            if have is None:
                self.outputs.append(None)
                continue
            layout = as_layout(have, (row, row), row=row)
            self.outputs.append(_Input(layout, as_layout(want, layout, row=layout[0])))

    def __deepcopy__(self, memo: Any) -> _OutputHook:
        return self

    def resolved(self) -> Resolved:
        return _prepares(self.outputs)

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        several = isinstance(outputs, tuple)
        values: Sequence[Any] = outputs if several else (outputs,)
        if len(values) != len(self.outputs):
            raise ValueError(
                f"{describe_module(module)}: gave {len(values)} outputs, but output_layouts has "
                f"{len(self.outputs)}"
            )
        for value, given in zip(values, self.outputs, strict=True):
            if given is not None and isinstance(value, Tensor):
                check_handed(value, normalize(given.have, value.ndim), module, self.grid)
        prepared = tuple(
            self._prepare(module, value, given, self.use_local)
            for value, given in zip(values, self.outputs, strict=True)
        )
        return prepared if several else prepared[0]
