"""The style of modules with replicated parameters and split tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.tensor import Shard

from ..mesh.grid import Grid
from ..mesh.layouts import Layout, as_layout, check_row_dim, is_pair
from .base import GridStyle, LayoutLike, Runner
from .embedding import EmbeddingRunner, check_options
from .module_kinds import embeds, is_embedding
from .surroundings import UNKNOWN
from .whole_module import WHOLE, WholeRunner
from .whole_samples import check_dropout

__all__ = ["Replicate"]


class Replicate(GridStyle):
    """Put a module on the mesh with its parameters replicated on every rank.

    It is for modules that no other plan entry names: a norm, a position embedding, a router. All
    parameters of a model have to be on one mesh, for torch's optimizers and ``clip_grad_norm_``,
    and the parameter gradients of a module that sees only some of the tokens have to be summed over
    the ranks.

    The module runs as it is, on a DTensor made of its first argument.

    Keyword Args:
        input_layouts: layout of the first tensor that it is given, if that is local. By default
            that of the residual stream, as far as the plan and the sizes of the current tokens
            tell it. An embedding's ids are replicated by default.
        output_layouts: layout of the output; by default as the module gives it.
        use_local_output: hand on local tensors; by default if the input was local.
        row_dim: the token dim that ``tp_row`` splits.
        grad_layouts: as in :class:`Colwise2D`. By default, if the input is ids that are replicated
            on every row, the output's gradient is partial along ``tp_row``, as for an embedding of
            positions.

    Inside :class:`Attention2D`, a module that runs on heads ``[batch, heads, sequence, features]``,
    in any order of the first three dims, gets this column's heads, and its parameters' gradients
    are summed over the columns.

    Raises:
        TypeError: for integer parameters.
        ValueError: in forward, if the plan does not tell the layout of a local tensor. That is so
            where features or heads may be split over ``tp_col``, as beside a Colwise2D with a local
            output, and where the plan splits the stream's tokens over it in some places only.

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
        grad_layouts: LayoutLike = None,
    ) -> None:
        super().__init__()
        check_row_dim(row_dim)
        row = Shard(row_dim)
        self.row_dim = row_dim
        self.given_layouts = input_layouts, output_layouts, grad_layouts
        self.grad_layouts = (
            None if grad_layouts is None else as_layout(grad_layouts, (row, row), row=row)
        )
        self.input_layouts = (
            None if input_layouts is None else as_layout(input_layouts, WHOLE, row=row)
        )
        self.output_layouts = (
            None if output_layouts is None else as_layout(output_layouts, WHOLE, row=row)
        )
        self.use_local_output = use_local_output
        self.by_default = False
        self.surroundings = UNKNOWN

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        check_dropout(module, grid)
        if self._looks_up(module):
            check_options(module)

    def _looks_up(self, module: nn.Module) -> bool:
        """Whether to run the module as an embedding of ids that are replicated by default.

        For an Embedding with a forward of its own, a pair in ``input_layouts`` says the layout of
        the ids, and the module then runs as any other.
        """
        return is_embedding(module) or (embeds(module) and not is_pair(self.given_layouts[0]))

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for owner in module.modules():
            for name, _ in owner.named_parameters(recurse=False):
                yield owner, name, WHOLE

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        if self._looks_up(module):
            return EmbeddingRunner(
                "Replicate",
                module,
                grid,
                weight=WHOLE,
                row_dim=self.row_dim,
                given_in=self.given_layouts[0],
                given_out=self.given_layouts[1],
                default_col=dt.Replicate(),
                use_local_output=self.use_local_output is not False,
                grad_layouts=self.grad_layouts,
            )
        runner = WholeRunner(
            "Replicate",
            module,
            grid,
            self.row_dim,
            self.input_layouts,
            self.output_layouts,
            self.use_local_output,
            surroundings=self.surroundings,
            certain=is_pair(self.given_layouts[0]),
            grad_layouts=self.grad_layouts,
        )
        runner.by_default = self.by_default
        return runner

    def __repr__(self) -> str:
        grads = "" if self.grad_layouts is None else f", grad_layouts={self.grad_layouts}"
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output}, "
            f"row_dim={self.row_dim}{grads})"
        )
