"""Trains a GPT-2 on Shakespeare, on a line or a grid of devices.

    python tutorials/text.py
    torchrun --nproc-per-node 4 tutorials/train_gpt2.py --grid 2x2

Runs on GPUs over NCCL where every process has one, else on the CPU over gloo. ``--verify`` trains
the same model on one device beside it and compares; ``--help`` lists the rest.

With ``--checkpoint`` it goes on from the last checkpoint that is whole, on this grid or another;
so it does by itself if a process dies and torchrun starts all of them again:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 --max-restarts 3 \\
        tutorials/train_gpt2.py --grid 2x2 --checkpoint checkpoints
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from common import (
    DTYPES,
    Learner,
    OneDevice,
    check_world,
    launch,
    loss_of,
    make_mesh,
    make_text_parser,
    mean_over,
    positive,
    share_of,
    warm_up_and_fall,
    whole,
    wrap_layers,
)
from gpt2 import GPT2, SIZES, GPT2Config
from plans import PLANS_1D, PLANS_2D, parallelize
from text import DATA, Batches, load
from torch.distributed.tensor.parallel import loss_parallel
from tqdm import tqdm

import torch_tp2d


def parse_args() -> argparse.Namespace:
    parser = make_text_parser(__doc__, DATA, steps=100, seq=128)
    add = parser.add_argument
    add("--plan", choices=[*PLANS_1D, *PLANS_2D], default="2d", help="see plans.py")
    add("--size", choices=SIZES, default="mini", help="of the model; the next three override it")
    add("--layers", type=positive)
    add("--hidden", type=positive)
    add("--heads", type=positive)
    add("--checkpoint", type=Path, metavar="DIR", help="save here; resume from the newest there")
    add("--checkpoint-every", type=positive, default=100, metavar="STEPS")
    add("--log-file", type=Path, metavar="FILE", help="append a JSON line a step")
    add("--eval-batches", type=int, default=8, help="validation batches at the end")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Raises a ValueError for arguments that do not fit each other or the devices."""
    check_world(args)
    rows, columns = args.grid
    if args.plan == "1d-sp" and args.seq % (rows * columns):
        raise ValueError(
            f"the stock sequence-parallel plan needs --seq ({args.seq}) to divide by its "
            f"{rows * columns} devices: change --seq, or use --plan 2d"
        )
    if args.verify and args.checkpoint:
        raise ValueError("--verify starts from the first step: leave --checkpoint out")


def build_config(args: argparse.Namespace) -> GPT2Config:
    named = SIZES[args.size]
    return replace(
        named,
        n_layer=args.layers or named.n_layer,
        n_embd=args.hidden or named.n_embd,
        n_head=args.heads or named.n_head,
        n_positions=max(args.seq, named.n_positions),
    )


def peak_memory(device: torch.device) -> int:
    """Bytes this process has held at most: of GPU memory, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether ``--verify``, if asked for, held."""
    rank = dist.get_rank()
    check(args)
    stock = args.plan in PLANS_1D
    mesh = make_mesh(args, device, line=stock)
    with device:
        model = GPT2(build_config(args), args.seed).to(DTYPES[args.dtype])
    schedule = warm_up_and_fall(args.lr, args.steps)
    alone = None
    if args.verify:
        alone = OneDevice(model, loss_of, schedule, args.clip, args.dtype)
    parallelize(model, mesh, args.plan)
    wrap_layers(model, model.h, mesh, args)
    loss_2d = torch_tp2d.cross_entropy
    learner = Learner(model, loss_of if stock else loss_2d, schedule, args.clip)
    # Stock logits stay split by vocabulary too; torch asks for this context around the backward.
    loss_context = loss_parallel if stock else contextlib.nullcontext

    batches = Batches(load("train", args.data), args.batch, args.seq, args.seed)
    first = 0
    if args.checkpoint and (found := newest_checkpoint(args.checkpoint, device)):
        first, batches.position = load_checkpoint(found, learner.model, learner.optimizer)

    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        grid = "x".join(map(str, args.grid))
        print(
            f"{count / 1e6:.1f} M parameters, plan {args.plan}, grid {grid}, dp {args.dp}, "
            f"{args.dtype} on {dist.get_world_size()} x {device.type}"
            + (f", resumed at step {first}" if first else "")
        )
    log = open(args.log_file, "a") if args.log_file and rank == 0 else None
    began = time.perf_counter()
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        ids, targets = (part.to(device) for part in next(batches))
        with loss_context():
            loss = mean_over(learner.step(step, share_of(ids, mesh), share_of(targets, mesh)), mesh)
        now = time.perf_counter()
        if alone is not None:
            alone.step(step, ids, targets, loss)
        rate = args.batch * args.seq / (now - started)
        memory = peak_memory(device)
        bar.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} tokens/s, {memory / 2**20:.0f} MiB")
        if log:
            entry = {
                "step": step + 1,
                "loss": loss,
                "lr": schedule(step),
                "tokens_per_second": rate,
                "seconds": now - began,
                "peak_memory_bytes": memory,
            }
            log.write(json.dumps(entry) + "\n")
            log.flush()
        last = step + 1 == args.steps
        if args.checkpoint and (last or (step + 1) % args.checkpoint_every == 0):
            save_checkpoint(
                args.checkpoint, learner.model, learner.optimizer, step + 1, batches.position
            )

    model.eval()
    validation = Batches(load("val", args.data), args.batch, args.seq, args.seed)
    total = 0.0
    with torch.no_grad(), loss_context():
        for _ in range(args.eval_batches):
            ids, targets = (part.to(device) for part in next(validation))
            loss = whole(learner.loss(model(share_of(ids, mesh)), share_of(targets, mesh)))
            total += mean_over(loss, mesh) / args.eval_batches
    if rank == 0 and args.eval_batches:
        print(f"validation: loss {total:.4f}, perplexity {math.exp(total):.1f}")
        if log:
            entry = {"validation_loss": total, "validation_perplexity": math.exp(total)}
            log.write(json.dumps(entry) + "\n")
    if log:
        log.close()

    return alone is None or alone.agrees_with(learner.model)


if __name__ == "__main__":
    launch(train, parse_args())
