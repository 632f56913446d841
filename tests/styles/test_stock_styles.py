"""What torch tests of its own tensor-parallel styles, of the same styles lifted and renamed.

A line of N ranks becomes a grid: wherever stock has a rank hold the whole batch, it holds its
row's part of it here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import collect, gradients, no_difference, randomized, spread, whole
from support.stock import BOTH, FEATURES, GRIDS, ROW, TOLERANCE, run_beside
from torch_tp2d import Colwise2D, CommCounter, Lifted, Rowwise2D, parallelize_module
from torch_tp2d.mesh.layouts import Layout

# Linear and Embedding.


def _linear(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, found = noise(8, 16), {}
    for kinds in ((ColwiseParallel, RowwiseParallel), (Colwise2D, Rowwise2D)):
        colwise, rowwise = kinds
        for style, given, taken in (
            (colwise(), ROW, FEATURES),
            (colwise(input_layouts=Shard(0)), BOTH, FEATURES),
            (rowwise(), FEATURES, ROW),
            (rowwise(output_layouts=Shard(0)), FEATURES, BOTH),
        ):
            reference = randomized(nn.Linear(16, 16))
            model = copy.deepcopy(reference)
            assert parallelize_module(model, mesh, style) is model
            seen = model(spread(x, mesh, given).to_local())
            assert seen.shape == spread(x, mesh, taken).to_local().shape, (style, seen.shape)
            differences = run_beside(reference, model, mesh, x, given, taken)
            found |= {f"{style} {what}": value for what, value in differences.items()}
    return found


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_linear(rows: int, columns: int) -> None:
    """Local shapes, forward, backward: whole or sharded tokens in, features, and back."""
    no_difference(world.run(4, _linear, rows, columns), TOLERANCE)


def _silent_forward() -> None:
    """What stock sends nothing for: whole tokens into a Colwise, ids into an embedding's."""
    for shape, colwise in (
        ((1, 4), Colwise2D),
        ((1, 4), ColwiseParallel),
        ((2, 2), ColwiseParallel),
    ):
        mesh = grid_mesh(*shape)
        linear, table = nn.Linear(16, 16), nn.Embedding(16, 16)
        for module in (linear, table):
            parallelize_module(module, mesh, colwise())
        ids = torch.arange(8).reshape(4, 2)
        torch.manual_seed(mesh.get_rank())
        x = torch.rand(8 // shape[0], 16)
        # The first input from outside is compared over the rows.
        linear(x)
        with CommCounter(mesh) as comm:
            linear(x)
            if shape[0] == 1:
                # On more rows a table that is whole there is looked up by each row for itself.
                table(ids).sum().backward()
        assert not comm.calls, str(comm)


def test_a_colwise_forward_sends_nothing() -> None:
    world.run(4, _silent_forward)


def _embedding(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    ids, found = torch.arange(8).reshape(4, 2), {}
    for style, taken in (
        (ColwiseParallel(), FEATURES),
        (Colwise2D(), FEATURES),
        (RowwiseParallel(input_layouts=Replicate()), ROW),
        (Rowwise2D(input_layouts=Replicate()), ROW),
    ):
        reference = randomized(nn.Embedding(16, 16))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, style)
        wanted, y = reference(ids), model(ids)
        grad = noise(4, 2, 16, seed=3)
        wanted.backward(grad)
        y.backward(spread(grad, mesh, taken).to_local())
        y = collect(y.detach(), mesh, taken, "local", wanted.shape)
        found[f"{style} output"] = relative(y, wanted)
        found |= {f"{style} {what}": value for what, value in gradients(reference, model).items()}
    # Ids of one dim have no batch: the output is the same on every row.
    ids = torch.arange(8)
    for kind in (RowwiseParallel, Rowwise2D):
        model = copy.deepcopy(reference)
        model = randomized(nn.Embedding(16, 16))
        wanted = model(ids)
        parallelize_module(model, mesh, kind(input_layouts=Replicate(), output_layouts=Shard(1)))
        y = model(ids)
        y = collect(y.detach(), mesh, (Replicate(), Shard(1)), "local", wanted.shape)
        found[f"{kind.__name__} of one dim"] = relative(y, wanted)
    return found


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_embedding(rows: int, columns: int) -> None:
    no_difference(world.run(4, _embedding, rows, columns), TOLERANCE)


def _frozen(rows: int, columns: int) -> None:
    mesh = grid_mesh(rows, columns)
    for style in (ColwiseParallel(), Colwise2D(), RowwiseParallel(), Rowwise2D()):
        model = nn.Linear(16, 16)
        model.weight.requires_grad = False
        parallelize_module(model, mesh, style)
        assert not model.weight.requires_grad and model.bias.requires_grad
        torch.manual_seed(mesh.get_rank())
        features = 16 // columns if isinstance(style, RowwiseParallel | Rowwise2D) else 16
        model(torch.rand(8 // rows, features)).sum().backward()
        assert model.weight.grad is None and isinstance(model.bias.grad, DTensor)


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_requires_grad_is_kept(rows: int, columns: int) -> None:
    world.run(4, _frozen, rows, columns)


# PrepareModuleInput and PrepareModuleOutput.


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, y: Tensor, z: Any = 2) -> Tensor:
        return self.linear(x) + y + z


class _OnlyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x: Tensor, y: Any = 2, z: Any = None) -> Tensor:
        return self.linear(x) + y + z


def _prepare(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    found = {}
    x = noise(8, 16)
    local = spread(x, mesh, BOTH).to_local()
    into = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())

    # Nothing inside says what the module works on: its row's tokens, where stock has a DTensor.
    y = parallelize_module(nn.Identity(), mesh, into)(local)
    found["identity"] = relative(collect(y, mesh, ROW, "local", x.shape), x)
    y = parallelize_module(nn.Identity(), mesh, Lifted(into, use_local_output=False))(local)
    found["identity, DTensor"] = relative(whole(y), x)

    out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    row = spread(x, mesh, ROW)
    for given in (row.to_local(), row):
        y = parallelize_module(nn.Identity(), mesh, out)(given)
        found[f"output, {type(given).__name__}"] = relative(
            collect(y, mesh, BOTH, "local", x.shape), x
        )
    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    y = parallelize_module(nn.Identity(), mesh, both)(local)
    found["both"] = relative(collect(y, mesh, (Shard(0), Shard(1)), "local", x.shape), x)
    return found


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_prepare_module_input_and_output(rows: int, columns: int) -> None:
    no_difference(world.run(4, _prepare, rows, columns), TOLERANCE)


def _several_inputs(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, y, found = noise(8, 8, seed=1), noise(8, 8, seed=2), {}
    for colwise in (ColwiseParallel, Colwise2D):
        reference = randomized(_Two())
        wanted = reference(x, y)
        model = copy.deepcopy(reference)
        parallelize_module(model.linear, mesh, colwise())
        into = PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
        )
        parallelize_module(model, mesh, into)
        ours = model(spread(x, mesh, BOTH).to_local(), spread(y, mesh, FEATURES).to_local())
        ours = collect(ours, mesh, FEATURES, "local", (8, 8))
        found[f"{colwise.__name__} positional"] = relative(ours, wanted)

        # Keywords, with DTensors inside: the linear hands them on, in an earlier call or a later.
        for order in ("linear first", "linear last"):
            reference = randomized(_Keywords())
            wanted = reference(x, y=y)
            model = copy.deepcopy(reference)
            into = PrepareModuleInput(
                input_kwarg_layouts={"y": Shard(0)},
                desired_input_kwarg_layouts={"y": Replicate()},
            )
            steps: list[tuple[nn.Module, ParallelStyle]] = [
                (model.linear, colwise(use_local_output=False)),
                (model, into),
            ]
            for module, style in steps if order == "linear first" else reversed(steps):
                parallelize_module(module, mesh, style)
            ours = model(spread(x, mesh, ROW).to_local(), y=spread(y, mesh, BOTH).to_local())
            assert isinstance(ours, DTensor)
            found[f"{colwise.__name__} keyword, {order}"] = relative(whole(ours), wanted)

            reference = randomized(_OnlyKeywords())
            wanted = reference(x=x, z=y)
            model = copy.deepcopy(reference)
            into = PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(0), "z": Shard(0)},
                desired_input_kwarg_layouts={"x": Replicate(), "z": Replicate()},
            )
            steps = [(model.linear, colwise(use_local_output=False)), (model, into)]
            for module, style in steps if order == "linear first" else reversed(steps):
                parallelize_module(module, mesh, style)
            z = spread(y, mesh, BOTH).to_local()
            for given in (spread(x, mesh, BOTH), spread(x, mesh, BOTH).to_local()):
                key = f"{colwise.__name__} keywords, {order}, {type(given).__name__}"
                found[key] = relative(whole(model(x=given, z=z)), wanted)
    return found


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_several_inputs(rows: int, columns: int) -> None:
    """By position and by keyword; a Colwise that hands on DTensors makes the others DTensors too.

    They stayed local, so that ``linear(x) + y`` mixed a DTensor with a tensor. It does not matter
    in which order, or call, the two styles are applied.
    """
    no_difference(world.run(4, _several_inputs, rows, columns), TOLERANCE)


