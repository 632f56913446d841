"""Twins: what a style takes in the place of an input that was gathered for a module around it.

The module's own code may use the gathered tensor in any way, so its gradient is taken to be
replicated. Its twin has the same value and a partial gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from .._torch_compat.tensors import asked_alone, hooks_of
from .._tracing import in_graph
from ..mesh.layouts import Layout
from ..runtime.context import Context

__all__ = ["keep_twin", "twin_of"]


def keep_twin(x: Tensor, layout: Layout, twin: Any, context: Context) -> None:
    """Keep ``twin`` for styles that are given ``x`` and take it in ``layout``.

    Backward raises a RuntimeError if by then the gradient of ``x`` itself is asked for, by a hook,
    ``retain_grad()`` or ``torch.autograd.grad``: a style that took the twin adds nothing to it.
    Where ``torch.autograd.grad`` is asked for something that ``x`` was made of as well, that it is
    asked for ``x`` too is not seen.
    """
    if in_graph():
        x._tp2d_twin = layout, twin  # type: ignore[attr-defined]
    else:
        refusal = _Refusal(f"{tuple(x.shape)} on mesh {context.of}")
        twin.register_hook(refusal)
        context.twins.put(x, layout, (twin, refusal))


_LACKS = (
    "the gradient of a local tensor {of}, gathered by PrepareModuleInput, PrepareModuleOutput or "
    "another style, is asked for by {how} since a module of the plan has taken it, and would lack "
    "that module's part: {mend} before its first use"
)


class _Refusal:
    """The hook of a twin that refuses hooks of its tensor which are set after a style took it."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._hooks: dict[int, Any] | None = None
        self._x: Callable[[], Tensor | None] = _nothing

    def taken(self, x: Tensor) -> None:
        """Watch the hooks of ``x``, which has none of others by now, from here on."""
        if self._hooks is None:
            # Hooks outlive their tensor, in a dict that is made with the first one. The tensor is
            # not held, as that would keep what was gathered; once it is gone, nobody can read the
            # gradient that it retains.
            if not hooks_of(x):
                x.register_hook(_AskedAlone(self._of, x))
            self._hooks, self._x = hooks_of(x), ref(x)

    def __call__(self, grad: Tensor) -> None:
        x = self._x()
        if _of_others(self._hooks) or (x is not None and x.retains_grad):
            how = "a hook or retain_grad()"
            raise RuntimeError(_LACKS.format(of=self._of, how=how, mend="ask"))


class _AskedAlone:
    """The hook of a tensor whose twin was taken: refuses ``torch.autograd.grad`` of the tensor.

    That does not go through the twin, which is made of what the tensor was made of.
    """

    def __init__(self, of: str, x: Tensor) -> None:
        self._of, self._x = of, ref(x)

    def __call__(self, grad: Tensor) -> None:
        x = self._x()
        if x is not None and asked_alone(x):
            how, mend = "torch.autograd.grad", "call its retain_grad()"
            raise RuntimeError(_LACKS.format(of=self._of, how=how, mend=mend))


def _of_others(hooks: dict[int, Any] | None) -> bool:
    if not hooks:
        return False
    return any(not isinstance(hook, _AskedAlone) for hook in hooks.values())


def _nothing(*args: Any) -> None:
    pass


def twin_of(x: Tensor, layout: Layout, context: Context) -> Any:
    """The twin kept for ``x`` in this layout; None if there is none or ``x`` has changed since."""
    if in_graph():
        kept, twin = getattr(x, "_tp2d_twin", (None, None))
        return twin if kept == layout else None
    found = context.twins.get(x, layout)
    if found is None or x.retains_grad or _of_others(hooks_of(x)):
        # Its own gradient may be asked for, by FSDP2 for one, which gathers parameters then.
        return None
    twin, refusal = found
    refusal.taken(x)
    return twin
