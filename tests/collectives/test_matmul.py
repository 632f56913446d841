"""Every algorithm against the plain reference, and against every other, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
import world
from marks import deep
from models import grid_mesh
from torch import Tensor

from torch_tp2d.mesh.grid import Grid
from torch_tp2d.ops.matmul import ALGORITHMS, Call, Cut, LinearOp, linear2d

GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), deep(2, 4), (3, 3)]
SIZES = [(12, 24, 36), (7, 5, 11), (3, 2, 2)]
"""Tokens, features in, features out: even, odd, and smaller than the grid."""
TOLERANCE = 1e-12


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _block(x: Tensor, grid: Grid, row_dim: int | None, col_dim: int | None) -> Tensor:
    if row_dim is not None:
        x = x.split(grid.row.split(x.shape[row_dim]), row_dim)[grid.row.index]
    if col_dim is not None:
        x = x.split(grid.col.split(x.shape[col_dim]), col_dim)[grid.col.index]
    return x


def _products(rows: int, columns: int, sizes: tuple[int, int, int]) -> dict[str, float]:
    """The largest relative difference of each algorithm from one device, all results taken."""
    m, k, n = sizes
    grid = Grid(grid_mesh(rows, columns))
    x, weight, bias = _random(m, k, seed=0), _random(n, k, seed=1), _random(n, seed=2)
    grad = _random(m, n, seed=3)
    wanted = reference.linear(x, weight, bias, grad)
    worst = {}
    for name, algorithm in ALGORITHMS.items():
        if algorithm.SQUARE and rows != columns:
            continue
        for gathers in (True, False):
            for transposed in (False, True):
                for keep in (False, True):
                    p, q = (k, n) if gathers else (n, k)
                    op = LinearOp(
                        algorithm, Cut(grid.row, grid.col, p, q), gathers, transposed, keep
                    )
                    found = _one(op, grid, x, weight, bias, grad)
                    for kind, ours, theirs in zip(
                        ("y", "dx", "dw", "db"), found, wanted, strict=True
                    ):
                        key = f"{name} {kind} {gathers=} {transposed=} {keep=}"
                        scale = theirs.norm().item()
                        worst[key] = (ours - theirs).norm().item() / scale
    return worst


def _one(op: LinearOp, grid: Grid, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Any:
    """Forward and backward of one op, gathered to whole tensors."""
    whole = op.algorithm.WHOLE
    weight_dims = (1, 0) if op.gathers_input else (0, 1)
    local_w = _block(weight, grid, *weight_dims)
    local_w = local_w.t() if op.transposed else local_w
    local_w = local_w.clone(memory_format=torch.contiguous_format).requires_grad_()
    local_b = _block(bias, grid, None, 0).clone().requires_grad_()
    x_whole = op.gathers_input and whole
    y_partial = not op.gathers_input and whole
    local_x = _block(x, grid, 0, None if x_whole else 1).clone().requires_grad_()
    local_g = _block(grad, grid, 0, None if y_partial else 1)
    y = linear2d(local_x, local_w, local_b, Call(op, context=grid.context))
    y.backward(local_g)
    dw = local_w.grad.t() if op.transposed else local_w.grad
    assert local_w.grad.is_contiguous()
    return (
        _collect(y.detach(), grid, x.shape[0], grad.shape[1], partial=y_partial),
        _collect(local_x.grad, grid, *x.shape, partial=x_whole),
        _collect(dw, grid, *weight.shape, swapped=op.gathers_input),
        _vector(local_b.grad, grid, bias.shape[0]),
    )


def _collect(
    block: Tensor, grid: Grid, rows: int, columns: int, partial: bool = False, swapped: bool = False
) -> Tensor:
    """The whole matrix of which every rank holds a block (or, along tp_col, a partial sum)."""
    whole = block.new_zeros(rows, columns)
    on_row, on_col = (grid.col, grid.row) if swapped else (grid.row, grid.col)
    row_sizes, col_sizes = on_row.split(rows), on_col.split(columns)
    top = sum(row_sizes[: on_row.index])
    left = 0 if partial else sum(col_sizes[: on_col.index])
    whole[top : top + block.shape[0], left : left + block.shape[1]] = block
    torch.distributed.all_reduce(whole)
    return whole


def _vector(block: Tensor, grid: Grid, size: int) -> Tensor:
    """The bias's gradient, which has to be the same on every row."""
    whole = block.new_zeros(size)
    start = sum(grid.col.split(size)[: grid.col.index])
    whole[start : start + block.shape[0]] = block
    torch.distributed.all_reduce(whole)
    return whole / grid.row.size


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_every_algorithm_equals_one_device(rows: int, columns: int) -> None:
    for sizes in SIZES:
        for worst in world.run(rows * columns, _products, rows, columns, sizes):
            bad = {key: value for key, value in worst.items() if not value < TOLERANCE}
            assert not bad, f"{rows}x{columns}, sizes {sizes}: {bad}"


def _every_algorithm_ran() -> set[str]:
    return {key.split()[0] for key in _products(2, 2, (4, 4, 4))}


def test_no_algorithm_is_left_out_on_a_square_grid() -> None:
    assert world.run(4, _every_algorithm_ran)[0] == set(ALGORITHMS)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", [reference.bmr, reference.cannon])
def test_the_reference_itself(n: int, algorithm: Any) -> None:
    a, b = _random(7, 5, seed=0), _random(5, 11, seed=1)
    blocks = algorithm(reference.scatter(a, n, n), reference.scatter(b, n, n))
    torch.testing.assert_close(reference.gather(blocks), a @ b)


def _empty_row() -> None:
    """A grid row without tokens still takes part in every transfer along tp_row."""
    grid = Grid(grid_mesh(2, 2))
    for name, algorithm in ALGORITHMS.items():
        for gathers in (True, False):
            k, n = 5, 7
            x, weight = _random(1, k, seed=0), _random(n, k, seed=1)
            bias, grad = _random(n, seed=2), _random(1, n, seed=3)
            p, q = (k, n) if gathers else (n, k)
            op = LinearOp(algorithm, Cut(grid.row, grid.col, p, q), gathers, False, False)
            found = _one(op, grid, x, weight, bias, grad)
            for ours, theirs in zip(found, reference.linear(x, weight, bias, grad), strict=True):
                torch.testing.assert_close(ours, theirs, msg=name)


def test_a_row_without_tokens() -> None:
    world.run(4, _empty_row)
