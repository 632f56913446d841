"""Rates of devices and links: measured here, looked up, or given."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..comm import GLOO, NCCL, Axis, all_reduce
from .rates import Rates, gathering, in_one_piece, latency_of, link_rate

__all__ = [
    "DEVICES",
    "Device",
    "Machine",
    "calibrate",
    "check_transport",
    "machine_of",
    "read_link",
    "read_size",
]

REACHED = 0.75
"""The fraction of a data sheet's operations per second that large products reach, roughly. On an
H100 it was 0.72 to 0.76; what else a step does counts by itself."""
LINK_REACHED = 0.8
"""The fraction of a link's nominal rate that collectives reach, roughly."""
PROBE_SIDE = 768
BLOCKS, BLOCK_BYTES = 16, 4 * 2**20
"""Too many to be cached, and each small enough for its memory to be used again."""
GPU_BLOCKS, GPU_BLOCK_BYTES = 4, 256 * 2**20
"""Each larger than a GPU's cache, and copied for longer than the host takes to ask for the next."""
CALLS = 1000
PROBE_SECONDS = 0.3
GATHERED_BYTES, MOST_GATHERS = 512 * 1024, 8
"""Of a rank, and how many are under way at once at most: they are memory, as in a step."""
LEAST_BESIDE_WORK = 0.1
STARTS = 10
GLOO_SUPPOSED = "gloo", 0.3e-3
"""Transport and latency if there are no ranks to measure it on."""


@dataclass(frozen=True)
class Device:
    """A data sheet.

    Args:
        flops: dense 16-bit operations per second; for 32 bits half as many are assumed.
        memory: bytes.
        memory_rate: bytes per second.
        link: bytes per second to its neighbours, each way.
    """

    flops: float
    memory: float
    memory_rate: float
    link: float


DEVICES: Mapping[str, Device] = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS, 2039 GB/s, NVLink 600 GB/s both ways together.
    "a100": Device(312e12, 80e9, 2.039e12, 300e9),
    # NVIDIA H100 SXM data sheet: 989 TFLOPS dense, 3.35 TB/s, NVLink 900 GB/s.
    "h100": Device(989e12, 80e9, 3.35e12, 450e9),
    # NVIDIA H200 SXM data sheet: as H100, 141 GB at 4.8 TB/s.
    "h200": Device(989e12, 141e9, 4.8e12, 450e9),
    # NVIDIA DGX B200 data sheet, an eighth: 2250 TFLOPS dense, 180 GB, 8 TB/s, NVLink 1.8 TB/s.
    "b200": Device(2250e12, 180e9, 8e12, 900e9),
    # NVIDIA L40S data sheet: 362 TFLOPS dense, 48 GB at 864 GB/s, PCIe 4.0 x16.
    "l40s": Device(362e12, 48e9, 0.864e12, 31.5e9),
    # NVIDIA Ada whitepaper: 165 TFLOPS dense with 32-bit sums, 24 GB at 1008 GB/s, PCIe 4.0 x16.
    "rtx4090": Device(165e12, 24e9, 1.008e12, 31.5e9),
}


@dataclass(frozen=True)
class Machine:
    """The rates of one rank.

    Args:
        flops: multiplications and additions in products, per second.
        memory_rate: bytes read or written per second by all other operators.
        link: bytes received per second.
        op_seconds: seconds that calling an operator takes, beside its work on a CPU; a GPU works
            meanwhile, at what it was asked for before.
        latency: seconds that a transfer takes beside sending its bytes on NCCL; the least that it
            takes on gloo, where what wakes the threads runs while the kernel sends.
        host_seconds: seconds that starting a transfer and taking its result hold up what computes.
        host_rate: bytes received per second of the time that receiving takes from the processor
            that computes, as gloo's threads do.
        beside_work: the fraction of its rates that a link reaches while ranks compute: less than 1
            where more ranks than processors send and compute at once.
        near: bytes received per second from ranks of the same node; needed if these are several.
        per_node: ranks of a node; 1 if the link between any two ranks is the same.
        transport: ``"nccl"`` or ``"gloo"``.

    Raises:
        ValueError: for another transport, and for nodes within which no rate is known.
    """

    flops: float
    memory_rate: float
    link: float
    op_seconds: float = 0.0
    latency: float = 0.0
    host_seconds: float = 0.0
    host_rate: float = math.inf
    beside_work: float = 1.0
    near: float = math.inf
    per_node: int = 1
    transport: str = "nccl"

    def __post_init__(self) -> None:
        check_transport(self.transport)
        if self.per_node > 1 and self.near == math.inf:
            raise ValueError(
                f"per_node={self.per_node} says that ranks of a node have a link of their own, but "
                f"no rate of it is known, as none is measured: give device= one of "
                f"{sorted(DEVICES)}, or a Machine with near=, its bytes per second, as in "
                f"replace(calibrate(), near=25e9, per_node={self.per_node})"
            )

    def rate(self, reach: int) -> tuple[str, float]:
        """The name of the link on which a group of ranks sends, and its rate.

        Args:
            reach: the number of consecutive ranks within which the group lies.
        """
        return ("near", self.near) if reach <= self.per_node else ("link", self.link)

    @property
    def rates(self) -> Rates | None:
        """The rates that styles would measure on this machine on gloo; None on NCCL."""
        return Rates(self.link, self.link, self.flops) if self.transport == "gloo" else None

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON and for ``Machine(**...)``, without infinite ones, the defaults."""
        return {name: value for name, value in asdict(self).items() if value != math.inf}


_SIZES: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def read_link(link: str | float) -> float:
    """Read a rate, ``"400gbit"``, ``"200 Mbit/s"``, ``"25GB/s"`` or a number, as bytes per second.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(link, (int, float)) and not isinstance(link, bool) and link > 0:
        return float(link)
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(bit|b)(?:ps|/s)?\s*", str(link), re.IGNORECASE)
    rate = _number(found.group(1)) if found else 0.0
    if not found or rate <= 0:
        raise ValueError(
            f'link is a rate, "400gbit", "200 Mbit/s", "25GB/s" or bytes a second, not {link!r}'
        )
    rate *= _SIZES[found.group(2).lower()]
    return rate / 8 if found.group(3).lower() == "bit" else rate


