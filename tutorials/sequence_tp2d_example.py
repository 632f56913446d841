"""A residual stream split over the whole grid: sequence parallelism in two dimensions.

    torchrun --standalone --nproc-per-node 4 tutorials/sequence_tp2d_example.py
    torchrun --standalone --nproc-per-node 8 tutorials/sequence_tp2d_example.py --grid 2x4
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tutorials/sequence_tp2d_example.py

Blocks of a norm and a feed-forward layer, whose plan is the one of stock sequence parallelism with
two classes renamed. Between the layers a rank holds 1/R of the batch and 1/C of the sequence and
nothing twice: the norms, which are stock ``SequenceParallel``, run on those. ``up`` gathers the
sequence along ``tp_col``, ``down`` adds up its parts and scatters them along the sequence again.

Runs on GPUs over NCCL where every process has one, else on the CPU over gloo; says what each rank
holds and moves, and the loss beside one device's. Exits with 1 if they differ.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import (
    DTYPES,
    Learner,
    OneDevice,
    check_world,
    launch,
    make_parser,
    survey,
    train_beside,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel

from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

BATCH, SEQUENCE, HIDDEN, BLOCKS = 4, 16, 16, 2


class Block(nn.Module):
    """``[B, S, H] -> [B, S, H]`` through ``4 H`` features, beside which the input passes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Over all elements, wherever they are: of DTensors it is the whole batch's."""
    return (outputs - targets).square().mean()


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether one device agrees."""
    check_world(args)
    mesh = init_device_mesh(device.type, args.grid, mesh_dim_names=("tp_row", "tp_col"))
    dtype = DTYPES[args.dtype]

    # The same weights and batches on every rank.
    torch.manual_seed(args.seed)
    model = nn.Sequential(*(Block(HIDDEN) for _ in range(BLOCKS))).to(device, dtype)
    alone = OneDevice(model, mean_squared_error, lambda step: args.lr, args.clip, args.dtype)

    parallelize_module(
        model,
        mesh,
        {
            "*.norm": SequenceParallel(),
            "*.up": Colwise2D(input_layouts=Shard(1)),
            # A DTensor, as x is: the two are added.
            "*.down": Rowwise2D(output_layouts=Shard(1), use_local_output=False),
        },
    )
    learner = Learner(model, mean_squared_error, lambda step: args.lr, args.clip)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        """Inputs, and what is to be learnt of them: each feature's neighbour, turned round."""
        generator = torch.Generator().manual_seed(args.seed + step)
        x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).to(device, dtype)
        return x, -x.roll(1, dims=-1)

    def on_grid(whole_batch: Tensor) -> DTensor:
        """This rank's tokens: batch over tp_row, sequence over tp_col."""
        # Every rank has the whole batch, so nothing is sent.
        return distribute_tensor(whole_batch, mesh, (Shard(0), Shard(1)), src_data_rank=None)

    inputs, targets = map(on_grid, batch(0))
    survey(learner, mesh, inputs, targets, modules=["0.norm", "0.up", "0.down", "0"])
    return train_beside(learner, alone, batch, args.steps, share=on_grid)


if __name__ == "__main__":
    launch(train, make_parser(__doc__, lr=1e-2).parse_args())
