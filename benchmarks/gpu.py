#!/usr/bin/env python3
"""What nobody has measured yet: this library on GPUs, in ten minutes, as one JSON to send back.

    torchrun --standalone --nproc-per-node 8 benchmarks/gpu.py --out gpu.json

On the devices that there are (2 to 8 of one node; CPUs and gloo where there are none, to try the
script):

parity   a small Llama 2 in fp64 on every grid of the ranks, beside one device: the largest
         relative difference of its loss and of any gradient; on GPUs with fused products, too.
         Beyond 1e-10 the exit status is 1.
times    a training step (forward and backward) of GPT blocks in bf16: every grid of ours beside
         the stock plans of ``variants.py`` as a careful user would run them, weights kept and
         gathered again, each by itself, the median of its steps, in two rounds of other orders; and
         the most memory that it takes.
kernels  of one step of our fastest grid and of the fastest stock plan, from torch's profiler:
         seconds of products, of NCCL's kernels, of the rest, and of NCCL's while no other ran.

With one GPU:

    python benchmarks/gpu.py --as-rank-of 16 --out rank.json

times each plan as the last of so many ranks runs it, but for the transfers, which are left out:
what a rank computes, how long Python takes to ask for it, and the memory that it needs, beside what
``torch_tp2d.describe`` predicts.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from block import grid as read_grid
from measure import largest_over_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from validate import predict
from variants import (
    AGAIN,
    FSDP_PLANS,
    GRID_PLANS,
    OURS,
    NotRunnable,
    Sizes,
    Variant,
    build_grid,
    build_stock,
    fresh_model,
    global_input,
    grids_of,
    is_ours,
    sequence_plan,
    stock_meshes,
    titled,
)

import torch_tp2d
from torch_tp2d.planner.machine import calibrate

ROOT = Path(__file__).resolve().parents[1]
FUSED = f"{OURS}:fused"
STOCK = ("tp-input", "tp-sp", *FSDP_PLANS)
TOLERANCE = 1e-10
WARM_UP, STEPS = 3, 8


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Parity, times and kernels on GPUs.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--as-rank-of", type=int, metavar="N", help="one process, no transfers")
    parser.add_argument("--compiled", action="store_true", help="with --as-rank-of: by block, too")
    parser.add_argument("--plans", nargs="*", help="with --as-rank-of: these alone")
    parser.add_argument("--grid", type=read_grid, action="append", help="RxC (all of the ranks)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (4)")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the model (4096)")
    parser.add_argument("--heads", type=int, default=32, help="attention heads (32)")
    parser.add_argument("--batch", type=int, default=8, help="sequences, all ranks together (8)")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of one sequence (2048)")
    return parser.parse_args(argv)


def parity(device: torch.device, grid: tuple[int, int], algorithm: str) -> float:
    """The largest relative difference of loss and gradients from one device's."""
    sys.path.insert(0, str(ROOT / "tutorials"))
    from llama2 import Llama2, Llama2Config
    from plans import llama2_2d

    config = Llama2Config(vocab_size=515, dim=64, n_layers=2, n_heads=8, multiple_of=32)
    reference = Llama2(config).double().to(device)
    model = Llama2(config).double().to(device)
    mesh = init_device_mesh(device.type, grid, mesh_dim_names=("tp_row", "tp_col"))
    plan = llama2_2d()
    for key, style in plan.items():
        if key.startswith("layers.") and hasattr(style, "algorithm"):
            style.algorithm = algorithm
    torch_tp2d.parallelize_module(model, mesh, plan)
    ids = torch.randint(0, 515, (2, 9, 33), generator=torch.Generator().manual_seed(0)).to(device)
    wanted = F.cross_entropy(reference(ids[0]).flatten(0, 1), ids[1].flatten())
    loss = torch_tp2d.cross_entropy(model(ids[0]), ids[1])
    wanted.backward()
    loss.backward()
    pairs = [(loss.detach(), wanted.detach())]
    for ours, alone in zip(model.parameters(), reference.parameters(), strict=True):
        pairs.append((ours.grad.full_tensor(), alone.grad))
    return max(float((ours - alone).norm() / alone.norm()) for ours, alone in pairs)


