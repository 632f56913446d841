"""What a call of one of torch's functions was given, and where the user's code calls it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..styles.module_kinds import describe_module

__all__ = ["Call", "is_local", "local_tensors", "namespace_of", "place_of"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_MODULES = f"{Path(nn.modules.__file__).parent}{os.sep}"
_LOCAL = f"{_PACKAGE}styles{os.sep}local_runner.py"
_WATCH = (
    *("user_code.py", "split_dims.py", "moved_dims.py", "own_parameters.py", "unfollowed.py"),
    *("drawn.py", "side_by_side.py", "dtensor_losses.py"),
)
"""The files between a function and what asks for its caller."""
_OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


class Call(NamedTuple):
    """Of one of torch's functions."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Sequence[Tensor]
    """This rank's own tensors among the arguments."""
    made: Sequence[Tensor] = ()

    @property
    def is_new(self) -> bool:
        """Whether it makes a tensor that is like another, ``zeros_like`` or ``new_empty``."""
        return self.name.endswith("_like") or self.name.startswith("new_")


def is_local(x: Any) -> TypeGuard[Tensor]:
    """Whether ``x`` is a tensor of this rank's own."""
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def namespace_of(func: Any) -> str:
    """That of an operator, ``aten`` of ``torch.ops.aten.add``; empty for another function."""
    return str(func).partition(".")[0] if isinstance(func, _OPERATORS) else ""


def local_tensors(args: Any, kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Those among the arguments of one of torch's functions, and in their lists and tuples."""
    found: list[Tensor] = []
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, tuple | list):
            found += filter(is_local, given)
        elif is_local(given):
            found.append(given)
    return found


def place_of(by_style: bool = False) -> str | None:
    """The file and line of the user's code that calls a function; None if a style does.

    The name of one of torch's modules that does, run by Local2D on what a rank has.

    Args:
        by_style: look further if it does.
    """
    frame: Any = inspect.currentframe()
    module, styled = "", False
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        # A mode around it stands between a function and who calls it.
        watches = path.startswith(_PACKAGE) and path.endswith(_WATCH)
        passes_on = watches or function == "__torch_function__"
        if path.startswith(_PACKAGE) and not (passes_on or by_style):
            if path == _LOCAL or not module:
                return module or None
            styled = True
        if function == "forward" and path.startswith(_MODULES) and not styled:
            module = module or describe_module(frame.f_locals["self"])
        if not path.startswith((_PACKAGE, _TORCH)):
            return None if styled else f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return None
