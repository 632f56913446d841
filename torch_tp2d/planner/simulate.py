"""How long a recorded step takes: its events in their order, on a machine.

One rank stands for all. It computes in the order of the program; a transfer begins when it is
started and its link is free, and what asks for its result waits. Links send one transfer after
another, and are as many as are apart: that between nodes, and that within one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .machine import Machine
from .trace import Compute, Event, Wait

__all__ = ["Timing", "simulate"]


@dataclass(frozen=True)
class Timing:
    """Seconds of a step.

    Args:
        seconds: from its beginning to its end.
        compute: of work, whatever travels meanwhile.
        transfers: of transfers, whatever is computed meanwhile.
    """

    seconds: float
    compute: float
    transfers: float

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.seconds + other.seconds,
            self.compute + other.compute,
            self.transfers + other.transfers,
        )

    def __mul__(self, times: float) -> Timing:
        return Timing(self.seconds * times, self.compute * times, self.transfers * times)


def simulate(
    events: Sequence[Event],
    machine: Machine,
    mesh: Mapping[str, int],
    *,
    stock: bool = False,
) -> Timing:
    """Play the events of a step.

    FSDP2 gathers a unit's parameters while the unit before computes, and reduces gradients while
    the next computes; not on gloo, where it waits for both.

    Args:
        events: of a :class:`~torch_tp2d.planner.trace.Recorder`.
        mesh: ranks of each axis, the innermost last; ranks of other axes are of several nodes.
        stock: torch's own collectives, of which gloo's reduce-scatter costs an all-reduce.
    """
    reach: dict[str, int] = {}
    ranks = 1
    for name, size in reversed(list(mesh.items())):
        reach[name] = ranks = ranks * size
    now = compute = transfers = 0.0
    free: dict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}
    asked = 0.0
    on_gloo = machine.transport == "gloo"
    for number, event in enumerate(events):
        if isinstance(event, Compute):
            # A product reads and writes while it multiplies.
            work = max(event.flops / machine.flops, event.touched / machine.memory_rate)
            work += event.ops * machine.op_seconds
            now += work
            compute += work
        elif isinstance(event, Wait):
            now = max(now, ends.get(event.start, now))
        else:
            link, rate = machine.rate(reach.get(event.axis, 1 << 62))
            twice = on_gloo and (stock or event.of_fsdp) and event.op.startswith("reduce_scatter")
            moved = event.bytes * (1 + twice)
            taken = machine.latency + moved / rate
            now += moved / machine.host_rate
            compute += moved / machine.host_rate
            gathers = event.of_fsdp and event.op == "allgather_base"
            # Of a unit of FSDP2 on NCCL: when the one before was asked for.
            began = asked if gathers and not on_gloo else now
            end = max(began, free[link]) + taken
            free[link] = ends[number] = end
            transfers += taken
            if gathers:
                asked = now
            if event.of_fsdp and (gathers or on_gloo):
                now = max(now, end)
    return Timing(max([now, *free.values()]), compute, transfers)
