"""An attention module's own view of its model's config, in which the heads are this column's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..module_kinds import HEADS, KEY_HEADS

__all__ = ["local_config", "read_from_config"]


def read_from_config(module: nn.Module) -> set[str]:
    """The numbers of heads that the module's forward reads from its config, as Phi-3's does."""
    config = getattr(module, "config", None)
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if config is None or code is None:
        return set()
    names = {*HEADS, *KEY_HEADS} & {*code.co_names}
    return {n for n in names if not hasattr(module, n) and type(getattr(config, n, None)) is int}


def _fixed(value: int) -> property:
    return property(lambda _: value)


def local_config(config: Any, values: Mapping[str, int]) -> Any:
    """The same config, whatever else becomes of it, but for some values."""
    fixed = {name: _fixed(value) for name, value in values.items()}
    kind = type(type(config).__name__, (type(config),), fixed)
    view: Any = object.__new__(kind)
    # Shared, so that what is set in one of the two is seen in the other.
    object.__setattr__(view, "__dict__", config.__dict__)
    return view
