"""Follows split dims through functions that move them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch_compat.tensors import disable_current_modes
from .user_code import Call

__all__ = ["RESHAPES", "VIEWS", "Part", "moved", "picked"]

RESHAPES = ("view", "reshape", "flatten", "unflatten")
VIEWS = (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze"),
    *("squeeze", "expand", "chunk", "split", "tensor_split", "unbind", "narrow", "select"),
    *("__getitem__", "__get__", "t", "adjoint"),
)

Of = Literal["features", "fused", "joined", "tokens", "samples", "several"]


class Part(NamedTuple):
    """How a dim is split."""

    axis: int
    """The index of the mesh axis."""
    of: Of
    """Features or heads; those of several projections, or of several tokens, of each a part; tokens
    of each sample; samples; several dims in one."""
    was: tuple[torch.Size, int] | None = None
    """The shape in which features were a dim by themselves, and that dim, if a view may undo it."""


def moved(
    call: Call, x: Tensor, split: Mapping[int, Part], cuts: Callable[[Sequence[int], int], None]
) -> Iterator[tuple[Tensor, dict[int, Part]]]:
    """What was made of ``x``, and how its dims are split: strides of a contiguous twin tell.

    Args:
        cuts: is told the sizes of the dims that split features are cut into, and the axis.
    """
    name, made = call.name, call.made
    with torch.no_grad(), disable_current_modes():
        # A dim of one, or of none, has no stride of its own.
        shape = [2 if at in split and size < 2 else size for at, size in enumerate(x.shape)]
        if name in RESHAPES:
            twin = torch.empty(x.shape, dtype=x.dtype, device="meta")
            twins: Any = [twin.view(made[0].shape)]
        else:
            twin = torch.empty(shape, dtype=x.dtype, device="meta")
            try:
                twins = call.func(*(twin if one is x else one for one in call.args), **call.kwargs)
            except (IndexError, RuntimeError):
                return
            twins = twins if isinstance(twins, tuple | list) else [twins]
    for y, like in zip(made, twins, strict=False):
        if not isinstance(like, Tensor) or y.ndim != like.ndim:
            continue
        found: dict[int, Part] = {}
        for dim, part in split.items():
            if name in RESHAPES and y.shape[: dim + 1] == x.shape[: dim + 1]:
                found[dim] = part
                continue
            if name in RESHAPES and part.was is not None and part.was[0] == y.shape:
                found[part.was[1]] = Part(part.axis, "features")
                continue
            if name in RESHAPES and part.of in ("samples", "several"):
                # Taken apart again, a dim of one among them would be lost.
                if dim == 0 and y.shape[0] > x.shape[0]:
                    found[0] = Part(part.axis, "several")
                continue
            if name in RESHAPES and 0 < dim == x.ndim - 1:
                at = _cut_at(x, y)
                if at is not None:
                    cuts(y.shape[at:], part.axis)
                    # Features become heads and features of each: the heads are split.
                    found[at] = _is_cut(part)
                if at is not None or y.shape[-2:] == (1, *x.shape[-1:]):
                    continue
            least, end = twin.stride(dim), twin.stride(dim) * twin.shape[dim]
            there = [
                (like.stride(at), at)
                for at in range(like.ndim)
                if like.shape[at] > 1
                and least <= like.stride(at)
                and like.stride(at) * like.shape[at] <= end
            ]
            if there:
                found[max(there)[1]] = part
                continue
            # Where this dim and others of one lie in several, the last of these.
            for at in reversed(range(like.ndim)):
                until = like.stride(at) * like.shape[at]
                if like.stride(at) <= least and end <= until:
                    found[at] = _is_joined(part, end == until, at == like.ndim - 1, (x.shape, dim))
                    break
            if part.of == "joined" and not found:
                found[y.ndim - 1] = part._replace(was=None)
        if found:
            yield y, found


def picked(call: Call, split: Mapping[int, Part]) -> dict[int, Part]:
    """How the dims are split of what a mask has picked, ``x[mask]``; empty for another call."""
    if call.name not in ("__getitem__", "masked_select") or len(call.given) != 2:
        return {}
    x, mask = call.given
    if mask.dtype != torch.bool or not 0 < mask.ndim <= x.ndim or call.args[1] is not mask:
        return {}
    ahead = mask.ndim if call.name == "__getitem__" else x.ndim
    found = {dim - ahead + 1: part for dim, part in split.items() if dim >= ahead}
    if part := next((part for dim, part in split.items() if dim < ahead), None):
        found[0] = Part(part.axis, "several")
    return found


def _cut_at(x: Tensor, y: Tensor) -> int | None:
    """Where in ``y`` the dims begin that the last of ``x`` is cut into, if it is."""
    last, ahead = x.shape[-1], x.ndim - 1
    if y.ndim > x.ndim and y.shape[:ahead] == x.shape[:-1]:
        return ahead
    sizes = {at: math.prod(y.shape[at:]) for at in range(y.ndim - 1)}
    return next((at for at, size in sizes.items() if size == last and y.shape[at] > 1), None)


def _is_cut(part: Part) -> Part:
    # Of several side by side, which dim holds the parts is not known.
    return part._replace(of="several") if part.of == "fused" else part._replace(was=None)


def _is_joined(part: Part, is_outer: bool, is_last: bool, was: tuple[torch.Size, int]) -> Part:
    """What a dim holds that this and other dims became."""
    if part.of not in ("features", "fused", "joined"):
        return Part(part.axis, "several")
    if is_outer:
        return part._replace(was=None)
    there = was if part.of == "features" else None
    return Part(part.axis, "joined" if is_last else "several", there)
