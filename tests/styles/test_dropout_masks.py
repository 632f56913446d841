"""Masks of dropout, and the keys that they are made of: drawn by all ranks alike, once a call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_tp2d
from support import models, world
from support.device import DEVICE
from support.dropout import Feeds, Layer, differences, feeds_plan, on_one_device
from support.models import batch, grid_mesh, loss_of, parallelize, relative, transformer
from torch_tp2d import Colwise2D, Rowwise2D
from torch_tp2d.ops.dropout import draw_key, drop, dropped, fused, recomputed

TOLERANCE = 1e-12


def test_what_is_dropped_looks_like_chance() -> None:
    """Rates, pairs of neighbours in each dim, and two keys, each within five deviations."""
    torch.manual_seed(0)
    index = [torch.arange(4), torch.arange(100), torch.arange(300)]
    for p in (0.01, 0.1, 0.5, 0.9):
        mask, other = (dropped(draw_key(), p, index).double() - p for _ in range(2))
        deviation = (p * (1 - p)) ** 0.5
        pairs = [mask, mask * other / deviation]
        for dim, size in enumerate(mask.shape):
            for step in (1, 2, 3, 8, 64):
                if step < size:
                    ahead = mask.narrow(dim, step, size - step)
                    pairs.append(mask.narrow(dim, 0, size - step) * ahead / deviation)
        for pair in pairs:
            assert abs(pair.mean().item()) < 5 * deviation / pair.numel() ** 0.5, (p, pair.shape)


def test_a_part_has_the_mask_of_the_whole() -> None:
    """A block, and positions in another order, as sequences cut in zigzag have them."""
    key = draw_key()
    index = [torch.arange(3), torch.arange(8), torch.arange(5)]
    whole = dropped(key, 0.3, index)
    order = torch.tensor([0, 1, 6, 7])
    part = dropped(key, 0.3, [index[0][1:], order, index[2][2:]])
    assert part.equal(whole[1:, order, 2:])
    assert not dropped(key, 0.0, index).any() and dropped(key, 1.0, index).all()
    x = torch.ones(3, 8, 5, requires_grad=True)
    y = drop(x, whole, 0.3)
    assert y.equal((~whole) / 0.7)
    y.sum().backward()
    assert x.grad is not None and x.grad.equal(y.detach())
    assert drop(x, torch.ones_like(whole), 1.0).eq(0).all()


def test_a_gpu_keeps_no_mask() -> None:
    """It is made again for the gradient, and for the gradient's: the same elements."""
    key, p = draw_key(), 0.3
    index = [torch.arange(3), torch.arange(8), torch.arange(5)]
    x = torch.randn(3, 8, 5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = recomputed(x, key, p, index)
    assert sum(saved.numel() for saved in kept) == 1 + 3 + 8 + 5
    assert y.equal(drop(x, dropped(key, p, index), p))
    grad = torch.randn_like(y).requires_grad_()
    (got,) = torch.autograd.grad(y, x, grad, create_graph=True)
    assert got.equal(drop(grad, dropped(key, p, index), p))
    (again,) = torch.autograd.grad(got, grad, torch.ones_like(got))
    assert again.equal(drop(torch.ones_like(y), dropped(key, p, index), p))


@pytest.mark.deep
def test_compiled_dropout() -> None:
    """What a GPU is given, compiled for a CPU: any sizes, rates and keys by the same two kernels.

    Every rate dropped as many as the first one: what Dynamo saw rounded was a constant to it.
    """
    metrics.reset()
    for seed, (p, sizes) in enumerate(
        ((0.1, (4, 6, 8)), (0.5, (3, 7, 5)), (0.25, (9, 2, 33)), (0.0, (5, 5, 5)), (1.0, (2, 3, 4)))
    ):
        torch.manual_seed(seed)
        key, index = draw_key(), [torch.arange(2, 2 + size) for size in sizes]
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(sizes, dtype=dtype)
            wanted = drop(x, dropped(key, p, index), p)
            torch.testing.assert_close(fused(x, key, p, index), wanted, rtol=1e-6, atol=0)
    # torch 2.12 takes each of the five rates for a constant, and has a graph of one kernel for it.
    older = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
    assert metrics.generated_kernel_count == 2 * (5 if older else 2), "of two dtypes"


def test_a_key_goes_with_tensors_of_any_device() -> None:
    """On a GPU the first dropout died: the key, drawn on the CPU, had been given a dim."""
    key = draw_key()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for sizes in ((5,), (8, 5), (3, 8, 5)):
            mask = dropped(key, 0.3, [torch.arange(size, device="cuda") for size in sizes])
            assert mask.shape == sizes and mask.device.type == "cuda"


def _recomputed() -> tuple[float, float]:
    """Layers computed again in backward, against layers that are not; and two kinds of seed."""
    vocab = 33
    model = Feeds(vocab)
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), feeds_plan(0, tokens=True))
    for layer in model.layers:
        inner = layer.forward
        layer.forward = partial(checkpoint, inner, use_reentrant=False)
    again = differences(reference, model, (3, 13, vocab))
    ids, target = batch(3, 13, vocab)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses += [loss_of(model(ids), target).item() for _ in range(2)]
    assert losses[:2] == losses[2:4]
    assert len(set(losses)) == 4
    return again


