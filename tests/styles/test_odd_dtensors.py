"""DTensors as the user's code makes them: partial, as an average of split tokens is, or flattened.

A Linear under ``Replicate()`` took a rank's part of an average for the whole, in silence: outputs
were right up to the first function that is not linear, gradients never. Others summed averages, and
a norm or a ``PrepareModuleInput`` raised or did the same.

Tokens that were split over both axes and then flattened lie in a ``_StridedShard``, which is no
``Shard``: a module under ``Replicate()`` left that axis out of the sum of its gradients (half of
them was missing, in silence), and others raised.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import whole
from torch_tp2d import (
    Colwise2D,
    Lifted,
    Local2D,
    Norm2D,
    Replicate,
    Rowwise2D,
    parallelize_module,
)

BATCH, LENGTH, WIDTH = 4, 12, 8


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + self.scale


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "Linear, Replicate": (lambda: nn.Linear(WIDTH, 5), Replicate),
    "LayerNorm, Replicate": (lambda: nn.LayerNorm(WIDTH), Replicate),
    "own, Replicate": (Own, Replicate),
    "RMSNorm, Norm2D": (lambda: nn.RMSNorm(WIDTH), lambda: Norm2D(use_local_output=False)),
    "LayerNorm, Norm2D": (lambda: nn.LayerNorm(WIDTH), lambda: Norm2D(use_local_output=False)),
    "own, Local2D": (Own, lambda: Local2D(use_local_output=False)),
}
for _name, _local in (("local", True), ("DTensor", False)):
    MODULES[f"Linear, PrepareModuleInput, {_name}"] = (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 5))),
        lambda local=_local: {
            "0": Lifted(
                PrepareModuleInput(
                    input_layouts=dt.Replicate(), desired_input_layouts=dt.Replicate()
                ),
                use_local_output=local,
            ),
            "0.0": ColwiseParallel(use_local_output=False),
        },
    )
_SCHEDULES: dict[str, dict[str, Any]] = {
    "collective": {"algorithm": "collective"},
    "pipelined": {"algorithm": "pipelined"},
    "summa": {"algorithm": "summa"},
    "stationary": {"dataflow": "weight_stationary"},
}
for _style, (_schedule, _options) in itertools.product((Colwise2D, Rowwise2D), _SCHEDULES.items()):
    MODULES[f"Linear, {_style.__name__}, {_schedule}"] = (
        lambda: nn.Linear(WIDTH, 5),
        partial(_style, use_local_output=False, **_options),
    )

REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "mean, kept": lambda x: x.mean(1, keepdim=True),
    "sum": lambda x: x.sum(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "flat": lambda x: x.flatten(0, 1),
}
PLACED = [(Shard(0), Shard(1)), (Shard(1), dt.Replicate()), (Shard(1), Shard(1))]


def _differences(rows: int, columns: int, functions: Sequence[str]) -> dict[str, str]:
    mesh = grid_mesh(rows, columns)
    found = {}
    for name, (make, style) in MODULES.items():
        for reduced, function in ((name, REDUCED[name]) for name in functions):
            for placed in PLACED:
                torch.manual_seed(0)
                reference = make().double()
                model = parallelize_module(copy.deepcopy(reference), mesh, style())
                x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
                mine = distribute_tensor(x, mesh, placed).requires_grad_()
                truth = x.clone().requires_grad_()
                case = f"{name} of {reduced} of {placed}"
                wanted = reference(function(truth))
                try:
                    taken = function(mine)
                except RuntimeError:
                    # torch flattens no dims of which the second alone is split.
                    found[case] = ""
                    continue
                try:
                    y = model(taken)
                except (ValueError, TypeError) as error:
                    found[case] = str(error)
                    continue
                y = y if isinstance(y, DTensor) else _global(y, wanted)
                torch.tanh(wanted).square().sum().backward()
                torch.tanh(y).square().sum().backward()
                pairs = [(y, wanted), (mine.grad, truth.grad)]
                pairs += [
                    (a.grad, b.grad)
                    for a, b in zip(model.parameters(), reference.parameters(), strict=True)
                ]
                worst = max((whole(a) - b).abs().max().item() for a, b in pairs)
                found[case] = "" if worst < 1e-10 else f"wrong by {worst}"
    return found


def _global(y: Tensor, wanted: Tensor) -> DTensor:
    raise AssertionError(f"a local output of shape {y.shape} for {wanted.shape}")


@pytest.mark.parametrize(
    "grid,functions",
    [
        ((1, 2), ("mean",)),
        *(deep(grid, tuple(REDUCED)) for grid in ((2, 2), (1, 2), (2, 1), (2, 3), (1, 4), (4, 1))),
    ],
    ids=str,
)
def test_what_is_partial_is_reduced_first(
    grid: tuple[int, int], functions: tuple[str, ...]
) -> None:
    for found in world.run(grid[0] * grid[1], _differences, *grid, functions):
        assert len(found) == len(MODULES) * len(functions) * len(PLACED)
        refused = {case for case, said in found.items() if "redistribute it to" in said}
        assert all(case.startswith("own, Local2D") for case in refused)
        assert not {case: said for case, said in found.items() if said and case not in refused}


class Product(nn.Module):
    """By a matrix of its own, over features that a Colwise2D before it splits."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 12 * 5).view(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def _of_split_features(kind: str, rows: int, columns: int) -> float:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    closing: nn.Module = Product() if kind == "own" else nn.Linear(12, 5)
    reference = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), closing).double()
    model = copy.deepcopy(reference)
    plan = {"0": Colwise2D(), "2": Replicate(input_layouts=Shard(-1))}
    parallelize_module(model, mesh, plan)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    y, wanted = model(distribute_tensor(x, mesh, (Shard(0), dt.Replicate()))), reference(x)
    mine = wanted.chunk(rows)[mesh.get_local_rank("tp_row")]
    # Every column sees all that its row gives.
    torch.tanh(y).square().sum().backward()
    torch.tanh(wanted).square().sum().backward()
    pairs = [(y, mine)]
    pairs += [
        (whole(a.grad), b.grad)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kind", ["own", "Linear"])
@pytest.mark.parametrize("grid", [(2, 2), (1, 4), deep((4, 1))])
def test_a_sum_does_not_leave_as_its_terms(kind: str, grid: tuple[int, int]) -> None:
    """A local output was a rank's term of it, in silence."""
    assert max(world.run(grid[0] * grid[1], _of_split_features, kind, *grid)) < 1e-10
