"""Predicts how long a recorded step takes on a machine, by playing its events in order.

One rank stands for all. It computes in the order of the program, on a GPU not before its host has
asked for it; a transfer begins when it has been started and its link is free, and a wait lasts
until the transfer has ended. There are two links,
one between nodes and one within a node, each of which sends one transfer after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .machine import Machine
from .trace import Compute, Event, Wait

__all__ = ["Timing", "simulate"]


@dataclass(frozen=True)
class Timing:
    """Times of a step in seconds.

    Args:
        seconds: from its beginning to its end.
        compute: the sum over its work, whether or not transfers run meanwhile.
        transfers: the sum over its transfers, whether or not work runs meanwhile.
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
    """Predict the times of a step by playing its events.

    FSDP2 gathers a unit's parameters while the unit before computes, and reduces gradients while
    the next one computes. On gloo it waits for both.

    Args:
        events: those of a :class:`~torch_tp2d.planner.trace.Recorder`.
        machine: the rates of its ranks and links.
        mesh: the number of ranks of each axis, the innermost last. A transfer along an axis that is
            not among them counts as one between nodes.
        stock: the collectives are torch's own; on gloo its reduce-scatter costs as much as an
            all-reduce.
    """
    reach: dict[str, int] = {}
    ranks = 1
    for name, size in reversed(list(mesh.items())):
        reach[name] = ranks = ranks * size
    now = compute = transfers = 0.0
    # Processor time that receiving still takes: beside work it delays that, while waiting nothing.
    receiving = 0.0
    free: dict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}
    asked = host = 0.0
    on_gloo = machine.transport == "gloo"
    for number, event in enumerate(events):
        if isinstance(event, Compute):
            products, others = event.flops / machine.flops, event.touched / machine.memory_rate
            calls = event.ops * machine.op_seconds
            if on_gloo:
                work = products + others + calls
            else:
                # Reading and writing overlap with multiplying, and the host has asked for all of
                # it by then.
                host += calls
                work = max(products, others, host - now)
            work += receiving
            receiving = 0.0
            for known in (free, ends):
                _delay(known, now, work, machine.beside_work)
            now += work
            compute += work
        elif isinstance(event, Wait):
            now, receiving = _until(ends.get(event.start, now), now, receiving)
        else:
            link, rate = machine.rate(reach.get(event.axis, 1 << 62))
            twice = on_gloo and (stock or event.of_fsdp) and event.op.startswith("reduce_scatter")
            moved = event.bytes * (1 + twice)
            late = machine.latency
            if on_gloo:
                # It is the time that idle threads take to wake up, while the kernel sends.
                late = max(0.0, late - moved / rate - max(0.0, free[link] - now))
            taken = late + moved / rate
            compute += machine.host_seconds
            now += machine.host_seconds
            receiving += moved / machine.host_rate
            gathers = event.of_fsdp and event.op == "allgather_base"
            # On NCCL, FSDP2 begins to gather a unit when it asks for the unit before.
            began = asked if gathers and not on_gloo else now
            end = max(began, free[link]) + taken
            free[link] = ends[number] = end
            transfers += taken
            if gathers:
                asked = now
            if event.of_fsdp and (gathers or on_gloo):
                now, receiving = _until(end, now, receiving)
    return Timing(max([now, *free.values()]), compute, transfers)


def _until(end: float, now: float, receiving: float) -> tuple[float, float]:
    """The time after waiting for ``end``, and the processor time of ``receiving`` then left."""
    return max(now, end), max(0.0, receiving - max(0.0, end - now))


def _delay(ends: dict[Any, float], now: float, work: float, rate: float) -> None:
    """Delay the ends of transfers that go on at a fraction of their rate during work."""
    if rate == 1.0:
        return
    for each, end in ends.items():
        if end > now:
            ends[each] = min(now + (end - now) / rate, end + work * (1 - rate))