def read_size(memory: str | float) -> float:
    """Read a size, ``"80GB"``, ``"24 GiB"`` or a number, as bytes.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and memory > 0:
        return float(memory)
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b\s*", str(memory), re.IGNORECASE)
    size = _number(found.group(1)) if found else 0.0
    if not found or size <= 0:
        raise ValueError(f'memory is a size, "80GB", "24GiB" or bytes, not {memory!r}')
    unit = found.group(2).lower()
    if found.group(3):
        return size * 1024.0 ** " kmgt".index(unit or " ")
    return size * _SIZES[unit]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def check_transport(transport: str | None) -> None:
    """Refuse a transport that there is not.

    Raises:
        ValueError: saying which there are.
    """
    if transport not in (None, GLOO.name, NCCL.name):
        raise ValueError(f'transport is "{NCCL.name}" or "{GLOO.name}", not {transport!r}')


def machine_of(
    device: str | Machine | None,
    link: str | float | None,
    per_node: int | None,
    transport: str | None,
    dtype: torch.dtype,
) -> tuple[Machine, float | None]:
    """The machine that the arguments describe, and the memory of its device if that is known.

    Raises:
        ValueError: for an unknown device, if a link has to be measured but there is none, and for
            nodes of a machine whose rate within a node is not known.
    """
    given = None if link is None else read_link(link)
    if device is None or isinstance(device, Machine):
        known = calibrate(link=given) if device is None else device
        changes: dict[str, Any] = {"link": given, "per_node": per_node, "transport": transport}
        return replace(known, **{k: v for k, v in changes.items() if v is not None}), None
    if device.lower() not in DEVICES:
        raise ValueError(
            f"device {device!r} is not in the table, which has {sorted(DEVICES)}: choose one, or "
            f"give a torch_tp2d.planner.machine.Machine, or none to have this one measured"
        )
    sheet = DEVICES[device.lower()]
    flops = sheet.flops * REACHED / (1 if dtype.itemsize <= 2 else 2)
    near = sheet.link * LINK_REACHED
    machine = Machine(
        flops,
        sheet.memory_rate * LINK_REACHED,
        near if given is None else given * LINK_REACHED,
        op_seconds=3e-6,
        latency=15e-6,
        near=near,
        per_node=per_node or 1,
        transport=transport or "nccl",
    )
    return machine, sheet.memory


def calibrate(link: float | None = None) -> Machine:
    """Measure this machine: products, memory and, if there is a process group, the link.

    All ranks of the group have to call it together, since they may share processors. It takes three
    to six seconds and returns the ranks' mean rates on all of them.

    Args:
        link: the link's rate in bytes per second, instead of measuring it.

    Raises:
        ValueError: without ``link`` and without a process group of at least two ranks to measure
            one on.

    Example::

        >>> machine = calibrate(link=25e6)
        >>> torch_tp2d.suggest(model, 4, batch=8, seq=512, device=machine)
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    several = dist.is_initialized() and dist.get_world_size() > 1
    if link is None and not several:
        raise ValueError(
            'there is no process group to measure a link on: say link="400gbit" or what yours '
            f"does, or device= one of {sorted(DEVICES)}, or run by torchrun"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),)) if several else None
    with torch.no_grad():
        dtype = torch.bfloat16 if on_gpu else torch.float32
        side = PROBE_SIDE * (8 if on_gpu else 1)
        matrix = torch.rand(side, side, device=device, dtype=dtype)
        count, size = (GPU_BLOCKS, GPU_BLOCK_BYTES) if on_gpu else (BLOCKS, BLOCK_BYTES)
        blocks = [torch.zeros(size // 4, device=device) for _ in range(count)]
        small = torch.zeros(8, device=device)

        def copy_all() -> None:
            # Kept and then freed together, as in a step: what is used again at once is faster.
            made = [block + 1 for block in blocks]
            made.clear()

        def mean(values: Sequence[float]) -> list[float]:
            if mesh is None:
                return list(values)
            # The same on every rank, so that all choose the same plan.
            own = torch.tensor(values, dtype=torch.float64, device=device) / mesh.size()
            return all_reduce(own, Axis.of(mesh, 0)).wait().tolist()

        taken = []
        for run in (
            lambda: matrix @ matrix,
            copy_all,
            lambda: [small + 1 for _ in range(CALLS)],
        ):
            mean([0.0])  # All ranks begin together.
            taken.append(_seconds(run, device))
        product, copy, call, shared = mean([each.wall for each in taken] + [taken[0].shared])
    transport, latency = ("nccl", 15e-6) if on_gpu else GLOO_SUPPOSED
    host_seconds, host_rate, beside_work = 0.0, math.inf, 1.0
    if link is None:
        assert mesh is not None
        axis = Axis.of(mesh, 0)
        link = link_rate(axis, device)
        latency = latency_of(axis, device)
        if not on_gpu:
            host_seconds, host_rate, beside_work = mean(
                [_seconds_to_start(axis, matrix) * shared, *_beside_work(axis, link, matrix)]
            )
            host_rate /= shared
    return Machine(
        flops=2 * side**3 / product,
        memory_rate=2 * count * size / copy,
        link=link,
        op_seconds=call / CALLS,
        latency=latency,
        host_seconds=host_seconds,
        host_rate=host_rate,
        beside_work=beside_work,
        transport=transport,
    )


class _Taken(NamedTuple):
    """What a run takes on average."""

    wall: float
    processor: float

    @property
    def shared(self) -> float:
        """How many processes share a processor with this one."""
        return self.wall / self.processor


def _seconds(run: Callable[[], object], device: torch.device) -> _Taken:
    """The seconds of a run, the mean over :data:`PROBE_SECONDS`, after one that is not counted.

    Long enough for ranks that share processors to get equal parts of them.
    """
    run()
    count, began, own = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < PROBE_SECONDS:
        run()
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return _Taken((time.perf_counter() - began) / count, (time.process_time() - own) / count)


def _seconds_to_start(axis: Axis, matrix: Tensor) -> float:
    """Processor time of starting a gather and taking its result, as if in a step: between products,
    which leave nothing of the code that does it in the caches.
    """
    taken, started = 0.0, []
    for _ in range(STARTS):
        matrix @ matrix
        began = time.thread_time()
        started.append(gathering(axis, "cpu", 1))
        taken += time.thread_time() - began
    for each in started:
        matrix @ matrix
        began = time.thread_time()
        each.wait()
        taken += time.thread_time() - began
    return taken / STARTS


def _beside_work(axis: Axis, link: float, matrix: Tensor) -> tuple[float, float]:
    """How gathers fare while this rank computes.

    Returns:
        Bytes received per second of the time that other threads take from the processor, and the
        fraction of the link's rate that is reached.
    """
    axis = in_one_piece(axis)
    alone = (axis.size - 1) * GATHERED_BYTES / link
    count = min(MOST_GATHERS, math.ceil(PROBE_SECONDS / alone))
    rounds = math.ceil(PROBE_SECONDS / (count * alone))
    work = left = others = 0.0
    for number in range(rounds + 1):
        began, before = time.perf_counter(), _seconds_of_other_threads()
        moving = [gathering(axis, "cpu", GATHERED_BYTES) for _ in range(count)]
        while time.perf_counter() - began < count * alone:
            matrix[: PROBE_SIDE // 8] @ matrix
        idle = time.perf_counter()
        for each in moving:
            each.wait()
        # What is left by then is sent at the full rate. The first round is not counted.
        if number:
            work += idle - began
            left += time.perf_counter() - idle
            others += _seconds_of_other_threads() - before
    reached = min(1.0, max(LEAST_BESIDE_WORK, 1 - left / work))
    return rounds * count * (axis.size - 1) * GATHERED_BYTES / max(others, 1e-9), reached


def _seconds_of_other_threads() -> float:
    return time.process_time() - time.thread_time()
