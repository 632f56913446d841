"""A view of a model's config for an attention module, with this column's numbers of heads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..module_kinds import HEADS, KEY_HEADS, forward_of

__all__ = ["local_config", "read_from_config"]


def read_from_config(module: nn.Module) -> set[str]:
    """Names of the head counts that a module's forward reads from its config, as Phi-3's does."""
    config = getattr(module, "config", None)
    code = getattr(inspect.unwrap(forward_of(module)), "__code__", None)
    if config is None or code is None:
        return set()
    names = {*HEADS, *KEY_HEADS} & {*code.co_names}
    return {n for n in names if not hasattr(module, n) and type(getattr(config, n, None)) is int}


def _fixed(value: int) -> property:
    return property(lambda _: value)


def local_config(config: Any, values: Mapping[str, int]) -> Any:
    """A view of a config with some fixed values, which follows all other changes of the config."""
    fixed = {name: _fixed(value) for name, value in values.items()}
    kind = type(type(config).__name__, (type(config),), fixed)
    view: Any = object.__new__(kind)
    # Both have one __dict__, so that an attribute set in one is seen in the other.
    object.__setattr__(view, "__dict__", config.__dict__)
    return view
