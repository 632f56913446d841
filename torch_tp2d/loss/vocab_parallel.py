"""``cross_entropy`` of logits that are sharded over the 2-D mesh, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat.distributed import StridedShard, root_mesh
from .._torch_compat.modules import disable_dynamo
from .._tracing import eager_only
from ..comm import Axis, move
from ..mesh.grid import Grid, check_mesh, describe_mesh
from ..mesh.layouts import TP_COL, TP_ROW, contiguous_strides
from ..ops.cross_entropy import token_losses

__all__ = ["as_dtensor", "cross_entropy", "loss_of"]

Placements = tuple[Placement, ...]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_dim: int = -1,
) -> Tensor:
    """:func:`torch.nn.functional.cross_entropy` of logits that are sharded over a 2-D mesh.

    The vocabulary may be split over either axis or both, and so may the tokens; logits are never
    gathered. Loss and gradients equal those of one device on the same global batch, so nothing has
    to be scaled by hand.

    Args:
        logits: a DTensor ``[B, S, V]`` or ``[N, V]`` on a ``("tp_row", "tp_col")`` mesh, as a head
            with ``use_local_output=False`` gives it, or flattened from that; with ``class_dim=1``
            ``[N, V, d1, ...]``.
        target: class ids, one per token: the logits' shape without the classes. Either replicated
            on every rank, or this rank's shard, split as the tokens of the logits are, or a
            DTensor.
        weight: ``[V]``, the weight of each class: replicated on every rank, or a DTensor. A mean
            is divided by the sum of the targets' weights.
        ignore_index: tokens with this target do not count.
        reduction: ``"mean"`` over *all* tokens of the mesh that count, ``"sum"``, or ``"none"``.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        class_dim: the dim of the classes: the last, or 1, where
            :func:`torch.nn.functional.cross_entropy` has it.

    Returns:
        A plain scalar, the same on every rank; with ``"none"`` a DTensor of the tokens' losses,
        placed as the tokens of the logits are. The loss is in fp32 for logits of lower precision.

    Raises:
        TypeError: for logits that are no DTensor, or a target that is not of integers.
        ValueError: for another mesh, a target or weight of another shape, a weight that requires
            grad, or an unknown ``reduction``.
        IndexError: for a replicated CPU target that holds an unknown class, as in torch. For a
            sharded target, where not every rank would see the error, on other devices, and in a
            compiled graph the loss is nan instead.

    Source: vocab-parallel cross entropy of Megatron-LM (arXiv 1909.08053, section 3), which moves
    three numbers per token instead of V.

    Example::

        >>> logits = model(ids)                      # lm_head: Colwise2D(use_local_output=False)
        >>> loss = torch_tp2d.cross_entropy(logits, target)
        >>> loss.backward()
    """
    if not isinstance(logits, DTensor):
        raise TypeError(
            f"the logits are a plain tensor of shape {tuple(logits.shape)}, which does not say "
            f"what part of the vocabulary this rank holds: give the head use_local_output=False, "
            f"or use torch.nn.functional.cross_entropy on whole logits "
            f"(output_layouts=(Replicate(), Replicate()))"
        )
    check_mesh(logits.device_mesh)
    return loss_of(logits, target, weight, ignore_index, reduction, label_smoothing, class_dim)


# Dynamo's graphs cannot look up a mesh's axes, nor return a DTensor that is a view of an input.
# So the loss breaks a compiled graph in two and runs eagerly between them.
@disable_dynamo
def loss_of(
    logits: DTensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    class_dim: int,
) -> Tensor:
    """:func:`cross_entropy` on any mesh.

    On meshes other than ``("tp_row", "tp_col")`` the loss is a replicated DTensor.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, not {label_smoothing}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target holds class ids, integers, but has dtype {target.dtype}")
    # Narrow integers would raise where a rank has tokens and not where it has none.
    target = target.long()
    if not -logits.ndim <= class_dim < logits.ndim:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no dim {class_dim}")
    mesh, axes = logits.device_mesh, _axes(logits.device_mesh)
    last = logits.ndim - 1
    if class_dim % logits.ndim != last:
        logits = cast(DTensor, logits.movedim(class_dim, -1))
    shape, vocab = tuple(logits.shape[:-1]), logits.shape[-1]
    if weight is not None:
        weight = _whole_weight(weight, vocab, mesh)

    placements = logits.placements
    if any(p.is_partial() for p in placements):
        placements = tuple(Replicate() if p.is_partial() else p for p in placements)
        logits = logits.redistribute(placements=placements)
    if any(isinstance(p, StridedShard) and p.dim == last for p in placements):
        raise ValueError(
            f"the classes of the logits {(*shape, vocab)} are placed {placements} on "
            f"{describe_mesh(mesh)}: redistribute them to Shard or Replicate"
        )
    vocab_axes = [axis for axis, p in zip(axes, placements, strict=True) if p == Shard(last)]
    tokens = tuple(Replicate() if p == Shard(last) else p for p in placements)
    token_axes = [axis for axis, p in zip(axes, tokens, strict=True) if p != Replicate()]

    local_target, whole_target = _local_target(target, shape, vocab, tokens, axes, mesh)
    if whole_target is not None:
        _check_classes(whole_target, vocab, ignore_index)
    start, width = 0, vocab
    for axis in vocab_axes:
        sizes = axis.split(width)
        start += sum(sizes[: axis.index])
        width = sizes[axis.index]
    losses = token_losses(
        logits.to_local(),
        local_target,
        weight=weight,
        vocab_start=start,
        vocab=vocab,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        axes=vocab_axes,
    )
    if reduction == "none":
        return as_dtensor(losses, mesh, tokens, shape)
    total = _sum_over(losses.sum(), token_axes)
    if reduction == "mean":
        total = _mean(total, local_target, whole_target, weight, ignore_index, token_axes)
    if mesh.mesh_dim_names == (TP_ROW, TP_COL):
        return total
    return as_dtensor(total, mesh, (Replicate(),) * mesh.ndim, ())


