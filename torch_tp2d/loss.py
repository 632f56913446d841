"""Cross entropy on the 2-D mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from ._torch_compat import (
    DisableTorchFunctionSubclass,
    StridedShard,
    disable_dynamo,
    make_wrapper_subclass,
    root_mesh,
)
from .comm import Axis, move
from .mesh.grid import Grid, check_mesh, describe_mesh
from .mesh.layouts import TP_COL, TP_ROW
from .ops.cross_entropy import token_losses

__all__ = ["cross_entropy", "loss_parallel"]

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
    """:func:`torch.nn.functional.cross_entropy` of logits that lie on a 2-D mesh.

    The vocabulary may be split over either axis or both, the tokens over any; logits are never
    gathered. Loss and gradients equal one device's on the same global batch: nothing is left to
    scale by hand.

    Args:
        logits: a DTensor ``[B, S, V]`` or ``[N, V]`` on a ``("tp_row", "tp_col")`` mesh, as a head
            with ``use_local_output=False`` gives it, or flattened from that; with ``class_dim=1``
            ``[N, V, d1, ...]``.
        target: class ids, one per token: the logits' shape without the classes. Either whole, the
            same on every rank, or this rank's part of it, cut as the tokens of the logits are, or
            a DTensor.
        weight: ``[V]``, what each class counts for: whole, the same on every rank, or a DTensor.
            A mean is divided by the sum of the targets' weights.
        ignore_index: tokens with this target count for nothing.
        reduction: ``"mean"`` over *all* tokens of the mesh that count, ``"sum"``, or ``"none"``.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        class_dim: the dim of the classes: the last, or 1, where
            :func:`torch.nn.functional.cross_entropy` has it.

    Returns:
        A plain scalar, the same on every rank; with ``"none"`` a DTensor of the tokens' losses,
        placed as the tokens of the logits are. In fp32 for logits of lower precision.

    Raises:
        TypeError: for logits that are no DTensor, or a target that is not of integers.
        ValueError: for another mesh, a target or weight of another shape, a weight to be learnt,
            or an unknown ``reduction``.
        IndexError: for a whole target on the CPU that is no class, as in torch. Where not every
            rank could tell, and in a compiled graph, the loss is nan.

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
    return _loss(logits, target, weight, ignore_index, reduction, label_smoothing, class_dim)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """:func:`torch.distributed.tensor.parallel.loss_parallel` for logits on a 2-D mesh.

    :func:`torch.nn.functional.cross_entropy` and :class:`torch.nn.CrossEntropyLoss` of a DTensor
    are :func:`cross_entropy` inside, with torch's own arguments: classes in dim 1 of more than two,
    ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``. So the loss line of a
    one-dimensional plan stays as it is. What differs from torch's context:

    - The mean is over all tokens of the mesh, and the loss a plain scalar, the same on every rank.
      Only on other meshes than ``("tp_row", "tp_col")`` is it a replicated DTensor, as torch's.
    - Targets and class weights may be plain tensors, whole on every rank.
    - ``backward()`` may be called inside or after.
    - Nothing is changed but what this thread calls: no other thread, no other ``log_softmax``.

    Logits may be flattened inside, ``logits.flatten(0, 1)``, whatever the batch and the mesh.
    Outside, DTensor refuses to flatten a batch that does not divide over the mesh; inside, what
    comes of that can be cast, and a loss made of it, nothing else.

    A plain tensor's loss is torch's own.

    Raises:
        TypeError: inside, by :func:`torch.nn.functional.nll_loss` of a DTensor.
        ValueError: inside, for logits on the ``tp_row`` or ``tp_col`` of a larger mesh alone, which
            do not tell what the other axis does; and as :func:`cross_entropy`.

    Example::

        >>> with torch_tp2d.loss_parallel():
        ...     pred = model(ids)                    # lm_head: Colwise2D(use_local_output=False)
        ...     loss = F.cross_entropy(pred.flatten(0, 1), target.flatten(0, 1))
        ...     loss.backward()
    """
    with _LossParallel():
        yield


class _LossParallel(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], DTensor | _FlatLogits):
            if func is F.cross_entropy:
                return _as_torch(*args, **kwargs)
            if func is F.nll_loss:
                raise TypeError(
                    f"nll_loss of a DTensor of shape {tuple(args[0].shape)} inside "
                    f"torch_tp2d.loss_parallel(): it would take log_softmax to gather the "
                    f"vocabulary, and means over ranks of unlike many tokens would be averaged. "
                    f"Use F.cross_entropy on the logits"
                )
            if func in _FLATTENING and isinstance(args[0], DTensor):
                return _flatten(func, args, kwargs)
        return func(*args, **kwargs)


