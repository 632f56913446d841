"""Every algorithm against the plain reference, and against every other, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

import torch_tp2d
from support import reference, world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, noise
from support.products import SIZES, product_of, products
from torch_tp2d import Colwise2D, Rowwise2D
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.ops.matmul import ALGORITHMS, Cut, LinearOp
from torch_tp2d.runtime.deferred import Gathering

GRIDS = [(1, 1), (1, 2), (2, 1), deep(2, 2), deep(1, 4), deep(4, 1), (2, 3), deep(2, 4), deep(3, 3)]
TOLERANCE = 1e-12


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_every_algorithm_equals_one_device(rows: int, columns: int) -> None:
    for sizes in SIZES:
        for worst in world.run(rows * columns, products, rows, columns, sizes):
            bad = {key: value for key, value in worst.items() if not value < TOLERANCE}
            assert not bad, f"{rows}x{columns}, sizes {sizes}: {bad}"


def _every_algorithm_ran() -> set[str]:
    return {key.split()[0] for key in products(2, 2, (4, 4, 4))}


def test_no_algorithm_is_left_out_on_a_square_grid() -> None:
    assert world.run(4, _every_algorithm_ran)[0] == set(ALGORITHMS)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", [reference.bmr, reference.cannon])
def test_the_reference_itself(n: int, algorithm: Any) -> None:
    a, b = noise(7, 5, seed=0), noise(5, 11, seed=1)
    blocks = algorithm(reference.scatter(a, n, n), reference.scatter(b, n, n))
    torch.testing.assert_close(reference.gather(blocks), a @ b)


def _empty_row() -> None:
    """A grid row without tokens still takes part in every transfer along tp_row."""
    grid = Grid(grid_mesh(2, 2))
    for name, algorithm in ALGORITHMS.items():
        for gathers in (True, False):
            k, n = 5, 7
            x, weight = noise(1, k, seed=0), noise(n, k, seed=1)
            bias, grad = noise(n, seed=2), noise(1, n, seed=3)
            p, q = (k, n) if gathers else (n, k)
            op = LinearOp(algorithm, Cut(grid.row, grid.col, p, q), gathers, False, False)
            found = product_of(op, grid, x, weight, bias, grad)
            for ours, theirs in zip(found, reference.linear(x, weight, bias, grad), strict=True):
                torch.testing.assert_close(ours, theirs, msg=name)


def test_a_row_without_tokens() -> None:
    world.run(4, _empty_row)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x))


@pytest.mark.parametrize("algorithm", ["collective", "pipelined"])
def test_a_gathered_input_is_not_copied(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flattening it is a view, and a view of what is still on its way was given a copy.

    Each Linear of a prepared module paid one, of the whole activation.
    """
    copied = []
    monkeypatch.setattr(Gathering, "own_value", lambda x: copied.append(x) or x.value())
    prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "": prepare,
        "up": Colwise2D(algorithm=algorithm),
        "gate": Colwise2D(algorithm=algorithm),
        "down": Rowwise2D(algorithm=algorithm, output_layouts=Shard(1)),
    }
    with fake_grid(2, 2) as mesh:
        model = torch_tp2d.parallelize_module(_Pair(), mesh, plan)
        with torch_tp2d.token_sizes(mesh, (4, 6)):
            model(torch.ones(2, 3, 8, requires_grad=True)).sum().backward()
    assert not copied
