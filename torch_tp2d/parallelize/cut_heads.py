"""Tells features that ``tp_col`` splits from heads that the user's code cuts them into.

``q.view(b, n, self.heads, -1)`` by the number of all heads, where each column has some of them:
the sizes fit, and a head has a part of its features.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from ..styles.module_kinds import HEAD_SIZES

__all__ = ["are_heads", "cut_heads"]


def cut_heads(frame: FrameType | None, sizes: Sequence[int], ranks: int) -> str:
    """What is wrong with heads that split features were reshaped to; empty if nothing seems so.

    Args:
        frame: of the code that reshapes. The first module above that has parameters is asked for
            its attributes.
        sizes: of the dims that the features have become, the last of them those of a head.
        ranks: how many have parts of the features.
    """
    frame = _of_module(frame)
    if frame is None or are_heads(frame, sizes):
        return ""
    module = _first_argument(frame)
    local, counts = _local_values(module), _counts(module)
    for name, count in counts:
        # n_heads // ranks, which its author keeps beside n_heads, is a rank's own.
        is_own = name in local or "local" in name or ranks * count in dict(counts).values()
        if not is_own and count in sizes[:-1]:
            return (
                f"in {frame.f_code.co_filename}:{frame.f_lineno} features of which each rank has a "
                f"part are cut into {count} heads ({name}), as those of all ranks would be, which "
                f"leaves {sizes[-1]} for each. Have the number divided by the size of tp_col, "
                f"Attention2D(local_attributes=({name!r},)) for the module around the "
                f"projections, or write -1 for it and the size of a head for the last dim"
            )
    return ""


def are_heads(frame: FrameType | None, sizes: Sequence[int]) -> bool:
    """Whether the module whose code runs says that dims of these sizes are a rank's own heads.

    By an attribute of a head's size, or one of the heads' number that was divided.
    """
    frame = _of_module(frame)
    if frame is None:
        return False
    module = _first_argument(frame)
    if any(getattr(module, name, None) == sizes[-1] for name in _SIZES):
        return True
    return any(size in _local_values(module).values() for size in sizes[:-1])


def _of_module(frame: FrameType | None) -> FrameType | None:
    # A module without parameters, einops' Rearrange, is another one's way to reshape.
    while frame is not None and not _has_parameters(_first_argument(frame)):
        frame = frame.f_back
    return frame


def _local_values(module: nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = getattr(getattr(module, "_tp2d", None), "local_values", {})
    return values


_SIZES = (*HEAD_SIZES, "dim_head")
_SHORT = ("h", "nh", "n_h")


def _first_argument(frame: FrameType) -> Any:
    """What a method calls self."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


def _has_parameters(x: Any) -> bool:
    return isinstance(x, nn.Module) and next(x.parameters(), None) is not None


def _counts(module: nn.Module) -> list[tuple[str, int]]:
    """Attributes of the module that may count heads or, if it has none, those of its config."""
    heads = getattr(getattr(module, "_tp2d", None), "heads", None)
    known = [] if heads is None or heads.whole_query else [("num_heads", heads.query)]
    for owner in (module, getattr(module, "config", None)):
        counts = [
            (name, value)
            for name, value in getattr(owner, "__dict__", {}).items()
            if type(value) is int and value > 1
            if name in _SHORT or "head" in name and "dim" not in name
        ]
        if counts:
            return counts + known
    return known
