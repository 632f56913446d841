"""``loss_parallel``: torch's own cross entropy call, for logits sharded over the 2-D mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._torch_compat.distributed import StridedShard
from .._torch_compat.modules import disable_dynamo
from .._torch_compat.tensors import DisableTorchFunctionSubclass, make_wrapper_subclass
from .vocab_parallel import as_dtensor, loss_of

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """:func:`torch.distributed.tensor.parallel.loss_parallel` for logits on a 2-D mesh.

    Inside the context, :func:`torch.nn.functional.cross_entropy` and
    :class:`torch.nn.CrossEntropyLoss` of a DTensor compute :func:`cross_entropy`, with torch's own
    arguments: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, and the classes
    in dim 1 where there are more than two dims. So the loss line of a one-dimensional plan stays as
    it is. What differs from torch's context:

    - The mean is over all tokens of the mesh, and the loss a plain scalar, the same on every rank.
      Only on other meshes than ``("tp_row", "tp_col")`` is it a replicated DTensor, as torch's.
    - Targets and class weights may be plain tensors, replicated on every rank.
    - ``backward()`` may be called inside the context or after it.
    - Only calls of this thread are affected, and ``log_softmax`` is left alone.

    Inside, logits may be flattened, ``logits.flatten(0, 1)``, whatever the batch and the mesh.
    Outside, DTensor refuses to flatten a batch that does not divide over the mesh. The flattened
    result of such a batch can only be cast and given to the loss.

    The loss of a plain tensor is torch's own.

    Raises:
        TypeError: inside, by :func:`torch.nn.functional.nll_loss` of a DTensor.
        ValueError: inside, for logits on only the ``tp_row`` or the ``tp_col`` of a larger mesh,
            from which the placement on the other axis is not known; and as :func:`cross_entropy`.

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
    """:func:`cross_entropy` with the signature of :func:`torch.nn.functional.cross_entropy`."""
    if size_average is not None or reduce is not None:
        whole = "sum" if size_average is False else "mean"
        reduction = "none" if reduce is False else whole
    if isinstance(input, DTensor):
        class_dim = 1 if input.ndim > 1 else 0
        return loss_of(input, target, weight, ignore_index, reduction, label_smoothing, class_dim)
    if reduction == "none":
        raise input.error
    target = input.unflatten_target(target)
    return loss_of(input.whole, target, weight, ignore_index, reduction, label_smoothing, -1)


class _FlatLogits(Tensor):
    """Logits ``[B, S, V]`` viewed as ``[B * S, V]``, where DTensor has no placement for the view.

    A batch of 3 over two mesh rows gives them 2 S and S tokens, and no Shard of 3 S tokens splits
    them so. The loss needs no such placement. Any other operation, except a change of dtype, raises
    the error that DTensor raised.
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
        """A target ``[B * S]``, or this rank's shard of it, as ``[B, S]``."""
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
    """``func(*args, **kwargs)``, or :class:`_FlatLogits` for logits that DTensor cannot flatten."""
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
        # DTensor flattens a sequence that does not divide, but its backward fails to unflatten it.
        local = x.to_local(grad_placements=x.placements).flatten(0, -2)
        return as_dtensor(local, x.device_mesh, result.placements, flat)
    return result
