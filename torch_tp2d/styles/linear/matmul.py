"""How a matmul style is applied: which modules it takes, and which runner each of them gets."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..._torch_compat.tensors import fuses_products
from ...comm.groups import sends
from ...mesh import layouts
from ...mesh.grid import Grid, describe_mesh
from ...mesh.layouts import STATIONARY, TP_COL
from ...ops.matmul import ALGORITHMS
from ...planner.rates import known
from ..base import Runner
from ..embedding import EmbeddingRunner, PatchRunner, check_options
from ..module_kinds import describe_module, embeds, is_conv1d, is_linear, is_patch_embedding
from .options import MatmulOptions
from .runners import ChoosingRunner, LinearRunner, StationaryRunner

__all__ = ["MatmulStyle"]


class MatmulStyle(MatmulOptions):
    """Base of Colwise2D, Rowwise2D and Block2DParallel: checks a module and makes its runner."""

    def check(self, module: Any, grid: Grid) -> None:
        super().check(module, grid)
        style = type(self).__name__
        if embeds(module):
            if not self.embeddings:
                raise TypeError(
                    f"{style} is for nn.Linear and Conv1D, not {describe_module(module)}: use "
                    f"Rowwise2D or Colwise2D"
                )
            check_options(module)
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
        elif isinstance(module, nn.Embedding):
            raise TypeError(
                f"{style} shards the weight of an nn.Embedding, but {describe_module(module)} has "
                f"other parameters too: put an nn.Embedding in its place and do the rest in the "
                f"module around it, or keep it whole on every rank: for ids [batch, sequence], "
                f"torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate()), "
                f"output_layouts=Replicate())"
            )
        elif not (is_linear(module) or is_conv1d(module)):
            raise TypeError(
                f"{style} is for nn.Linear, {'nn.Embedding ' if self.embeddings else ''}and "
                f"Conv1D with their own forward, not {describe_module(module)}: name the Linear "
                f"modules inside it, or use Norm2D for a norm and Replicate for anything else"
            )
        features = module.weight.shape[1 if is_conv1d(module) else 0]
        sizes = self.part_sizes(features)
        divide = sum(sizes) == features and not any(size % grid.col.size for size in sizes)
        if self.parts != 1 and (embeds(module) or not divide):
            several = f"{self.parts} projections" if isinstance(self.parts, int) else sizes
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: its {features} "
                f"features are not {several} that divide over "
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
        device = grid.mesh.device_type
        if self.algorithm == "fused" and sends(grid.mesh) and not fuses_products(device):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: algorithm 'fused' "
                f"multiplies in symmetric memory, for which torch has no operators on {device}: "
                f'use algorithm="pipelined"'
            )
        algorithm = ALGORITHMS[self.algorithm] if self.algorithm != "auto" else None
        if algorithm is not None and algorithm.SQUARE and grid.row.size != grid.col.size:
            raise ValueError(
                f"{describe_module(module)}: algorithm {self.algorithm!r} needs a square grid, "
                f'but the mesh is {describe_mesh(grid.mesh)}: use "summa" or "collective", which '
                f"take any grid"
            )

    def _check_patches(self, module: nn.Module) -> None:
        """Refuse options that are valid for a Linear but not for a patch embedding."""
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
        if self.grad_layouts is not None or self.parts != 1:
            raise ValueError(
                f"{describe_module(module)}: a patch embedding takes no grad_layouts and no parts: "
                f"leave them out"
            )

    def goes_by_rates(self, module: nn.Module, grid: Grid) -> bool:
        if self.algorithm != "auto" or self.dataflow == STATIONARY or grid.axes != TP_COL:
            return False
        return not (is_patch_embedding(module) or embeds(module))

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        if is_patch_embedding(module):
            return PatchRunner(self, module, grid, self.weight_layout(module))
        if not embeds(module):
            if self.dataflow == STATIONARY:
                return StationaryRunner(self, module, grid)
            rates = known(grid.mesh) if self.goes_by_rates(module, grid) else None
            own = LinearRunner(self, module, grid, rates)
            if rates is None or self.dataflow != "auto" or not self.shards_over_row:
                return own
            return ChoosingRunner(own, StationaryRunner(self, module, grid), self, rates)
        given_in, given_out, _ = self.given_layouts
        return EmbeddingRunner(
            self.rule.style,
            module,
            grid,
            weight=self.weight_layout(module),
            row_dim=self.row_dim,
            given_in=given_in,
            given_out=given_out,
            default_col=self.output_layouts[1],
            use_local_output=self.use_local_output,
            grad_layouts=self.grad_layouts,
        )
