"""The parallel styles: which layouts a module takes and gives, and which op computes it.

A style shards the module's parameters over the mesh and puts a class of its own in front of the
module's, so that ``forward`` runs an op of :mod:`torch_tp2d.ops` on local shards. The module
keeps its identity: ``isinstance``, parameter names and hooks are as before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from . import layouts
from .comm import deal_grad
from .edges import enter, leave, to_dtensor
from .grid import Axes, Grid, Sizes, describe_mesh
from .layouts import STATIONARY, TP_COL, Layout, MatmulRule, as_layout
from .ops.embedding import embedding2d
from .ops.matmul import ALGORITHMS, Cut, LinearOp, linear2d, ring
from .ops.matmul.stationary import StationaryOp, stationary2d
from .ops.norm import norm2d
from .ops.patches import patches
from .planner.choice import LinearCase, choose_algorithm, choose_dataflow
from .planner.rates import Rates, measured
from .prefetch import Ready, fetch
from .recognise import (
    describe_module,
    is_conv1d,
    is_embedding,
    is_linear,
    is_patch_embedding,
    norm_of,
)

__all__ = [
    "Block2DParallel",
    "Colwise2D",
    "EmbeddingRunner",
    "GridStyle",
    "Norm2D",
    "Rowwise2D",
    "Runner",
]

LayoutLike = Placement | Sequence[Placement] | None


class GridStyle(ParallelStyle):
    """A style that is at home on a ``("tp_row", "tp_col")`` mesh.

    ``check`` and ``param_layouts`` run before anything is changed or communicated, so that a plan
    with a mistake in it fails whole, on every rank.
    """

    axes: Axes = TP_COL
    is_hook: bool = False
    """Whether the module goes on running as it is, and so may have another style beside."""
    places_inside: bool = True
    """Whether the parameters of all modules inside are the style's business."""

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Refuse a module that this style cannot parallelize on this grid.

        Raises:
            TypeError: for a module of the wrong kind, or parameters that are not floating point.
            ValueError: for parameters that are on a mesh already, and as the style says.
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

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        """The module, name and (row, col) layout of each parameter that this style places."""
        return iter(())

    @abstractmethod
    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        """What the module's forward becomes; made before its parameters are placed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        grid = Grid(device_mesh, self.axes)
        self.check(module, grid)
        runner = self.runner(module, grid)
        for owner, name, layout in list(self.param_layouts(module)):
            place_parameter(owner, name, grid, layout, self.src_data_rank)
        put_on_grid(module, runner)
        return module


def place_parameter(
    module: nn.Module, name: str, grid: Grid, layout: Layout, src_data_rank: int | None
) -> None:
    """Make a parameter a DTensor on the mesh. Modules that shared it go on sharing it.

    Raises:
        ValueError: if a module that shares the parameter wants it in another layout.
    """
    param = getattr(module, name)
    placements = tuple(grid.placements(layouts.normalize(layout, param.ndim)))
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
            distribute_tensor(param, grid.mesh, placements, src_data_rank=src_data_rank),
            requires_grad=param.requires_grad,
        )
        # On the old parameter, which lives as long as another module still holds it.
        param._tp2d_placed = placed
    module.register_parameter(name, placed)


def tied_message(
    module: nn.Module, name: str, wanted: Sequence[Placement], other: Sequence[Placement]
) -> str:
    return (
        f"{describe_module(module)}: its {name} is tied to another module's, which is placed "
        f"{tuple(other)} on the mesh, but this style wants {tuple(wanted)}: give tied modules "
        f"styles of one layout (an embedding Rowwise2D and its head Colwise2D), or untie them"
    )


class Runner:
    """What a styled module does in forward. Immutable, and shared by copies of the module."""

    style: str
    by_default = False
    """Whether no plan entry asked for it, so that a later one may replace it."""

    def __deepcopy__(self, memo: Any) -> Runner:
        return self

    def installed(self, module: nn.Module) -> None:
        """The module runs on the grid from now on, with its parameters placed.

        Called again before its first forward: loading may have made other parameters.
        """

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module on the grid; ``forward`` is the module's own."""
        raise NotImplementedError


class _OnGrid:
    """Put in front of a module's class by a style."""

    _tp2d: Runner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tp2d.run(self, super().forward, *args, **kwargs)  # type: ignore[misc]


_classes: dict[tuple[str, type], type] = {}


def put_on_grid(module: nn.Module, runner: Runner) -> None:
    """Make the module's forward the runner's."""
    kind = type(module)
    if (runner.style, kind) not in _classes:
        name = f"{runner.style}{kind.__name__}"
        _classes[runner.style, kind] = type(name, (_OnGrid, kind), {})
    object.__setattr__(module, "_tp2d", runner)
    module.__class__ = _classes[runner.style, kind]
    runner.installed(module)


