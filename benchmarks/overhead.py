#!/usr/bin/env python3
"""What the styles cost beside the arithmetic: microseconds for a layer too small to compute.

    python benchmarks/overhead.py

Forward and backward of one Linear on one rank, as ``nn.Linear``, under the stock styles and under
ours; then of one GPT block, which has six, as rank 0 of four in a fake process group, whose
collectives return at once. All in one process and in turn; medians. No links, no root.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from variants import Sizes, build

import torch_tp2d

ROUNDS = 200
HIDDEN, TOKENS = 64, 16


@contextmanager
def pretended_world(ranks: int) -> Iterator[None]:
    """Rank 0 of a world whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def microseconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median time of each step, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 20):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 20:
                times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(taken) for name, taken in times.items()}


def linear_steps() -> dict[str, Callable[[], None]]:
    """One Linear in every way, each a step of forward and backward."""
    line = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp_row", "tp_col"))
    linears: dict[str, nn.Module] = {"nn.Linear": nn.Linear(HIDDEN, HIDDEN)}
    for style in (ColwiseParallel, RowwiseParallel):
        linears[style.__name__] = parallelize_module(nn.Linear(HIDDEN, HIDDEN), line, style())
    for name in ("auto", "collective", "pipelined"):
        for kind in (torch_tp2d.Colwise2D, torch_tp2d.Rowwise2D):
            linears[f"{kind.__name__} {name}"] = torch_tp2d.parallelize_module(
                nn.Linear(HIDDEN, HIDDEN), grid, kind(algorithm=name)
            )
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)

    def step(linear: nn.Module) -> None:
        linear(x * 1).sum().backward()

    return {name: lambda linear=linear: step(linear) for name, linear in linears.items()}


def block_steps() -> dict[str, Callable[[], None]]:
    """One block under the stock plans and ours."""
    sizes = Sizes(layers=1, hidden=HIDDEN, heads=4, batch=4, seq=TOKENS)
    names = ["tp", "tp-input", "tp-sp", "tp2d", "tp2d:collective", "tp2d:pipelined"]
    variants, refused = build(names, [(2, 2)], sizes)
    assert not refused, refused

    return {
        variant.name: lambda variant=variant: variant.step(sizes.elements)
        for variant in variants
        if not variant.efficient
    }


def report(title: str, taken: dict[str, float], base: str) -> None:
    """Print times, and ratios to ``base``."""
    print(f"{title}: microseconds, and the ratio to {base}")
    for name, time_taken in taken.items():
        print(f"  {name:24} {time_taken:8.0f} {time_taken / taken[base]:6.2f}")


def main() -> None:
    """Measure both and print them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with pretended_world(1):
        report("one Linear on one rank", microseconds(linear_steps()), "ColwiseParallel")
    with pretended_world(4):
        report("one block, rank 0 of 4", microseconds(block_steps()), "tp-sp")


if __name__ == "__main__":
    main()
