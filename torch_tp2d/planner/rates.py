"""Rates of links and of computation, measured once for a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat.distributed import root_mesh
from ..comm import FAST, Axis, Pending, all_gather, all_reduce, set_link_rate
from ..comm.groups import sends

__all__ = ["Rates", "assume", "assumed", "known", "link_rate", "measured", "suppose"]

SMALL_TRANSFERS = 20
PROBE_BYTES = 512 * 1024
"""How many bytes each rank sends to measure a link: 42 ms at 100 Mbit/s."""
LARGE_BYTES, LARGE_TRANSFERS = 4 * 2**20, 5
"""The same for links that are fast, and how often."""
PROBE_SIDE = 384
"""Side of the square matrices that are multiplied to measure a rank: 0.1 GFLOP."""


class Rates(NamedTuple):
    """Rates of the slowest rank: bytes received per second along each axis, operations per second.

    An axis of one rank transfers nothing; its rate is infinite.
    """

    row: float
    col: float
    flops: float


_known = WeakIdKeyDictionary()
_assumed: list[Rates | None] = []


def assume(rates: Rates | None) -> None:
    """Assume these rates for every mesh from now on, and measure none.

    If links are measured, two runs on one machine may choose differently at the margin, and then
    agree to rounding only; with the same assumed rates they choose alike. Call it on every rank,
    before :func:`~torch_tp2d.parallelize_module`.

    Args:
        rates: the rates; None for "not known", which chooses each style's own dataflow, and
            ``pipelined`` on gloo.

    Example::

        >>> torch_tp2d.planner.assume(Rates(row=25e6, col=25e6, flops=2e10))
    """
    _assumed[:] = [rates]


def suppose(mesh: DeviceMesh, rates: Rates) -> None:
    """Assume these rates for one mesh, as if they had been measured on it."""
    _known[root_mesh(mesh)] = rates


def assumed() -> str:
    """The assumed rates as text, for messages."""
    return repr(_assumed[0]) if _assumed else "not called"


def measured(mesh: DeviceMesh, row: Axis, col: Axis) -> Rates | None:
    """The rates of a mesh, the same on every rank, measured when they are first asked for.

    All ranks of the mesh have to call it together: when the first style of a plan that chooses by
    rates is applied, and at no other time. On transports that do not go by rates nothing is
    measured.
    """
    root, goes_by_rates = root_mesh(mesh), row.transport.goes_by_rates
    if goes_by_rates and not _assumed and root not in _known and sends(mesh):
        # Real tensors, even if the model is made on the meta device.
        with torch.device("cpu"), torch.no_grad():
            rates = _known[root] = _measure(row, col)
        set_link_rate(rates.row, row)
        set_link_rate(rates.col, col)
    return known(mesh)


def known(mesh: DeviceMesh) -> Rates | None:
    """The rates that were assumed, or measured before; sends nothing."""
    return _assumed[0] if _assumed else _known.get(root_mesh(mesh))


def _measure(row: Axis, col: Axis) -> Rates:
    axes = [axis for axis in (row, col) if axis.size > 1]
    matrix = torch.rand(PROBE_SIDE, PROBE_SIDE, dtype=torch.float32, device="cpu")
    slowest = [_seconds(lambda: matrix @ matrix), 0.0, 0.0]
    for axis in axes:
        slowest[1 + (axis is col)] = _seconds(partial(_gather, axis))
    agreed = torch.tensor(slowest, dtype=torch.float64, device="cpu")
    for axis in axes:
        agreed = all_reduce(agreed, axis, "max").wait()
    compute, *transfers = agreed.tolist()
    row_rate, col_rate = (
        PROBE_BYTES * (axis.size - 1) / seconds if axis.size > 1 else float("inf")
        for axis, seconds in zip((row, col), transfers, strict=True)
    )
    return Rates(row_rate, col_rate, 2 * PROBE_SIDE**3 / compute)


def link_rate(axis: Axis, device: torch.device) -> float:
    """Bytes per second that the slowest rank of an axis receives; all its ranks call it.

    A fast link is measured again by larger transfers, each in one piece, as FSDP2's are.
    """
    rate = _rate(axis, device, PROBE_BYTES, 2)
    if rate >= FAST:
        rate = max(rate, _rate(in_one_piece(axis), device, LARGE_BYTES, LARGE_TRANSFERS))
    return rate


def _rate(axis: Axis, device: torch.device, size: int, runs: int) -> float:
    seconds = _seconds(partial(_gather, axis, device, size), runs)
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    return size * (axis.size - 1) / all_reduce(slowest, axis, "max").wait().item()


def latency_of(axis: Axis, device: torch.device) -> float:
    """Seconds that a gather of one byte takes an axis' slowest rank; all its ranks call it."""
    start = time.perf_counter()
    for _ in range(SMALL_TRANSFERS):
        _gather(axis, device, size=1)
    seconds = (time.perf_counter() - start) / SMALL_TRANSFERS
    return all_reduce(torch.tensor([seconds], device=device), axis, "max").wait().item()


def in_one_piece(axis: Axis) -> Axis:
    """The axis with a transport that does not split transfers."""
    return replace(axis, transport=replace(axis.transport, cuts=False))


def _gather(axis: Axis, device: torch.device | str = "cpu", size: int = PROBE_BYTES) -> None:
    gathered = gathering(axis, device, size).wait()
    if gathered.is_cuda:
        torch.cuda.synchronize()


def gathering(axis: Axis, device: torch.device | str, size: int) -> Pending:
    """Start to gather so many bytes of each rank."""
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    return all_gather(sent, 0, (size,) * axis.size, axis)


def _seconds(run: Callable[[], object], runs: int = 2) -> float:
    """The seconds of the fastest of some runs, after one that connects the ranks."""
    run()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
