"""Dropout on shards: a style for ``nn.Dropout``, and one for dropout in a module's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ..mesh.grid import Grid
from ..mesh.layouts import as_layout, check_row_dim
from .base import GridStyle, LayoutLike, Resolved, Runner
from .intercept import Intercept
from .masks import Masks
from .module_kinds import describe_module, forward_of
from .own_dropout import Drops
from .surroundings import UNKNOWN

__all__ = ["OTHER_KINDS", "Dropout2D", "DropoutInside", "rates_of"]

OTHER_KINDS = (
    nn.AlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)
"""torch's dropouts of full channels, and those that keep mean and variance: not for shards."""


class Dropout2D(GridStyle):
    """``nn.Dropout`` on shards: each rank applies its part of one mask of the global tensor.

    Whether an element is dropped depends on its global index and on a key that is drawn from
    torch's default CPU generator, which has to be in the same state on all ranks of the mesh:
    ``torch.manual_seed(seed)`` on each. So copies of a token agree, shards differ, activation
    checkpointing (which restores the generator) repeats the mask, and the loss on any grid is the
    loss on a 1 x 1 grid with that seed. The mask is not the one that ``nn.Dropout`` draws from the
    same seed. Data-parallel replicas may use different seeds, and should, as otherwise each drops
    the same elements of its part of the batch.

    :func:`torch_tp2d.parallelize_module` gives this style to every ``nn.Dropout`` that stands
    beside or inside modules which the plan names. With p = 0, and in eval, the module runs as it
    is.

    Keyword Args:
        input_layouts: layout of a local input, read as by :class:`Colwise2D`. A DTensor knows its
            own. By default the sizes tell it, of at least two dims: the token layout if the
            sequence is this rank's part of the current tokens, the feature layout if the last dim
            is this rank's part of the features of a module beside it that hands on local features
            (such as ``wi`` in ``wo(dropout(act(wi(x))))``), else the row layout.
        row_dim: the token dim that ``tp_row`` splits.

    Raises:
        TypeError: for another kind of module.
        ValueError: for ``inplace=True``; in forward, for a local input whose sizes do not tell its
            layout, and if the ranks' generators differ.

    Example::

        >>> plan = {"layers.*.attention.dropout": Dropout2D(input_layouts=Shard(1)), ...}
        >>> torch.manual_seed(0)   # the same on every rank
        >>> parallelize_module(model, mesh, plan)
    """

    def __init__(self, *, input_layouts: LayoutLike = None, row_dim: int = 0) -> None:
        super().__init__()
        check_row_dim(row_dim)
        self.row_dim = row_dim
        self.input_layouts = (
            None
            if input_layouts is None
            else as_layout(input_layouts, (Shard(row_dim), Replicate()), row=Shard(row_dim))
        )
        self.beside: list[tuple[int, Placement]] = []
        """Feature count and ``tp_col`` placement of the outputs of the modules beside it."""
        self.surroundings = UNKNOWN
        self.by_default = False

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        if not isinstance(module, nn.Dropout) or forward_of(module) is not nn.Dropout.forward:
            raise TypeError(f"Dropout2D is for nn.Dropout, not {describe_module(module)}")
        if module.inplace and module.p:
            raise ValueError(
                f"{describe_module(module)}: dropout on shards does not write into its input: "
                f"set inplace to False"
            )

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _DropoutRunner(self, module, grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input_layouts={self.input_layouts}, row_dim={self.row_dim})"


class _DropoutRunner(Runner):
    def __init__(self, style: Dropout2D, module: nn.Module, grid: Grid) -> None:
        self.style = "Dropout2D"
        self.by_default, self.grid = style.by_default, grid
        self.masks = Masks(
            grid, style.row_dim, style.input_layouts, style.beside, module, style.surroundings
        )

    def resolved(self) -> Resolved:
        return self.masks.resolved()

    def run(self, module: Any, forward: Callable[..., Any], x: Tensor) -> Tensor:
        if not module.training or module.p == 0.0:
            return forward(x)
        return self.masks.drop(x, module.p)


class DropoutInside(GridStyle):
    """Dropout that a module's own code computes, by ``F.dropout`` or inside attention.

    :func:`torch_tp2d.parallelize_module` gives this style to modules without another one whose code
    refers to a function that drops (:mod:`torch_tp2d.styles.own_dropout`).
    """

    def __init__(self, row_dim: int, drops: Drops) -> None:
        super().__init__()
        self.row_dim = row_dim
        self.drops = drops
        self.beside: Sequence[tuple[int, Placement]] = ()
        """As of :class:`Dropout2D`."""
        self.taking: Sequence[tuple[int, Placement]] = ()
        """Input feature count of each Linear inside, and its placement on ``tp_col``."""
        self.surroundings = UNKNOWN

    def check(self, module: nn.Module, grid: Grid) -> None:
        """Accept any module: it runs unchanged while its rates are 0."""

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        masks = Masks(grid, self.row_dim, None, self.beside, module, self.surroundings, self.taking)
        return _InsideRunner(masks, self.drops)


def rates_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the attributes of a module that look like dropout rates for its own code.

    They count besides those that its code is seen to use, since it may hand them to functions that
    are not known before it runs. In an attention module they may be an ``nn.Dropout`` that is held
    only for its rate.
    """
    found = [name for name, value in vars(module).items() if isinstance(value, float)]
    if "att" in type(module).__name__.lower():
        found += [name for name, m in module.named_children() if isinstance(m, nn.Dropout)]
    return tuple(name for name in found if "drop" in name)


class _InsideRunner(Runner):
    style = "DropoutInside"
    by_default = True

    def __init__(self, masks: Masks, drops: Drops) -> None:
        self.masks, self.drops, self.grid = masks, drops, masks.grid

    def resolved(self) -> Resolved:
        return self.masks.resolved()._replace(runs_parameters=False)

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not module.training or not self.drops.may(module):
            return forward(*args, **kwargs)
        with Intercept(self.masks.drop, self.masks.attention, self.masks.here):
            return forward(*args, **kwargs)