def _lengths() -> None:
    mesh = grid_mesh(2, 2)
    with pytest.raises(AssertionError, match="same length"):
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Replicate(), None))
    model = _Two()
    into = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(model, mesh, {"": into, "linear": ColwiseParallel()})
    with pytest.raises(ValueError, match="got 2 inputs, but input_layouts has 1"):
        model(torch.randn(2, 8), torch.ones(4, 4))


def test_lengths_have_to_agree() -> None:
    world.run(4, _lengths)


def _plain_tensor() -> list[str]:
    mesh = grid_mesh(2, 2)
    into = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    seen = parallelize_module(nn.Identity(), mesh, into)(torch.ones(2, 16))
    return [type(seen).__name__]


def test_a_prepared_module_is_handed_a_plain_tensor() -> None:
    """``PrepareModuleInput`` on an Identity gave back a tensor class of the library's own."""
    assert world.run(4, _plain_tensor) == [["Tensor"]] * 4


# Inputs that are not tokens.


class _WithTable(nn.Module):
    """Adds a table to tokens, and multiplies by a mask where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor, mask: Any = None) -> Tensor:
        y = self.linear(x) + table.view(1, x.shape[1], 8)
        return y if mask is None else y * mask


def _with_table(columns_have: Any, local: bool) -> tuple[nn.Module, nn.Module, Any]:
    reference = randomized(_WithTable())
    into = PrepareModuleInput(
        input_layouts=(Shard(1), columns_have), desired_input_layouts=(Replicate(), columns_have)
    )
    plan = {"": into, "linear": Colwise2D(output_layouts=Replicate(), use_local_output=local)}
    return reference, copy.deepcopy(reference), plan


def _tables(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, table, found = noise(4, 6, 8), noise(6, 8, seed=3), {}
    whole_everywhere = Replicate(), Replicate()
    for have in (Replicate(), whole_everywhere):
        for local in (True, False):
            reference, model, plan = _with_table(have, local)
            parallelize_module(model, mesh, plan)
            own, theirs = (table.clone().requires_grad_() for _ in range(2))
            grad = noise(4, 6, 8, seed=4)
            wanted = reference(x, own)
            wanted.backward(grad)
            y = model(spread(x, mesh, (Shard(0), Shard(1))).to_local(), theirs)
            assert isinstance(y, DTensor) is not local
            share = spread(grad, mesh, ROW)
            y.backward(share.to_local() if local else share)
            key = f"{have} {local=}"
            y = collect(y.detach(), mesh, ROW, "local" if local else "mesh", x.shape)
            found[f"{key} output"] = relative(y, wanted)
            assert theirs.grad is not None and own.grad is not None
            if not local:
                # A local tensor's gradient is this row's: the table is the user's own there.
                found[f"{key} table's gradient"] = relative(theirs.grad, own.grad)
            found |= {f"{key} {k}": v for k, v in gradients(reference, model).items()}
    # A mask of this row's samples is said to be one by a pair.
    reference, model, _ = _with_table(None, False)
    mask = noise(4, 1, 1, seed=6)
    into = PrepareModuleInput(
        input_layouts=(Shard(1), Replicate(), ROW),
        desired_input_layouts=(Replicate(), Replicate(), ROW),
    )
    plan = {"": into, "linear": Colwise2D(output_layouts=Replicate(), use_local_output=False)}
    parallelize_module(model, mesh, plan)
    tokens = spread(x, mesh, (Shard(0), Shard(1))).to_local()
    y = model(tokens, table, spread(mask, mesh, ROW).to_local())
    found["mask of a pair"] = relative(whole(y), reference(x, table, mask))
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), deep(1, 4)])
def test_a_table_is_the_same_on_every_row(rows: int, columns: int) -> None:
    """A table declared ``Replicate()`` was taken for tokens of this row: R times its length."""
    no_difference(world.run(4, _tables, rows, columns), TOLERANCE)


def _refusals() -> list[str]:
    mesh = grid_mesh(2, 2)
    tokens = spread(noise(4, 6, 8), mesh, (Shard(0), Shard(1))).to_local()
    table = noise(6, 8, seed=3)
    messages = []

    def caught(act: Callable[[], Any]) -> None:
        with pytest.raises(ValueError) as error:
            act()
        messages.append(str(error.value))

    # A mask of this row's samples, declared to be the same everywhere.
    _, model, plan = _with_table(None, False)
    three = (Shard(1), Replicate(), Replicate()), (Replicate(), Replicate(), Replicate())
    plan[""] = PrepareModuleInput(input_layouts=three[0], desired_input_layouts=three[1])
    parallelize_module(model, mesh, plan)
    mask = spread(noise(2, 1, 1, seed=6), mesh, ROW).to_local()
    caught(lambda: model(tokens, table, mask))

    # Sharded tokens second: is the first a table or this row's queries?
    _, model, plan = _with_table(None, False)
    two = (Replicate(), Shard(1)), (Replicate(), Replicate())
    plan[""] = PrepareModuleInput(input_layouts=two[0], desired_input_layouts=two[1])
    caught(lambda: parallelize_module(model, mesh, plan))
    assert not any(isinstance(param, DTensor) for param in model.parameters())

    # Keywords have no first one.
    plan[""] = PrepareModuleInput(
        input_kwarg_layouts={"x": Replicate(), "table": Replicate()},
        desired_input_kwarg_layouts={"x": Replicate(), "table": Replicate()},
    )
    caught(lambda: parallelize_module(model, mesh, plan))
    return messages


def test_inputs_that_may_be_tokens_or_not() -> None:
    """Found before they become DTensors, on every rank alike, by what is declared or compared."""
    for mask, order, keywords in world.run(4, _refusals):
        for words in ("(1, 1, 1)", "_WithTable", "(tp_row=2, tp_col=2)", "(Shard(0), Replicate())"):
            assert words in mask, mask
        assert "['input 0']" in order and "(Replicate(), Replicate())" in order, order
        assert "['x', 'table']" in keywords, keywords


# SequenceParallel.


class _RMSNormPython(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def _sequence(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, found = noise(8, 12, 10), {}
    tokens: Layout = Shard(0), Shard(1)
    for name, module in {
        "LayerNorm": nn.LayerNorm(10),
        "LayerNorm without parameters": nn.LayerNorm(10, elementwise_affine=False),
        "RMSNorm": _RMSNormPython(10),
    }.items():
        reference = randomized(module)
        for given, dtensor in ((tokens, True), (tokens, False), (BOTH, True)):
            model = copy.deepcopy(reference)
            parallelize_module(model, mesh, SequenceParallel())
            with CommCounter(mesh) as comm:
                y = model(spread(x, mesh, given) if dtensor else spread(x, mesh, given).to_local())
            assert isinstance(y, DTensor) and y.placements == tokens
            if given == tokens and dtensor:
                assert not comm.calls, str(comm)
            reference.zero_grad()
            differences = run_beside(reference, model, mesh, x, given, tokens, dtensor=dtensor)
            key = f"{name}, {given}, {dtensor=}"
            found |= {f"{key}: {what}": value for what, value in differences.items()}
    return found


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_sequence_parallel(rows: int, columns: int) -> None:
    """Norms in C++ and in Python; a DTensor sharded in another dim is resharded first."""
    no_difference(world.run(4, _sequence, rows, columns), TOLERANCE)


def _dropout() -> list[Any]:
    mesh = grid_mesh(2, 2)
    torch.manual_seed(3)
    model = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    x = torch.ones(8, 12, 10)
    y = model(spread(x, mesh, (Shard(0), Shard(1))))
    assert isinstance(y, DTensor) and y.placements == (Shard(0), Shard(1))
    return y.to_local().flatten().tolist()


def test_sequence_parallel_dropout_drops_other_elements_of_each_shard() -> None:
    """Every shard lost the same elements: the ranks' generators agree, as dropout needs here."""
    masks = world.run(4, _dropout)
    assert len({tuple(mask) for mask in masks}) == 4
