"""What a parallel style is, what a styled module runs, and how a style is put on a module.

A style shards the module's parameters over the mesh and replaces the module's class by a subclass
of it, whose ``forward`` runs an op of :mod:`torch_tp2d.ops` on local shards. The module keeps its
identity: ``isinstance``, parameter names and hooks are as before.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .. import debug
from .._torch_compat.modules import guard_global_sizes, parameters_of
from .._torch_compat.tensors import are_functorch_transforms_active
from .._tracing import in_graph, in_one_piece
from ..mesh.grid import Axes, Grid, describe_mesh
from ..mesh.layouts import TP_COL, Layout, normalize
from ..planner.rates import measured
from ..runtime.versions import count_steps
from .boundary import Exit
from .empty_shards import refuse_empty_under_fsdp
from .module_kinds import describe_module

__all__ = [
    "AS_INPUT",
    "AT_FIRST_FORWARD",
    "FEATURES",
    "GridStyle",
    "LayoutLike",
    "Resolved",
    "Runner",
    "check_dims",
    "first_tensor",
    "place_parameter",
    "put_on_grid",
    "refuse_transforms",
    "take_off_grid",
    "tied_message",
]

LayoutLike = Placement | Sequence[Placement] | None
FEATURES = "[..., features] with at least one dim of tokens"
"""The input of a Linear or a norm, for messages."""


class GridStyle(ParallelStyle):
    """A style for a ``("tp_row", "tp_col")`` mesh.

    ``check`` and ``param_layouts`` run before anything is changed or communicated, so that a plan
    with a mistake fails on every rank and leaves the model as it was.
    """

    axes: Axes = TP_COL
    is_hook: bool = False
    """Whether the module keeps its own forward, so that it may have another style as well."""
    places_inside: bool = True
    """Whether the style places the parameters of all modules inside, not only the module's own."""

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Refuse a module that this style cannot parallelize on this grid.

        Raises:
            TypeError: for a module of the wrong kind, or parameters that are not floating point.
            ValueError: for parameters that are on another mesh already, for a module that has a
                style, and as the style documents.
        """
        if isinstance(module, _OnGrid):
            raise ValueError(
                f"{describe_module(module)} has a style already ({module._tp2d.style}): name it "
                f"in one plan entry"
            )
        for name, param in module.named_parameters():
            if not param.is_floating_point():
                raise TypeError(
                    f"{describe_module(module)}: {name} has dtype {param.dtype}, but a 2-D style "
                    f"needs floating point parameters: leave the module out of the plan"
                )
            if isinstance(param, DTensor) and param.device_mesh != grid.mesh:
                raise ValueError(
                    f"{describe_module(module)}: {name} of shape {tuple(param.shape)} is a DTensor "
                    f"on mesh {describe_mesh(param.device_mesh)} already, but the style is on "
                    f"{describe_mesh(grid.mesh)}: apply the 2-D plan first, then fully_shard"
                )
        for owner, name, _ in self.param_layouts(module):
            if name not in parameters_of(owner) and isinstance(getattr(owner, name, None), Tensor):
                held = sorted(n for n, _ in owner.named_parameters())
                held += sorted(n for n, _ in owner.named_buffers(recurse=False))
                why = (
                    "as in a parametrized or weight-normed module: apply the plan first and "
                    "parametrize afterwards, by operations that DTensor has (weight_norm's own "
                    "is none of them), or make it a parameter again "
                    "(torch.nn.utils.parametrize.remove_parametrizations)"
                )
                if hasattr(owner, "base_layer"):
                    why = (
                        "and of peft's adapters only LoRA's pairs of Linears and modules_to_save "
                        "are laid out: leave the layer out of target_modules"
                    )
                raise ValueError(
                    f"{describe_module(module)}: its {name} is no parameter but comes of {held}, "
                    f"{why}"
                )

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        """The module, name and (row, col) layout of each parameter that this style places."""
        return iter(())

    def goes_by_rates(self, module: nn.Module, grid: Grid) -> bool:
        """Whether the behavior of the style's runner depends on the rates of the mesh's links."""
        return False

    @abstractmethod
    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        """The runner that becomes the module's forward; made before its parameters are placed.

        It must not communicate. Any rates that it needs have been measured before the call.
        """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        grid = Grid(device_mesh, self.axes)
        self.check(module, grid)
        if self.goes_by_rates(module, grid):
            measured(grid.mesh, grid.row, grid.col)
        runner = self.runner(module, grid)
        for owner, name, layout in list(self.param_layouts(module)):
            place_parameter(owner, name, grid, layout, self.src_data_rank)
        put_on_grid(module, runner)
        refuse_empty_under_fsdp(module, grid.mesh)
        return module


def place_parameter(
    module: nn.Module, name: str, grid: Grid, layout: Layout, src_data_rank: int | None
) -> None:
    """Make a parameter a DTensor on the mesh. Tied parameters stay tied.

    Raises:
        ValueError: if a module with the tied parameter wants it in another layout.
    """
    param = getattr(module, name)
    placements = tuple(grid.placements(normalize(layout, param.ndim)))
    if isinstance(param, DTensor):
        if tuple(param.placements) != placements:
            raise ValueError(
                f"{describe_module(module)}: {name} is placed {param.placements} on the mesh "
                f"already, but this style wants {placements}: name the module in one plan entry"
            )
        return
    placed: Any = getattr(param, "_tp2d_placed", None)
    if placed is not None and placed.device_mesh == grid.mesh:
        if tuple(placed.placements) != placements:
            raise ValueError(tied_message(module, name, placements, placed.placements))
    else:
        placed = nn.Parameter(
            _distribute(param, grid.mesh, placements, src_data_rank),
            requires_grad=param.requires_grad,
        )
        # Kept on the old parameter, which lives as long as another module still holds it.
        param._tp2d_placed = placed
    module.register_parameter(name, placed)


def _distribute(
    param: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None
) -> DTensor:
    """``distribute_tensor`` which, along an axis of one rank, takes that rank as the source."""
    if not source or 1 not in mesh.shape:
        return distribute_tensor(param, mesh, placements, src_data_rank=source)
    dim = mesh.shape.index(1) ^ 1
    names = mesh.mesh_dim_names
    assert names is not None
    line = distribute_tensor(param, mesh[names[dim]], [placements[dim]], src_data_rank=source)
    return DTensor.from_local(
        line.to_local(),
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def tied_message(
    module: nn.Module, name: str, wanted: Sequence[Placement], other: Sequence[Placement]
) -> str:
    return (
        f"{describe_module(module)}: its {name} is tied to another module's, which is placed "
        f"{tuple(other)} on the mesh, but this style wants {tuple(wanted)}: give tied modules "
        f"styles of one layout (an embedding Rowwise2D and its head Colwise2D), or untie them"
    )


AS_INPUT = "as the input"
AT_FIRST_FORWARD = "at the first forward"


class Resolved(NamedTuple):
    """What is known of a style when the plan is applied, for :func:`torch_tp2d.layouts_of`."""

    input: Layout | str = ""
    output: Layout | str = ""
    dataflow: str = ""
    algorithm: str = ""
    told_by: str = "entry"
    runs_parameters: bool = True
    """Whether the runner uses the module's own parameters."""