def test_recomputation_repeats_the_mask() -> None:
    assert max(world.run(4, _recomputed)) < TOLERANCE


def _again_and_again() -> None:
    """Three forwards, the second of which draws the second and the third key of the grid."""
    mesh = grid_mesh(2, 1)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).double()
    torch_tp2d.parallelize_module(net, mesh, {"0": Colwise2D(), "2": Rowwise2D()})

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 2, 8, dtype=torch.float64).chunk(2)[mesh.get_local_rank(0)]
        checkpoint(net, x, use_reentrant=False, context_fn=contexts).sum().backward()


def test_selective_checkpointing_of_dropout() -> None:
    """Keys drawn again were counted, and compared where they had not been in forward.

    "aten.select.int encountered during backward but not found in storage", now and then.
    """
    world.run(2, _again_and_again)


def _without() -> None:
    """Neither eval nor p = 0 draws a number or changes a tensor."""
    mesh = grid_mesh(2, 2)
    layer = Layer(6, 10, 0.5)
    torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})
    assert isinstance(layer.dropout, nn.Dropout)
    x = torch.ones(2, 4, 6)
    state = torch.get_rng_state()
    assert layer.eval().dropout(x) is x
    layer.train().dropout.p = 0.0
    assert layer.dropout(x).equal(x)
    assert torch.get_rng_state().equal(state)


def test_without_dropout_nothing_is_drawn() -> None:
    world.run(4, _without)


def _astray(first: int) -> str:
    """Rank 1 draws a number of its own before call ``first``."""
    mesh = grid_mesh(2, 2)
    layer = Layer(6, 10, 0.5)
    torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})
    torch.manual_seed(0)
    for call in range(first + 1):
        if call == first and torch.distributed.get_rank() == 1:
            torch.rand(())
        try:
            layer.dropout(torch.ones(2, 4, 6))
        except ValueError as error:
            assert call == first
            return str(error)
    return ""


def test_generators_that_differ_are_refused() -> None:
    """On every rank, at the first call or at one of the later checks."""
    for first in (0, 1, 3):
        for message in world.run(4, _astray, first):
            assert "call torch.manual_seed(seed) with one seed on every rank" in message


def _replicas(seeds: tuple[int, int]) -> float:
    """Two replicas, each with its share of the batch and a seed, under FSDP2."""
    vocab = 33
    mesh = init_device_mesh(DEVICE, (2, 2, 1), mesh_dim_names=("dp", "tp_row", "tp_col"))
    model = Feeds(vocab)
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], feeds_plan(0, tokens=True))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ids, target = batch(6, 13, vocab)
    for replica, seed in enumerate(seeds):
        torch.manual_seed(seed)
        share = slice(3 * replica, 3 * replica + 3)
        (loss_of(reference(ids[share]), target[share]) / 2).backward()
    here = mesh.get_local_rank("dp")
    torch.manual_seed(seeds[here])
    share = slice(3 * here, 3 * here + 3)
    loss_of(model(ids[share]), target[share]).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(relative(ours.grad, param.grad) for ours, param in pairs)


def test_replicas_have_seeds_of_their_own() -> None:
    assert max(world.run(4, _replicas, (7, 8))) < TOLERANCE


def _compiled(rows: int, columns: int) -> float:
    vocab = 33
    model = transformer(vocab, n_layers=1, dropout_p=0.2)
    reference = on_one_device(model)
    parallelize(model, grid_mesh(rows, columns), models.plan_2d())
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    return differences(reference, model, (3, 13, vocab))


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns", [(1, 2), (2, 1)])
def test_a_compiled_block_drops_the_same(rows: int, columns: int) -> None:
    """In a graph, where nobody can be asked, a batch of 3 on two rows was taken for one of 4."""
    assert max(world.run(2, _compiled, rows, columns)) < TOLERANCE
