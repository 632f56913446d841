#!/usr/bin/env python3
"""Time one training step of a GPT block under several parallel plans, in one interleaved run.

    python benchmarks/netlab.py -n 4 --rate 200mbit -- python benchmarks/block.py --grid 2x2
    torchrun --nproc-per-node 4 benchmarks/block.py --plans tp,tp2d

A step is forward and backward, without the optimizer, of a stack of GPT blocks with neither
embedding nor head: the input is a fixed hidden tensor and the loss the mean square of the output.
Every plan starts from the same weights and the same global batch, and a plan whose loss or
gradient norm differs from the first one's ends the run: what is timed is the same arithmetic.

The plans take turns, one step each per round and in another order each round, so that whatever
else this machine does hits all of them alike. A step's time is that of the slowest rank; the
ratios are taken within a round, so a slow minute does not bend them.

Plans:
    tp        ColwiseParallel and RowwiseParallel on a line of ranks; norms and residuals whole
    tp-input  the same, its input prepared once by PrepareModuleInput, so that the gradients of
              the q, k and v projections are summed before they are reduced, not after
    tp-sp     tp-input with SequenceParallel norms and a residual stream sharded by sequence
    fsdp      FSDP2 alone, the batch split over the ranks
    fsdp-tp   FSDP2 over 2, `tp` over the rest
    tp2d      the tp-sp plan with its two classes renamed to torch_tp2d's, on each --grid
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

PLANS = ("tp", "tp-input", "tp-sp", "fsdp", "fsdp-tp", "tp2d")
SEED = 20240
# Sums of a few million fp32 terms in another order agree to about 1e-6.
TOLERANCE = 1e-5
MIB = 2**20


class Attention(nn.Module):
    """Causal self-attention that takes as many heads as its projections give it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.wq = nn.Linear(hidden, hidden)
        self.wk = nn.Linear(hidden, hidden)
        self.wv = nn.Linear(hidden, hidden)
        self.wo = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape, or to a plan's layout of it."""
        b, s, _ = x.shape
        # -1 rather than the number of heads: a plan leaves each rank some of them.
        q, k, v = (
            projection(x).view(b, s, -1, self.head_dim).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """Two Linears, four times as wide in between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, 4 * hidden)
        self.w2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape, or to a plan's layout of it."""
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Variant:
    """One plan, ready to step, and what was seen of it.

    ``copies`` is on how many ranks each element of the output is; ``gradient_scale`` undoes the
    average that FSDP takes over its ranks, so that every plan computes the same gradients.
    """

    name: str
    model: nn.Module
    local_input: Tensor
    copies: int = 1
    gradient_scale: int = 1
    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    step_memory: list[int] = field(default_factory=list)

    def step(self, elements: int) -> Tensor:
        """Forward and backward; returns this rank's share of the loss."""
        out = self.model(self.local_input)
        loss = out.float().pow(2).sum() / elements
        (loss * self.gradient_scale).backward()
        for parameter in self.model.parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
            # A step that leaves a transfer running has not ended.
            if isinstance(grad, AsyncCollectiveTensor):
                grad.wait()
        return loss.detach() / self.copies


def line_plan() -> dict[str, ParallelStyle]:
    """Tensor parallelism alone."""
    return {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
    }


def line_input_plan() -> dict[str, ParallelStyle]:
    """Tensor parallelism with one gradient reduction for the three projections."""
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return {"layers.*.attention": prepare, **line_plan()}


def sequence_plan(
    colwise: Callable[..., ParallelStyle], rowwise: Callable[..., ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Tensor and sequence parallelism, in the shape of PyTorch's tutorial plan."""
    prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": prepare,
        "layers.*.attention.wq": colwise(),
        "layers.*.attention.wk": colwise(),
        "layers.*.attention.wv": colwise(),
        "layers.*.attention.wo": rowwise(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": prepare,
        "layers.*.feed_forward.w1": colwise(),
        "layers.*.feed_forward.w2": rowwise(output_layouts=Shard(1)),
    }


def shard_blocks(model: Model, mesh: DeviceMesh) -> None:
    """FSDP2 as its documentation applies it: block by block, then the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def part(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's equal part of ``x`` along ``dim``, over a one-dimensional mesh."""
    if x.shape[dim] % mesh.size():
        raise SystemExit(f"dim {dim} of {list(x.shape)} does not divide by {mesh.size()} ranks")
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()


def build_line(name: str, model: Model, x: Tensor) -> Variant:
    """The stock plans on a line of all ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if name == "tp-sp":
        parallelize_module(model, mesh, sequence_plan(ColwiseParallel, RowwiseParallel))
        return Variant(name, model, part(x, 1, mesh))
    parallelize_module(model, mesh, line_plan() if name == "tp" else line_input_plan())
    return Variant(name, model, x, copies=world)


def build_fsdp(name: str, model: Model, x: Tensor) -> Variant:
    """FSDP2, alone or over tensor parallelism."""
    world = dist.get_world_size()
    if name == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        shard_blocks(model, mesh)
        return Variant(name, model, part(x, 0, mesh), gradient_scale=world)
    if world < 4 or world % 2:
        raise SystemExit(f"fsdp-tp needs an even number of ranks, 4 or more, got {world}")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], line_plan())
    shard_blocks(model, mesh["dp"])
    return Variant(name, model, part(x, 0, mesh["dp"]), copies=world // 2, gradient_scale=2)


def build_grid(model: Model, x: Tensor, grid: tuple[int, int], algorithm: str) -> Variant:
    """The tp-sp plan on a grid: two classes renamed, and the mesh."""
    # Imported here so that the stock plans can be timed without the package.
    try:
        import torch_tp2d
    except ModuleNotFoundError as error:
        if error.name != "torch_tp2d":
            raise
        raise SystemExit(
            "no torch_tp2d here: pip install -e . at the root of the repository, "
            "or leave tp2d out of --plans"
        ) from None

    def colwise(**layouts: Any) -> ParallelStyle:
        return torch_tp2d.Colwise2D(algorithm=algorithm, **layouts)

    def rowwise(**layouts: Any) -> ParallelStyle:
        return torch_tp2d.Rowwise2D(algorithm=algorithm, **layouts)

    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("tp_row", "tp_col"))
    torch_tp2d.parallelize_module(model, mesh, sequence_plan(colwise, rowwise))
    tokens = part(part(x, 0, mesh["tp_row"]), 1, mesh["tp_col"])
    return Variant(f"tp2d {grid[0]}x{grid[1]} {algorithm}", model, tokens)


def build(args: argparse.Namespace) -> list[Variant]:
    """Every variant asked for, all from the same weights and input."""

    def fresh_model() -> Model:
        torch.manual_seed(SEED)
        return Model(args.layers, args.hidden, args.heads)

    generator = torch.Generator().manual_seed(SEED + 1)
    x = torch.randn(args.batch, args.seq, args.hidden, generator=generator)
    variants = []
    for name in args.plans:
        if name == "tp2d":
            variants += [
                build_grid(fresh_model(), x, grid, algorithm)
                for grid in args.grid
                for algorithm in args.algorithm
            ]
        else:
            builder = build_fsdp if name.startswith("fsdp") else build_line
            variants.append(builder(name, fresh_model(), x))
    return variants


class Meter:
    """What a step costs this rank besides time."""

    def __init__(self) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
        self.counter = counter if interface and counter.is_file() else None
        self.libc = ctypes.CDLL(None)
        self.memory_before = 0
        self.sent_before = 0

    @staticmethod
    def _resident(key: str) -> int:
        """A figure of /proc/self/status, in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def sent(self) -> int:
        """Bytes this rank's interface has sent since it exists; 0 where none is known."""
        return int(self.counter.read_text()) if self.counter else 0

    def start(self) -> None:
        """Begin a step from a heap that keeps nothing of the step before."""
        gc.collect()
        self.libc.malloc_trim(0)
        # Makes the peak, VmHWM, start again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self.memory_before = self._resident("VmRSS")
        self.sent_before = self.sent()

    def stop(self) -> tuple[int, int]:
        """Bytes sent and most memory added since `start`."""
        return self.sent() - self.sent_before, self._resident("VmHWM") - self.memory_before


def gradient_norm(model: nn.Module) -> float:
    """The norm of the gradient of the whole model, whatever its layout."""
    total = 0.0
    for parameter in model.parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        total += float(whole.double().pow(2).sum())
    return math.sqrt(total)


def warm_up(variants: Sequence[Variant], elements: int) -> dict[str, tuple[float, float]]:
    """One untimed step of each; the loss and gradient norm of each must be the first one's."""
    seen: dict[str, tuple[float, float]] = {}
    for variant in variants:
        loss = variant.step(elements)
        dist.all_reduce(loss)
        seen[variant.name] = (float(loss), gradient_norm(variant.model))
        variant.model.zero_grad(set_to_none=True)
        wanted = seen[variants[0].name]
        for what, value, expected in zip(
            ("loss", "gradient norm"), seen[variant.name], wanted, strict=True
        ):
            if not math.isclose(value, expected, rel_tol=TOLERANCE):
                raise SystemExit(
                    f"{variant.name}: {what} {value:.9g}, but {variants[0].name} has {expected:.9g}"
                )
    return seen


def measure(variants: Sequence[Variant], repeats: int, elements: int) -> None:
    """Step all variants in turn, ``repeats`` times, noting what each step cost this rank."""
    meter = Meter()
    for turn in range(repeats):
        first = turn % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            meter.start()
            dist.barrier()
            began = time.perf_counter()
            variant.step(elements)
            variant.seconds.append(time.perf_counter() - began)
            # What a rank has handed to its socket is not yet sent; by here it is.
            dist.barrier()
            sent, memory = meter.stop()
            variant.sent.append(sent)
            variant.step_memory.append(memory)
            variant.model.zero_grad(set_to_none=True)


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """Elementwise maximum over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def held(model: nn.Module) -> int:
    """Bytes of parameters this rank keeps."""
    return sum(
        local.numel() * local.element_size()
        for p in model.parameters()
        for local in [p.to_local() if isinstance(p, DTensor) else p]
    )


def summarize(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """One record per variant; the same on every rank."""
    base = next((v for v in variants if v.name == "tp"), variants[0])
    for variant in variants:
        variant.seconds = largest_over_ranks(variant.seconds)
    has_counter = Meter().counter is not None
    records = []
    for variant in variants:
        ratios = [own / other for own, other in zip(variant.seconds, base.seconds, strict=True)]
        sent = statistics.median(largest_over_ranks(variant.sent))
        records.append(
            {
                "plan": variant.name,
                "base": base.name,
                "seconds": variant.seconds,
                "median_seconds": statistics.median(variant.seconds),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "sent_bytes": sent if has_counter else None,
                "parameter_bytes": largest_over_ranks([held(variant.model)])[0],
                "step_peak_bytes": statistics.median(largest_over_ranks(variant.step_memory)),
            }
        )
    return records


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """The records, one line each."""
    base = records[0]["base"]
    width = max(len(record["plan"]) for record in records)
    print(
        f"{'plan':{width}}  {'seconds':>8}  {'ratio to ' + base:>15} {'min':>6} {'max':>6}"
        f"  {'MB sent':>8}  {'weights MB':>10}  {'step peak MB':>12}"
    )
    for record in records:
        sent = "-" if record["sent_bytes"] is None else f"{record['sent_bytes'] / 1e6:.1f}"
        print(
            f"{record['plan']:{width}}  {record['median_seconds']:8.3f}  {record['ratio']:15.3f} "
            f"{record['ratio_min']:6.3f} {record['ratio_max']:6.3f}  {sent:>8}  "
            f"{record['parameter_bytes'] / 1e6:10.1f}  {record['step_peak_bytes'] / 1e6:12.1f}"
        )


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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time one training step of a GPT block under several parallel plans.",
    )
    parser.add_argument("--plans", type=listed(str), default=list(PLANS), help=",".join(PLANS))
    parser.add_argument("--grid", type=listed(grid), help="of tp2d, RxC[,RxC...] (most square)")
    parser.add_argument("--algorithm", type=listed(str), default=["auto"], help="of tp2d, A[,A...]")
    parser.add_argument("--seq", type=int, default=512, help="tokens of one sequence (512)")
    parser.add_argument("--batch", type=int, default=8, help="sequences, all ranks together (8)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (512)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (8)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each plan (5)")
    parser.add_argument("--json", type=Path, help="write the records there too")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.plans) - set(PLANS))
    if unknown:
        parser.error(f"no plan {', '.join(unknown)}: choose from {', '.join(PLANS)}")
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank; returns the exit status."""
    args = parse(argv)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    if args.grid is None:
        rows = max(r for r in range(1, math.isqrt(world) + 1) if world % r == 0)
        args.grid = [(rows, world // rows)]
    if dist.get_rank() == 0:
        print(
            f"{world} ranks, {args.layers} blocks, hidden {args.hidden}, heads {args.heads}, "
            f"sequence {args.seq}, batch {args.batch}, fp32, {args.repeats} timed steps"
        )
    variants = build(args)
    elements = args.batch * args.seq * args.hidden
    seen = warm_up(variants, elements)
    measure(variants, args.repeats, elements)
    records = summarize(variants)
    for record in records:
        record["loss"], record["gradient_norm"] = seen[record["plan"]]
    process_peak = largest_over_ranks([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    if dist.get_rank() == 0:
        print_table(records)
        print(
            f"loss {records[0]['loss']:.9g}, gradient norm {records[0]['gradient_norm']:.9g}, "
            f"the same within {TOLERANCE:g} in all plans; "
            f"peak of a process that holds all of them {process_peak[0]:.0f} MiB"
        )
        if args.json:
            settings = {
                name: getattr(args, name)
                for name in ("batch", "heads", "hidden", "layers", "repeats", "seq")
            }
            report = {"ranks": world, **settings, "torch": torch.__version__, "plans": records}
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
