"""Losses that torch's DTensor has wrong, seen in torch 2.13, with stock tensor parallelism too."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .user_code import Call, place_of

__all__ = ["wrong_on_dtensors"]

_TOO_LARGE = (
    "binary_cross_entropy",
    "huber_loss",
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Those whose gradients of sharded DTensors torch divides by a shard's number of elements."""
_OF_CLASSES = ("cross_entropy", "nll_loss")
"""Those whose means of parts torch averages, as if each part counted as many tokens."""
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")


def wrong_on_dtensors(call: Call, out: Any) -> str:
    """What torch has wrong of the mean that a loss of sharded DTensors is, and where.

    Empty if nothing.

    Args:
        out: what the call has returned. Under :func:`torch_tp2d.loss_parallel` it is no DTensor.
    """
    name, args, kwargs = call.name, call.args, call.kwargs
    if name not in (*_TOO_LARGE, *_OF_CLASSES) or kwargs.get("reduction", "mean") != "mean":
        return ""
    place = place_of()
    if place is None:
        return ""
    if name in _OF_CLASSES:
        if not isinstance(out, DTensor) or not _parts_count_unlike(call):
            return ""
        return (
            f"in {place} {name} takes a DTensor whose tokens are split over the mesh, of which "
            f"torch averages the means of the parts, though with weight= or ignore_index= parts do "
            f"not count alike: call it within torch_tp2d.loss_parallel(), or give it "
            f"x.full_tensor()"
        )
    if not any(
        isinstance(x, DTensor) and x.requires_grad and any(p.is_shard() for p in x.placements)
        for x in (*args, *kwargs.values())
    ):
        return ""
    return (
        f"in {place} {name} takes a DTensor that is split over the mesh, whose gradient torch "
        f"divides by the number of elements of a shard, not of all: write the mean out, as in "
        f"(x - y).square().mean(), or give it x.full_tensor()"
    )


def _parts_count_unlike(call: Call) -> bool:
    given: dict[str, Any] = dict(zip(_ARGUMENTS, call.args, strict=False)) | dict(call.kwargs)
    x, target = given["input"], given["target"]
    classes = min(1, x.ndim - 1)
    tokens_split = isinstance(x, DTensor) and any(
        p.is_shard() and not p.is_shard(classes) for p in x.placements
    )
    if not tokens_split or not isinstance(target, Tensor) or target.is_floating_point():
        return False
    local = target.to_local() if isinstance(target, DTensor) else target
    ignored = bool((local == given.get("ignore_index", -100)).any())
    return given.get("weight") is not None or ignored
