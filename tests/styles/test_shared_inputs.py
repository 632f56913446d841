"""Tensors that several modules are given: gathered once, whatever user code does with them."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
)

from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import (
    TOLERANCE,
    WHOLE,
    collect,
    feed,
    gradients,
    join,
    no_difference,
    one_device,
    randomized,
    spread,
)
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, parallelize_module


class _Attention(nn.Module):
    """q, k and v of one tensor, w1 and w3 of another; ``again`` changes the first in between."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        for name in ("q", "k", "v", "w1", "w3"):
            setattr(self, name, nn.Linear(7, 7))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        q = self.q(x)
        if self.again:
            x.mul_(3).add_(1)
        y = q * self.k(x) + self.v(x)
        h = x.sin()
        return y + self.w1(h) * self.w3(h)


def _sharing(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    given, out = (Shard(0), Shard(1)), (Shard(0), Shard(2))
    worst = {}
    for again, stock, kind in product((False, True), (False, True), ("local", "mesh")):
        reference = randomized(_Attention(again))
        if again:
            # On one device too, a Linear that learns keeps its input and forbids the change.
            reference.requires_grad_(False)
        model = copy.deepcopy(reference)
        style = Colwise2D(input_layouts=Shard(1))
        other = ColwiseParallel(input_layouts=Shard(1)) if stock else style
        parallelize_module(model, mesh, {"[qv]": style, "k": other, "w?": style})
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, given, kind)
        with CommCounter(mesh) as comm:
            y = model(leaf)
        if columns > 1:
            # Sizes of local tensors are asked for with a gather of one number. In rounds what the
            # others have is sent for; else all of it, the shorter shards padded.
            one = spread(x, mesh, given).to_local()
            row = one.shape[0] * 7 * 8
            others = (5 - one.shape[1]) * row
            longest = -(-5 // columns) * row * (columns - 1)
            gathered = comm.bytes["tp_col", "all_gather_into_tensor"] // longest
            gathered += comm.bytes["tp_col", "all_to_all_single"] // others
            assert gathered == (3 if again else 2), (again, stock, kind, str(comm))
        with CommCounter(mesh) as comm:
            y.backward(spread(grad, mesh, out).to_local())
        if columns > 1:
            backward = comm.calls["tp_col", "all_to_all_single"]
            assert backward == (3 if again else 2), (again, stock, str(comm))
        assert leaf.grad is not None
        key = f"{again=} {stock=} {kind}"
        worst[f"output {key}"] = relative(join(y, mesh, out, x.shape), wanted)
        worst[f"grad of input {key}"] = relative(collect(leaf.grad, mesh, given, kind, x.shape), dx)
        if not again:
            found = gradients(reference, model)
            worst |= {f"{what} {key}": value for what, value in found.items()}
    return worst


@pytest.mark.gloo
@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(2, 3)])
def test_modules_given_one_tensor_gather_it_once(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _sharing, rows, columns))