def take_off_grid(module: nn.Module) -> None:
    """Give the module its own class back."""
    module.__class__ = type(module).__mro__[2]
    del module._tp2d


def local_shard(param: Any) -> Any:
    """A parameter's shard; its gradient comes back as a DTensor placed like the parameter."""
    return param.to_local() if isinstance(param, DTensor) else param


class _MatmulStyle(GridStyle):
    """What Colwise2D, Rowwise2D and Block2DParallel share."""

    rule: MatmulRule
    embeddings = True
    patches = False
    """Whether it takes the Conv2d of a patch embedding."""

    def __init__(
        self,
        *,
        input_layouts: LayoutLike = None,
        output_layouts: LayoutLike = None,
        use_local_output: bool = True,
        row_dim: int = 0,
        dataflow: str = "auto",
        algorithm: str = "auto",
        reshard_after_forward: bool | None = None,
        regather_input: bool = False,
        grad_layouts: LayoutLike = None,
        parts: int = 1,
    ) -> None:
        super().__init__()
        layouts.check_row_dim(row_dim)
        if dataflow not in ("auto", self.rule.dataflow, STATIONARY):
            raise ValueError(
                f'{type(self).__name__} has dataflow "{self.rule.dataflow}" (or "auto") or '
                f'"{STATIONARY}", not {dataflow!r}'
            )
        if algorithm != "auto" and algorithm not in ALGORITHMS:
            raise ValueError(f'algorithm is "auto" or one of {list(ALGORITHMS)}, not {algorithm!r}')
        self.row_dim = row_dim
        self.dataflow = dataflow
        self.algorithm = algorithm
        self.use_local_output = use_local_output
        whole_input = isinstance(self.rule.input_col, Replicate)
        if regather_input and not (whole_input and algorithm in ("auto", "ring")):
            raise ValueError(
                f"{type(self).__name__} with algorithm {algorithm!r} keeps no gathered tokens for "
                f'backward: regather_input is for Colwise2D with "ring", leave it out'
            )
        if parts < 1 or (parts > 1 and not (self.rule is layouts.COLWISE and use_local_output)):
            raise ValueError(
                f"parts is the number of projections that a fused weight holds side by side, at "
                f"least 1, for Colwise2D with use_local_output=True, not {parts} for "
                f"{type(self).__name__}"
            )
        self.parts = parts
        self.reshard_after_forward = reshard_after_forward
        self.regather_input = regather_input
        self.given_layouts = input_layouts, output_layouts, grad_layouts
        row = Shard(row_dim)
        self.input_layouts = as_layout(input_layouts, (row, self.rule.input_col), row=row)
        self.output_layouts = as_layout(output_layouts, (row, self.rule.output_col), row=row)
        self.grad_layouts = (
            None if grad_layouts is None else as_layout(grad_layouts, (row, row), row=row)
        )
        for layout in (self.input_layouts, self.output_layouts):
            if any(not isinstance(p, Shard | Replicate) for p in layout):
                raise ValueError(
                    f"{type(self).__name__}: layouts are made of Shard and Replicate, not {layout}"
                )
        if parts > 1 and self.output_layouts != (row, Shard(-1)):
            raise ValueError(
                f"parts={parts} is for an output whose features are split, {(row, Shard(-1))}, "
                f"not {self.output_layouts}: a whole output has the projections side by side anyway"
            )

    shards_over_row = True
    """Whether tp_row holds 1/R of the weight; lifted stock styles replicate it there."""

    def _weight_layout(self, module: Any) -> Layout:
        on_row, on_col = self.rule.weight_dims
        if is_patch_embedding(module):
            # [out, channels, height, width]: of what a patch is made of, the dim that cuts finest.
            sizes: Any = module.weight.shape
            on_row = max((1, 2, 3), key=lambda dim: sizes[dim])
        if is_embedding(module):
            # The tied head is this weight transposed in role: [vocab, hidden] = [out, in].
            on_row, on_col = on_col, on_row
        if is_conv1d(module):
            on_row, on_col = 1 - on_row, 1 - on_col
        return (Shard(on_row) if self.shards_over_row else Replicate()), Shard(on_col)

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", self._weight_layout(module)
        if getattr(module, "bias", None) is not None:
            yield module, "bias", (Replicate(), Shard(0))

    def check(self, module: Any, grid: Grid) -> None:
        super().check(module, grid)
        style = type(self).__name__
        if is_embedding(module):
            if not self.embeddings:
                raise TypeError(
                    f"{style} is for nn.Linear and Conv1D, not {describe_module(module)}: use "
                    f"Rowwise2D or Colwise2D"
                )
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(module, option):
                    raise ValueError(
                        f"{describe_module(module)}: {option} is not supported on a sharded "
                        f"embedding: make it without"
                    )
            if self.algorithm not in ("auto", "collective"):
                raise ValueError(
                    f"{describe_module(module)}: an embedding multiplies nothing, so algorithm "
                    f"{self.algorithm!r} means nothing for it: leave it out"
                )
        elif self.patches and is_patch_embedding(module):
            self._check_patches(module)
        elif self.patches and isinstance(module, nn.Conv2d):
            raise TypeError(
                f"{style} takes a Conv2d whose patches do not overlap (stride equal to the kernel, "
                f"no padding, dilation or groups), not {describe_module(module)}: use "
                f"torch_tp2d.Replicate() for it"
            )
        elif not (is_linear(module) or is_conv1d(module)):
            raise TypeError(
                f"{style} is for nn.Linear, {'nn.Embedding ' if self.embeddings else ''}and "
                f"Conv1D with their own forward, not {describe_module(module)}: name the Linear "
                f"modules inside it, or use Norm2D for a norm and Replicate for anything else"
            )
        features = module.weight.shape[1 if is_conv1d(module) else 0]
        if self.parts > 1 and (is_embedding(module) or features % (self.parts * grid.col.size)):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: its {features} "
                f"features are not {self.parts} projections that divide over "
                f"{grid.col.name}={grid.col.size}: use another number of columns, or "
                f"output_layouts=Replicate() without parts"
            )
        if self.dataflow == STATIONARY and self.algorithm not in ("auto", "collective"):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: algorithm "
                f"{self.algorithm!r} is a schedule for moving the weight, but "
                f'dataflow="{STATIONARY}" moves none: use algorithm="auto" or '
                f'dataflow="{self.rule.dataflow}"'
            )
        algorithm = ALGORITHMS[self.algorithm] if self.algorithm != "auto" else None
        if algorithm is not None and algorithm.SQUARE and grid.row.size != grid.col.size:
            raise ValueError(
                f"{describe_module(module)}: algorithm {self.algorithm!r} needs a square grid, "
                f'but the mesh is {describe_mesh(grid.mesh)}: use "summa" or "collective", which '
                f"take any grid"
            )

    def _check_patches(self, module: nn.Module) -> None:
        """Options that are right for a Linear and wrong for a patch embedding."""
        if self.row_dim != 0:
            raise ValueError(
                f"{describe_module(module)}: row_dim={self.row_dim} would split the channels of "
                f"an image over {layouts.TP_ROW}: use row_dim=0, which splits the batch"
            )
        if self.dataflow == STATIONARY or self.algorithm not in ("auto", "collective"):
            raise ValueError(
                f"{describe_module(module)}: a patch embedding gathers its small weight at once, "
                f"so dataflow={self.dataflow!r} and algorithm={self.algorithm!r} mean nothing for "
                f"it: leave them out"
            )
        if self.grad_layouts is not None or self.parts > 1:
            raise ValueError(
                f"{describe_module(module)}: a patch embedding takes no grad_layouts and no parts: "
                f"leave them out"
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        if is_patch_embedding(module):
            return _PatchRunner(self, module, grid, self._weight_layout(module))
        if not is_embedding(module):
            if self.dataflow == STATIONARY:
                return _StationaryRunner(self, module, grid)
            rates = measured(grid.mesh, grid.row, grid.col) if grid.axes == TP_COL else None
            own = _LinearRunner(self, module, grid, rates)
            if rates is None or self.dataflow != "auto" or not self.shards_over_row:
                return own
            return _ChoosingRunner(own, _StationaryRunner(self, module, grid), self, rates)
        given_in, given_out, _ = self.given_layouts
        return EmbeddingRunner(
            self.rule.style,
            module,
            grid,
            weight=self._weight_layout(module),
            row_dim=self.row_dim,
            given_in=given_in,
            given_out=given_out,
            default_col=self.output_layouts[1],
            use_local_output=self.use_local_output,
            grad_layouts=self.grad_layouts,
        )

    def __repr__(self) -> str:
        options = {
            "reshard_after_forward": (self.reshard_after_forward, None),
            "regather_input": (self.regather_input, False),
            "grad_layouts": (self.grad_layouts, None),
            "parts": (self.parts, 1),
        }
        given = [f", {name}={x!r}" for name, (x, default) in options.items() if x != default]
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output}, "
            f"row_dim={self.row_dim}, dataflow={self.dataflow!r}, algorithm={self.algorithm!r}"
            f"{''.join(given)})"
        )


