"""The global size of a dim of which this rank holds a shard: known here, or asked of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.modules import constant_in_graphs
from .._torch_compat.tensors import active_fake_mode, disable_current_modes
from .._tracing import in_graph
from ..comm import Axis, Pending, all_gather
from ..runtime.context import Sizes
from .axes import part_of
from .handed import tokens_told
from .layouts import Layout, describe_mesh

__all__ = ["ask_extent", "ask_sizes", "extent_told"]


def ask_sizes(size: int, axis: Axis, device: torch.device) -> Pending:
    """Exchange a size with the other ranks of the axis, all of which have to call this.

    With fake tensors the transfer is made too, so that its cost is counted, but it brings no
    values: the other ranks are assumed to have the same size.

    Returns:
        A pending tensor with the size on each rank of the axis.
    """
    mine = torch.full((1,), size, device=device)
    asked = all_gather(mine, 0, (1,) * axis.size, axis.asking)
    if active_fake_mode() is None:
        return asked
    asked.wait()
    with disable_current_modes():
        return Pending(torch.full((axis.size,), size, device="cpu"))


@constant_in_graphs
def _warn_of_parts() -> bool:
    """When a graph is traced that will not be made, of which torch says nothing by default."""
    warnings.warn(
        "torch_tp2d: a compiled block is given local tensors whose sizes on all ranks a graph "
        "cannot ask for, so torch runs most of the block in eager: run it in "
        "torch_tp2d.token_sizes(mesh, (batch, sequence)), or have the module before hand on a "
        "DTensor (use_local_output=False)",
        stacklevel=2,
    )
    return True


def ask_extent(x: Tensor, dim: int, cuts: Sequence[Axis]) -> Callable[[], int]:
    """The global size of a dim of ``x`` that the axes in ``cuts`` shard, outermost first.

    A local tensor says nothing about the other ranks' shards. Calling this starts to ask them;
    calling the function that it returns waits for their answers. With fake tensors, which bring no
    answers, the size known from the tensors that ``x`` was made of is used instead.

    Raises:
        ValueError: by the returned function, if the ranks' sizes are not those of torch.chunk; in
            a graph, which asks nobody, at once.
    """
    extent = x.shape[dim]
    if in_graph():
        _warn_of_parts()
        raise ValueError(
            f"the size of dim {dim} of a local tensor on all ranks is not known in a compiled "
            f"graph: run it in torch_tp2d.token_sizes(mesh, (batch, sequence)), or have the module "
            f"before hand on a DTensor (use_local_output=False)"
        )
    known = None
    if active_fake_mode() is not None:
        whole = (tokens_told(x) or ())[dim : dim + 1]
        if whole and part_of(whole[0], cuts) == extent:
            known = whole[0]

    *outer, inner = cuts
    asked = ask_sizes(extent, inner, x.device)

    def answer(asked: Pending, axis: Axis) -> int:
        sizes = asked.wait().tolist()
        if tuple(sizes) != axis.split(sum(sizes)):
            raise ValueError(
                f"the ranks along {axis.name} hold {sizes} elements of dim {dim}, which is not how "
                f"torch.chunk splits {sum(sizes)}: expected {axis.split(sum(sizes))}. A rank that "
                f"has none is given one that stands in, which is not told from others in what the "
                f"code makes of it (x[:, -1]): have the module before hand on a DTensor "
                f"(use_local_output=False), or give every rank some"
            )
        return sum(sizes)

    def total() -> int:
        extent = answer(asked, inner)
        for axis in reversed(outer):
            extent = answer(ask_sizes(extent, axis, x.device), axis)
        return extent if known is None else known

    return total


def extent_told(
    x: Tensor,
    dim: int,
    cuts: Sequence[Axis],
    layout: Layout,
    known: Sizes | None,
    mesh: DeviceMesh,
) -> int | None:
    """The global size of a token dim of ``x``, if the sizes ``known`` of its tokens tell it.

    Raises:
        ValueError: if ``x`` is not this rank's shard of that size.
    """
    if known is None or dim >= len(known):
        return None
    if x.shape[dim] == part_of(known[dim], cuts):
        return known[dim]
    raise ValueError(
        f"dim {dim} of a local tensor of shape {tuple(x.shape)} in layout {layout} is not this "
        f"rank's part of the tokens {known} that were last embedded on {describe_mesh(mesh)}: pass "
        f"the part that the layout says, or a DTensor, which knows its own sizes; a model with no "
        f"embedding of its own, beside one that has one, runs in "
        f"torch_tp2d.token_sizes(mesh, (batch, sequence)), or is given a mesh of its own by "
        f"another init_device_mesh"
    )