def variants(sizes: Sizes, grids: list[tuple[int, int]]) -> Iterator[tuple[str, Any]]:
    """The name of each plan, and what makes it."""
    for name in STOCK:
        for grid in stock_meshes(name, grids, dist.get_world_size()):
            if name not in GRID_PLANS or min(grid) > 1:
                yield (
                    titled(name, grid),
                    lambda name=name, grid=grid: build_stock(
                        name, grid, sizes, global_input(sizes)
                    )[0],
                )
    for grid in grids:
        names = [OURS]
        names += [OURS + AGAIN] if grid[0] > 1 else []
        names += [FUSED] if grid[1] > 1 else []
        for name in names:
            yield (
                titled(name, grid),
                lambda name=name, grid=grid: build_grid(
                    name, fresh_model(sizes), global_input(sizes), grid
                ),
            )


def synchronize(device: torch.device) -> None:
    """Wait for what the device has to do, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def timed(variant: Variant, sizes: Sizes, device: torch.device) -> tuple[float, int]:
    """The median of some steps in seconds, that of the slowest rank; and a step's peak in bytes."""
    for _ in range(WARM_UP):
        variant.step(sizes.elements)
        variant.model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(STEPS):
        synchronize(device)
        began = time.perf_counter()
        variant.step(sizes.elements)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        variant.model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    slowest = largest_over_ranks([statistics.median(seconds), float(peak)])
    return slowest[0], int(slowest[1])


def kernels(variant: Variant, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Seconds of one step's kernels on this rank, and of transfers with nothing beside them."""
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        variant.step(sizes.elements)
        synchronize(device)
    spans: dict[str, list[tuple[float, float]]] = {"nccl": [], "products": [], "others": []}
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        of_products = any(part in name for part in ("gemm", "cutlass", "flash", "nvjet"))
        kind = "nccl" if "nccl" in name else "products" if of_products else "others"
        spans[kind].append((event.time_range.start * 1e-6, event.time_range.end * 1e-6))
    busy = merged(spans["products"] + spans["others"])
    alone = sum(end - start for start, end in merged(spans["nccl"])) - common(
        merged(spans["nccl"]), busy
    )
    sums = {kind: sum(end - start for start, end in merged(of)) for kind, of in spans.items()}
    return {**sums, "nccl_alone": alone}


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The time that is in both; each without overlaps."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in some
        for other_start, other_end in others
    )


def predicted_peak(name: str, variant: Variant, sizes: Sizes) -> int:
    """What the planner says that a step of this plan takes, in bytes."""
    model = fresh_model(replace(sizes, device="meta"))
    tokens = torch.empty_like(variant.local_input, device="meta")
    base, _, grid = name.partition(" ")
    styles = [
        partial(style, reshard_after_forward=base.endswith(AGAIN))
        for style in (torch_tp2d.Colwise2D, torch_tp2d.Rowwise2D)
    ]
    told = torch_tp2d.describe(
        *(model, read_grid(grid), sequence_plan(*styles)),
        batch=sizes.batch,
        seq=sizes.seq,
        inputs=(tokens,),
        loss=lambda out: out.float().pow(2).sum() / sizes.elements,
        optimizer="sgd",
        transport="nccl",
    )
    return told.memory.peak


