"""FSDP2 around a grid: what torch's own tests hold it to around stock tensor parallelism.

Truth is one device in fp64 that sees the whole batch. On four ranks a grid is 1x2 or 2x1 with two
replicas, or 2x2 with one; all three at once is eight ranks, and slow.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from support import world
from support.fsdp import BATCH, PLANS, SEQUENCE, SHAPES, TOLERANCE, VOCAB, Differences, Pair, Shape
from support.marks import deep
from support.models import batch, loss_of, parallelize, relative
from support.one_module import no_difference
from torch_tp2d.comm.counter import CommCounter


def _across(param: Any) -> Shard:
    """The dim that ``tp_col`` does not split."""
    col = param.placements[-1]
    return Shard(1 - col.dim if param.ndim == 2 and isinstance(col, Shard) else 0)


CASES: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "one unit": {"units": "root"},
    "grouped": {"units": "grouped"},
    "nested": {"units": "nested"},
    "recomputed": {"recompute": True},
    "recomputed and kept": {"recompute": True, "reshard_after_forward": False},
    "across": {"shard_placement_fn": _across},
    "mixed": {"plan": "mixed"},
    "stock": {"plan": "stock", "reshard_after_forward": False},
    "DTensors": {"plan": "dtensor"},
    "without sequence parallelism": {"plan": "without_sp"},
    "frozen in the middle": {"frozen": [0]},
    "frozen from the start": {"frozen": [-1, 0]},
}


def _train(shape: Shape, cases: list[str]) -> Differences:
    seen = {name: Pair(shape, **CASES[name]).train(0, 1) for name in cases}
    for keep in (False, True):
        pair = Pair(shape, reshard_after_forward=not keep)
        seen[f"two forwards, {keep}"] = pair.train(0, 2, twice=True)
    return seen


@pytest.mark.deep
@pytest.mark.parametrize("shape", SHAPES)
def test_training(shape: Shape) -> None:
    """A quarter of the cases on a column, another on a row."""
    no_difference(world.run(4, _train, shape, list(CASES)[SHAPES.index(shape) :: 4]), TOLERANCE)


@pytest.mark.deep
@pytest.mark.parametrize(
    "shape", [*SHAPES, (2, 2, 2), (1, 2, 2), (2, 2, 1, 2), (2, 1, 1, 2)], ids=str
)
def test_training_in_every_case(shape: Shape) -> None:
    no_difference(world.run(torch.Size(shape).numel(), _train, shape, list(CASES)), TOLERANCE)


def _by_hand(shape: Shape) -> Differences:
    """What a user asks of FSDP2's modules beside a forward."""
    seen = {}
    pair = Pair(shape)
    first, second = pair.ours.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    seen["prefetched"] = pair.train(0, 1)
    handles = [layer.unshard(async_op=True) for layer in (first, second)]
    for handle in handles:
        handle.wait()
    seen["unsharded before"] = pair.train(2)
    first.unshard()
    first.reshard()
    pair.ours.set_reshard_after_forward(False)
    seen["and kept from now on"] = pair.train(3)
    with torch.no_grad():
        pair.losses(4)
    seen["after an evaluation"] = pair.train(5)
    pair.backward(6)
    for layer in (first, second, pair.ours):
        layer.set_gradient_divide_factor(1.0)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.backward(7)
    for _, alone, _ in pair.params():
        alone.grad *= pair.replicas
    seen["summed over replicas"] = pair.grads_differ()
    return seen


