"""Trains a Llama 2 on Shakespeare, on a line or a grid of devices.

    python tutorials/text.py
    torchrun --standalone --nproc-per-node 4 tutorials/llama2_tp2d.py --grid 2x2 --verify
    torchrun --standalone --nproc-per-node 4 tutorials/llama2_tp2d.py --grid 1x4 --plan 1d
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tutorials/llama2_tp2d.py --size 7b --dp 2 --grid 2x4 --dtype bf16 --recompute --compile

The model is ``llama2.py``; the plan, in ``plans.py``, is PyTorch's for it, with two classes
renamed. Runs on GPUs over NCCL where every process has one, else on the CPU over gloo; says what
each rank holds and moves (FSDP's own collectives excepted). ``--verify`` trains the same on one
device beside it, says both losses, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from functools import partial

import text
import torch
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
    share_of,
    survey,
    train_beside,
    warm_up_and_fall,
    wrap_layers,
)
from llama2 import OUTPUTS, SIZES, Llama2
from plans import LLAMA2_PLANS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module

import torch_tp2d


def parse_args() -> argparse.Namespace:
    parser = make_text_parser(__doc__, text.DATA, steps=20)
    add = parser.add_argument
    add("--plan", choices=LLAMA2_PLANS, default="2d", help="1d: stock, on a line of R * C devices")
    add("--size", choices=SIZES, default="tiny", help="of the model")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Raises a ValueError for arguments that do not fit each other or the devices."""
    check_world(args)
    rows, columns = args.grid
    heads = SIZES[args.size].kv_heads
    # The 2-D plan finds such things out by itself.
    for what, size in (("heads of keys and values", heads), ("tokens (--seq)", args.seq)):
        if args.plan == "1d" and size % (rows * columns):
            raise ValueError(
                f"the stock plan needs its {rows * columns} devices to divide {size} {what}: "
                f"change the sizes, or use --plan 2d"
            )


def distribute(model: Llama2, mesh: DeviceMesh, plan: str) -> None:
    """Applies a plan by name, in place, on the mesh's ``tp`` or its ``tp_row`` and ``tp_col``."""
    if plan == "1d":
        stock_parallelize_module(model, mesh["tp"], LLAMA2_PLANS[plan]())
    else:
        torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], LLAMA2_PLANS[plan]())


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether ``--verify``, if asked for, held."""
    check(args)
    stock = args.plan == "1d"
    mesh = make_mesh(args, device, line=stock)
    with device:
        config = replace(SIZES[args.size], vocab_size=text.VOCABULARY)
        model = Llama2(config, args.seed).to(DTYPES[args.dtype])
    learning_rate = warm_up_and_fall(args.lr, args.steps)
    alone = None
    if args.verify:
        alone = OneDevice(model, loss_of, learning_rate, args.clip, args.dtype)
    distribute(model, mesh, args.plan)
    wrap_layers(model, model.layers, mesh, args)
    loss = loss_of if stock else torch_tp2d.cross_entropy
    learner = Learner(model, loss, learning_rate, args.clip)

    tokens = text.Batches(text.load("train", args.data), args.batch, args.seq, args.seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens.position = step * args.batch
        ids, targets = next(tokens)
        return ids.to(device), targets.to(device)

    share = partial(share_of, mesh=mesh)

    # Stock logits stay split by vocabulary too; torch asks for this context around the backward.
    with loss_parallel() if stock else contextlib.nullcontext():
        ids, targets = batch(0)
        survey(learner, mesh, share(ids), share(targets), OUTPUTS)
        return train_beside(
            learner, alone, batch, args.steps, share, mean=lambda loss: mean_over(loss, mesh)
        )


if __name__ == "__main__":
    launch(train, parse_args())
