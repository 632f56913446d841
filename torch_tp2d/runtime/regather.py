"""Weights gathered a second time for backward, ahead of the modules that need them.

Where the forward did not keep a gathered weight, its gather for backward starts while backward
computes the module that ran next in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from .._torch_compat.modules import parameters_of, submodules_of
from ..comm import Pending
from .context import Context, in_backward
from .reductions import Backward

__all__ = ["GATHERED_AHEAD", "WeightRegather", "is_whole"]

GATHERED_AHEAD = 4
"""The most weights gathered ahead of the modules that use them."""


def is_whole(module: Any, mesh: DeviceMesh) -> bool:
    """Whether a module's weight can be gathered along the mesh as it is; the same on all ranks.

    It cannot while FSDP2, which shards it too, has put its own shard on the module, nor if it or
    the bias is parametrized and so computed anew at each use.
    """
    params = parameters_of(module)
    if "weight" not in params:
        return False
    # Looked for first, as asking for an attribute that is not there takes longer.
    if "parametrizations" in submodules_of(module) and is_parametrized(module):
        return False
    weight = params["weight"]
    return not isinstance(weight, DTensor) or weight.device_mesh == mesh


class WeightRegather:
    """The gather of a weight for backward, where the forward's was not kept.

    The gathers of one forward form a chain, each linked to that of the module that ran before.

    Args:
        module: the module whose weight it is.
        shard: the weight's shard.
        gather: starts the gather of the shard.
    """

    def __init__(
        self, module: Any, shard: Tensor, gather: Callable[[Tensor], Pending], context: Context
    ) -> None:
        self._module, self._shard, self._gather = module, shard.detach(), gather
        self._moving: Pending | None = None
        self._taken = False
        self._on_behalf = context.on_behalf_of()
        running = None if in_backward() else context.running
        self._before = None if running is None else running.last_regather
        if running is not None:
            running.last_regather = self

    def _start(self, backward: Backward) -> bool:
        if self._moving is None:
            if self._taken or not is_whole(self._module, self._module._tp2d.grid.mesh):
                return False
            self._moving = self._on_behalf(self._gather, self._shard)
            backward.at_end.append(self._abandon)
        return True

    def _abandon(self) -> None:
        if self._moving is not None:
            # This backward has not used it. Another one may, and then starts a new gather.
            self._moving.wait()
            self._moving = None

    def take(self) -> Pending:
        """The gather for the module's own backward, started here if it was not before."""
        moving, self._moving, self._taken = self._moving, None, True
        return self._gather(self._shard) if moving is None else moving

    def start_those_before(self, backward: Backward) -> None:
        """Start the gathers of the modules next in backward, to overlap with this module."""
        link = self._before
        for _ in range(GATHERED_AHEAD):
            if link is None or not link._start(backward):
                break
            link = link._before