class _LinearRunner(Runner):
    def __init__(self, style: _MatmulStyle, module: Any, grid: Grid, rates: Rates | None) -> None:
        self.style = style.rule.style
        transposed = is_conv1d(module)
        out_features, in_features = (
            reversed(module.weight.shape) if transposed else (module.weight.shape)
        )
        gathers = style.rule.gathers_input
        name = style.algorithm
        if name == "auto":
            name = "ring" if style.regather_input else choose_algorithm(grid.col.is_gloo, rates)
        algorithm = ALGORITHMS[name]
        self.in_rounds = name == "ring"
        self.may_reshard = style.reshard_after_forward is None
        p, q = (in_features, out_features) if gathers else (out_features, in_features)
        self.grid = grid
        self.row_dim = style.row_dim
        self.in_features, self.out_features = in_features, out_features
        self.parts, self.out_dim = style.parts, int(transposed)
        self.declared, self.wanted_out = style.input_layouts, style.output_layouts
        self.use_local_output, self.grad_layouts = style.use_local_output, style.grad_layouts
        self.op = LinearOp(
            algorithm=algorithm,
            cut=Cut(grid.row, grid.col, p, q, replicated=not style.shards_over_row),
            gathers_input=gathers,
            transposed=transposed,
            keep_weight=not style.reshard_after_forward,
            regather_input=style.regather_input,
        )
        self.resharding = replace(self.op, keep_weight=False)
        row = Shard(style.row_dim)
        whole = algorithm.WHOLE
        self.operand: Layout = row, Replicate() if gathers and whole else Shard(-1)
        self.result: Layout = row, Partial() if whole and not gathers else Shard(-1)

    def _shards(self, module: Any) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank multiplies its output features by."""
        weight, bias = local_shard(module.weight), local_shard(module.bias)
        if torch.is_autocast_enabled(weight.device.type):
            # Before anything moves: the wire carries the low precision too.
            dtype = torch.get_autocast_dtype(weight.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if self.parts > 1:
            return deal_grad(weight, self.out_dim, bias, self.parts, self.grid.col)
        return weight, bias

    def prepare(self, module: Any) -> Ready | None:
        """Start gathering the weight; None if it is not there to be gathered."""
        if isinstance(module.weight, DTensor) and module.weight.device_mesh != self.grid.mesh:
            return None
        weight, bias = self._shards(module)
        moving = self.op.algorithm.prefetch(self.op.as_b(weight.detach()), self.op.cut)
        return Ready(ring.late(weight), None if bias is None else ring.late(bias), moving)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        arriving = self.in_rounds and not torch.compiler.is_compiling()
        ready = fetch(module, self.prepare) if arriving else None
        sizes, tokens = self.grid.sizes_of(x), self.grid.tokens_of(x)
        x = enter(
            x,
            self.declared,
            self.operand,
            self.grid,
            self.row_dim,
            self.in_features,
            arriving=arriving,
        )
        have, op = self.result, self._op(x, tokens)
        if ready is None:
            y = linear2d(x, *self._shards(module), op)
        else:
            shards = self._leaves_by(x)
            if shards is not None:
                have = have[0], Shard(shards.dim)
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(ready.weight.dtype)
            y = ring.linear(x, ready.weight, ready.bias, op, ready.moving, shards)
        return leave(
            y,
            have,
            self.wanted_out,
            self.grid,
            self.out_features,
            use_local_output=self.use_local_output,
            grad_layouts=self.grad_layouts,
            sizes=sizes,
        )

    def _op(self, x: Tensor, tokens: Sizes | None) -> LinearOp:
        """The op, which keeps its gathered weight if that is no larger than ``x``.

        Decided by sizes that all ranks know: a rank with fewer tokens has to decide alike. Without
        an embedding that writes them, some modules' sizes are known and others' not: all keep.
        """
        cut = self.op.cut
        if self.may_reshard and tokens is not None and self.grid.tokens.shape is not None:
            longest = math.prod(tokens) // tokens[self.row_dim]
            longest *= self.grid.row.split(tokens[self.row_dim])[0]
            if cut.p * cut.col.split(cut.q)[cut.col.index] > longest * x.shape[-1]:
                return self.resharding
        return self.op

    def _leaves_by(self, x: Tensor) -> ring.Shards | None:
        """How a partial result goes to its output layout, if that is by shards of the tokens."""
        row, col = layouts.normalize(self.wanted_out, x.ndim)
        if not self.result[1].is_partial() or self.grid.col.size == 1:
            return None
        if not isinstance(col, Shard) or col.dim == x.ndim - 1 or row != self.result[0]:
            return None
        return ring.Shards(col.dim, self.grid.col.split(x.shape[col.dim]), self.grid.col)


class _StationaryRunner(Runner):
    """A Linear whose weight stays: the changes of layout on either side are all that moves."""

    def __init__(self, style: _MatmulStyle, module: Any, grid: Grid) -> None:
        self.style = style.rule.style
        transposed = is_conv1d(module)
        out_features, in_features = (
            reversed(module.weight.shape) if transposed else (module.weight.shape)
        )
        self.grid = grid
        self.row_dim = style.row_dim
        self.in_features, self.out_features = in_features, out_features
        self.parts = style.parts
        self.declared, self.wanted_out = style.input_layouts, style.output_layouts
        self.use_local_output, self.grad_layouts = style.use_local_output, style.grad_layouts
        self.operand, self.result = style.rule.stationary_input, style.rule.stationary_output
        self.op = StationaryOp(
            row=grid.row,
            col=grid.col,
            out_features=out_features,
            sums_over_row=style.rule.gathers_input,
            transposed=transposed,
        )

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        sizes = self.grid.sizes_of(x)
        x = enter(x, self.declared, self.operand, self.grid, self.row_dim, self.in_features)
        y = stationary2d(x, local_shard(module.weight), local_shard(module.bias), self.op)
        y = leave(
            y,
            self.result,
            self.wanted_out,
            self.grid,
            self.out_features,
            use_local_output=self.use_local_output,
            grad_layouts=self.grad_layouts,
            sizes=sizes,
        )
        if self.parts > 1:
            # The weight is not to move, so the few tokens' features do.
            y, _ = deal_grad(y, y.ndim - 1, None, self.parts, self.grid.col)
        return y


class _ChoosingRunner(Runner):
    """Chooses the dataflow by the number of tokens, which every rank knows, each time."""

    def __init__(
        self, own: _LinearRunner, stationary: _StationaryRunner, style: _MatmulStyle, rates: Rates
    ) -> None:
        self.style = own.style
        self.grid, self.rates = own.grid, rates
        self.own, self.stationary = own, stationary
        self.case = LinearCase(
            rule=style.rule,
            takes=style.input_layouts,
            gives=style.output_layouts,
            in_features=own.in_features,
            out_features=own.out_features,
            rows=own.grid.row.size,
            columns=own.grid.col.size,
            overlaps=own.in_rounds,
            keeps_weight=None if own.may_reshard else own.op.keep_weight,
        )
        self.chosen: dict[tuple[int, int, bool], str] = {}

    def prepare(self, module: Any) -> Ready | None:
        return self.own.prepare(module)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        tokens = self.grid.tokens_of(x)
        if tokens is None or torch.compiler.is_compiling():
            return self.own.run(module, forward, x)
        key = math.prod(tokens), x.element_size(), torch.is_grad_enabled()
        dataflow = self.chosen.get(key)
        if dataflow is None:
            count, itemsize, backward = key
            dataflow = choose_dataflow(self.case, count, itemsize, self.rates, backward=backward)
            self.chosen[key] = dataflow
        stays = dataflow == STATIONARY
        return (self.stationary if stays else self.own).run(module, forward, x)


class EmbeddingRunner(Runner):
    """Looks up this rank's part of the vocabulary and brings the result into its layout."""

    def __init__(
        self,
        style: str,
        module: Any,
        grid: Grid,
        *,
        weight: Layout,
        row_dim: int,
        given_in: LayoutLike,
        given_out: LayoutLike,
        default_col: Placement,
        use_local_output: bool,
        grad_layouts: Layout | None,
    ) -> None:
        self.style = style
        self.grid = grid
        self.row_dim = row_dim
        vocab, self.hidden = module.weight.shape
        # Ids are whole everywhere unless a pair says otherwise.
        self.declared = as_layout(given_in, (Replicate(), Replicate()), row=Replicate())
        self.given_out = given_out
        self.default_col = default_col
        self.use_local_output, self.grad_layouts = use_local_output, grad_layouts
        # A dim of the weight that is split leaves the vocabulary partial, or the hidden dim cut.
        on_row, on_col = (
            Partial() if p == Shard(0) else Shard(-1) if isinstance(p, Shard) else Replicate()
            for p in weight
        )
        self.result: Layout = on_row, on_col
        self.vocab_start = 0
        for axis, placement in zip((grid.row, grid.col), weight, strict=True):
            if isinstance(placement, Shard) and placement.dim == 0:
                self.vocab_start = sum(axis.split(vocab)[: axis.index])

    def _output_layout(self, ids: Tensor) -> Layout:
        """Ids of one dim are positions, ``[sequence]``: they have no batch for tp_row to split."""
        row: Placement = Shard(self.row_dim)
        if ids.ndim == 1:
            row = Replicate() if self.row_dim == 0 else Shard(0)
        return as_layout(self.given_out, (row, self.default_col), row=row)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        whole: Layout = Replicate(), Replicate()
        ids = enter(x, self.declared, whole, self.grid, self.row_dim, None)
        wanted = self._output_layout(ids)
        if ids.ndim == 2 and isinstance(wanted[0], Shard):
            self.grid.tokens.shape = tuple(ids.shape)
        y = embedding2d(ids, local_shard(module.weight), self.vocab_start, module.padding_idx)
        grads = self.grad_layouts
        if grads is None and isinstance(wanted[0], Replicate):
            # Every row adds these to tokens of its own, so each has a share of the gradient.
            grads = Partial(), wanted[1]
        return leave(
            y,
            self.result,
            wanted,
            self.grid,
            self.hidden,
            use_local_output=self.use_local_output,
            grad_layouts=grads,
            sizes=tuple(ids.shape),
        )


