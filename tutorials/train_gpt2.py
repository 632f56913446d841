"""Trains a GPT-2 on Shakespeare, on a line or a grid of devices.

    python tutorials/text.py
    torchrun --nproc-per-node 4 tutorials/train_gpt2.py --grid 2x2

Runs on GPUs over NCCL where every process has one, else on the CPU over gloo. ``--verify`` trains
the same model on one device beside it and compares; ``--help`` lists the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from gpt2 import GPT2, SIZES, GPT2Config
from plans import PLANS_1D, PLANS_2D, parallelize
from text import Batches, load
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from tqdm import tqdm

import torch_tp2d

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """How far ``--verify`` lets a run stray from one device.

    Attributes:
        loss: the largest difference of any step's loss.
        travel: the largest root-mean-square difference of any parameter, over the sum of the
            learning rates: about the length of the path that Adam takes every element along,
            whatever the size of its gradient. A wrong gradient strays by about 1.
    """

    loss: float
    travel: float


# Adding in another order moves a gradient by a few last places, and Adam divides by the
# gradient's own size: where that is round-off alone (a key's bias: softmax does not see it) no
# digit is shared. So parameters agree less well than losses, and fp64 is the sharp test. In bf16
# the weights themselves are rounded to 8 bits after each step, which is coarser than a step.
TOLERANCES = {
    "fp64": Tolerance(loss=1e-10, travel=1e-8),
    "fp32": Tolerance(loss=1e-3, travel=1e-2),
    "bf16": Tolerance(loss=2e-2, travel=1.0),
}


def parse_grid(text: str) -> tuple[int, int]:
    """``"2x3"`` to ``(2, 3)``."""
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isdigit() and columns.isdigit() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write rows x columns, as in 2x2")
    return int(rows), int(columns)


def positive(text: str) -> int:
    """A whole number from 1 upwards."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 upwards")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    devices = "devices: dp * R * C must be the number of processes"
    add("--grid", type=parse_grid, default=(2, 2), metavar="RxC", help=devices)
    add("--dp", type=positive, default=1, help="data-parallel replicas, sharded by FSDP")
    add("--plan", choices=[*PLANS_1D, *PLANS_2D], default="2d", help="see plans.py")
    add("--size", choices=SIZES, default="mini", help="of the model; the next three override it")
    add("--layers", type=positive)
    add("--hidden", type=positive)
    add("--heads", type=positive)
    add("--seq", type=positive, default=128, help="tokens in a sequence")
    add("--batch", type=positive, default=8, help="sequences in a step, over all replicas")
    add("--steps", type=positive, default=100)
    add("--lr", type=float, default=1e-3, help="the highest; warms up, then falls as a cosine")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradient")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights, gradients and activations")
    add("--recompute", action="store_true", help="recompute each layer in the backward pass")
    add("--compile", action="store_true", help="compile each layer")
    add("--checkpoint", type=Path, metavar="DIR", help="save here; resume from the newest there")
    add("--checkpoint-every", type=positive, default=100, metavar="STEPS")
    add("--log-file", type=Path, metavar="FILE", help="append a JSON line a step")
    add("--eval-batches", type=int, default=8, help="validation batches at the end")
    add("--seed", type=int, default=0, help="of the initial weights and the order of the text")
    add("--verify", action="store_true", help="compare with one device; exit 1 if they differ")
    return parser.parse_args()


def check(args: argparse.Namespace, world: int) -> None:
    """Raises a ValueError for arguments that do not fit each other or the devices."""
    rows, columns = args.grid
    if args.dp * rows * columns != world:
        raise ValueError(
            f"--dp {args.dp} --grid {rows}x{columns} takes {args.dp * rows * columns} processes "
            f"and there are {world}: set torchrun's --nproc-per-node to match"
        )
    if args.batch % args.dp:
        raise ValueError(f"--batch {args.batch} does not divide over --dp {args.dp} replicas")
    if args.plan == "1d-sp" and args.seq % (rows * columns):
        raise ValueError(
            f"the stock sequence-parallel plan needs --seq ({args.seq}) to divide by its "
            f"{rows * columns} devices: change --seq, or use --plan 2d"
        )
    if args.verify and args.checkpoint:
        raise ValueError("--verify starts from the first step: leave --checkpoint out")


