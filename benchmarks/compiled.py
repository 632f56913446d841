#!/usr/bin/env python3
"""Time the same step in eager, and with each block compiled, with and without ``overlap_options``.

    python benchmarks/netlab.py -n 4 --rate 200mbit -- python benchmarks/compiled.py --grid 2x2,4x1
    torchrun --nproc-per-node 4 benchmarks/compiled.py --plans fsdp-kept,tp2d

The blocks, plans and steps are ``block.py``'s. Inductor compiles each block by itself, once as it
comes and, of our plans, once with ``torch_tp2d.integrations.inductor.overlap_options()``; a way
whose loss or gradient norm differs from the first one's ends the run. All ways of all plans take
turns, in another, shuffled order each round. What is printed of each: seconds of a step, that of
the slowest rank, the median (least..most) of the rounds; how many times as long as in eager, taken
within a round; and the memory that a step adds.

Four ranks of two cores take minutes to compile a block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from block import grid, listed, plan_name
from measure import difference, gradient_norm, largest_over_ranks, measure
from variants import OURS, Sizes, Variant, build, grids_of, is_ours

from torch_tp2d.integrations.inductor import overlap_options

EAGER, COMPILED, OVERLAPPED = "eager", "compiled", "overlapped"
WARM_UP = 3
"""The first forwards run in eager, and in backward a graph is compiled when it first runs."""
RECOMPILED = 1000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--plans", type=listed(plan_name), default=[OURS])
    parser.add_argument("--grid", type=listed(grid), help="RxC[,RxC...] (every grid of the ranks)")
    for name, value in (("layers", 2), ("hidden", 512), ("heads", 8), ("batch", 8), ("seq", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each way (7)")
    parser.add_argument("--json", type=Path, help="write what was printed there too")
    return parser.parse_args(argv)


def compile_blocks(variant: Variant, way: str, *, ours: bool) -> None:
    """Compile the blocks of a plan, in a way that is not eager.

    Ours have one graph each. FSDP2's hooks break it, so stock plans' may have several.
    """
    for layer in variant.model.layers:
        layer.compile(fullgraph=ours, options=overlap_options() if way == OVERLAPPED else None)


def warm_up(variant: Variant, elements: int) -> tuple[float, float]:
    """The loss and the gradient norm of the last of some steps that are not timed."""
    for _ in range(WARM_UP):
        variant.model.zero_grad(set_to_none=True)
        loss = variant.step(elements)
    dist.all_reduce(loss)
    norm = gradient_norm(variant.model)
    variant.model.zero_grad(set_to_none=True)
    return float(loss), norm


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank; returns the exit status."""
    args = parse(argv)
    dist.init_process_group("gloo")
    # All plans compile the same code. Beyond the limit torch would run some of them in eager.
    torch._dynamo.config.recompile_limit = RECOMPILED
    sizes = Sizes(args.layers, args.hidden, args.heads, args.batch, args.seq)
    grids = args.grid or grids_of(dist.get_world_size())
    ways: dict[tuple[str, str], Variant] = {}
    for way in (EAGER, COMPILED, OVERLAPPED):
        plans = [plan for plan in args.plans if way != OVERLAPPED or is_ours(plan)]
        variants, refused = build(plans, grids, sizes)
        if refused:
            raise SystemExit(f"{refused}")
        for variant in variants:
            if way != EAGER:
                compile_blocks(variant, way, ours=is_ours(variant.name))
            ways[variant.title, way] = variant
    first: tuple[str, tuple[float, float]] | None = None
    for (title, way), variant in ways.items():
        seen = warm_up(variant, sizes.elements)
        first = first or (title, seen)
        if wrong := difference(f"{title} {way}", (*seen, 0.0), first[0], (*first[1], 0.0)):
            raise SystemExit(wrong)
    measure(list(ways.values()), args.repeats, sizes.elements)
    seconds = {key: largest_over_ranks(variant.seconds) for key, variant in ways.items()}
    memory = {key: largest_over_ranks(each.step_memory)[0] / 1e6 for key, each in ways.items()}
    if dist.get_rank() == 0:
        report(seconds, memory, args.json)
    dist.destroy_process_group()
    return 0


def report(
    seconds: dict[tuple[str, str], list[float]],
    memory: dict[tuple[str, str], float],
    path: Path | None,
) -> None:
    """Print what was measured, and write it."""
    print(f"{'plan':44} {'':12} {'seconds':24} {'/ eager':20} peak MB")
    for (title, way), taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds[title, EAGER], strict=True)]
        print(
            f"{title:44} {way:12} {summary(taken):24} {summary(ratios):20} "
            f"{memory[title, way]:.0f}",
            flush=True,
        )
    if path:
        records = [
            {"plan": title, "way": way, "seconds": taken, "peak_mb": memory[title, way]}
            for (title, way), taken in seconds.items()
        ]
        path.write_text(json.dumps(records, indent=2) + "\n")


def summary(values: Sequence[float]) -> str:
    """The median (least..most)."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
