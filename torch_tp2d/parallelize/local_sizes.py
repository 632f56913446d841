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
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import is_compiled, tree_leaves
from .._tracing import eager_only
from ..comm.groups import sends
from ..mesh.grid import Grid
from ..runtime.context import context_of, in_backward
from .first_forward import remove_hooks
from .split_dims import SplitDims

__all__ = ["LocalSizes"]


class LocalSizes:
    """Hooks around the first forward of a model, and the first that records gradients.

    Only the graph tells of tokens that are mixed. The hooks remove themselves after that forward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._ran = False
        self._watch: SplitDims | None = None

    def __deepcopy__(self, memo: Any) -> LocalSizes:
        return LocalSizes(self.mesh)

    @classmethod
    def watch(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        hooks = cls(mesh)
        module.register_forward_pre_hook(hooks.begins)
        module.register_forward_hook(hooks.compares)
        # The other only if the forward has not raised, which one rank alone may do.
        module.register_forward_hook(hooks.ends, always_call=True)

    @eager_only
    def begins(self, module: nn.Module, args: Any) -> None:
        context = context_of(self.mesh)
        if in_backward() or context.watch is not None or not sends(self.mesh):
            return
        if self._ran and not torch.is_grad_enabled():
            return
        if any(map(is_compiled, module.modules())):
            # A graph made while a mode is active would be made again without it.
            self._remove(module)
            return
        self._watch = SplitDims(Grid(self.mesh))
        self._watch.__enter__()
        context.watch = self._watch

    @eager_only
    def compares(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self._end()
        if watch is not None:
            self._ran = True
            if torch.is_grad_enabled():
                self._remove(module)
            outputs = (x for x in tree_leaves(output) if isinstance(x, Tensor))
            watch.goes_on_with([x for x in outputs if x.requires_grad])
            watch.compare(module)

    @eager_only
    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        watch, raised = self._end(), sys.exc_info()[1]
        # Only after a forward that has raised is a watch left; what was found may be the cause.
        if watch and watch.refused and raised and hasattr(raised, "add_note"):
            raised.add_note(f"torch_tp2d: {watch.refused}")

    def _end(self) -> SplitDims | None:
        watch = self._watch
        if watch is not None:
            watch.__exit__(None, None, None)
            self._watch, context_of(self.mesh).watch = None, None
        return watch

    def _remove(self, module: nn.Module) -> None:
        remove_hooks(module, self.begins, self.compares, self.ends)