def set_up() -> torch.device:
    """Joins the process group; returns this process's device.

    Raises:
        ValueError: if torchrun did not launch this process.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"launch it with torchrun: torchrun --nproc-per-node 4 {sys.argv[0]} ...")
    local_rank = int(os.environ["LOCAL_RANK"])
    # Its advice (flatten the mesh for one reduction of a scalar) does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def build_mesh(args: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """``[dp, tp]`` for the stock plans, ``[dp, tp_row, tp_col]`` for the grid's."""
    rows, columns = args.grid
    if args.plan in PLANS_1D:
        return init_device_mesh(device.type, (args.dp, rows * columns), mesh_dim_names=("dp", "tp"))
    return init_device_mesh(
        device.type, (args.dp, rows, columns), mesh_dim_names=("dp", "tp_row", "tp_col")
    )


def build_config(args: argparse.Namespace) -> GPT2Config:
    named = SIZES[args.size]
    return replace(
        named,
        n_layer=args.layers or named.n_layer,
        n_embd=args.hidden or named.n_embd,
        n_head=args.heads or named.n_head,
        n_positions=max(args.seq, named.n_positions),
    )


def distribute(model: GPT2, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Parallelizes ``model`` in place. The order matters: each step wraps the one before."""
    parallelize(model, mesh, args.plan)
    if args.recompute:
        for index, block in enumerate(model.h):
            model.h[index] = checkpoint_wrapper(block)
    if args.compile:
        for block in model.h:
            block.compile()
    if args.dp > 1:
        for block in model.h:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one device's or stock logits, ``[B, S, V]`` against ``[B, S]``."""
    # bf16 tells losses near 10 apart by 1/16 only.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Rises over the first tenth of the run (20 steps at most), then falls to a tenth."""
    warm_up = min(20, max(1, args.steps // 10))
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Learner:
    """A model, its optimizer, and one step of training: the same code for one device or many.

    Args:
        model: the model, parallel or not.
        loss: ``(logits, targets) -> scalar``.
        args: the run's arguments.
    """

    def __init__(
        self, model: GPT2, loss: Callable[[Tensor, Tensor], Tensor], args: argparse.Namespace
    ) -> None:
        self.model, self.loss, self.args = model, loss, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    def step(self, step: int, ids: Tensor, targets: Tensor) -> Tensor:
        """Learns from ids and targets ``[B, S]``; returns their loss before the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args)
        loss = self.loss(self.model(ids), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole(loss.detach())


def whole(value: Tensor) -> Tensor:
    """A DTensor's full value; a plain tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over(values: Tensor, mesh: DeviceMesh) -> float:
    """The mean of a scalar over the data-parallel replicas."""
    total = values.double().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return total.item() / mesh["dp"].size()


def peak_memory(device: torch.device) -> int:
    """Bytes this process has held at most: of GPU memory, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end (its metadata is written last)."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


def save_checkpoint(folder: Path, learner: Learner, step: int, position: int) -> None:
    """Each rank writes its own shards; the files know nothing of the grid."""
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    progress = {"step": step, "position": position}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    dcp.save(state, checkpoint_id=folder / f"step-{step:08d}")


def load_checkpoint(path: Path, learner: Learner) -> tuple[int, int]:
    """Fills the learner, on whichever grid it lies; returns the step and the data's position."""
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0, "position": 0}}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        learner.model, learner.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    return state["progress"]["step"], state["progress"]["position"]


def largest_differences(
    learner: Learner, reference: Learner | None, travel: float
) -> tuple[float, float]:
    """Of the parameters: the largest of all, and the largest root mean square over ``travel``.

    Every rank calls it; rank 0 alone has the reference, and the answer.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    ours = get_model_state_dict(learner.model, options=options)
    if reference is None:
        return 0.0, 0.0
    theirs = reference.model.state_dict()
    differences = [(ours[name].double() - theirs[name].cpu().double()) for name in theirs]
    # torch's maximum hands a NaN on; Python's would lose it.
    largest = torch.stack([difference.abs().max() for difference in differences]).max()
    spread = torch.stack([difference.square().mean().sqrt() for difference in differences]).max()
    return largest.item(), spread.item() / travel


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether ``--verify``, if asked for, held."""
    rank, world = dist.get_rank(), dist.get_world_size()
    check(args, world)
    mesh = build_mesh(args, device)
    with device:
        model = GPT2(build_config(args), args.seed).to(DTYPES[args.dtype])
    reference = None
    if args.verify and rank == 0:
        reference = Learner(copy.deepcopy(model), loss_of, args)
    distribute(model, mesh, args)
    stock = args.plan in PLANS_1D
    learner = Learner(model, loss_of if stock else torch_tp2d.cross_entropy, args)
    # Stock logits stay split by vocabulary too; torch asks for this context around the backward.
    loss_context = loss_parallel if stock else contextlib.nullcontext

    batches = Batches(load("train"), args.batch, args.seq, args.seed)
    first = 0
    if args.checkpoint and (found := newest_checkpoint(args.checkpoint)):
        first, batches.position = load_checkpoint(found, learner)
    share = args.batch // args.dp
    mine = slice(mesh.get_local_rank("dp") * share, (mesh.get_local_rank("dp") + 1) * share)

    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        grid = "x".join(map(str, args.grid))
        print(
            f"{count / 1e6:.1f} M parameters, plan {args.plan}, grid {grid}, dp {args.dp}, "
            f"{args.dtype} on {world} x {device.type}"
            + (f", resumed at step {first}" if first else "")
        )
    log = open(args.log_file, "a") if args.log_file and rank == 0 else None
    loss_gaps: list[float] = []
    travel, began = 0.0, time.perf_counter()
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        ids, targets = (part.to(device) for part in next(batches))
        with loss_context():
            loss = mean_over(learner.step(step, ids[mine], targets[mine]), mesh)
        now = time.perf_counter()
        if reference is not None:
            loss_gaps.append(abs(loss - reference.step(step, ids, targets).item()))
        rate = args.batch * args.seq / (now - started)
        memory = peak_memory(device)
        travel += learning_rate(step, args)
        bar.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} tokens/s, {memory / 2**20:.0f} MiB")
        if log:
            entry = {
                "step": step + 1,
                "loss": loss,
                "lr": learning_rate(step, args),
                "tokens_per_second": rate,
                "seconds": now - began,
                "peak_memory_bytes": memory,
            }
            log.write(json.dumps(entry) + "\n")
            log.flush()
        last = step + 1 == args.steps
        if args.checkpoint and (last or (step + 1) % args.checkpoint_every == 0):
            save_checkpoint(args.checkpoint, learner, step + 1, batches.position)

    model.eval()
    validation = Batches(load("val"), args.batch, args.seq, args.seed)
    total = 0.0
    with torch.no_grad(), loss_context():
        for _ in range(args.eval_batches):
            ids, targets = (part.to(device) for part in next(validation))
            loss = whole(learner.loss(model(ids[mine]), targets[mine]))
            total += mean_over(loss, mesh) / args.eval_batches
    if rank == 0 and args.eval_batches:
        print(f"validation: loss {total:.4f}, perplexity {math.exp(total):.1f}")
        if log:
            entry = {"validation_loss": total, "validation_perplexity": math.exp(total)}
            log.write(json.dumps(entry) + "\n")
    if log:
        log.close()

    if not args.verify:
        return True
    largest, strayed = largest_differences(learner, reference, travel)
    allowed = TOLERANCES[args.dtype]
    # "Within", not "beyond": a NaN must fail.
    held = all(gap <= allowed.loss for gap in loss_gaps) and strayed <= allowed.travel
    if rank == 0:
        print(
            f"one device against {world} over {args.steps} steps of {args.dtype}: "
            f"loss differs by {max(loss_gaps):.1e} at most (allowed {allowed.loss:.0e}), "
            f"a parameter by {largest:.1e}; "
            f"root mean square over Adam's path {strayed:.1e} (allowed {allowed.travel:.0e}): "
            + ("the same" if held else "DIFFERENT")
        )
    return held


def main() -> None:
    args = parse_args()
    device = set_up()
    try:
        held = train(args, device)
    finally:
        dist.destroy_process_group()
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
