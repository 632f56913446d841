"""Twins: what a style takes in the place of an input that was gathered for a module around it.

The module's own code may use the gathered tensor in any way, so its gradient is taken to be
replicated. Its twin has the same value and a partial gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch_compat import has_hooks
from .._tracing import in_graph
from ..mesh.layouts import Layout
from ..runtime.context import Context

__all__ = ["keep_twin", "twin_of"]


def keep_twin(x: Tensor, layout: Layout, twin: Any, context: Context) -> None:
    """Keep ``twin`` for styles that are given ``x`` and take it in ``layout``."""
    if in_graph():
        x._tp2d_twin = layout, twin  # type: ignore[attr-defined]
    else:
        context.twins.put(x, layout, twin)


def twin_of(x: Tensor, layout: Layout, context: Context) -> Any:
    """The twin kept for ``x`` in this layout; None if there is none or ``x`` has changed since."""
    if in_graph():
        kept, twin = getattr(x, "_tp2d_twin", (None, None))
        return twin if kept == layout else None
    if x.retains_grad or has_hooks(x):
        # Its own gradient is asked for, by FSDP2 for one, which gathers parameters when it comes.
        return None
    return context.twins.get(x, layout)
