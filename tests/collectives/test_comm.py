"""The collectives: each against what one process computes, and each gradient against autograd."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
import world
from models import grid_mesh
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_tp2d
from torch_tp2d import comm
from torch_tp2d.comm import groups
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.mesh.layouts import TP_COL, TP_ROW

GRIDS = [(1, 3), (2, 2), (3, 2)]


def _whole(rows: int = 7, columns: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _mine(whole: Tensor, dim: int, axis: comm.Axis) -> Tensor:
    return whole.split(axis.split(whole.shape[dim]), dim)[axis.index]


def _raw(rows: int, columns: int, piece: int) -> None:
    comm.axis.PIECE_BYTES = piece
    grid = Grid(grid_mesh(rows, columns))
    for axis, dim, size in product((grid.row, grid.col), (0, 1), (7, 6, 2, 1)):
        whole = _whole(size, 5) if dim == 0 else _whole(5, size)
        sizes = axis.split(size)
        shard = _mine(whole, dim, axis)
        assert torch.equal(comm.all_gather(shard, dim, sizes, axis).wait(), whole)

        parts = [_whole(*whole.shape, seed=rank) for rank in range(axis.size)]
        total = functools.reduce(torch.add, parts)
        part = parts[axis.index]
        torch.testing.assert_close(
            comm.reduce_scatter(part, dim, sizes, axis).wait(), _mine(total, dim, axis)
        )
        torch.testing.assert_close(comm.all_reduce(part, axis).wait(), total)
        if dim == 0:
            theirs = comm.gather_others(shard, sizes, axis).wait()
            blocks = [b for r, b in enumerate(whole.split(sizes)) if r != axis.index]
            assert torch.equal(theirs, torch.cat(blocks) if blocks else whole[:0])
            sent = [b for r, b in enumerate(part.split(sizes)) if r != axis.index]
            summed = comm.reduce_from_others(
                torch.cat(sent) if sent else part[:0], sizes, axis
            ).wait()
            torch.testing.assert_close(summed, _mine(total, 0, axis) - _mine(part, 0, axis))
        other = 1 - dim
        moved = comm.all_to_all(shard, other, axis.split(5), dim, sizes, axis).wait()
        assert torch.equal(moved, _mine(whole, other, axis))

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


@pytest.mark.parametrize("piece", [comm.axis.PIECE_BYTES, 16], ids=["whole", "cut"])
@pytest.mark.parametrize("rows,columns", GRIDS)
def test_raw_collectives_take_uneven_and_empty_shards(rows: int, columns: int, piece: int) -> None:
    world.run(rows * columns, _raw, rows, columns, piece)


def _pieces_by_rate() -> list[int]:
    grid = Grid(grid_mesh(2, 2))
    comm.axis.PIECE_BYTES, comm.axis.FAST_PIECE_BYTES, shards = 64, 128, (16, 16)
    comm.set_link_rate(12.5e6, grid.row)
    comm.set_link_rate(125e6, grid.col)
    whole = _whole(32, 4)
    counted = []
    for axis in (grid.row, grid.col):
        with torch_tp2d.CommCounter(grid.mesh) as counter:
            gathered = comm.all_gather(_mine(whole, 0, axis), 0, shards, axis).wait()
        assert torch.equal(gathered, whole)
        counted += [sum(counter.calls.values()), len(axis.rounds(shards, 4, whole.dtype))]
    return counted


def test_a_fast_link_takes_larger_pieces() -> None:
    for counted in world.run(4, _pieces_by_rate):
        assert counted == [8, 8, 4, 4]


def _exact_reduce_scatter() -> None:
    """torch's own gloo reduce-scatter, under the flag that turns the exchange off."""
    grid = Grid(grid_mesh(2, 2))
    plain = comm.Axis("plain", grid.col.parts, grid.col.index, grid.col.group, comm.NCCL)
    for size in (6, 7, 1):
        part = _whole(size, 3, seed=dist.get_rank())
        ours = comm.reduce_scatter(part, 0, grid.col.split(size), grid.col).wait()
        theirs = comm.reduce_scatter(part, 0, plain.split(size), plain).wait()
        torch.testing.assert_close(ours, theirs)