def _axes(mesh: DeviceMesh) -> tuple[Axis, ...]:
    names = mesh.mesh_dim_names
    if names == (TP_ROW, TP_COL):
        grid = Grid(mesh)
        return grid.row, grid.col
    root = root_mesh(mesh)
    if names in ((TP_ROW,), (TP_COL,)) and {TP_ROW, TP_COL} <= set(root.mesh_dim_names or ()):
        raise ValueError(
            f"the logits are a DTensor on {describe_mesh(mesh)} alone, of the mesh "
            f"{describe_mesh(root)}: whether the other axis holds other tokens is not known, so "
            f'that a mean over all is not either; put them on mesh["{TP_ROW}", "{TP_COL}"]'
        )
    return tuple(Axis.of(mesh, dim) for dim in range(mesh.ndim))


def _mean(
    total: Tensor,
    local_target: Tensor,
    whole_target: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    token_axes: Sequence[Axis],
) -> Tensor:
    target = local_target if whole_target is None else whole_target
    counts = target != ignore_index
    count = counts.sum()
    if weight is None:
        if whole_target is None:
            count = _sum_over(count, token_axes)
        divisor = count
    else:
        weight = weight.to(total.dtype)
        chosen = weight[target.clamp(0, weight.shape[0] - 1)].masked_fill(~counts, 0)
        both = torch.stack([count.to(total.dtype), chosen.sum()])
        if whole_target is None:
            both = _sum_over(both, token_axes)
        count, divisor = both.unbind()
    # Where no token counts, the loss is nan and the gradients are zero, both as in torch.
    divisor = torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, total / divisor, torch.nan)


def _sum_over(value: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        value = move(value, axis, Partial(), Replicate(), {})
    return value


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]
) -> DTensor:
    stride = contiguous_strides(shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _part(whole: Tensor, axes: Sequence[Axis], placements: Placements) -> Tensor:
    """This rank's shard of a tensor that is replicated on every rank."""
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, StridedShard):
            # DTensor makes this of a sharded sequence dim that is flattened with the batch before
            # it: as many pieces as there are sequences, and the axis splits each of them.
            dim = placement.dim
            pieces = whole.chunk(int(placement.split_factor), dim)
            whole = torch.cat([_chunk(piece, dim, axis) for piece in pieces], dim)
        elif isinstance(placement, Shard):
            whole = _chunk(whole, placement.dim, axis)
    return whole


def _chunk(whole: Tensor, dim: int, axis: Axis) -> Tensor:
    sizes = axis.split(whole.shape[dim])
    return whole.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])


def _local_target(
    target: Tensor,
    shape: tuple[int, ...],
    vocab: int,
    placements: Placements,
    axes: Sequence[Axis],
    mesh: DeviceMesh,
) -> tuple[Tensor, Tensor | None]:
    """The targets of this rank's tokens, and the full target if this rank holds it, else None."""
    if isinstance(target, DTensor):
        if target.device_mesh != mesh or tuple(target.shape) != shape:
            raise ValueError(
                f"the target is a DTensor of shape {tuple(target.shape)}, but the logits' tokens "
                f"are {shape} on the mesh of the logits"
            )
        if target.placements == placements:
            return target.to_local(), None
        if not any(isinstance(p, StridedShard) for p in (*placements, *target.placements)):
            return target.redistribute(placements=placements).to_local(), None
        target = target.redistribute(placements=(Replicate(),) * mesh.ndim).to_local()
    if tuple(target.shape) == shape:
        return _part(target, axes, placements), target
    wanted = tuple(_part(torch.empty(shape, device="meta"), axes, placements).shape)
    if tuple(target.shape) == wanted:
        return target, None
    raise ValueError(
        f"the target has shape {tuple(target.shape)}, but the tokens of logits of shape "
        f"{(*shape, vocab)}, classes last, placed {placements} on {describe_mesh(mesh)} need the "
        f"whole {shape} or this rank's part {wanted}; F.cross_entropy takes classes from dim 1"
    )


@eager_only
def _check_classes(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise torch's error for an unknown class, where looking does not wait for a device.

    The caller passes a replicated target, so that every rank raises or none.
    """
    if type(target) is not Tensor or target.device.type != "cpu":
        return
    unknown = ((target < 0) | (target >= vocab)) & (target != ignore_index)
    if unknown.any():
        raise IndexError(
            f"target {int(target[unknown][0])} is no class of the logits, which have {vocab}, nor "
            f"ignore_index, {ignore_index}"
        )


def _whole_weight(weight: Tensor, vocab: int, mesh: DeviceMesh) -> Tensor:
    if tuple(weight.shape) != (vocab,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but the logits have {vocab} classes: it is "
            f"one number for each, whole on every rank or a DTensor"
        )
    if weight.requires_grad:
        raise ValueError("weight requires grad, but a loss has no gradient for it: detach() it")
    if not isinstance(weight, DTensor):
        return weight
    if weight.device_mesh != mesh:
        raise ValueError(
            f"weight is a DTensor on {describe_mesh(weight.device_mesh)}, but the logits are on "
            f"{describe_mesh(mesh)}"
        )
    return weight.redistribute(placements=(Replicate(),) * mesh.ndim).to_local()
