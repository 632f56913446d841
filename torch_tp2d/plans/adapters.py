"""Models with the adapters of ``peft``: where in them is the model that a plan is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .._torch_compat.modules import submodules_of
from ..parallelize.lora import is_adapted, plain

__all__ = ["inside_peft", "without_adapters"]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it the model has plain layers for those whose adapters a plan's entries cover."""
    adapted = [
        (submodules_of(parent), name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if is_adapted(child)
    ]
    try:
        for children, name, child in adapted:
            children[name] = plain(child)
        yield
    finally:
        for children, name, child in adapted:
            children[name] = child


def inside_peft(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The name and the model in a ``PeftModel`` whose layers carry adapters; None for any other.

    One that learns a prompt instead has its layers as they were, and its own modules beside them.
    """
    base = getattr(model, "get_base_model", None)
    if not callable(base) or not hasattr(model, "peft_config"):
        return None
    inner = base()
    name = next((name for name, module in model.named_modules() if module is inner), "")
    return None if name in ("", "base_model") else (name, inner)