class _PatchRunner(Runner):
    """Cuts this row's images into patches, and computes this column's features of each."""

    def __init__(self, style: _MatmulStyle, module: Any, grid: Grid, weight: Layout) -> None:
        self.style = style.rule.style
        self.grid = grid
        self.weight_layout, self.weight_shape = weight, tuple(module.weight.shape)
        given_in, given_out, _ = style.given_layouts
        # Images are whole everywhere, as an embedding's ids are, unless a pair says otherwise.
        self.declared = as_layout(given_in, (Replicate(), Replicate()), row=Replicate())
        self.wanted_out = as_layout(given_out, (Shard(0), Shard(1)), row=Shard(0))
        self.use_local_output = style.use_local_output

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        grid, own = self.grid, (Shard(0), Replicate())
        if isinstance(x, DTensor):
            batch = x.shape[0]
        else:
            batch = grid.extent(x, 0, self.declared)
        # What follows knows the batch by this; how many tokens an image has changes on the way.
        grid.tokens.shape = (batch,)
        x = enter(x, self.declared, own, grid, 0, None)
        summed: Layout = Replicate(), Shard(0)
        weight = grid.redistribute(
            local_shard(module.weight),
            self.weight_layout,
            summed,
            shape=self.weight_shape,
            partial_grad=(True, False),
        )
        bias = local_shard(module.bias)
        if bias is not None:
            bias = grid.redistribute(bias, summed, summed, partial_grad=(True, False))
        y = F.linear(patches(x, *module.kernel_size), weight.flatten(1), bias).permute(0, 3, 1, 2)
        shape = (batch, self.weight_shape[0], *y.shape[2:])
        y = grid.redistribute(y, (Shard(0), Shard(1)), self.wanted_out, shape=shape)
        if not self.use_local_output:
            return to_dtensor(y, self.wanted_out, grid, shape)
        if self.wanted_out[0] == Shard(0) and not grid.row.split(batch)[grid.row.index]:
            y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])
        return y


