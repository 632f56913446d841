"""Cross entropy on the 2-D mesh."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .comm import Axis, move
from .edges import to_dtensor
from .grid import Grid
from .layouts import TP_COL, TP_ROW, Layout, normalize, reduced
from .ops.cross_entropy import token_losses

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`torch.nn.functional.cross_entropy` of logits that lie on a 2-D mesh.

    The vocabulary may be split over either axis or both, the tokens over any; logits are never
    gathered. Loss and gradients equal one device's on the same global batch: nothing is left to
    scale by hand.

    Args:
        logits: a DTensor ``[B, S, V]`` or ``[N, V]`` (classes last) on a ``("tp_row", "tp_col")``
            mesh, as a head with ``use_local_output=False`` gives it.
        target: class ids, one per token. Either the whole ``[B, S]`` (``[N]``), the same on every
            rank, or this rank's part of it, cut as the tokens of the logits are, or a DTensor.
        ignore_index: tokens with this target count for nothing.
        reduction: ``"mean"`` over *all* tokens of the mesh that count, ``"sum"``, or ``"none"``.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A plain scalar, the same on every rank; with ``"none"`` a DTensor of the tokens' losses,
        placed as the tokens of the logits are. In fp32 for logits of lower precision.

    Raises:
        TypeError: for logits that are no DTensor, or a target that is not of integers.
        ValueError: for another mesh, a target of another shape, or an unknown ``reduction``.

    Source: vocab-parallel cross entropy of Megatron-LM (arXiv 1909.08053, section 3), which moves
    three numbers per token instead of V.

    Example::

        >>> logits = model(ids)                      # lm_head: Colwise2D(use_local_output=False)
        >>> loss = torch_tp2d.cross_entropy(logits, target)
        >>> loss.backward()
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, not {label_smoothing}")
    if not isinstance(logits, DTensor):
        raise TypeError(
            f"the logits are a plain tensor of shape {tuple(logits.shape)}, which does not say "
            f"what part of the vocabulary this rank holds: give the head use_local_output=False, "
            f"or use torch.nn.functional.cross_entropy on whole logits "
            f"(output_layouts=(Replicate(), Replicate()))"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target holds class ids, integers, but has dtype {target.dtype}")
    grid = Grid(logits.device_mesh)
    layout = normalize(grid.layout(logits, 0), logits.ndim)
    if any(p.is_partial() for p in layout):
        layout = reduced(layout)
        logits = logits.redistribute(placements=layout)
    shape, last = tuple(logits.shape), logits.ndim - 1
    vocab_axes = [a for a, p in zip((grid.row, grid.col), layout, strict=True) if p == Shard(last)]
    on_row, on_col = (Replicate() if p == Shard(last) else p for p in layout)
    token_layout: Layout = on_row, on_col

    local_target, whole_target = _local_target(target, shape, token_layout, grid)
    local = logits.to_local()
    start, width = 0, shape[-1]
    for axis in vocab_axes:
        sizes = axis.split(width)
        start += sum(sizes[: axis.index])
        width = sizes[axis.index]
    losses = token_losses(
        local,
        local_target,
        vocab_start=start,
        vocab=shape[-1],
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        axes=vocab_axes,
    )
    if reduction == "none":
        return to_dtensor(losses, token_layout, grid, shape[:-1])
    token_axes = [
        axis
        for axis, p in zip((grid.row, grid.col), token_layout, strict=True)
        if isinstance(p, Shard)
    ]
    total = _sum_over(losses.sum(), token_axes)
    if reduction == "sum":
        return total
    if whole_target is not None:
        count = (whole_target != ignore_index).sum()
    else:
        count = _sum_over((local_target != ignore_index).sum(), token_axes)
    # nan where no token counts, as in torch, but with gradients of zero, as in torch.
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _sum_over(value: Tensor, axes: list[Axis]) -> Tensor:
    partial: Placement = torch.distributed.tensor.Partial()
    for axis in axes:
        value = move(value, axis, partial, Replicate(), {})
    return value


def _local_target(
    target: Tensor, shape: tuple[int, ...], layout: Layout, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """The targets of this rank's tokens, and all of them where they are at hand."""
    wanted = grid.local_shape(shape[:-1], layout)
    if isinstance(target, DTensor):
        if target.device_mesh != grid.mesh or tuple(target.shape) != shape[:-1]:
            raise ValueError(
                f"the target is a DTensor of shape {tuple(target.shape)}, but the logits' tokens "
                f"are {shape[:-1]} on the mesh of the logits"
            )
        return target.redistribute(placements=grid.placements(layout)).to_local(), None
    if tuple(target.shape) == shape[:-1]:
        local = target
        cuts = ((grid.row, layout[0]), (grid.col, layout[1]))
        for axis, placement in cuts:
            if isinstance(placement, Shard):
                sizes = axis.split(local.shape[placement.dim])
                start = sum(sizes[: axis.index])
                local = local.narrow(placement.dim, start, sizes[axis.index])
        return local, target
    if tuple(target.shape) == wanted:
        return target, None
    raise ValueError(
        f"the target has shape {tuple(target.shape)}, but the logits {shape} on {TP_ROW} and "
        f"{TP_COL} placed {layout} need the whole {shape[:-1]} or this rank's part {wanted}"
    )