def _optimizer_in_backward(shape: Shape) -> Differences:
    pair = Pair(shape)
    for _, _, ours in pair.params():
        optimizer = torch.optim.AdamW([ours], lr=1e-2)

        def update(param: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        ours.register_post_accumulate_grad_hook(update)
    worst = 0.0
    for seed in range(2):
        pair.backward(seed)
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        worst = max(worst, pair.differ())
    return {"optimizer in backward": worst}


WAYS = {
    "last": ["set_is_last_backward"],
    "synced": ["set_requires_gradient_sync"],
    "synced, last and kept": [
        "set_requires_gradient_sync",
        "set_is_last_backward",
        "set_reshard_after_backward",
    ],
    "reduced over the shards": ["set_requires_all_reduce"],
}


def _accumulate(shape: Shape, ways: list[str]) -> Differences:
    """Three batches to a step, in each way that FSDP2 has of not reducing, or not waiting."""
    seen = {}
    for index, name in enumerate(ways):
        pair = Pair(shape, reshard_after_forward=index % 2 == 0)
        worst = 0.0
        for step in range(2):
            for number in range(3):
                for call in WAYS[name]:
                    getattr(pair.ours, call)(number == 2)
                pair.backward(3 * step + number)
            worst = max(worst, pair.grads_differ())
            pair.step()
        seen[name] = max(worst, pair.differ())
    pair = Pair(shape)
    pair.ours.layers[0].set_requires_gradient_sync(False)
    pair.backward(0)
    pair.ours.layers[0].set_requires_gradient_sync(True)
    pair.backward(1)
    seen["one block"] = pair.grads_differ()
    return seen


@pytest.mark.parametrize(
    "shape", [deep((2, 1, 2)), deep((2, 2, 1)), deep((1, 2, 2)), deep((2, 2, 2))]
)
def test_what_a_training_loop_asks_for(shape: Shape) -> None:
    """A block that lay whole before it began, by ``unshard()`` say, lost its gradients.

    The block before it had taken up its parameters already, so that autograd brought their
    gradients after FSDP2 had reduced the block's: they were None, or those of other batches.
    """
    size = torch.Size(shape).numel()
    for body in (_by_hand, _optimizer_in_backward):
        no_difference(world.run(size, body, shape), TOLERANCE)
    no_difference(world.run(size, _accumulate, shape, list(WAYS)), TOLERANCE)


@pytest.mark.parametrize(
    "shape,ways",
    [
        deep((2, 1, 1, 2), ["reduced over the shards"]),
        deep((2, 1, 1, 2), list(WAYS)),
        deep((2, 2, 2, 1), list(WAYS)),
    ],
)
def test_accumulation_in_replicas_of_shards(shape: Shape, ways: list[str]) -> None:
    no_difference(world.run(torch.Size(shape).numel(), _accumulate, shape, ways), TOLERANCE)


def _clip(shape: Shape) -> Differences:
    seen = {}
    pair = Pair(shape)
    pair.backward(0)
    grads = [(param, param.grad) for _, *both in pair.params() for param in both]
    for kind, foreach in product((2.0, 1.0, 3.0, torch.inf), (True, False)):
        for param, grad in grads:
            param.grad = grad.clone()
        alone, ours = (
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2, kind, foreach=foreach)
            for model in (pair.alone, pair.ours)
        )
        assert float(alone) > 1e-2, "nothing was clipped"
        seen[f"{kind}, {foreach}"] = max(relative(ours, alone), pair.grads_differ())
    # On one rank alone: all have to hear of it.
    if dist.get_rank() == dist.get_world_size() - 1:
        pair.ours.layers[1].feed_forward.w1.weight.grad.to_local()[0, 0] = torch.inf
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(
                pair.ours.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach
            )
    return seen


@pytest.mark.parametrize(
    "shape", [deep((2, 1, 2)), deep((1, 2, 2)), deep((2, 2, 1)), deep((2, 2, 2))]
)
def test_clipping(shape: Shape) -> None:
    no_difference(world.run(torch.Size(shape).numel(), _clip, shape), TOLERANCE)


def _precision(shape: Shape, low: torch.dtype) -> tuple[set[Any], float]:
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    pair = Pair(shape, mp_policy=policy)
    dtypes = set()
    pair.ours.layers[0].attention.wo.register_forward_hook(
        lambda module, args, y: dtypes.add((module.weight.dtype, args[0].dtype, y.dtype))
    )
    pair.backward(0)
    for _, _, ours in pair.params():
        assert ours.dtype == ours.grad.dtype == torch.float64
    return dtypes, pair.grads_differ()


@pytest.mark.parametrize("shape", [(2, 1, 2), deep((2, 2, 1))])
def test_mixed_precision(shape: Shape) -> None:
    """Weights and activations are as exact as ``param_dtype``; parameters and gradients are kept.

    A dozen roundings in a chain, to 2^-24 and to 2^-9.
    """
    for low, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.04)):
        for dtypes, difference in world.run(4, _precision, shape, low):
            assert dtypes == {(low, low, low)}
            assert tolerance / 1e4 < difference < tolerance


def _one_replica(offloads: bool) -> tuple[bool, float]:
    """Our own collectives of a step, with FSDP2 and without; the difference from one device."""
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}
    pair = Pair((1, 2, 2), **policy)
    seen = pair.train(0, 1)
    bare: Any = copy.deepcopy(pair.alone)
    grid = pair.mesh["tp_row", "tp_col"]
    parallelize(bare, grid, PLANS["2d"]())
    ids, target = batch(BATCH, SEQUENCE, VOCAB)
    counts = []
    for model in (bare, pair.ours):
        loss_of(model(ids), target).backward()
        with CommCounter(grid) as comm:
            loss_of(model(ids), target).backward()
        counts.append(str(comm))
    return counts[0] == counts[1], seen


@pytest.mark.deep
def test_one_replica() -> None:
    """FSDP2 over an axis of one rank changes nothing, and adds no collective to ours."""
    for offloads in (False, True):
        for same, difference in world.run(4, _one_replica, offloads):
            assert same
            assert difference < TOLERANCE