def test_exchange_and_reduce_scatter_agree() -> None:
    world.run(4, _exact_reduce_scatter)


def _move_gradients(rows: int, columns: int) -> None:
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
        whole, weights = _whole(7, 5), _whole(7, 5, seed=9)
        sizes = {0: axis.split(7), 1: axis.split(5)}
        if isinstance(src, Shard):
            x = _mine(whole, src.dim, axis).clone()
        elif isinstance(src, Partial):
            x = whole * (axis.index + 1) / sum(range(1, axis.size + 1))
        else:
            x = whole.clone()
        x.requires_grad_()
        y = comm.move(x, axis, src, dst, sizes, partial_grad=share)
        wanted = _mine(whole, dst.dim, axis) if isinstance(dst, Shard) else whole
        torch.testing.assert_close(y, wanted)
        # The loss is sum(weights * y^2) over the whole tensor. With `share`, a rank computes a
        # part of it on its copy.
        grad = 2 * weights * whole
        grad = _mine(grad, dst.dim, axis) if isinstance(dst, Shard) else grad
        part = (axis.index + 1) / sum(range(1, axis.size + 1))
        y.backward(grad * part if share and axis.size > 1 else grad)
        wanted_grad = 2 * weights * whole
        if isinstance(src, Shard):
            wanted_grad = _mine(wanted_grad, src.dim, axis)
        torch.testing.assert_close(x.grad, wanted_grad)


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_move_and_its_gradient(rows: int, columns: int) -> None:
    world.run(rows * columns, _move_gradients, rows, columns)


def _compiled() -> None:
    grid = Grid(grid_mesh(2, 2))
    sizes = {0: grid.col.split(7)}

    def there_and_back(x: Tensor) -> Tensor:
        whole = comm.move(x * 2, grid.col, Shard(0), Replicate(), sizes, partial_grad=True)
        return comm.move(whole * whole, grid.col, Partial(), Shard(0), sizes)

    x = _mine(_whole(), 0, grid.col).clone().requires_grad_()
    plain = there_and_back(x)
    plain.sum().backward()
    grad, x.grad = x.grad, None
    traced = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(x)
    traced.sum().backward()
    torch.testing.assert_close(traced, plain)
    torch.testing.assert_close(x.grad, grad)


def test_collectives_trace_into_one_graph() -> None:
    world.run(4, _compiled)


def _workers() -> None:
    grid, again = Grid(grid_mesh(2, 2)), Grid(grid_mesh(2, 2))
    flat = Grid(grid.mesh, (TP_ROW, TP_COL))
    assert (grid.row.group, grid.col.group) == (again.row.group, again.col.group)
    for axis in (grid.row, grid.col, flat.col):
        group = dist.distributed_c10d._resolve_process_group(axis.group)
        assert group._get_backend(torch.device("cpu")).options._threads == 1
    # Transfers of several groups under way at once, each answered by its own group.
    mine = torch.full((4,), float(dist.get_rank()))
    pending = [
        comm.all_gather(mine + step, 0, (4,) * axis.size, axis)
        for step in range(50)
        for axis in (grid.row, grid.col, flat.col)
    ]
    for index, transfer in enumerate(pending):
        whole = transfer.wait()
        assert whole.numel() in (8, 16) and (mine + index // 3 == whole.view(-1, 4)).all(1).any()


def test_each_axis_has_one_worker_on_gloo() -> None:
    """Two workers of one group freed a string twice (``groups.py``), once in some hundred steps.

    The heap was corrupted long before the process died of it, so what is checked is the worker,
    not the crash; run under an address sanitizer the double free is what it reports.
    """
    world.run(4, _workers)


def test_the_interface_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts our groups listened on the loopback interface, and nobody could connect."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        groups._devices()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(groups._devices()) == 2