class Colwise2D(_MatmulStyle):
    """Shard the outputs of a Linear over ``tp_col`` and its inputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.ColwiseParallel`: rename it and
    the plan goes on working. For ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Replicate())``     ``[B/R, S, K]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    Forward gathers the input along ``tp_col``, where it is not whole, and the weight along
    ``tp_row``. On an ``nn.Embedding`` ``W[V, H]`` the hidden dim lies over ``tp_col``, the
    vocabulary over ``tp_row``, and the ids are whole on every rank.

    On an ``nn.Conv2d`` that embeds patches, its kernel equal to its stride, the images
    ``[B, C, H, W]`` are whole on every rank too, and a row embeds its own. The output is
    ``[B, N, H / height, W / width]``, in ``(Shard(0), Shard(1))`` by default. The weight's outputs
    lie over ``tp_col`` and the longest of its other dims over ``tp_row``. A row without images
    gets one of zeros, which :class:`Local2D` drops again.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient. For few tokens, as in decoding:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(-1), Replicate())``    ``[B, S, K/R]``
    result           ``(Partial(), Shard(-1))``      ``[B, S, N/C]``
    ===============  ==============================  ==============================

    The input is brought there from ``input_layouts`` and the result to ``output_layouts``, which
    mean what they always do and have the same defaults. What moves least is an input in the
    transposed layout, ``(Shard(-1), Shard(1))``, gathered along ``tp_col``, or of whole tokens,
    ``(Shard(-1), Replicate())``, gathered by nobody; and an output summed along ``tp_row``:
    ``(Shard(0), Shard(-1))`` or ``(Replicate(), Shard(-1))``. ``tutorials/decode.py`` is a whole
    model laid out so.

    Keyword Args:
        input_layouts: layout of a local input tensor, by default ``Replicate()``: a single
            Placement is the one on ``tp_col``, ``tp_row`` stays ``Shard(row_dim)``; a pair is
            ``(tp_row, tp_col)``. A DTensor knows its own. Ids: ``Replicate()`` on both axes.
        output_layouts: layout of the output, by default ``Shard(-1)``, read likewise. An
            embedding of one-dim ids (positions) has no batch, so its output is replicated along
            ``tp_row``.
        use_local_output: hand on a local tensor (default) or a DTensor of the global shape.
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        dataflow: ``"auto"``, the style's own (above), or ``"weight_stationary"``. An embedding's
            weight never moves, whatever the dataflow.
        algorithm: ``"auto"``, ``"ring"``, ``"collective"``, ``"summa"``, ``"bmr"`` or
            ``"cannon"``; the last two need a square grid. ``"auto"`` is ``"ring"`` on gloo and
            ``"collective"`` elsewhere. A weight that stays takes ``"auto"`` and
            ``"collective"`` only.
        reshard_after_forward: free the gathered weight after forward and gather it again in
            backward (True), or keep it (False): 1/C of the weight more memory, a third less
            weight traffic. None (default) gathers it again only where it is larger than the
            input that is kept beside it, in a model whose embedding is on the mesh too. Only
            ``"ring"`` and ``"collective"`` gather a weight.
        regather_input: gather an input that is split by tokens over ``tp_col`` again for
            backward instead of keeping it: 1/N of it is kept, not 1/R, and it travels three times
            instead of twice. With ``"ring"`` in eager; q, k and v share it.
        grad_layouts: layout of the gradient that comes back for a local output, where that is
            not the output's own. The default is right for a head that is whole everywhere
            (every rank computes the same loss: Replicate) and for positions (replicated along
            ``tp_row``, added to other tokens in each row: Partial there).
        parts: how many projections of one size a fused weight holds side by side: 3 for the
            queries, keys and values of GPT-2's ``c_attn``. The weight is sharded as any other
            (and so saved as one matrix), but the output is this rank's share of each projection,
            side by side. For that the ranks along ``tp_col`` exchange columns of their shards
            before the product, at most ``N*K/(R*C)`` elements, and of the gradient after. Weight
            stationary, they exchange the output's features instead.

    Raises:
        TypeError: when applied to another kind of module, or to integer weights.
        ValueError: for an unknown option, a mesh that is not ``("tp_row", "tp_col")``, a square
            algorithm on an oblong grid, an algorithm that moves a weight that is to stay, or
            parameters that are on another mesh already.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; our count of what moves is
    ``(C-1)/C * M/R * K + (R-1)/R * K*N/C`` elements received per device in forward, and
    ``(C-1)/C * M * K/R + (R-1)/R * M * N/C`` weight stationary between transposed and feature
    layout (:func:`torch_tp2d.planner.cost.linear_traffic`).

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> plan = {"w1": Colwise2D(), "w2": Rowwise2D()}
        >>> parallelize_module(mlp, mesh, plan)
        >>> mlp(x_of_this_row)     # [B/2, S, H] -> [B/2, S, H]
    """

    rule = layouts.COLWISE
    patches = True


