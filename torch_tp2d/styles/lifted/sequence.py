"""``SequenceParallel`` on a grid: replicated parameters, tokens split over both axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from ...mesh.grid import Grid
from ...mesh.layouts import Layout
from ..base import GridStyle, Resolved, Runner
from ..dropout import OTHER_KINDS, Dropout2D
from ..module_kinds import describe_module, forward_of
from ..whole_module import WholeRunner
from ..whole_samples import check_dropout

__all__ = ["LiftedSequence"]


class LiftedSequence(GridStyle):
    """SequenceParallel along tp_col: replicated parameters, tokens split over both axes."""

    def __init__(self, sequence_dim: int, use_local_output: bool, row_dim: int) -> None:
        super().__init__()
        self.row_dim = row_dim
        self.layout: Layout = Shard(row_dim), Shard(sequence_dim)
        self.use_local_output = use_local_output

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for owner in module.modules():
            for name, _ in owner.named_parameters(recurse=False):
                yield owner, name, (Replicate(), Replicate())

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        check_dropout(module, grid)
        if isinstance(module, OTHER_KINDS) and module.p:
            raise ValueError(
                f"{describe_module(module)} drops more than single elements, which is not defined "
                f"on shards here: use nn.Dropout in its place, or set its p to 0"
            )
        if _is_dropout(module):
            Dropout2D(row_dim=self.row_dim).check(module, grid)

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        runner = WholeRunner(
            "SequenceParallel",
            module,
            grid,
            self.row_dim,
            self.layout,
            None,
            self.use_local_output,
            enforce_input=True,
        )
        if not _is_dropout(module):
            return runner
        return _SequenceDropout(runner, Dropout2D(row_dim=self.row_dim).runner(module, grid))


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and forward_of(module) is nn.Dropout.forward


class _SequenceDropout(Runner):
    """Dropout in the layouts of SequenceParallel, with a mask of its own for each shard.

    DTensor's own dropout draws the same numbers on every rank of a CPU mesh, so that each shard
    would lose the same elements.
    """

    style = "SequenceParallel"

    def __init__(self, whole: WholeRunner, masks: Runner) -> None:
        self.whole, self.masks = whole, masks
        self.grid = whole.grid

    def resolved(self) -> Resolved:
        return self.whole.resolved()

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def drop(x: Tensor) -> Tensor:
            return self.masks.run(module, forward, x)

        return self.whole.run(module, drop, *args, **kwargs)
