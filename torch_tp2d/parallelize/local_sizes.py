"""Refuses what the user's code makes by the sizes of a rank's part, as if they were the whole's.

``x + table[: x.shape[1]]`` where each rank has some of the tokens, a rotary embedding of
``torch.arange(q.shape[2])`` where each has some of the queries, a slope for each of the heads that
a rank sees: the sizes fit, and each rank takes what belongs to the first one's part.

The user's code is watched for it in a model's first forward (:mod:`.split_dims`), for heads made of
some of their features (:mod:`.cut_heads`), and for norms and means of a part
(:mod:`.mixed_features`). Styles tell the watch of tokens that were mixed within a rank's part, too
(:mod:`torch_tp2d.styles.mixed_tokens`). What is found the ranks tell each other when the forward is
over: what one of them sees, with a single token or none, must not decide about a transfer.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.modules import constant_in_graphs
from .._torch_compat.tensors import tree_leaves
from .._tracing import eager_only, in_graph
from ..comm.groups import is_pretended, sends
from ..mesh.grid import Grid
from ..runtime.context import context_of, in_backward
from .first_forward import remove_hooks
from .in_eager import InEager
from .split_dims import SplitDims

__all__ = ["LocalSizes"]


@constant_in_graphs
def _warn_of_a_graph() -> bool:
    """When a graph is traced, whose code has no values to look at."""
    warnings.warn(
        "torch_tp2d: a model is compiled as a whole and has not run in eager, where its checks "
        "look at the code between modules: compile its blocks alone, or run a forward first, in "
        "torch.compiler.set_stance('force_eager')",
        stacklevel=2,
    )
    return True


class LocalSizes:
    """Hooks around the first forward of a model, and the first that records gradients.

    Only the graph tells of tokens that are mixed. The hooks remove themselves after that forward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._ran = False
        self._watch: SplitDims | None = None
        self._eager = InEager()

    def __deepcopy__(self, memo: Any) -> LocalSizes:
        return LocalSizes(self.mesh)

    @classmethod
    def watch(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        if is_pretended(mesh):
            return
        hooks = cls(mesh)
        module.register_forward_pre_hook(hooks.begins)
        module.register_forward_hook(hooks.compares)
        # The other only if the forward has not raised, which one rank alone may do.
        module.register_forward_hook(hooks.ends, always_call=True)

    def begins(self, module: nn.Module, args: Any) -> None:
        if in_graph():
            _warn_of_a_graph()
            return
        context = context_of(self.mesh)
        if in_backward() or not sends(self.mesh):
            return
        if context.watch is not None:
            # That of a model around this one looks at it, too.
            if self._watch is None and torch.is_grad_enabled():
                self._remove(module)
            return
        if self._ran and not torch.is_grad_enabled():
            return
        # In a graph nothing can be looked at, and one made while a mode is active would be made
        # again without it.
        self._eager.begin(module)
        self._watch = SplitDims(Grid(self.mesh))
        self._watch.__enter__()
        context.watch = self._watch

    @eager_only
    def compares(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self._end(output)
        if watch is not None:
            self._ran = True
            if torch.is_grad_enabled():
                self._remove(module)
            outputs = (x for x in tree_leaves(output) if isinstance(x, Tensor))
            watch.goes_on_with([x for x in outputs if x.requires_grad])
            watch.compare(module)

    @eager_only
    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        raised = sys.exc_info()[1]
        note = self._eager.note(raised)
        # Only after a forward that has raised is a watch left; what was found may be the cause.
        watch = self._end(None)
        note = watch.refused or note if watch else note
        if note and raised and hasattr(raised, "add_note"):
            raised.add_note(f"torch_tp2d: {note}")

    def _end(self, output: Any) -> SplitDims | None:
        watch, context = self._watch, context_of(self.mesh)
        if watch is not None:
            watch.__exit__(None, None, None)
            self._watch, context.watch = None, None
        self._eager.end(output, context)
        return watch

    def _remove(self, module: nn.Module) -> None:
        remove_hooks(module, self.begins, self.compares, self.ends)
