#!/usr/bin/env python3
"""Time one training step of a GPT block under several parallel plans, in one interleaved run.

    python benchmarks/netlab.py -n 4 --rate 200mbit -- python benchmarks/block.py --grid 2x2
    torchrun --nproc-per-node 4 benchmarks/block.py --plans tp,tp2d

This is what each rank runs; ``compare.py`` starts it for many sizes, rates and rank counts.

A step is forward and backward, without the optimizer, of a stack of GPT blocks with neither
embedding nor head: the input is a fixed hidden tensor and the loss the mean square of the output.
Every plan (see ``variants.py``) starts from the same weights and the same global batch, and a plan
whose loss or gradient norm differs from the first one's ends the run: what is timed is the same
arithmetic. A plan that cannot run gets a line that says why.

The plans take turns, one step each per round and in another, shuffled order each round, so that
whatever else this machine does hits all of them alike. A step during which the host of a virtual
machine took more than 3 % of its processors is taken again, at most twice. Of those still disturbed
then, the least so is stored, and counts only for a plan that has no other. What is printed and
stored for each plan:

seconds     of a step, that of the slowest rank, the median over rounds
/ tp        the ratio to stock TP, taken within a round, so that a slow minute does not bend it:
            the median (least..most)
MB sent     in a step by the rank that sends most, headers included, as its network interface
            counts them; known in a network namespace of netlab.py only
arithmetic  MB that a rank sends by the formulas of the README (``traffic.predicted_bytes``);
            for a grid the same whatever the algorithm
NCCL        MB that a rank would send if every collective moved as little as NCCL's ring ones do,
            from counting the collectives of a step; gloo's reduce-scatter moves more
peak MB     resident memory that a step adds at most to what the rank held before it
compute s   compute alone: one rank's share of the same step, the same blocks made as narrow as
            the plan makes them and on as many tokens, in plain PyTorch without DTensor, plan or
            transfer, run by all ranks at once and in turn with the plans. It is the least work
            that the plan leaves a rank, and has none of the plan's own overhead
/ limit     seconds / max(compute alone, arithmetic bytes / link rate): 1 is a plan that moves no
            more than the arithmetic says and hides the smaller of the two wholly behind the other
eff. rs     the same plan with an efficient reduce-scatter put under it by this benchmark
            (``reduce_scatter.py``); gloo's own costs as much as an all-reduce

Below the table stands our best grid against the best stock plan, as it is and with an efficient
reduce-scatter under it, and against the best that needs no more memory for its step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measure import (
    TOLERANCE,
    bytes_per_second,
    headlines,
    largest_over_ranks,
    measure,
    summarize,
    table,
    warm_up,
)
from variants import OURS, STOCK_PLANS, Sizes, build, build_share, grids_of

from torch_tp2d.comm.groups import BACKEND
from torch_tp2d.planner.machine import calibrate

BACKENDS = ("gloo", BACKEND)
LINKS = {None: "of this machine", "none": "not shaped"}


def grid(text: str) -> tuple[int, int]:
    """Read "2x4" as (2, 4)."""
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdigit() and columns.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid; write rows x columns, as in 2x4")
    return int(rows), int(columns)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of ``kind`` joined by commas."""

    def read(text: str) -> list[Any]:
        return [kind(item.strip()) for item in text.split(",")]

    return read


def plan_name(text: str) -> str:
    """Read a plan's name, ours with or without an algorithm."""
    if text not in STOCK_PLANS and text.partition(":")[0] != OURS:
        known = ", ".join((*STOCK_PLANS, OURS))
        raise argparse.ArgumentTypeError(f"no plan {text}: choose from {known} or {OURS}:ALGORITHM")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time one training step of a GPT block under several parallel plans.",
    )
    plans = (*STOCK_PLANS, OURS)
    parser.add_argument(
        *("--plans", "--plan"),
        type=listed(plan_name),
        default=list(plans),
        help=f"{','.join(plans)} (these), {OURS}:ALGORITHM",
    )
    parser.add_argument(
        "--grid", type=listed(grid), help="of the plans on grids, RxC[,RxC...] (all of the ranks)"
    )
    parser.add_argument("--seq", type=int, default=512, help="tokens of one sequence (512)")
    parser.add_argument("--batch", type=int, default=8, help="sequences, all ranks together (8)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (512)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (8)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each plan (5)")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="gloo",
        help=f"of torch.distributed: gloo, as users have it (default), or {BACKEND}, "
        "which does not have the race in torch's gloo that can end a process",
    )
    parser.add_argument("--json", type=Path, help="write the records there too")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank; returns the exit status."""
    args = parse(argv)
    rate = os.environ.get("NETLAB_RATE")
    bytes_per_second(rate)  # One that cannot be read is an error before the run, not after it.
    dist.init_process_group(args.backend)
    world = dist.get_world_size()
    if args.grid is None:
        args.grid = grids_of(world)
    sizes = Sizes(args.layers, args.hidden, args.heads, args.batch, args.seq)
    if dist.get_rank() == 0:
        print(
            f"{world} ranks, links {LINKS.get(rate, rate)}, {args.layers} blocks, "
            f"hidden {args.hidden}, heads {args.heads}, sequence {args.seq}, batch {args.batch}, "
            f"fp32, {args.backend}, {args.repeats} timed steps",
            flush=True,
        )
    machine = calibrate()
    variants, refused = build(args.plans, args.grid, sizes)
    seen, failed = warm_up(variants, sizes.elements)
    refused |= failed
    variants = [variant for variant in variants if variant.name not in failed]
    if not variants:
        raise SystemExit(f"no plan can run: {refused}")
    shares = {
        share: build_share(share, sizes) for share in dict.fromkeys(v.share for v in variants)
    }
    for variant in shares.values():
        variant.step(sizes.elements)
        variant.model.zero_grad(set_to_none=True)
    measure([*variants, *shares.values()], args.repeats, sizes.elements)
    records = summarize(variants, shares, seen, sizes, rate)
    process_peak = largest_over_ranks([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    if dist.get_rank() == 0:
        print(table(records, refused))
        print(
            f"loss {records[0]['loss']:.9g}, gradient norm {records[0]['gradient_norm']:.9g}, "
            f"the same within {TOLERANCE:g} in all plans; "
            f"peak of a process that holds all of them {process_peak[0]:.0f} MiB",
            flush=True,
        )
        if args.json:
            report: dict[str, Any] = {
                "ranks": world,
                "rate": rate,
                **asdict(sizes),
                "dtype": str(sizes.dtype),
                "grids": args.grid,
                "backend": args.backend,
                "repeats": args.repeats,
                # What the planner is told, for validate.py.
                "calibrated": machine.to_dict(),
                "plans": records,
                "headlines": {which: line._asdict() for which, line in headlines(records).items()},
                "not_runnable": refused,
            }
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
