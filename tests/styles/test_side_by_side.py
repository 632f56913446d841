"""What the user's code makes by the sizes of a part, given to any function beside that part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import Between, gradients, up_and_down
from torch_tp2d import parallelize_module

WIDTH, WIDE, VOCAB = 12, 24, 11
TABLE = torch.linspace(0.5, 1.5, WIDE, dtype=torch.float64)
With = Callable[[Tensor, Tensor], Tensor]
Act = Callable[[Tensor], Tensor]


class Middle(nn.Module):
    """Features that are split, which a function is given."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


TABLES: dict[str, With] = {
    "add": lambda x, t: x + t,
    "atan2": torch.atan2,
    "clamp": lambda x, t: x.clamp(max=t),
    "compared": lambda x, t: x * (x > t),
    "fmod": torch.fmod,
    "fmax": torch.fmax,
    "copysign": lambda x, t: torch.copysign(x, t - 0.9),
    "logaddexp": torch.logaddexp,
    "addcdiv": lambda x, t: torch.addcdiv(x, t, t + 1),
    "complex": lambda x, t: torch.complex(x, t.expand(x.shape)).abs(),
    "loss": lambda x, t: F.mse_loss(x, t.expand(x.shape), reduction="none"),
    "einsum": lambda x, t: torch.einsum("bsf,f->bsf", x, t),
    "stack": lambda x, t: torch.stack([x, t.expand(x.shape)]).prod(0),
    "expand_as": lambda x, t: x * t.expand_as(x),
    "to": lambda x, t: x * t.to(x),
}


def _bernoulli(x: Tensor) -> Tensor:
    return x * torch.distributions.Bernoulli(logits=x.detach()).sample()


DRAWS: dict[str, Act] = {
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.unflatten(-1, (-1, 4))).flatten(2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "normal": lambda x: torch.normal(x.detach(), 1.0) * x,
    "bernoulli": _bernoulli,
    "rand": lambda x: x + torch.rand(x.shape).to(x),
    "poisson": lambda x: x + torch.poisson(x.detach().abs()),
}


def _tried(act: Act, own: Act, mesh: Any) -> str:
    """What is said of one of a rank's part, held against ``own`` of the whole."""
    model = Between(VOCAB, WIDTH, lambda: Middle(act)).double()
    reference = copy.deepcopy(model)
    reference.middle.act = own
    ids = torch.randint(0, VOCAB, (8, 5), generator=torch.Generator().manual_seed(1))
    parallelize_module(model, mesh, up_and_down())
    try:
        y = model(ids)
    except ValueError as error:
        return str(error)
    for out in (y.full_tensor(), reference(ids)):
        F.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
    return f"differs by {max(gradients(reference, model).values()) > 1e-10}"


def _with_tables(rows: int, columns: int) -> dict[str, tuple[str, str]]:
    mesh = grid_mesh(rows, columns)
    mine = TABLE.chunk(columns)[mesh.get_local_rank("tp_col")]
    return {
        name: (
            _tried(lambda x, f=f: f(x, TABLE[: x.shape[-1]]), lambda x, f=f: f(x, TABLE), mesh),
            _tried(lambda x, f=f: f(x, mine), lambda x, f=f: f(x, TABLE), mesh),
        )
        for name, f in TABLES.items()
    }


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(1, 4)])
def test_a_table_of_the_first_part_s_features_beside_any_part(rows: int, columns: int) -> None:
    """Only in functions of a list, ``x + table``, was it seen, and silently wrong in others.

    ``x.clamp(max=table)``, ``x > table``, an einsum: gradients were others on every rank but those
    of the first part.
    """
    for said in world.run(rows * columns, _with_tables, rows, columns):
        for name, (of_the_first, of_its_own) in said.items():
            there = "test_side_by_side.py:" in of_the_first and "along tp_col" in of_the_first
            assert there and "the same values on these ranks" in of_the_first, (name, of_the_first)
            assert of_its_own == "differs by False", (name, of_its_own)


def _drawn(rows: int, columns: int) -> dict[str, tuple[str, str]]:
    mesh = grid_mesh(rows, columns)

    def seeded(f: Act, seed: int) -> Act:
        def act(x: Tensor) -> Tensor:
            torch.manual_seed(seed)
            return f(x)

        return act

    def said(f: Act, seed: int) -> str:
        return _tried(seeded(f, seed), seeded(f, 0), mesh)

    return {name: (said(f, 0), said(f, 1 + dist.get_rank())) for name, f in DRAWS.items()} | {
        "eval": (_tried(F.rrelu, F.rrelu, mesh),) * 2
    }


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(4, 1)])
def test_random_numbers_that_a_function_draws_for_a_part(rows: int, columns: int) -> None:
    """Functions that draw for the tensor they are given drew the same for each rank's part.

    ``F.gumbel_softmax(x)``, ``F.rrelu``, ``torch.normal(x, 1)``, ``Bernoulli(x).sample()``, while
    ``torch.rand_like(x)`` was refused where it met ``x``.
    """
    for said in world.run(rows * columns, _drawn, rows, columns):
        assert said.pop("eval")[0] == "differs by False"
        for name, (of_one_seed, of_its_own) in said.items():
            assert "test_side_by_side.py:" in of_one_seed, (name, of_one_seed)
            assert "the same values on these ranks" in of_one_seed, (name, of_one_seed)
            assert of_its_own.startswith("differs by"), (name, of_its_own)