def asked_and_busy(variant: Variant, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Seconds until Python has asked for all of a step, and those in which any kernel ran."""
    asked = []
    for _ in range(STEPS):
        synchronize(device)
        began = time.perf_counter()
        variant.step(sizes.elements)
        asked.append(time.perf_counter() - began)
        variant.model.zero_grad(set_to_none=True)
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as trace:
        variant.step(sizes.elements)
        synchronize(device)
    variant.model.zero_grad(set_to_none=True)
    ran = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return statistics.median(asked), sum(end - start for start, end in merged(ran))


def as_rank_of(ranks: int, args: argparse.Namespace) -> int:
    """Time each plan as one of so many ranks runs it, without the transfers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # What is left of a step without transfers, by the rates of this device.
    machine = calibrate(link=math.inf)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = Sizes(args.layers, args.hidden, args.heads, args.batch, args.seq, device.type, dtype)
    grids = args.grid or grids_of(ranks)
    report: dict[str, Any] = {"ranks": ranks, "sizes": {**asdict(sizes), "dtype": str(dtype)}}
    report["calibrated"] = machine.to_dict()
    for compiled in (False, True) if args.compiled else (False,):
        for name, make in variants(sizes, grids):
            if FUSED in name or (args.plans and name.partition(" ")[0] not in args.plans):
                continue
            title = f"{name} compiled" if compiled else name
            try:
                variant = make()
                if compiled:
                    # Each plan with all of torch's recompilations left to it.
                    torch.compiler.reset()
                    for layer in variant.model.layers:
                        layer.compile()
                seconds, peak = timed(variant, sizes, device)
            except NotRunnable as error:
                report[title] = str(error)
                continue
            asked, busy = asked_and_busy(variant, sizes, device)
            report[title] = {
                "seconds": seconds,
                "peak_bytes": peak,
                "asked_seconds": asked,
                "busy_seconds": busy,
            }
            if is_ours(name) and not compiled:
                report[title]["predicted_peak_bytes"] = predicted_peak(name, variant, sizes)
            case = {"ranks": ranks, **asdict(sizes)}
            report[title]["predicted_seconds"] = predict(name, case, machine, dtype)
            print(f"{title}: {report[title]}", flush=True)
            del variant
            gc.collect()
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of it on this rank; returns the exit status."""
    args = parse(argv)
    if args.as_rank_of:
        return as_rank_of(args.as_rank_of, args)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    world, first = dist.get_world_size(), dist.get_rank() == 0
    grids = args.grid or grids_of(world)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_tp2d": torch_tp2d.__version__,
        "python": platform.python_version(),
        "ranks": world,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
    }

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    report["parity"] = {}
    for grid in grids_of(world):
        for algorithm in ("auto", "fused") if device.type == "cuda" else ("auto",):
            worst = largest_over_ranks([parity(device, grid, algorithm)])[0]
            name = "x".join(map(str, grid)) + (" fused" if algorithm == "fused" else "")
            report["parity"][name] = worst
            say(f"parity on {name}: {worst:.1e}")

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = Sizes(args.layers, args.hidden, args.heads, args.batch, args.seq, device.type, dtype)
    report["sizes"] = {**asdict(sizes), "dtype": str(dtype)}
    plans = dict(variants(sizes, grids))
    times: dict[str, list[float]] = {}
    report["peak_bytes"], report["not_runnable"] = {}, {}
    for turn in range(2):
        order = list(plans)
        random.Random(turn).shuffle(order)
        for name in order:
            try:
                variant = plans[name]()
            except NotRunnable as error:
                report["not_runnable"][name] = str(error)
                continue
            seconds, peak = timed(variant, sizes, device)
            times.setdefault(name, []).append(seconds)
            report["peak_bytes"][name] = peak
            say(f"{name}: {seconds * 1e3:.1f} ms, peak {peak / 2**30:.2f} GiB")
            del variant
            gc.collect()
    report["seconds"] = times

    report["kernels"] = {}
    if device.type == "cuda":
        for ours in (True, False):
            of = [name for name in times if is_ours(name) == ours]
            best = min(of, key=lambda name: min(times[name]))
            report["kernels"][best] = kernels(plans[best](), sizes, device)
            say(f"{best}: {report['kernels'][best]}")
    if first:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 0 if max(report["parity"].values()) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