class Rowwise2D(_MatmulStyle):
    """Shard the inputs of a Linear over ``tp_col`` and its outputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.RowwiseParallel`. For
    ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(0), Shard(1))``        ``[N/R, K/C]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Replicate())``     ``[B/R, S, N]``
    ===============  ==============================  ==============================

    Forward gathers the weight along ``tp_row`` and reduces the output along ``tp_col``:
    ``output_layouts=Shard(1)`` scatters it over the sequence (the residual stream of sequence
    parallelism), ``Shard(-1)`` over the hidden dim. On an ``nn.Embedding`` ``W[V, H]`` the
    vocabulary lies over ``tp_col`` and the hidden dim over ``tp_row``, the layout of a tied
    :class:`Colwise2D` head; the ids are whole on every rank.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient; the bias lies as above too, and its gradient is summed along ``tp_row``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Replicate(), Shard(-1))``    ``[B, S, K/C]``
    result           ``(Shard(-1), Partial())``      ``[B, S, N/R]``
    ===============  ==============================  ==============================

    An input in the feature layout is gathered along ``tp_row``; an output is summed along
    ``tp_col`` alone if ``output_layouts`` is the transposed ``(Shard(-1), Shard(1))`` or, with
    whole tokens, ``(Shard(-1), Replicate())``.

    The keyword arguments and errors are :class:`Colwise2D`'s; ``input_layouts`` is ``Shard(-1)``
    and ``output_layouts`` ``Replicate()`` by default.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; received per device in forward:
    ``(R-1)/R * K*N/C + (C-1)/C * M/R * N`` elements; weight stationary, from feature to
    transposed layout, ``(R-1)/R * M * K/C + (C-1)/C * M * N/R``.

    Example::

        >>> plan = {"tok_embeddings": Rowwise2D(output_layouts=Shard(1)),
        ...         "layers.*.feed_forward.w2": Rowwise2D(output_layouts=Shard(1))}
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.ROWWISE


class Block2DParallel(_MatmulStyle):
    """Keep both the input and the output of a Linear in blocks: the feature layout.

    For stacks in which the hidden dim itself stays split over ``tp_col`` (with :class:`Norm2D`
    between), as in the paper's Algorithm 1. For ``X[B, S, K]`` and ``W[N, K]``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    The keyword arguments and errors are :class:`Colwise2D`'s; it does not take an embedding.
    Weight stationary, ``X`` is brought to ``(Shard(-1), Replicate())`` and the result, a sum along
    ``tp_row``, to the feature layout, as by Colwise2D.

    Source: TP2D (doi 10.11992/tis.202411023), Algorithm 1 with ``algorithm="bmr"``.

    Example::

        >>> plan = {"fc1": Block2DParallel(algorithm="bmr"), "fc2": Block2DParallel()}
        >>> parallelize_module(mlp, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.BLOCK
    embeddings = False


class Norm2D(GridStyle):
    """A LayerNorm or RMSNorm over a hidden dim that is split along an axis.

    Takes ``nn.LayerNorm``, ``nn.RMSNorm`` and any module that computes one of the two over the
    last dim (its forward is tried on a few numbers when the style is applied).

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input, output    ``(Shard(0), Shard(-1))``       ``[B/R, S, H/C]``
    weight, bias     ``(Replicate(), Shard(0))``     ``[H/C]``
    ===============  ==============================  ==============================

    In the transposed layout of the weight-stationary dataflow, which it takes where
    ``input_layouts`` split the hidden dim along ``tp_row`` and not along ``tp_col``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input, output    ``(Shard(-1), Shard(1))``       ``[B, S/C, H/R]``
    input, output    ``(Shard(-1), Replicate())``    ``[B, S, H/R]``
    weight, bias     ``(Shard(0), Replicate())``     ``[H/R]``
    ===============  ==============================  ==============================

    Only the statistics cross the wire, along the axis that splits the hidden dim, in fp32 at
    least; and the gradients of weight and bias, along the axis that splits the tokens.

    Keyword Args:
        input_layouts, output_layouts: as in :class:`Colwise2D`; ``Shard(-1)`` by default. In the
            transposed layout the output is laid out as the input by default.
        use_local_output: hand on a local tensor (default) or a DTensor.
        row_dim: the token dim that ``tp_row`` splits.

    Raises:
        TypeError: if the module computes something else.

    Example::

        >>> plan = {"ln": Norm2D(), "fc1": Block2DParallel(), "fc2": Block2DParallel()}
        >>> one_token = {"ln": Norm2D(input_layouts=(Shard(-1), Replicate())), ...}
    """

    def __init__(
        self,
        *,
        input_layouts: LayoutLike = None,
        output_layouts: LayoutLike = None,
        use_local_output: bool = True,
        row_dim: int = 0,
    ) -> None:
        super().__init__()
        layouts.check_row_dim(row_dim)
        default = layouts.feature_layout(row_dim)
        self.row_dim = row_dim
        self.input_layouts = as_layout(input_layouts, default, row=default[0])
        # The placements of a hidden dim, in 2, 3 or more dims or in the three that are usual.
        hidden = (Shard(-1), Shard(2))
        self.transposed = self.input_layouts[0] in hidden and self.input_layouts[1] not in hidden
        self.blocks = self.input_layouts if self.transposed else default
        self.output_layouts = as_layout(output_layouts, self.blocks, row=default[0])
        self.use_local_output = use_local_output

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        norm_of(module)

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        layout: Layout = (Shard(0), Replicate()) if self.transposed else (Replicate(), Shard(0))
        for name, _ in module.named_parameters(recurse=False):
            yield module, name, layout

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _NormRunner(self, module, grid)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output}, "
            f"row_dim={self.row_dim})"
        )


