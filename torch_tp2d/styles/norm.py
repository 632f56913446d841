"""The style for norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from .._torch_compat.modules import parameters_of
from ..mesh.grid import Grid
from ..mesh.layouts import Layout, as_layout, check_row_dim, feature_layout, is_pair
from ..ops.norm import norm2d
from ..runtime.prefetch import Prepared, prepare_parameters
from ..runtime.versions import guard_in_backward
from .base import FEATURES, GridStyle, LayoutLike, Resolved, Runner, check_dims
from .boundary import Entry, Exit, dims_needed
from .dtensors import local_shards
from .module_kinds import describe_module, norm_of

__all__ = ["Norm2D"]


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

    If ``input_layouts`` split the hidden dim along ``tp_row`` and not along ``tp_col``, it uses the
    transposed layout of the weight-stationary dataflow:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input, output    ``(Shard(-1), Shard(1))``       ``[B, S/C, H/R]``
    input, output    ``(Shard(-1), Replicate())``    ``[B, S, H/R]``
    weight, bias     ``(Shard(0), Replicate())``     ``[H/R]``
    ===============  ==============================  ==============================

    Only the statistics and the parameters' gradients cross the wire: the statistics along the axis
    that splits the hidden dim, in fp32 at least, and the gradients of weight and bias along the
    axis that splits the tokens.

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
        check_row_dim(row_dim)
        default = feature_layout(row_dim)
        self.row_dim = row_dim
        self.input_layouts = as_layout(input_layouts, default, row=default[0])
        self.certain = is_pair(input_layouts)
        # The placements of the hidden dim: Shard(2) is that of [batch, sequence, hidden] alone.
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
    exit: Exit

    def __init__(self, style: Norm2D, module: nn.Module, grid: Grid) -> None:
        self.style = "Norm2D"
        self.norm = norm_of(module)
        self.grid = grid
        blocks, hidden, local = style.blocks, self.norm.hidden, style.use_local_output
        self.entry = Entry(
            grid,
            style.input_layouts,
            blocks,
            style.row_dim,
            hidden,
            whole_grad=True,
            certain=style.certain,
        )
        by = describe_module(module)
        self.exit = Exit(grid, blocks, style.output_layouts, hidden, local, by=by)
        self.hidden_axis, across = (
            (grid.row, grid.col) if style.transposed else (grid.col, grid.row)
        )
        tokens = blocks[1] if style.transposed else blocks[0]
        self.token_axis = across if isinstance(tokens, Shard) else None

    def resolved(self) -> Resolved:
        return Resolved(self.entry.declared, self.exit.wanted)

    def prepare(self, module: nn.Module) -> Prepared:
        """The parameters' local shards, as the norm takes them."""
        return Prepared(
            *local_shards(*(getattr(module, name, None) for name in ("weight", "bias")))
        )

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        check_dims(module, x, dims_needed(self.entry, self.exit), FEATURES)
        hidden, sizes = self.norm.hidden, self.grid.sizes_of(x)
        x = self.entry.shard(x, module)
        ready = prepare_parameters(module, self.prepare, self.grid.context)
        weight, bias = ready.weight, ready.bias
        if weight is not None and self.norm.weight_offset:
            weight = weight + self.norm.weight_offset
        y = norm2d(
            x,
            weight,
            bias,
            hidden=hidden,
            eps=torch.finfo(x.dtype).eps if self.norm.eps is None else self.norm.eps,
            centered=self.norm.centered,
            hidden_axis=self.hidden_axis,
            token_axis=self.token_axis,
            context=self.grid.context,
        )
        if x.requires_grad:
            # What is parametrized is not read, which would compute it again.
            guard_in_backward(y, map(parameters_of(module).get, ("weight", "bias")))
        return self.exit.output(y, sizes)
