"""Which of torch's functions take all of a dim together, as a norm, a softmax and a mean do.

Of a dim that is split, features, heads, tokens or samples, they would see a rank's part. Sums are
left to the user's code: those of the ranks add up to the sum of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["dims_mixed", "dims_reduced", "is_wrong_on_dtensors"]

_DIM_SECOND = ("softmax", "log_softmax", "softmin", "mean", "var", "std", "cumsum", "flip")
_DIM_THIRD = ("normalize", "norm", "vector_norm", "roll")
"""Functions by which of their arguments is the dim."""

_REDUCE_SECOND = (
    *("mean", "nanmean", "var", "std", "logsumexp", "amax", "amin", "max", "min", "prod"),
    *("median", "nanmedian"),
)
_REDUCE_THIRD = ("norm", "vector_norm")
_MEAN_LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss"),
    *("gaussian_nll_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss"),
    *("poisson_nll_loss", "soft_margin_loss"),
)

_TOO_LARGE = (
    "binary_cross_entropy",
    "huber_loss",
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Those whose gradients of sharded DTensors torch divides by a shard's number of elements."""


def is_wrong_on_dtensors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch's DTensor has wrong gradients for this call, seen in torch 2.13."""
    if name not in _TOO_LARGE or kwargs.get("reduction", "mean") != "mean":
        return False
    return any(
        isinstance(x, DTensor) and x.requires_grad and any(p.is_shard() for p in x.placements)
        for x in (*args, *kwargs.values())
    )


def dims_mixed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int
) -> tuple[int, ...]:
    """The dims over which a function of this name takes its first argument's elements together.

    Empty for another function, and for one over all dims, which gives a single number.
    """
    name = name.removeprefix("linalg_")
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return tuple(range(ndim - len(tuple(shape)), ndim))
    if name == "group_norm":
        return (1,)
    if name not in (*_DIM_SECOND, *_DIM_THIRD):
        return ()
    at = 1 if name in _DIM_SECOND else 2
    left_out = 1 if name == "normalize" else None
    named = next((kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs), left_out)
    dims = args[at] if len(args) > at else named
    if name == "flip":
        dims = args[1:] if type(dims) is int else dims
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    # x.std(False) is over all dims.
    dims = tuple(dim % ndim for dim in dims if type(dim) is int)
    return dims if len(dims) < ndim else ()


def dims_reduced(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int
) -> tuple[int, ...] | None:
    """The dims over which a function of this name makes one number, which is not a sum, of many.

    None for another function.
    """
    name = name.removeprefix("linalg_")
    if name in _MEAN_LOSSES:
        return tuple(range(ndim)) if kwargs.get("reduction", "mean") == "mean" else None
    if name not in (*_REDUCE_SECOND, *_REDUCE_THIRD):
        return None
    at = 1 if name in _REDUCE_SECOND else 2
    given = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else None))
    if isinstance(given, Tensor):
        return None  # The larger of two tensors.
    dims = given if isinstance(given, tuple | list) else (given,)
    dims = tuple(dim % ndim for dim in dims if type(dim) is int)
    return dims or tuple(range(ndim))
