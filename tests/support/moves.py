"""Collectives and moves of uneven shards, against what one process computes."""

from __future__ import annotations

import functools
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from support.models import grid_mesh
from torch_tp2d import comm
from torch_tp2d.mesh.grid import Grid

GRIDS = [(1, 3), (2, 2), (3, 2)]


def whole_of(rows: int = 7, columns: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def mine_of(whole: Tensor, dim: int, axis: comm.Axis) -> Tensor:
    return whole.split(axis.split(whole.shape[dim]), dim)[axis.index]


def raw_collectives(rows: int, columns: int, piece: int, copies_from: int) -> None:
    comm.axis.PIECE_BYTES, comm.axis.COPIES_FROM = piece, copies_from
    grid = Grid(grid_mesh(rows, columns))
    for axis, dim, size in product((grid.row, grid.col), (0, 1), (7, 6, 2, 1)):
        whole = whole_of(size, 5) if dim == 0 else whole_of(5, size)
        sizes = axis.split(size)
        shard = mine_of(whole, dim, axis)
        assert torch.equal(comm.all_gather(shard, dim, sizes, axis).wait(), whole)

        parts = [whole_of(*whole.shape, seed=rank) for rank in range(axis.size)]
        total = functools.reduce(torch.add, parts)
        part = parts[axis.index]
        torch.testing.assert_close(
            comm.reduce_scatter(part, dim, sizes, axis).wait(), mine_of(total, dim, axis)
        )
        torch.testing.assert_close(comm.all_reduce(part, axis).wait(), total)
        largest = comm.all_reduce(part, axis, "max").wait()
        assert torch.equal(largest, functools.reduce(torch.maximum, parts))
        if dim == 0:
            theirs = comm.gather_others(shard, sizes, axis).wait()
            blocks = [b for r, b in enumerate(whole.split(sizes)) if r != axis.index]
            assert torch.equal(theirs, torch.cat(blocks) if blocks else whole[:0])
            sent = [b for r, b in enumerate(part.split(sizes)) if r != axis.index]
            summed = comm.reduce_from_others(
                torch.cat(sent) if sent else part[:0], sizes, axis
            ).wait()
            torch.testing.assert_close(summed, mine_of(total, 0, axis) - mine_of(part, 0, axis))
        other = 1 - dim
        moved = comm.all_to_all(shard, other, axis.split(5), dim, sizes, axis).wait()
        assert torch.equal(moved, mine_of(whole, other, axis))

        last = axis.size - 1
        block = comm.broadcast(part, None, part.shape, last, axis).wait()
        assert torch.equal(block, parts[last])
        summed = comm.reduce(part, last, axis).wait()
        if axis.index == last:
            torch.testing.assert_close(summed, total)
        else:
            assert summed.numel() == 0
        for steps in (-1, 0, 1, 2):
            there = (axis.index + steps) % axis.size
            rolled = comm.shift(shard, steps, axis, dim, sizes).wait()
            assert torch.equal(rolled, whole.split(sizes, dim)[there])


def move_gradients(rows: int, columns: int) -> None:
    """d(sum of f(result))/d(source), against the same function of the whole tensor."""
    grid = Grid(grid_mesh(rows, columns))
    pairs = [
        (Shard(0), Replicate(), False),
        (Shard(0), Replicate(), True),
        (Replicate(), Shard(1), False),
        (Shard(0), Shard(1), False),
        (Partial(), Shard(0), False),
        (Partial(), Replicate(), False),
        (Partial(), Replicate(), True),
        (Replicate(), Replicate(), True),
    ]
    for axis, (src, dst, share) in product((grid.row, grid.col), pairs):
        whole, weights = whole_of(7, 5), whole_of(7, 5, seed=9)
        sizes = {0: axis.split(7), 1: axis.split(5)}
        if isinstance(src, Shard):
            x = mine_of(whole, src.dim, axis).clone()
        elif isinstance(src, Partial):
            x = whole * (axis.index + 1) / sum(range(1, axis.size + 1))
        else:
            x = whole.clone()
        x.requires_grad_()
        y = comm.move(x, axis, src, dst, sizes, partial_grad=share)
        wanted = mine_of(whole, dst.dim, axis) if isinstance(dst, Shard) else whole
        torch.testing.assert_close(y, wanted)
        # The loss is sum(weights * y^2) over the whole tensor. With `share`, a rank computes a
        # part of it on its copy.
        grad = 2 * weights * whole
        grad = mine_of(grad, dst.dim, axis) if isinstance(dst, Shard) else grad
        part = (axis.index + 1) / sum(range(1, axis.size + 1))
        y.backward(grad * part if share and axis.size > 1 else grad)
        wanted_grad = 2 * weights * whole
        if isinstance(src, Shard):
            wanted_grad = mine_of(wanted_grad, src.dim, axis)
        torch.testing.assert_close(x.grad, wanted_grad)