class Runner:
    """Runs the forward of a styled module. Copies of the module hold the same runner."""

    style: str
    name = ""
    """The module's name in the model that the plan was applied to, for messages."""
    by_default = False
    """Whether no plan entry asked for the style, so that a later plan may replace it."""
    exit: Exit | None = None
    """How the output leaves, if every call uses the same :class:`Exit`."""

    def __deepcopy__(self, memo: Any) -> Runner:
        return self

    def installed(self, module: nn.Module) -> None:
        """Called when the module has its runner and its parameters are placed.

        Called once more before the first forward, as loading may have replaced parameters.
        """

    def resolved(self) -> Resolved:
        """The layouts to which the plan was resolved for this module."""
        return Resolved()

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module on the grid; ``forward`` is the module's own."""
        raise NotImplementedError


class _OnGrid:
    """Mixin that a style puts in front of a module's class, to run its :class:`Runner`."""

    _tp2d: Runner
    _tp2d_first: str | None
    """The name of the first argument of the module's own forward."""
    _tp2d_own: Any = None
    """The forward that was put on the module itself, before the plan was applied."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args and self._tp2d_first in kwargs:
            args = (kwargs.pop(self._tp2d_first),)
        forward = self._tp2d_own or super().forward  # type: ignore[misc]
        if in_graph():
            guard_global_sizes()
        else:
            refuse_transforms(self)  # type: ignore[arg-type]
        if debug.is_on():
            module: Any = self
            name = repr(self._tp2d.name) if self._tp2d.name else describe_module(module)
            run = partial(in_one_piece, self._tp2d.run, self, forward)
            return debug.run_as_layer(module, name, run, args, kwargs)
        return in_one_piece(self._tp2d.run, self, forward, *args, **kwargs)


_classes: dict[tuple[str, type], type] = {}


def put_on_grid(module: nn.Module, runner: Runner) -> None:
    """Make the module's forward call the runner."""
    count_steps()
    kind = type(module)
    if (runner.style, kind) not in _classes:
        name = f"{runner.style}{kind.__name__}"
        _, *given = inspect.signature(kind.forward).parameters.values()
        first = _first_of(given)
        _classes[runner.style, kind] = type(name, (_OnGrid, kind), {"_tp2d_first": first})
    object.__setattr__(module, "_tp2d", runner)
    own = vars(module).pop("forward", None)
    if own is not None:
        first = _first_of(inspect.signature(own).parameters.values())
        vars(module).update(_tp2d_own=own, _tp2d_first=first)
    module.__class__ = _classes[runner.style, kind]
    runner.installed(module)


