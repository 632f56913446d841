"""Llama 2 under 2-D tensor parallelism and FSDP2: a mesh of three axes.

    torchrun --standalone --nproc-per-node 8 tutorials/fsdp_tp2d_example.py
    torchrun --standalone --nproc-per-node 4 tutorials/fsdp_tp2d_example.py
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tutorials/fsdp_tp2d_example.py

``tp_row`` and ``tp_col`` carry activations and belong within a host, where links are fast; ``dp``
is the outermost axis, so that torchrun's order of ranks lays it across hosts. There are as many
replicas as the processes make whole grids of. The plan comes first, ``fully_shard`` after it; the
norms are stock ``SequenceParallel``, and the loss is taken of logits that stay split.

Runs on GPUs over NCCL where every process has one, else on the CPU over gloo; says what each rank
holds and moves (FSDP's own collectives excepted), and the loss beside one device's. Exits with 1 if
they differ.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
import torch.distributed as dist
from common import (
    DTYPES,
    Learner,
    OneDevice,
    check_world,
    launch,
    loss_of,
    make_parser,
    mean_over,
    share_of,
    survey,
    train_beside,
)
from llama2 import OUTPUTS, Llama2, Llama2Config
from plans import llama2_2d
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_tp2d import cross_entropy, parallelize_module

CONFIG = Llama2Config(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32)
BATCH, SEQUENCE = 4, 16  # of one replica


def counting(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and next ids ``[sequences, S]`` that go up by 1 to 4, by how much the first one says."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(CONFIG.vocab_size, (sequences, 1), generator=generator)
    text = (start + (1 + start % 4) * torch.arange(SEQUENCE + 1)) % CONFIG.vocab_size
    return text[:, :-1], text[:, 1:]


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether one device agrees."""
    args.dp = max(1, dist.get_world_size() // math.prod(args.grid))
    check_world(args)
    mesh = init_device_mesh(
        device.type, (args.dp, *args.grid), mesh_dim_names=("dp", "tp_row", "tp_col")
    )
    with device:
        model = Llama2(CONFIG, args.seed).to(DTYPES[args.dtype])
    alone = OneDevice(model, loss_of, lambda step: args.lr, args.clip, args.dtype)

    parallelize_module(model, mesh["tp_row", "tp_col"], llama2_2d())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    learner = Learner(model, cross_entropy, lambda step: args.lr, args.clip)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, targets = counting(args.dp * BATCH, args.seed + step)
        return ids.to(device), targets.to(device)

    share = partial(share_of, mesh=mesh)
    ids, targets = batch(0)
    survey(learner, mesh, share(ids), share(targets), OUTPUTS)
    return train_beside(
        learner, alone, batch, args.steps, share, mean=lambda loss: mean_over(loss, mesh)
    )


if __name__ == "__main__":
    launch(train, make_parser(__doc__, lr=1e-2).parse_args())
