"""Runs a forward of a model in eager though parts of it are compiled, to look at what it does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat.modules import is_compiled
from .._torch_compat.tensors import tree_leaves
from ..runtime.context import Context
from ..runtime.reductions import Backward, backward_of

__all__ = ["InEager"]

_FORCE = "force_eager"
_MEMORY = (
    "the first forward of a model runs in eager, for its checks, though parts of it are compiled, "
    "and takes more memory for that. Give it a smaller batch once, before training"
)


class InEager:
    """One forward, and what checkpointing runs again of it in backward: both have to be alike."""

    def __init__(self) -> None:
        self._stance: Any = None

    def begin(self, module: nn.Module) -> None:
        """Begin a forward: nothing changes if no part of the model is compiled."""
        if any(map(is_compiled, module.modules())):
            self._stance = torch.compiler.set_stance(_FORCE)

    def end(self, output: Any, context: Context) -> None:
        """End a forward, also one that has raised, without any ``output``."""
        if self._stance is None:
            return
        self._stance.__exit__(None, None, None)
        self._stance = None
        running: list[Backward] = []

        def begins(grad: Tensor) -> None:
            backward = backward_of(context)
            if backward not in running:
                running.append(backward)
                stance = torch.compiler.set_stance(_FORCE)
                backward.in_any_case.append(lambda: stance.__exit__(None, None, None))

        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(begins)

    def note(self, raised: BaseException | None) -> str:
        """What to add to an error of the forward that runs; empty if that does not explain it."""
        full = self._stance is not None and isinstance(raised, torch.OutOfMemoryError)
        return _MEMORY if full else ""
