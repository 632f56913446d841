"""Micro-batches under ``no_sync``: one device's gradients, and weights that move once a step."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_tp2d
from support import world
from support.device import DEVICE
from support.marks import deep, values_are_compared
from support.models import (
    batch,
    grid_mesh,
    loss_of,
    parallelize,
    plan_2d,
    plan_mixed,
    relative,
    transformer,
)
from torch_tp2d.runtime.context import context_of

TOLERANCE = 1e-11
VOCAB, SEQUENCE = 33, 13
SIZES = (3, 1, 2)
"""Of the micro-batches of a step: no two alike."""


def _of_algorithm(name: str, **options: Any) -> dict[str, Any]:
    plan = plan_2d()
    for key, style in plan.items():
        if "embeddings" not in key and hasattr(style, "algorithm"):
            style.algorithm = name
            vars(style).update(options)
    return plan


def _micro_step(
    model: nn.Module, mesh: DeviceMesh | None, seed: int, sync: Callable[[bool], Any] | None = None
) -> None:
    """Forward and backward of all micro-batches of a step, on one device or on a grid."""
    for number, size in enumerate(SIZES):
        ids, target = batch(size, SEQUENCE, VOCAB, seed=10 * seed + number)
        last = number == len(SIZES) - 1
        if mesh is None:
            (loss_of(model(ids), target) / len(SIZES)).backward()
            continue
        if sync is not None:
            sync(last)
        if last:
            (loss_of(model(ids), target) / len(SIZES)).backward()
        else:
            with torch_tp2d.no_sync(mesh):
                (loss_of(model(ids), target) / len(SIZES)).backward()


def _compare(reference: nn.Module, model: nn.Module) -> None:
    for (name, wanted), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (wanted.grad is None), name
        if ours.grad is not None:
            assert isinstance(ours.grad, DTensor) and ours.grad.placements == ours.placements, name
            assert relative(ours.grad, wanted.grad) < TOLERANCE, name
        assert relative(ours.detach(), wanted.detach()) < TOLERANCE, name


def _train(reference: nn.Module, model: nn.Module, mesh: DeviceMesh, **given: Any) -> None:
    """Three steps of AdamW; every gradient and parameter is one device's."""
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (reference, model)]
    for step in range(3):
        _micro_step(reference, None, step)
        _micro_step(model, mesh, step, **given)
        assert not context_of(mesh).accumulation, "weights or gradients are still kept"
        _compare(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _micro_batches(rows: int, columns: int, algorithms: list[str]) -> None:
    mesh = grid_mesh(rows, columns)
    again = _of_algorithm("pipelined", reshard_after_forward=True)
    for plan in [*map(_of_algorithm, algorithms), again, plan_mixed()]:
        reference = transformer(VOCAB)
        model = copy.deepcopy(reference)
        parallelize(model, mesh, plan)
        _train(reference, model, mesh)


FEW = ["pipelined", "collective"]


@pytest.mark.parametrize(
    "rows,columns,algorithms",
    [
        (2, 1, FEW[:1]),
        deep(2, 2, FEW),
        deep(2, 2, ["summa", "bmr", "cannon"]),
        *(deep(*grid, [*FEW, "summa"]) for grid in ((3, 1), (4, 1), (1, 4), (4, 2))),
    ],
)
def test_micro_batches_add_up_to_one_device(rows: int, columns: int, algorithms: list[str]) -> None:
    world.run(rows * columns, _micro_batches, rows, columns, algorithms)


class _Experts(nn.Module):
    """Of two MLPs a micro-batch uses one, or both; their first weight is a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(12, 16), "down": nn.Linear(8, 12)}) for _ in range(2)
        )

    def forward(self, ids: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        x = self.embed(ids)
        for number in which:
            gate, value = self.experts[number]["up"](x).chunk(2, -1)
            x = x + self.experts[number]["down"](gate.tanh() * value)
        return x


def _skipping(frozen: str) -> None:
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    reference = _Experts().double()
    model = copy.deepcopy(reference)
    plan = {
        "embed": torch_tp2d.Rowwise2D(),
        "experts.*.up": torch_tp2d.Colwise2D(parts=2),
        "experts.*.down": torch_tp2d.Rowwise2D(),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    for part in (reference, model):
        part.experts[0]["up"].weight.requires_grad_(frozen != "before")
    for number, which in enumerate([(0,), (0, 1), (1,)]):
        ids, _ = batch(4, SEQUENCE, VOCAB, seed=number)
        if number == 2 and frozen == "meanwhile":
            for part in (reference, model):
                part.experts[0].requires_grad_(False)
        reference(ids, which).square().mean().backward()
        loss = model(ids, which).square().mean() / 2
        if number < 2:
            with torch_tp2d.no_sync(mesh):
                loss.backward()
        else:
            loss.backward()
    _compare(reference, model)
    assert not context_of(mesh).accumulation


@pytest.mark.parametrize("frozen", ["", "before", "meanwhile"])
def test_a_weight_that_the_last_micro_batch_does_not_use_has_its_gradient(frozen: str) -> None:
    """Its part would be kept for ever, and its ``.grad`` stay None without an error.

    One that was frozen in the meantime raised at the last backward, on every rank, and what others
    had kept stayed on the mesh, where it broke the next model's step.
    """
    world.run(4, _skipping, frozen)


def _checkpointed() -> None:
    mesh = grid_mesh(2, 2)
    for kind in CheckpointImpl:
        reference = transformer(VOCAB)
        model = copy.deepcopy(reference)
        parallelize(model, mesh, plan_2d())
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, kind)
        _train(reference, model, mesh)


@pytest.mark.deep
def test_under_activation_checkpointing() -> None:
    world.run(4, _checkpointed)


def _under_fsdp() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2, 1), mesh_dim_names=("dp", "tp_row", "tp_col"))
    reference = transformer(VOCAB)
    model = copy.deepcopy(reference)
    parallelize(model, mesh["tp_row", "tp_col"], plan_2d())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # Data-parallel ranks are given the same batch, so that the mean over them is one's.
    _train(reference, model, mesh["tp_row", "tp_col"], sync=model.set_requires_gradient_sync)


def test_under_fsdp2() -> None:
    world.run(4, _under_fsdp)


def _bytes_along_rows(model: nn.Module, mesh: DeviceMesh, held: bool) -> int:
    with torch_tp2d.CommCounter(mesh) as counter:
        for number in range(4):
            ids, target = batch(4, 16, VOCAB, seed=number)
            with torch_tp2d.no_sync(mesh) if held and number < 3 else contextlib.nullcontext():
                loss_of(model(ids), target).backward()
    return sum(size for (axis, _), size in counter.bytes.items() if axis == "tp_row")


def _counted(transport: str | None) -> tuple[int, int, int]:
    if transport is not None:
        os.environ["TP2D_TRANSPORT"] = transport
    mesh = grid_mesh(2, 2)
    model = transformer(VOCAB)
    parallelize(model, mesh, _of_algorithm("pipelined"))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    once = sum(module.weight.to_local().numel() * 8 for module in linears)
    for _ in range(2):
        _bytes_along_rows(model, mesh, held=False)
    return _bytes_along_rows(model, mesh, False), _bytes_along_rows(model, mesh, True), once


@pytest.mark.deep
@pytest.mark.gloo
def test_weights_move_once_for_four_micro_batches() -> None:
    """The other row's shard is gathered, and its part of this one's gradient received."""
    for plain, held, once in world.run(4, _counted, None):
        assert plain - held == (4 * 2 - 2) * once, (plain, held, once)


@pytest.mark.deep
def test_weights_that_are_gathered_again_move_once_too() -> None:
    """Off gloo, where weights are gathered again for backward, every micro-batch gathered them.

    Cause: none was kept for the next that was not to be kept for backward.
    """
    for plain, held, once in world.run(4, _counted, "nccl"):
        assert plain - held == (4 * 3 - 2) * once, (plain, held, once)


def _given_up() -> None:
    mesh = grid_mesh(2, 2)
    for how in ("discard", "exception"):
        reference = transformer(VOCAB)
        model = copy.deepcopy(reference)
        parallelize(model, mesh, plan_2d())
        ids, target = batch(4, SEQUENCE, VOCAB, seed=3)
        with (
            contextlib.suppress(FloatingPointError),
            torch_tp2d.no_sync(mesh),
        ):
            loss_of(model(ids), target).backward()
            if how == "exception":
                raise FloatingPointError
        if how == "discard":
            torch_tp2d.no_sync(mesh).discard()
        model.zero_grad()
        _train(reference, model, mesh)


@pytest.mark.deep
def test_a_step_that_is_given_up_leaves_nothing_to_the_next() -> None:
    """Not in ``.grad``, they outlived ``zero_grad()`` and were added to the next step's."""
    world.run(4, _given_up)


def _all_inside() -> list[str]:
    mesh = grid_mesh(2, 2)
    model = transformer(VOCAB)
    parallelize(model, mesh, plan_2d())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ids, target = batch(4, SEQUENCE, VOCAB, seed=3)
    said = []
    with torch_tp2d.no_sync(mesh):
        loss_of(model(ids), target).backward()
    # Of another model on the mesh, say, of which no Linear ran.
    model.tok_embeddings(ids).square().mean().backward()
    try:
        optimizer.step()
    except ValueError as error:
        said.append(str(error))
    loss_of(model(ids), target).backward()
    optimizer.step()
    return said


def test_a_step_before_the_last_backward_is_an_error() -> None:
    """Optimizers stepped without the gradients that were kept, and the next step had them."""
    for (said,) in world.run(4, _all_inside):
        assert "outside of no_sync" in said


def _asked_for() -> None:
    mesh = grid_mesh(2, 2)
    for plan in (plan_2d(), _of_algorithm("collective")):
        reference = transformer(VOCAB)
        model = copy.deepcopy(reference)
        parallelize(model, mesh, plan)
        for number in range(4):
            ids, target = batch(4, SEQUENCE, VOCAB, seed=number)
            grads = []
            for net in (reference, model):
                held = torch_tp2d.no_sync(mesh) if number < 2 else contextlib.nullcontext()
                with held if net is model else contextlib.nullcontext():
                    loss = loss_of(net(ids), target)
                    # A penalty's, say; of some weights, and of none at all.
                    weights = [
                        net.layers[0].feed_forward.w2.weight,
                        net.layers[1].attention.wq.weight,
                    ]
                    grads.append(torch.autograd.grad(loss, weights, retain_graph=True))
                    torch.autograd.grad(loss, [net.norm.weight], retain_graph=True)
                    if number != 2:
                        loss.backward()
            for wanted, ours in zip(*grads, strict=True):
                assert relative(ours, wanted) < TOLERANCE
        _compare(reference, model)


@pytest.mark.deep
def test_what_autograd_grad_is_asked_for_is_of_one_micro_batch() -> None:
    """It was None inside, and outside had the kept gradients of others; and it was kept, to be
    added to ``.grad``, though nobody had called backward."""
    world.run(4, _asked_for)


def _changed() -> str:
    mesh = grid_mesh(2, 2)
    model = transformer(VOCAB)
    parallelize(model, mesh, plan_2d())
    ids, target = batch(4, SEQUENCE, VOCAB)
    seen, unseen = model.layers[0].feed_forward.w2, model.layers[1].feed_forward.w2
    with torch.no_grad():
        # Not equal to itself, and not changed.
        unseen.weight[0, 0] = float("nan")
    said = ""
    with contextlib.suppress(ValueError), torch_tp2d.no_sync(mesh):
        loss_of(model(ids), target).backward()
        with torch.no_grad():
            # Seen by torch, on all ranks alike: gathered again.
            seen.weight.mul_(1.5)
        model(ids)
        unseen.weight.to_local().detach().data.mul_(1.5)
        try:
            loss_of(model(ids), target).backward()
        except ValueError as error:
            said = str(error)
            raise
    return said


@values_are_compared
def test_a_weight_that_is_changed_between_is_gathered_again_or_an_error() -> None:
    """Whether to gather may not go by the values of one rank's shard."""
    for said in world.run(4, _changed, fresh=True):
        assert "under no_sync" in said and "torch does not see" in said


def _interrupted() -> None:
    mesh = grid_mesh(2, 2)
    accumulation = context_of(mesh).accumulation
    with pytest.raises(RuntimeError, match="mine"), torch_tp2d.no_sync(mesh):
        with torch_tp2d.no_sync(mesh):
            pass
        assert accumulation.holds
        raise RuntimeError("mine")
    assert not accumulation.holds
    with pytest.raises(ValueError, match="tp_row"):
        torch_tp2d.no_sync(init_device_mesh(DEVICE, (4,), mesh_dim_names=("tp",)))


def test_leaves_as_it_came() -> None:
    world.run(4, _interrupted)
