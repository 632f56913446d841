"""Weights gathered again for backward, ahead of the modules that need them there.

Where the gathered weight of a forward was not kept, each module's gather starts while the one that
ran after it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat import parameters_of
from ..comm import Pending
from .context import Context, in_backward
from .reductions import Backward

__all__ = ["GATHERED_AHEAD", "WeightRegather", "is_whole"]

GATHERED_AHEAD = 4
"""The most gathered weights that wait for their turn."""


def is_whole(module: Any, mesh: DeviceMesh) -> bool:
    """Whether a module's weight is there as it is, on every rank or on none.

    FSDP2, if it shards the weight too, puts another on the module while its part is not gathered. A
    parametrized weight is computed anew each time.
    """
    params = parameters_of(module)
    if "weight" not in params:
        return False
    weight = params["weight"]
    return not isinstance(weight, DTensor) or weight.device_mesh == mesh


class WeightRegather:
    """A weight's gather for backward, if the forward's was not kept.

    Those of one forward are a chain, from each to that of the module before it.

    Args:
        module: whose weight it is.
        shard: of the weight.
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
            with self._on_behalf():
                self._moving = self._gather(self._shard)
            backward.at_end.append(self._abandon)
        return True

    def _abandon(self) -> None:
        if self._moving is not None:
            # This backward did not come here. Another may, and then gathers again.
            self._moving.wait()
            self._moving = None

    def take(self) -> Pending:
        """This gather, started by now."""
        moving, self._moving, self._taken = self._moving, None, True
        return self._gather(self._shard) if moving is None else moving

    def start_those_before(self, backward: Backward) -> None:
        """Start what backward comes to next: its gathers travel while this module computes."""
        link = self._before
        for _ in range(GATHERED_AHEAD):
            if link is None or not link._start(backward):
                break
            link = link._before
