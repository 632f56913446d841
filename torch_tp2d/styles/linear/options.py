"""The keyword arguments of a matmul style, and the layouts, entry and exit that they imply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ...mesh import layouts
from ...mesh.grid import Grid
from ...mesh.layouts import STATIONARY, Layout, MatmulRule, as_layout
from ...ops.matmul import ALGORITHMS, IN_ROUNDS
from ..base import GridStyle, LayoutLike
from ..boundary import Entry, Exit
from ..module_kinds import embeds, is_conv1d, is_patch_embedding

__all__ = ["MatmulOptions"]


class MatmulOptions(GridStyle):
    """The options of Colwise2D, Rowwise2D and Block2DParallel, before they are applied."""

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
        reduce_dtype: torch.dtype | None = None,
        grad_layouts: LayoutLike = None,
        parts: int | Sequence[int] | None = None,
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
        if regather_input and not (whole_input and algorithm in ("auto", *IN_ROUNDS)):
            raise ValueError(
                f"{type(self).__name__} with algorithm {algorithm!r} keeps no gathered tokens for "
                f'backward: regather_input is for Colwise2D with "pipelined" or "fused", '
                f"leave it out"
            )
        self.says_parts = parts is not None
        self.parts: int | tuple[int, ...] = (
            1 if parts is None else parts if isinstance(parts, int) else tuple(parts)
        )
        least = min(self.parts, default=0) if isinstance(self.parts, tuple) else self.parts
        if least < 1 or (
            self.parts != 1 and not (self.rule is layouts.COLWISE and use_local_output)
        ):
            raise ValueError(
                f"parts is the number of projections that a fused weight holds side by side, at "
                f"least 1, or their sizes, for Colwise2D with use_local_output=True, not {parts} "
                f"for {type(self).__name__}"
            )
        self.reshard_after_forward = reshard_after_forward
        self.regather_input = regather_input
        sums_at_once = algorithm == "auto" or ALGORITHMS[algorithm].WHOLE
        if reduce_dtype is not None and not (reduce_dtype.is_floating_point and sums_at_once):
            raise ValueError(
                f"{type(self).__name__} with algorithm {algorithm!r}: reduce_dtype is a floating "
                f'point dtype, for "pipelined", "fused" and "collective", which sum a gradient '
                f"in one transfer, not {reduce_dtype}"
            )
        self.reduce_dtype = reduce_dtype
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
        if self.parts != 1 and self.output_layouts != (row, Shard(-1)):
            raise ValueError(
                f"parts={parts} is for an output whose features are split, {(row, Shard(-1))}, "
                f"not {self.output_layouts}: a whole output has the projections side by side anyway"
            )

    def part_sizes(self, features: int) -> tuple[int, ...]:
        """The sizes of the projections that are fused in a weight of ``features`` outputs."""
        if isinstance(self.parts, tuple):
            return self.parts
        return (features // self.parts,) * self.parts

    shards_over_row = True
    """Whether tp_row splits the weight, 1/R a row; lifted stock styles replicate it there."""

    def weight_layout(self, module: Any) -> Layout:
        on_row, on_col = self.rule.weight_dims
        if is_patch_embedding(module):
            # [out, channels, height, width]: tp_row splits the longest dim of a patch.
            sizes: Any = module.weight.shape
            on_row = max((1, 2, 3), key=lambda dim: sizes[dim])
        if embeds(module):
            # A tied head uses this weight with the roles swapped: [vocab, hidden] = [out, in].
            on_row, on_col = on_col, on_row
        if is_conv1d(module):
            on_row, on_col = 1 - on_row, 1 - on_col
        return (Shard(on_row) if self.shards_over_row else Replicate()), Shard(on_col)

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", self.weight_layout(module)
        if getattr(module, "bias", None) is not None:
            yield module, "bias", (Replicate(), Shard(0))

    def entry(self, grid: Grid, takes: Layout, features: int) -> Entry:
        """How the input enters, for an op that takes it in layout ``takes``."""
        certain = layouts.is_pair(self.given_layouts[0])
        fuses = self.algorithm == "fused"
        return Entry(
            grid, self.input_layouts, takes, self.row_dim, features, certain=certain, fuses=fuses
        )

    def exit(self, grid: Grid, gives: Layout, features: int, by: str) -> Exit:
        """How the result leaves, for an op that gives it in layout ``gives``."""
        local, grads = self.use_local_output, self.grad_layouts
        fused = self.parts != 1
        return Exit(grid, gives, self.output_layouts, features, local, grads, by, fused)

    def __repr__(self) -> str:
        options = {
            "reshard_after_forward": (self.reshard_after_forward, None),
            "regather_input": (self.regather_input, False),
            "reduce_dtype": (self.reduce_dtype, None),
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