class _UsesItTwice(nn.Module):
    """User code between PrepareModuleInput and q, k, v that uses the tensor in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(7, 11), nn.Linear(7, 11)
        self.o = nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        gate = x.square().mean(1, keepdim=True)
        y = self.o(self.q(x) * self.k(x) + self.q(x.sin()))
        return (y + x * gate).view(batch, sequence, -1)


def _user_code(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    given = (Shard(0), Shard(1))
    worst = {}
    for stock in (False, True):
        colwise = ColwiseParallel if stock else Colwise2D
        reference = randomized(_UsesItTwice())
        model = copy.deepcopy(reference)
        into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan = {"": into, "q": colwise(), "k": Colwise2D(), "o": Rowwise2D()}
        parallelize_module(model, mesh, plan)
        parallelize_module(model, mesh, out)
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, given, "local")
        y = model(leaf)
        y.backward(spread(grad, mesh, given).to_local())
        assert leaf.grad is not None
        worst[f"output {stock=}"] = relative(join(y, mesh, given, x.shape), wanted)
        worst[f"grad of input {stock=}"] = relative(join(leaf.grad, mesh, given, x.shape), dx)
        found = gradients(reference, model)
        worst |= {f"{what} {stock=}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 2), (2, 2), (3, 2)])
def test_user_code_may_use_the_prepared_tensor_in_any_way(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _user_code, rows, columns))


def _grad_modes() -> None:
    """A gather made without gradients is not handed to one that needs them, nor kept alive."""
    mesh = grid_mesh(1, 2)
    model = randomized(nn.Linear(7, 4))
    parallelize_module(model, mesh, Colwise2D(input_layouts=Shard(1)))
    leaf = feed(noise(3, 6, 7), mesh, (Shard(0), Shard(1)), "local")
    h = leaf * 2
    with torch.no_grad():
        without = model(h)
    y = model(h)
    assert y.requires_grad and torch.equal(y, without)
    y.sum().backward()
    assert leaf.grad is not None

    alive = weakref.ref(h)
    del y, h, without
    gc.collect()
    assert alive() is None


def test_a_shared_gather_knows_the_grad_mode() -> None:
    world.run(2, _grad_modes)


def _inference_mode() -> None:
    mesh = grid_mesh(2, 2)
    x = noise(4, 6, 7)
    for layout in ((Shard(0), Shard(1)), (Shard(0), Replicate())):
        reference = randomized(nn.Linear(7, 4))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, Colwise2D(input_layouts=layout, output_layouts=WHOLE))
        with torch.inference_mode():
            local = spread(x, mesh, layout).to_local().clone()
            assert relative(model(local), reference(x)) < TOLERANCE
            reference = randomized(nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 4)))
            first = Colwise2D(input_layouts=layout, algorithm="pipelined")
            second = Rowwise2D(output_layouts=WHOLE, algorithm="pipelined")
            model = parallelize_module(copy.deepcopy(reference), mesh, {"0": first, "1": second})
            for _ in range(2):
                assert relative(model(local), reference(x)) < TOLERANCE


def test_inference_mode() -> None:
    """Tensors made there have no version counter, which the shared gather asks for.

    Taking up parameters asked for it too, and a model made or placed there raised.
    """
    world.run(4, _inference_mode)


class _Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(self.seen.append)
        y.retain_grad()
        self.between = y
        return self.second(y)


def _prepared_between(module: Any) -> tuple[Any, Any]:
    """``first`` and ``second`` on one device, and with what is between gathered on ``1 x 2``."""
    mesh, reference = grid_mesh(1, 2), randomized(module)
    model = copy.deepcopy(reference)
    output = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    plan = {
        "first": Rowwise2D(input_layouts=Replicate(), output_layouts=Shard(1)),
        "second": Colwise2D(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model.first, mesh, output)
    return reference, model


def _hooked() -> dict[str, float]:
    reference, model = _prepared_between(_Watched())
    x, grad = noise(3, 5, 8, seed=1), noise(3, 5, 6, seed=2)
    for part in (reference, model):
        part(x).backward(grad)
    assert len(model.seen) == 1 and model.between.grad is not None
    assert reference.between.grad is not None
    found = gradients(reference, model)
    found["hook"] = relative(model.seen[0], reference.seen[0])
    return found | {"kept": relative(model.between.grad, reference.between.grad)}


def test_the_gradient_of_a_prepared_output_is_seen_by_hooks() -> None:
    """They were passed by, and ``retain_grad()`` kept nothing: the next style took a twin of it.

    FSDP2 gathers a block's parameters by such a hook, and so backward met freed ones.
    """
    no_difference(world.run(2, _hooked))


class _Between(nn.Module):
    """Goes on with what is between two projections, and keeps it."""

    def __init__(self, retains: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.retains = retains

    def forward(self, x: Tensor) -> Tensor:
        self.between = self.first(x)
        if self.retains:
            self.between.retain_grad()
        return self.second(self.between) + self.between.square()


def _asked_of_autograd(retains: bool) -> tuple[float, str]:
    reference, model = _prepared_between(_Between(retains))
    expected, got = (part(noise(3, 5, 8, seed=1)).square().sum() for part in (reference, model))
    if retains:
        (one,) = torch.autograd.grad(expected, reference.between)
        (ours,) = torch.autograd.grad(got, model.between)
        return relative(ours, one), ""
    with pytest.raises(RuntimeError, match=r"by torch\.autograd\.grad") as error:
        torch.autograd.grad(got, model.between, retain_graph=True)
    expected.backward()
    got.backward()
    return max(gradients(reference, model).values()), str(error.value)


@pytest.mark.parametrize("retains", [True, False])
def test_what_autograd_grad_is_asked_of_a_prepared_output(retains: bool) -> None:
    """It gave the part of the code between alone, in silence: the next style had taken a twin,
    which is made of the same shard, and so is not on the way to the tensor."""
    for difference, said in world.run(2, _asked_of_autograd, retains):
        assert difference < TOLERANCE
        assert retains or ("retain_grad() before its first use" in said and "tp_col=2" in said)