def _as_torch(
    input: DTensor | _FlatLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`torch.nn.functional.cross_entropy` with its own parameters."""
    if size_average is not None or reduce is not None:
        whole = "sum" if size_average is False else "mean"
        reduction = "none" if reduce is False else whole
    if isinstance(input, DTensor):
        class_dim = 1 if input.ndim > 1 else 0
        return _loss(input, target, weight, ignore_index, reduction, label_smoothing, class_dim)
    if reduction == "none":
        raise input.error
    target = input.unflatten_target(target)
    return _loss(input.whole, target, weight, ignore_index, reduction, label_smoothing, -1)


# A graph cannot look up what a mesh is made of, nor hand out a DTensor that is a view of what it
# was given: a compiled loss is run as it is, between two graphs.
@disable_dynamo
def _loss(
    logits: DTensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    class_dim: int,
) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, not {label_smoothing}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target holds class ids, integers, but has dtype {target.dtype}")
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
        return _to_dtensor(losses, mesh, tokens, shape)
    total = _sum_over(losses.sum(), token_axes)
    if reduction == "mean":
        total = _mean(total, local_target, whole_target, weight, ignore_index, token_axes)
    if mesh.mesh_dim_names == (TP_ROW, TP_COL):
        return total
    return _to_dtensor(total, mesh, (Replicate(),) * mesh.ndim, ())


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
    # nan where no token counts, as in torch, but with gradients of zero, as in torch.
    divisor = torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, total / divisor, torch.nan)


def _sum_over(value: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        value = move(value, axis, Partial(), Replicate(), {})
    return value


def _to_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]
) -> DTensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _part(whole: Tensor, axes: Sequence[Axis], placements: Placements) -> Tensor:
    """This rank's part of a tensor that is whole on every rank."""
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, StridedShard):
            # What DTensor makes of a sequence that an axis cuts when the batch is flattened into
            # it: as many pieces as there are sequences, each of them cut.
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
    """The targets of this rank's tokens, and all of them where they are at hand."""
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


def _check_classes(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Raises torch's error where every rank does, and where looking costs no wait for a device."""
    if type(target) is not Tensor or target.device.type != "cpu" or torch.compiler.is_compiling():
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


class _FlatLogits(Tensor):
    """Logits ``[B, S, V]`` as ``[B * S, V]``, where DTensor has no placement for that.

    A batch of 3 on two rows leaves 2 S tokens and S, which no Shard of 3 S is. A loss needs no such
    placement; anything else, a change of dtype excepted, raises what DTensor raised.
    """

    whole: DTensor
    error: RuntimeError

    @staticmethod
    def __new__(cls, whole: DTensor, error: RuntimeError) -> _FlatLogits:
        self: _FlatLogits = make_wrapper_subclass(
            cls,
            (math.prod(whole.shape[:-1]), whole.shape[-1]),
            dtype=whole.dtype,
            device=whole.device,
            requires_grad=whole.requires_grad,
        )
        self.whole, self.error = whole, error
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"flattened({self.whole!r})"

    def unflatten_target(self, target: Tensor) -> Tensor:
        """A target ``[B * S]``, or this rank's part of it, with the dims of the tokens again."""
        for shape in (self.whole.shape[:-1], self.whole.to_local().shape[:-1]):
            if tuple(target.shape) == (math.prod(shape),):
                return target.view(shape)
        return target

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTING and isinstance(args[0], _FlatLogits):
            return _FlatLogits(func(args[0].whole, *args[1:], **kwargs), args[0].error)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise next(arg.error for arg in args if isinstance(arg, _FlatLogits))


_CASTING = frozenset(
    (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.contiguous)
)
_FLATTENING = frozenset((Tensor.flatten, torch.flatten, Tensor.view, Tensor.reshape, torch.reshape))


@disable_dynamo
def _flatten(func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """``func(*args, **kwargs)``, or what stands for logits that DTensor cannot flatten."""
    x = args[0]
    flat = math.prod(x.shape[:-1]), x.shape[-1]
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        wanted = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs).shape
        if x.ndim < 3 or wanted != flat:
            raise
        return _FlatLogits(x, error)
    if not isinstance(result, DTensor) or x.ndim < 3 or result.shape != flat:
        return result
    if any(isinstance(p, StridedShard) for p in result.placements):
        # DTensor flattens a sequence that does not divide, but fails in backward to undo it.
        local = x.to_local(grad_placements=x.placements).flatten(0, -2)
        return _to_dtensor(local, x.device_mesh, result.placements, flat)
    return result
