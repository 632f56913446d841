"""Products by every algorithm, against one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support import reference
from support.models import grid_mesh, noise
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.ops.matmul import ALGORITHMS, Call, Cut, LinearOp, linear2d

SIZES = [(12, 24, 36), (7, 5, 11), (3, 2, 2)]
"""Tokens, features in, features out: even, odd, and smaller than the grid."""


def block_of(x: Tensor, grid: Grid, row_dim: int | None, col_dim: int | None) -> Tensor:
    if row_dim is not None:
        x = x.split(grid.row.split(x.shape[row_dim]), row_dim)[grid.row.index]
    if col_dim is not None:
        x = x.split(grid.col.split(x.shape[col_dim]), col_dim)[grid.col.index]
    return x


def products(rows: int, columns: int, sizes: tuple[int, int, int]) -> dict[str, float]:
    """The largest relative difference of each algorithm from one device, all results taken."""
    m, k, n = sizes
    grid = Grid(grid_mesh(rows, columns))
    x, weight, bias = noise(m, k, seed=0), noise(n, k, seed=1), noise(n, seed=2)
    grad = noise(m, n, seed=3)
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
                    found = product_of(op, grid, x, weight, bias, grad)
                    for kind, ours, theirs in zip(
                        ("y", "dx", "dw", "db"), found, wanted, strict=True
                    ):
                        key = f"{name} {kind} {gathers=} {transposed=} {keep=}"
                        scale = theirs.norm().item()
                        worst[key] = (ours - theirs).norm().item() / scale
    return worst


def product_of(
    op: LinearOp, grid: Grid, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor
) -> Any:
    """Forward and backward of one op, gathered to whole tensors."""
    whole = op.algorithm.WHOLE
    weight_dims = (1, 0) if op.gathers_input else (0, 1)
    local_w = block_of(weight, grid, *weight_dims)
    local_w = local_w.t() if op.transposed else local_w
    local_w = local_w.clone(memory_format=torch.contiguous_format).requires_grad_()
    local_b = block_of(bias, grid, None, 0).clone().requires_grad_()
    x_whole = op.gathers_input and whole
    y_partial = not op.gathers_input and whole
    local_x = block_of(x, grid, 0, None if x_whole else 1).clone().requires_grad_()
    local_g = block_of(grad, grid, 0, None if y_partial else 1)
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
