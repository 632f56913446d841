"""A feed-forward layer trained on a grid of devices: two classes of a stock plan renamed.

    torchrun --standalone --nproc-per-node 4 tutorials/tp2d_example.py
    torchrun --standalone --nproc-per-node 6 tutorials/tp2d_example.py --grid 3x2
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tutorials/tp2d_example.py

The plan that PyTorch's own example lays over a line of devices is

    {"up": ColwiseParallel(), "down": RowwiseParallel()}

Every process hands the layer the whole batch and gets the whole output, there and here. Inside,
the grid keeps 1/R of the tokens and 1/C of the features on each of its R x C devices, and 1/(R C)
of each weight. Runs on GPUs over NCCL where every process has one, else on the CPU over gloo; says
what each rank holds and moves, and the loss beside one device's. Exits with 1 if they differ.
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
from torch.distributed.tensor import Replicate

from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

TOKENS, HIDDEN = 24, 16

WHOLE = (Replicate(), Replicate())


class FeedForward(nn.Module):
    """``[tokens, H] -> [tokens, H]`` through ``4 H`` features."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether one device agrees."""
    check_world(args)
    mesh = init_device_mesh(device.type, args.grid, mesh_dim_names=("tp_row", "tp_col"))
    dtype = DTYPES[args.dtype]

    # The same weights and batches on every rank.
    torch.manual_seed(args.seed)
    model = FeedForward(HIDDEN).to(device, dtype)
    alone = OneDevice(model, F.mse_loss, lambda step: args.lr, args.clip, args.dtype)

    parallelize_module(
        model,
        mesh,
        {
            "up": Colwise2D(input_layouts=WHOLE),
            "down": Rowwise2D(output_layouts=WHOLE),
        },
    )
    learner = Learner(model, F.mse_loss, lambda step: args.lr, args.clip)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        """Inputs and what the layer is to learn of them: each feature's neighbour, turned round."""
        generator = torch.Generator().manual_seed(args.seed + step)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)
        return x, -x.roll(1, dims=-1)

    survey(learner, mesh, *batch(0), modules=["up", "down"])
    return train_beside(learner, alone, batch, args.steps)


if __name__ == "__main__":
    launch(train, make_parser(__doc__, lr=1e-2).parse_args())