class _NormRunner(Runner):
    def __init__(self, style: Norm2D, module: nn.Module, grid: Grid) -> None:
        self.style = "Norm2D"
        self.norm = norm_of(module)
        self.grid = grid
        self.row_dim = style.row_dim
        self.declared, self.wanted_out = style.input_layouts, style.output_layouts
        self.blocks = style.blocks
        self.hidden_axis, across = (
            (grid.row, grid.col) if style.transposed else (grid.col, grid.row)
        )
        tokens = self.blocks[1] if style.transposed else self.blocks[0]
        self.token_axis = across if isinstance(tokens, Shard) else None
        self.use_local_output = style.use_local_output

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        hidden, sizes = self.norm.hidden, self.grid.sizes_of(x)
        x = enter(x, self.declared, self.blocks, self.grid, self.row_dim, hidden, whole_grad=True)
        weight = local_shard(getattr(module, "weight", None))
        if weight is not None and self.norm.weight_offset:
            weight = weight + self.norm.weight_offset
        y = norm2d(
            x,
            weight,
            local_shard(getattr(module, "bias", None)),
            hidden=hidden,
            eps=torch.finfo(x.dtype).eps if self.norm.eps is None else self.norm.eps,
            centered=self.norm.centered,
            hidden_axis=self.hidden_axis,
            token_axis=self.token_axis,
        )
        return leave(
            y,
            self.blocks,
            self.wanted_out,
            self.grid,
            hidden,
            use_local_output=self.use_local_output,
            sizes=sizes,
        )
