"""Modules whose parameters are whole on every rank and whose tokens are split: run as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from .base import GridStyle, LayoutLike, Runner, local_shards
from .comm import Axis, all_reduce
from .edges import to_dtensor
from .embedding import EmbeddingRunner
from .grid import Grid
from .layouts import Layout, as_layout, check_row_dim, normalize
from .recognise import is_embedding
from .runtime.ahead import Ready, take_up
from .runtime.context import Context
from .runtime.late import summed

__all__ = ["Replicate", "SumGrads", "WholeRunner"]

_WHOLE: Layout = dt.Replicate(), dt.Replicate()


class Replicate(GridStyle):
    """Put a module on the mesh with its parameters whole on every rank.

    For what no other plan entry names: a norm, a position embedding, a router. All parameters of
    a model have to be on one mesh, for torch's optimizers and ``clip_grad_norm_``, and the
    gradient of a module that sees only some of the tokens has to be summed over the others.

    The module runs as it is, on a DTensor made of its first argument.

    Keyword Args:
        input_layouts: layout of a local first argument. By default the token layout where its
            sequence is this rank's shard of the tokens under way, else the row layout. An
            embedding's ids are whole by default.
        output_layouts: layout of the output; by default as the module gives it.
        use_local_output: hand on local tensors; by default if the input was local.
        row_dim: the token dim that ``tp_row`` splits.

    Raises:
        TypeError: for integer parameters.

    Example::

        >>> plan = {"layers.*.norm": torch_tp2d.Replicate(), "layers.*.w1": Colwise2D(), ...}
    """

    def __init__(
        self,
        *,
        input_layouts: LayoutLike = None,
        output_layouts: LayoutLike = None,
        use_local_output: bool | None = None,
        row_dim: int = 0,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        row = Shard(row_dim)
        self.row_dim = row_dim
        self.given_layouts = input_layouts, output_layouts, None
        self.input_layouts = (
            None if input_layouts is None else as_layout(input_layouts, _WHOLE, row=row)
        )
        self.output_layouts = (
            None if output_layouts is None else as_layout(output_layouts, _WHOLE, row=row)
        )
        self.use_local_output = use_local_output
        self.by_default = False

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for owner in module.modules():
            for name, _ in owner.named_parameters(recurse=False):
                yield owner, name, _WHOLE

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        if is_embedding(module):
            return EmbeddingRunner(
                "Replicate",
                module,
                grid,
                weight=_WHOLE,
                row_dim=self.row_dim,
                given_in=self.given_layouts[0],
                given_out=self.given_layouts[1],
                default_col=dt.Replicate(),
                use_local_output=self.use_local_output is not False,
                grad_layouts=None,
            )
        runner = WholeRunner(
            "Replicate",
            module,
            grid,
            self.row_dim,
            self.input_layouts,
            self.output_layouts,
            self.use_local_output,
        )
        runner.by_default = self.by_default
        return runner

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output}, "
            f"row_dim={self.row_dim})"
        )


class WholeRunner(Runner):
    """Runs a module with whole parameters on a DTensor of its first argument."""

    def installed(self, module: nn.Module) -> None:
        for param in module.parameters():
            if param.requires_grad and isinstance(param, DTensor):
                _settle_after_backward(param)

    def __init__(
        self,
        style: str,
        module: nn.Module,
        grid: Grid,
        row_dim: int,
        declared: Layout | None,
        wanted: Layout | None,
        use_local_output: bool | None,
        *,
        enforce_input: bool = False,
    ) -> None:
        self.style = style
        self.locally = _local_math(module)
        self.grid = grid
        self.row_dim = row_dim
        self.declared, self.wanted = declared, wanted
        self.use_local_output = use_local_output
        self.enforce_input = enforce_input

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, *rest = args
        was_local = not isinstance(x, DTensor)
        use_local = was_local if self.use_local_output is None else self.use_local_output
        if was_local:
            declared = self.declared
            if declared is None:
                declared = self.grid.guess_layout(x, self.row_dim)
            if self.wanted is None and self._takes_tokens(x, declared):
                x = self.grid.without_stand_in(x, declared)
                shape = self.grid.shape_of(x, declared)
                y = self._locally(module, x, declared)
                # Asked for before the module ran, so that the answer came meanwhile.
                sizes = shape()[:-1]
                if use_local:
                    return self.grid.with_stand_in(y, declared, sizes)
                return to_dtensor(y, declared, self.grid, (*sizes, y.shape[-1]))
            x = to_dtensor(x, declared, self.grid)
        elif x.device_mesh != self.grid.mesh:
            layout = self.grid.layout(x, self.row_dim)
            x = to_dtensor(x.to_local(), layout, self.grid)
        if self.enforce_input and self.declared is not None:
            placements = self.grid.placements(normalize(self.declared, x.ndim))
            if tuple(x.placements) != tuple(placements):
                x = x.redistribute(placements=placements)
        layout = self.grid.layout(x, self.row_dim)
        if self._takes_tokens(x, layout):
            y = self._locally(module, x.to_local(), layout)
            y = to_dtensor(y, layout, self.grid, (*x.shape[:-1], y.shape[-1]))
        else:
            y = forward(x, *rest, **kwargs)
        if not isinstance(y, DTensor):
            return y
        wanted = self.wanted
        if wanted is None and y.shape == x.shape:
            # DTensor replicates where a dim is too short for the mesh.
            wanted = layout
        if wanted is not None:
            target = self.grid.placements(normalize(wanted, y.ndim))
            if tuple(y.placements) != target:
                y = y.redistribute(placements=target)
        if not use_local:
            return y
        layout = self.grid.layout(y, self.row_dim)
        return self.grid.with_stand_in(y.to_local(), layout, self.grid.sizes_of(y))

    def _takes_tokens(self, x: Tensor, layout: Layout) -> bool:
        """Whether the module takes tokens one by one, and each is whole where it lies."""
        return self.locally is not None and Shard(x.ndim - 1) not in normalize(layout, x.ndim)

    def _locally(self, module: Any, x: Tensor, layout: Layout) -> Tensor:
        """The module on a local shard: no DTensor dispatch."""
        assert self.locally is not None
        axes = [
            axis
            for axis, placement in zip((self.grid.row, self.grid.col), layout, strict=True)
            if isinstance(placement, Shard) and axis.size > 1
        ]
        ready = take_up(module, self.prepare, self.grid.context)
        params = SumGrads.apply(axes, self.grid.context, ready.weight, ready.bias)
        return self.locally(module, x, *params)

    def prepare(self, module: nn.Module) -> Ready:
        """Take up the parameters."""
        return Ready(*local_shards(*map(module._parameters.get, ("weight", "bias"))))


_LocalMath = Callable[..., Tensor]


def _layer_norm(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _rms_norm(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, weight, module.eps)


def _linear(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _local_math(module: nn.Module) -> _LocalMath | None:
    """The forward of torch's own modules that take tokens one by one."""
    own = type(module).forward
    if own is nn.Linear.forward:
        return _linear
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1:
        if own is nn.LayerNorm.forward:
            return _layer_norm
        if own is nn.RMSNorm.forward:
            return _rms_norm
    return None


class SumGrads(torch.autograd.Function):
    """Whole parameters used on different tokens: their gradients are summed, in one transfer."""

    @staticmethod
    def forward(
        ctx: Any, axes: Sequence[Axis], context: Context, *params: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.axes, ctx.context = axes, context
        return tuple(None if p is None else p.view_as(p) for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *summed(grads, ctx.axes, ctx.context)


def _settle_after_backward(param: DTensor) -> None:
    hooks = param._post_accumulate_grad_hooks
    if hooks and _settle_grad in hooks.values():
        # to_empty() puts another tensor under the parameter, and hooks fire where they were set.
        param._post_accumulate_grad_hooks = hooks
    else:
        param.register_post_accumulate_grad_hook(_settle_grad)


def _settle_grad(param: DTensor) -> None:
    """Sum a gradient that DTensor left partial, once, instead of in each op that reads it."""
    grad = param.grad
    if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
        local = grad.to_local()
        grid = Grid(param.device_mesh)
        for axis, placement in zip((grid.row, grid.col), grad.placements, strict=True):
            if placement.is_partial():
                local = all_reduce(local, axis).wait()
        param.grad = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)
