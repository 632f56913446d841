"""Models whose weights stay where they are, in the transposed layout."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
from decode import Decoder
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from support.models import grid_mesh, noise, relative
from support.one_module import Layout, Mlp, feed, gradients, join, one_device, randomized
from torch_tp2d import Colwise2D, Norm2D, Rowwise2D, parallelize_module

STATIONARY = "weight_stationary"


LAYOUTS = [
    "token",
    "feature",
    "row",
    "whole",
    "transposed",
    "transposed batch",
    "transposed whole",
    "columns",
]


def mlp_plan(stream: Layout, inner: Layout) -> dict[str, Any]:
    return {
        "*.norm": Norm2D(input_layouts=stream),
        "*.w1": Colwise2D(input_layouts=stream, output_layouts=inner, dataflow=STATIONARY),
        "*.w2": Rowwise2D(input_layouts=inner, output_layouts=stream, dataflow=STATIONARY),
    }


def mlps(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for tokens, inner, size in product(
        (Replicate(), Shard(0), Shard(1)),
        ((Replicate(), Shard(-1)), (Shard(0), Shard(-1))),
        ((3, 5), (1, 1)),
    ):
        stream = (Shard(-1), tokens)
        reference = randomized(nn.Sequential(Mlp(), Mlp()))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, mlp_plan(stream, inner))
        x, grad = noise(*size, 7, seed=1), noise(*size, 7, seed=2)
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, stream, "local")
        y = model(leaf)
        y.backward(feed(grad, mesh, stream, "local").detach())
        assert leaf.grad is not None
        found = {
            "output": relative(join(y, mesh, stream, x.shape), wanted),
            "grad of input": relative(join(leaf.grad, mesh, stream, x.shape), dx),
        } | gradients(reference, model)
        worst |= {f"{what} {stream} {inner} {size}": value for what, value in found.items()}
    return worst


def decoder(hidden: int = 24) -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab=13, context=16, hidden=hidden, heads=12, layers=2).double()