def _first_of(parameters: Iterable[inspect.Parameter]) -> str | None:
    first = next(iter(parameters), None)
    return None if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD else first.name


def take_off_grid(module: nn.Module) -> None:
    """Give the module its own class, and forward, back."""
    module.__class__ = type(module).__mro__[2]
    del module._tp2d
    own = vars(module).pop("_tp2d_own", None)
    if own is not None:
        del module._tp2d_first
        vars(module)["forward"] = own


def refuse_transforms(module: nn.Module) -> None:
    """Refuse to run under a transform of torch.func, which wraps parameters in tensors of its own.

    Raises:
        NotImplementedError: under a transform; the message says how to get the gradients instead.
    """
    if are_functorch_transforms_active():
        raise NotImplementedError(
            f"{describe_module(module)}: torch.func's transforms (grad, vjp, jvp, vmap) do not "
            f"reach into a module on a mesh: call it by torch.func.functional_call with the "
            f"parameters wanted, and take torch.autograd.grad of that"
        )


def check_dims(module: nn.Module, x: Tensor, least: int, wanted: str) -> None:
    """Refuse an input with fewer than ``least`` dims.

    Args:
        wanted: the shape to ask for, in the message.

    Raises:
        ValueError: naming the module and the shape.
    """
    if x.ndim < least:
        mend = "unsqueeze(0) what is one of them"
        if least > 2:
            wanted, mend = "[batch, sequence, features]", "use row_dim=0 for [tokens, features]"
        raise ValueError(
            f"{describe_module(module)} got an input of shape {tuple(x.shape)}, but on a mesh, "
            f"which splits tokens, it takes {wanted}: {mend}"
        )


def first_tensor(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The input that a module's layouts describe: the first floating point tensor, else the first.

    Raises:
        TypeError: if no argument is a tensor.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        raise TypeError(f"{describe_module(module)} was given no tensor")
    return next((x for x in tensors if x.is_floating_point()), tensors[0])
