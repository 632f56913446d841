"""A rank's part, where what becomes of it cannot be followed: a warning, once for each place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import Between, gradients, up_and_down
from torch_tp2d import parallelize_module

WIDTH, WIDE, VOCAB = 12, 32, 11
Act = Callable[[Tensor], Tensor]


@torch.library.custom_op("tp2d_tests::cubed", mutates_args=())
def _cubed(x: Tensor) -> Tensor:
    return x**3


@_cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


_cubed.register_autograd(lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2, setup_context=_keep)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (y * grad).sum(-1, keepdim=True))


class Middle(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def _looked_at(x: Tensor) -> Tensor:
    with torch.no_grad():
        assert x.abs().max().item() < 1e6
    return x.tanh()


WRONG: dict[str, Act] = {
    "item": lambda x: x / x.detach().abs().max().item(),
    "tolist": lambda x: x * x.detach().mean((0, 1, 2)).tolist(),
    "numpy": lambda x: x * float(x.detach().norm().numpy()),
    "__float__": lambda x: x / (1 + float(x.detach().square().sum())),
    "softmax, inside torch.vmap,": torch.vmap(lambda one: one.softmax(-1)),
}
RIGHT: dict[str, Act] = {
    "cubed, not torch's own,": lambda x: _cubed(x),
    "tanh, inside torch.vmap,": torch.vmap(torch.tanh),
}
OF_NOTHING: dict[str, Act] = {
    "looked at": _looked_at,
    "an operator of torch": lambda x: torch.ops.aten.tanh.default(x),
    "a token's number": lambda x: x * x.detach().new_tensor(2.0).item(),
}
REFUSED: dict[str, Act] = {
    "cumsum": lambda x: torch.ops.aten.cumsum.default(x, -1),
    "histc": lambda x: x * torch.ops.aten.histc(x.detach(), 4)[0],
    "softmax": _Softmax.apply,
}


def _told(rows: int, columns: int) -> dict[str, tuple[list[str], str]]:
    mesh, told = grid_mesh(rows, columns), {}
    for name, act in (WRONG | RIGHT | OF_NOTHING | REFUSED).items():
        model = Between(VOCAB, WIDTH, lambda act=act: Middle(act)).double()
        reference = copy.deepcopy(model)
        ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
        parallelize_module(model, mesh, up_and_down())
        error = ""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                try:
                    y = model(ids)
                except ValueError as raised:
                    error = str(raised)
        if not error:
            for out in (y.full_tensor(), reference(ids)):
                F.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
            worst = max(gradients(reference, model).values())
            error = f"differs by {worst > 1e-10}"
        told[name] = [str(one.message) for one in seen], error
    return told


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2)])
def test_a_part_of_the_features_that_goes_where_nothing_sees_it(rows: int, columns: int) -> None:
    """A number of Python's made of a rank's own features was wrong in silence."""
    for told in world.run(rows * columns, _told, rows, columns):
        for name in WRONG | RIGHT:
            warned, came_out = told.pop(name)
            assert len(warned) == 1 and f" {name} " in warned[0], (name, warned)
            assert "test_unfollowed.py:" in warned[0] and "along tp_" in warned[0]
            assert came_out == f"differs by {name in WRONG}", (name, came_out)
        for name in OF_NOTHING:
            assert told.pop(name) == ([], "differs by False"), name
        for name, (warned, came_out) in told.items():
            assert f" {name} takes " in came_out and not warned, (name, warned, came_out)
