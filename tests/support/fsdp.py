"""One device's model beside ours under FSDP2 around a grid."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from support import models
from support.models import batch, loss_of, parallelize, relative, transformer

from .device import DEVICE

TOLERANCE = 1e-10
VOCAB, SEQUENCE, BATCH = 33, 7, 4
NAMES = {3: ("dp", "tp_row", "tp_col"), 4: ("replicate", "shard", "tp_row", "tp_col")}

Shape = tuple[int, ...]
"""Replicas, or replicas and shards; rows and columns."""
SHAPES: list[Shape] = [(2, 1, 2), (2, 2, 1)]
Differences = dict[str, float]

PLANS = {
    "2d": models.plan_2d,
    "mixed": models.plan_mixed,
    "stock": lambda: models.tutorial_plan(ColwiseParallel, RowwiseParallel),
    "dtensor": models.plan_dtensor,
    "without_sp": models.plan_without_sequence_parallel,
}


class Pair:
    """One device's model and ours under FSDP2, which train beside one another.

    Args:
        plan: a key of ``PLANS``.
        units: what FSDP2 wraps: blocks, root, grouped (modules that are one unit) or nested.
        recompute: checkpoint each block, by torch's own hooks.
        frozen: blocks that do not learn; with -1 the embeddings do not either.
        fsdp: for ``fully_shard``.
    """

    def __init__(
        self,
        shape: Shape,
        plan: str = "2d",
        units: str = "blocks",
        recompute: bool = False,
        frozen: Iterable[int] = (),
        **fsdp: Any,
    ) -> None:
        self.mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=NAMES[len(shape)])
        self.data: DeviceMesh = self.mesh[NAMES[len(shape)][:-2]]
        self.replicas = self.data.size()
        self.replica = int((self.data.mesh.flatten() == dist.get_rank()).nonzero())
        self.alone = transformer(VOCAB)
        for index in frozen:
            part: Any = self.alone.layers[index] if index >= 0 else self.alone.tok_embeddings
            part.requires_grad_(False)
        self.ours: Any = copy.deepcopy(self.alone)
        parallelize(self.ours, self.mesh["tp_row", "tp_col"], PLANS[plan]())
        self.placed = {name: p.placements for name, p in self.ours.named_parameters()}
        if recompute:
            for layer in self.ours.layers:
                checkpoint(layer)
        shard(self.ours, self.data, units, **fsdp)
        self.optimizers = [self.optimizer(model) for model in (self.alone, self.ours)]

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    def losses(self, seed: int) -> tuple[Tensor, Tensor]:
        ids, target = batch(BATCH, SEQUENCE, VOCAB, seed=seed)
        mine = [x.chunk(self.replicas)[self.replica] for x in (ids, target)]
        return loss_of(self.alone(ids), target), loss_of(self.ours(mine[0]), mine[1])

    def backward(self, seed: int, twice: bool = False) -> None:
        """Backward of a batch, or of two forwards at once."""
        losses = self.losses(seed)
        if twice:
            losses = tuple(a + b for a, b in zip(losses, self.losses(seed + 1), strict=True))
        for loss in losses:
            loss.backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def params(self) -> list[tuple[str, Any, Any]]:
        pairs = zip(self.alone.named_parameters(), self.ours.parameters(), strict=True)
        return [(name, alone, ours) for (name, alone), ours in pairs]

    def grads_differ(self) -> float:
        worst = 0.0
        for name, alone, ours in self.params():
            assert (ours.grad is None) == (alone.grad is None), name
            if ours.grad is not None:
                assert ours.grad.placements == ours.placements, name
                worst = max(worst, relative(ours.grad, alone.grad))
        return worst

    def differ(self) -> float:
        return max(relative(ours.detach(), alone.detach()) for _, alone, ours in self.params())

    def train(self, *seeds: int, twice: bool = False) -> float:
        worst = 0.0
        for seed in seeds:
            self.backward(seed, twice)
            worst = max(worst, self.grads_differ())
            self.step()
            worst = max(worst, self.differ())
        return worst


def shard(model: Any, data: DeviceMesh, units: str, **fsdp: Any) -> None:
    for layer in model.layers if units != "root" else ():
        for inside in (layer.attention, layer.feed_forward) if units == "nested" else ():
            fully_shard(inside, mesh=data, **fsdp)
        fully_shard(layer, mesh=data, **fsdp)
    if units == "grouped":
        # A tied weight has to be in one of them.
        fully_shard([model.tok_embeddings, model.norm, model.output], mesh=data, **fsdp)
    fully_shard(model, mesh=data, **fsdp)
