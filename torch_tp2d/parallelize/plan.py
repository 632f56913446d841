"""``parallelize_module``: applies a plan, and changes nothing before all of it is checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from .._torch_compat.distributed import current_mesh
from ..mesh.grid import check_mesh
from ..runtime.context import context_of
from ..runtime.prefetch import Forward
from ..styles.base import Runner, put_on_grid, take_off_grid
from ..styles.module_kinds import describe_module
from ..styles.whole_module import WholeRunner
from .agree import on_all_ranks
from .around import with_surroundings
from .check import check_entries, check_source, check_wrappers, facts_of
from .dense import DenseParameters
from .first_forward import FirstForward
from .fused import check_fused
from .local_sizes import LocalSizes
from .resolve import Entry, entries_of, is_hook
from .ties import tie_again, ties_of
from .written_buffers import WrittenBuffers

__all__ = ["parallelize_module"]

Plan = ParallelStyle | dt.Replicate | Mapping[str, Any]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """:func:`torch.distributed.tensor.parallel.parallelize_module` for a 2-D mesh.

    The same call. It also takes unmodified stock styles in the plan (see :class:`Lifted`), checks
    the full plan on every rank before it changes or sends anything, keeps tied parameters tied,
    and puts every parameter on the one mesh. It also handles two kinds of modules that the plan
    does not name but that stand beside named ones. A module that holds only vectors (a norm) is
    replicated, as a stock plan leaves it, and dropout drops what one device would drop
    (:class:`Dropout2D`). An entry for a Linear with low-rank adapters of the ``peft`` library
    covers the adapters too, and one for a module in ``modules_to_save`` its copies.

    Args:
        module: the model, or a part of it.
        device_mesh: a mesh named ``("tp_row", "tp_col")``: ``mesh["tp_row", "tp_col"]`` of a larger
            one. By default the mesh of the surrounding ``with mesh:``.
        parallelize_plan: a style for ``module`` itself, or a dict from module names (with ``*``,
            ``?`` and ``[]`` within a name; ``""`` is ``module``) to styles. The placement
            ``Replicate()`` stands for the style :class:`torch_tp2d.Replicate`. A key for a module
            that is None, because it was pruned for a pipeline stage, is skipped. If the plan is
            None, nothing is done, with a warning, as in stock.
        src_data_rank: the index along each axis (of more than one rank) of the rank whose values
            are taken; ``None``: each rank keeps its shard of its own values, without
            communication.

    Returns:
        ``module``.

    Raises:
        TypeError: for a plan, style or module of the wrong kind.
        ValueError: for a mesh, a shape or an option that cannot work, for a key that matches no
            module, and for a module in DistributedDataParallel or FSDP1.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> parallelize_module(model, mesh, {
        ...     "layers.*.attention.w[qkv]": Colwise2D(),
        ...     "layers.*.attention.wo": Rowwise2D(output_layouts=Shard(1)),
        ...     "layers.*.ffn_norm": SequenceParallel(),
        ... })
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    if parallelize_plan is None:
        warnings.warn("no parallelize_plan is given, so nothing is parallelized", stacklevel=2)
        return module
    entries = checked_entries(module, mesh, parallelize_plan, src_data_rank)
    ties = ties_of(module)
    for entry in entries:
        entry.style.src_data_rank = src_data_rank
        entry.style._apply(entry.module, mesh)
    tie_again(ties)
    FirstForward.watch(module, mesh, ties)
    DenseParameters.watch(module, mesh)
    WrittenBuffers.watch(module, mesh)
    LocalSizes.watch(module, mesh)
    Forward(context_of(mesh)).watch(module)
    return module


def checked_entries(
    module: nn.Module, mesh: DeviceMesh, plan: Any, src_data_rank: int | None = None
) -> list[Entry]:
    """The plan's entries, resolved and checked. No parameter of ``module`` changes its values."""
    check_mesh(mesh)
    with on_all_ranks(mesh) as facts:
        check_source(src_data_rank, mesh)
        entries = with_surroundings(entries_of(module, plan))
        check_wrappers(module, entries)
        facts += facts_of(module, mesh, entries, src_data_rank)
    # In a second block, since a check may create a grid's process groups, for which all ranks have
    # to have passed the first.
    defaults = _Defaults()
    try:
        with on_all_ranks(mesh):
            for entry in entries:
                defaults.undo(entry)
            check_entries(entries, mesh)
            check_fused(module, [entry[1:] for entry in entries], mesh)
    except BaseException:
        defaults.restore()
        raise
    return entries


class _Defaults:
    """Modules that an earlier call replicated by default and that the plan gives other styles.

    Where the plan is refused they get their styles and parameters back.
    """

    def __init__(self) -> None:
        self._runners: list[tuple[nn.Module, Runner]] = []
        self._params: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._plain: dict[int, nn.Parameter] = {}

    def undo(self, entry: Entry) -> None:
        """Take an entry's module off the mesh. Parameters that are tied stay tied.

        Raises:
            ValueError: if its style was asked for, not a default.
        """
        module = entry.module
        runner = module.__dict__.get("_tp2d")
        if runner is None or is_hook(entry.style):
            return
        if not runner.by_default:
            raise ValueError(
                f"{entry.name!r}: {describe_module(module)} has a style already "
                f"({runner.style}): name it in one plan entry"
            )
        take_off_grid(module)
        self._runners.append((module, runner))
        if not isinstance(runner, WholeRunner):
            return
        for owner in module.modules():
            for name, param in list(owner.named_parameters(recurse=False)):
                assert isinstance(param, DTensor)
                self._params.append((owner, name, param))
                if id(param) not in self._plain:
                    values = param.to_local().detach()
                    self._plain[id(param)] = nn.Parameter(values, param.requires_grad)
                owner.register_parameter(name, self._plain[id(param)])

    def restore(self) -> None:
        """Undo what :meth:`undo` did."""
        for owner, name, param in self._params:
            owner.register_parameter(name, param)
        for module, runner in self._runners:
            put_on_grid(module, runner)
