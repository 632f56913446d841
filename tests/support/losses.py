"""A loss on a mesh and the gradient of its logits, against torch's own of the whole."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from support.models import grid_mesh, noise
from support.one_module import join, spread
from torch_tp2d import cross_entropy

TOLERANCE = 1e-12

Layout = tuple[Placement, Placement]
BATCHED: list[Layout] = [
    (Shard(0), Shard(2)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(2)),
    (Shard(2), Replicate()),
    (Shard(2), Shard(2)),
    (Shard(1), Shard(2)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Replicate(), Replicate()),
]
FLAT: list[Layout] = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(0), Shard(0)),
]
REPLICATED: Layout = (Replicate(), Replicate())
SIZES = [(4, 6, 12), (3, 5, 7), (3, 5, 2)]
"""Batch, sequence, vocabulary: even, odd, and a vocabulary smaller than the grid."""


def tokens_of(layout: Layout, last: int) -> Layout:
    """The layout of what holds one number for each token."""
    row, col = (Replicate() if p == Shard(last) else p for p in layout)
    return row, col


def whole(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return join(x.detach().to_local(), x.device_mesh, x.placements, x.shape)


def far(ours: Tensor, wanted: Tensor) -> float:
    """Relative difference; nan where one is nan and the other is not."""
    assert ours.shape == wanted.shape
    if torch.equal(ours.isnan(), wanted.isnan()):
        ours, wanted = ours.nan_to_num(), wanted.nan_to_num()
    scale = wanted.norm().item()
    return (ours - wanted).norm().item() / (scale if scale else 1.0)


def loss_beside(
    mesh: DeviceMesh,
    layout: Layout,
    logits: Tensor,
    target: Tensor,
    kind: str,
    **options: Any,
) -> tuple[float, float]:
    """Relative differences of the loss and of the logits' gradient."""
    leaf = logits.clone().requires_grad_()
    wanted = F.cross_entropy(leaf.flatten(0, -2), target.flatten(), **options)
    ours_leaf = spread(logits, mesh, layout).requires_grad_()
    given: Tensor = target
    tokens = tokens_of(layout, logits.ndim - 1)
    if kind == "local":
        given = spread(target, mesh, tokens).to_local()
    elif kind == "dtensor":
        given = spread(target, mesh, tokens)
    elif kind == "whole dtensor":
        given = spread(target, mesh, (Replicate(), Replicate()))
    ours = cross_entropy(ours_leaf, given, **options)
    if options.get("reduction") == "none":
        weights = noise(*target.shape, seed=8)
        wanted.backward(weights.flatten())
        wanted = wanted.view_as(target)
        assert isinstance(ours, DTensor) and ours.shape == target.shape
        assert tuple(ours.placements) == tokens
        ours.backward(spread(weights, mesh, tokens))
        ours = whole(ours)
    else:
        assert not isinstance(ours, DTensor) and ours.ndim == 0
        wanted.backward()
        ours.backward()
    assert ours_leaf.grad is not None and leaf.grad is not None
    assert ours_leaf.grad.placements == ours_leaf.placements
    return far(ours.detach(), wanted.detach()), far(whole(ours_leaf.grad), leaf.grad)


def close(pair: tuple[float, float], tolerance: float = TOLERANCE) -> bool:
    """Not by ``max``, which skips a nan in the second place."""
    return all(value < tolerance for value in pair)


def target_of(batch: int, sequence: int, vocab: int, ignore_index: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, vocab, (batch, sequence), generator=generator)
    # More of them in one row than in another, so that a mean of means would show.
    target[0, : sequence - 1] = ignore_index
    target[-1, 0] = vocab - 1
    return target


def losses(rows: int, columns: int) -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(rows, columns)
    layouts = [*product((True,), BATCHED), *product((False,), FLAT)]
    cases = list(
        product(
            layouts,
            ("whole", "local", "dtensor", "whole dtensor"),
            SIZES,
            (-100, 1),
            ("mean", "sum", "none"),
            (0.0, 0.1, 1.0),
        )
    )
    found = {}
    # Coprime to the number of values of each, so that all of them meet.
    for (batched, layout), kind, size, ignore, reduction, smoothing in cases[::29]:
        batch, sequence, vocab = size
        logits = noise(*size, seed=1)
        target = target_of(batch, sequence, vocab, ignore)
        if not batched:
            logits, target = logits.flatten(0, 1), target.flatten()
        key = f"{layout} {kind} {size} {ignore=} {reduction} {smoothing=} {batched=}"
        found[key] = loss_beside(
            mesh,
            layout,
            logits,
            target,
            kind,
            ignore_index=ignore,
            reduction=reduction,
            label_smoothing=smoothing,
        )
    return found


def class_weights(vocab: int) -> Tensor:
    """Class weights, one of them 0."""
    weight = noise(vocab, seed=5).abs()
    weight[vocab // 2] = 0.0
    return weight
