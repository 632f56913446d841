"""Compares inputs from outside the model over the ranks, at a module's first forward.

Nothing else would reveal a data loop that gives every rank the full batch where each mesh row takes
its own part, or different batches where all ranks take the same one: gradients would be wrong,
without an error. In debug mode, inputs that have to be the same are compared at every forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from .. import debug
from .._torch_compat.tensors import disable_current_modes
from .._tracing import eager_only
from ..comm.groups import gather_facts, sends
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import Layout
from ..runtime.context import in_backward
from .module_kinds import describe_module

__all__ = ["compare_over_ranks", "facts_of_all"]


@eager_only
def compare_over_ranks(
    x: Tensor, declared: Layout, module: nn.Module, grid: Grid, *, certain: bool, to_all: bool
) -> None:
    """Compare a local input from outside with what the other ranks were given.

    Args:
        certain: the user declared the layout as a pair, so equal values on all rows are accepted.
        to_all: ``x`` comes from a data loader (ids, images), so it has to be identical, bit by
            bit, on ranks along which ``declared`` replicates it.

    Raises:
        ValueError: on every rank, if each row should have its own part but all rows were given the
            same tensor, unless that holds one number throughout; or if ranks were given different
            tensors where ``declared`` replicates.
    """
    outside = (to_all or (x.is_leaf and torch.is_grad_enabled())) and grid.handed(x) is None
    if not outside or in_backward():
        return
    axes, compared = (grid.row, grid.col), grid.context.compared
    first = module not in compared
    apart = first and not certain and grid.row.size > 1 and isinstance(declared[0], Shard)
    alike = [
        to_all and axis.size > 1 and isinstance(placement, Replicate)
        for axis, placement in zip(axes, declared, strict=True)
    ]
    due = apart or (any(alike) and (first or debug.is_on()))
    if not due or not sends(grid.mesh):
        return
    compared.add(module)
    facts = facts_of_all([x], grid)[:, :, 0]
    where = f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}"
    varied = bool((facts[..., -1] != 0).any())
    if apart and varied and torch.equal(facts, facts[:1].expand_as(facts)):
        raise ValueError(
            f"{where} was given one and the same local tensor, {tuple(x.shape)}, on every row, but "
            f"in layout {declared} each row has a part of its own, and gradients are summed over "
            f"the rows: pass this row's part (x.chunk({grid.row.size}, dim)[row]) or a DTensor of "
            f"the whole (distribute_tensor(x, mesh, {declared})). If the rows' parts are alike on "
            f"purpose, say so by a pair: input_layouts={declared}"
        )
    others = [
        axis.name
        for axis, same, one in zip(axes, alike, (facts[:1], facts[:, :1]), strict=True)
        if same and not torch.equal(facts, one.expand_as(facts))
    ]
    if others:
        raise ValueError(
            f"{where} was given other values, {tuple(x.shape)} here, on other ranks of "
            f"{' and '.join(others)}, but in layout {declared} all of these are given the same: "
            f"deal the data out over the data-parallel axis alone, by one seed "
            f"(DistributedSampler(data, num_replicas=, rank=) of that axis), or, if each row has a "
            f"part of its own, say so: input_layouts=(Shard(0), Replicate())"
        )


def facts_of_all(values: Sequence[Tensor], grid: Grid) -> Tensor:
    """Facts of every rank's local tensors, ``[mesh rows, mesh columns, values, facts]``.

    All ranks get the same answer.
    """
    # Hidden from selective checkpointing, since the recomputation does not repeat it.
    with disable_current_modes():
        facts = torch.cat([_facts(x.detach()) for x in values])
        for axis in (grid.col, grid.row):
            if axis.size > 1:
                facts = gather_facts(facts, axis.process_group)
    return facts.view(grid.row.size, grid.col.size, len(values), -1)


def _facts(x: Tensor) -> Tensor:
    """Shape and content of a tensor in four integers; the last is 0 if all elements are equal."""
    shape = hash((x.element_size(), *x.shape))
    x = (torch.view_as_real(x) if x.is_complex() else x).contiguous()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.view(integers).reshape(-1, max(1, x.shape[-1] if x.ndim else 1))
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    places = [torch.arange(1, len(part) + 1, device=x.device) for part in sums]
    first, second = (torch.sum(part * at) for part, at in zip(sums, places, strict=True))
    varied = (bits != bits[:1, :1]).any().long()
    return torch.stack([torch.tensor(shape, device=x.device), first, second, varied])
