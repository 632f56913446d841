"""The collectives: each against what one process computes, and each gradient against autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import torch_tp2d
from support import world
from support.device import DEVICE
from support.models import grid_mesh
from support.moves import GRIDS, mine_of, move_gradients, raw_collectives, whole_of
from torch_tp2d import comm
from torch_tp2d.comm import groups
from torch_tp2d.comm.transport import GLOO
from torch_tp2d.mesh.extents import ask_sizes
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.mesh.layouts import TP_COL, TP_ROW


@pytest.mark.parametrize(
    "piece,copies_from",
    [(comm.axis.PIECE_BYTES, comm.axis.COPIES_FROM), (16, 2)],
    ids=["whole", "cut"],
)
@pytest.mark.parametrize("rows,columns", GRIDS)
def test_raw_collectives_take_uneven_and_empty_shards(
    rows: int, columns: int, piece: int, copies_from: int
) -> None:
    world.run(rows * columns, raw_collectives, rows, columns, piece, copies_from)


def _pieces_by_rate() -> list[int]:
    grid = Grid(grid_mesh(2, 2))
    comm.axis.PIECE_BYTES, comm.axis.FAST_PIECE_BYTES, shards = 64, 128, (16, 16)
    comm.set_link_rate(12.5e6, grid.row)
    comm.set_link_rate(125e6, grid.col)
    whole = whole_of(32, 4)
    counted = []
    for axis in (grid.row, grid.col):
        with torch_tp2d.CommCounter(grid.mesh) as counter:
            gathered = comm.all_gather(mine_of(whole, 0, axis), 0, shards, axis).wait()
        assert torch.equal(gathered, whole)
        counted += [sum(counter.calls.values()), len(axis.rounds(shards, 4, whole.dtype))]
    return counted


@pytest.mark.gloo
def test_a_fast_link_takes_larger_pieces() -> None:
    for counted in world.run(4, _pieces_by_rate):
        assert counted == [8, 8, 4, 4]


@pytest.mark.parametrize("ranks,pieces", [(2, 1), (4, 1), (8, 2), (16, 3)])
def test_an_exchange_is_split_by_what_comes_in_at_once(ranks: int, pieces: int) -> None:
    """Exchanges of 128 KB with each rank went in one piece, whatever the number of ranks.

    On 8 ranks they took up to 1.5 times as long as what they move.
    """
    axis = comm.Axis(TP_ROW, (ranks,), 0, "", GLOO)
    assert axis.pieces(2**15, torch.float32) == 1
    assert axis.pieces(2**15, torch.float32, exchanged=True) == pieces
    assert len(axis.rounds([2**10] * ranks, 2**5, torch.float32)) == pieces
    comm.set_link_rate(125e6, axis)
    assert axis.pieces(2**15, torch.float32, exchanged=True) == -(-pieces // 2)
    # In a compiled graph shards are gathered, each rank from one neighbour.
    assert len(axis.rounds([2**10] * ranks, 2**5, torch.float32, exchanged=False)) == 1


@pytest.mark.parametrize(
    "ranks,elements,copied",
    [(4, 2**9, False), (5, 2**9, True), (8, 2**11, True), (8, 2**13, False)],
)
def test_a_small_sum_along_many_ranks_is_of_copies(ranks: int, elements: int, copied: bool) -> None:
    axis = comm.Axis(TP_ROW, (ranks,), 0, "", GLOO)
    assert axis.copies_terms(elements, torch.float32) == copied
    assert not comm.Axis(TP_ROW, (ranks,), 0, "", comm.NCCL).copies_terms(elements, torch.float32)


def _sum_of_copies() -> tuple[Tensor, dict[tuple[str, str], int]]:
    grid = Grid(grid_mesh(5, 1))
    # Sums of such terms depend on their order.
    part = whole_of(seed=dist.get_rank()) * 10.0 ** (3 * dist.get_rank())
    with torch_tp2d.CommCounter(grid.mesh) as counter:
        moving = comm.all_reduce(part, grid.row)
        part.zero_()
        total = moving.wait()
    return total, dict(counter.bytes)


@pytest.mark.gloo
def test_a_sum_of_copies_is_the_same_on_every_rank() -> None:
    """Each has all terms and adds them up itself; parameters would drift apart by the last bits."""
    first, *others = world.run(5, _sum_of_copies)
    for total, received in others:
        assert torch.equal(total, first[0])
        assert received == first[1] == {(TP_ROW, "all_to_all_single"): 4 * 7 * 5 * 8}


def _of_dtensors() -> None:
    mesh = grid_mesh(1, 2)[TP_COL]
    x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
    with CommDebugMode() as seen, torch_tp2d.CommCounter(grid_mesh(1, 2)) as counter:
        first = x[0].to_local()
    assert first.tolist() == [1, 1, 1]
    assert sum(seen.get_comm_counts().values()) == sum(counter.calls.values()) == 1
    assert counter.bytes == {(TP_COL, "all_gather_into_tensor"): 4 * 3 * 4}


def test_what_an_operator_of_dtensors_moves_is_counted() -> None:
    """It was not: a stock plan whose user indexes a sharded output seemed to move less."""
    world.run(2, _of_dtensors)


def _exact_reduce_scatter() -> None:
    """torch's own gloo reduce-scatter, under the flag that turns the exchange off."""
    grid = Grid(grid_mesh(2, 2))
    plain = comm.Axis("plain", grid.col.parts, grid.col.index, grid.col.group, comm.NCCL)
    for size in (6, 7, 1):
        part = whole_of(size, 3, seed=dist.get_rank())
        ours = comm.reduce_scatter(part, 0, grid.col.split(size), grid.col).wait()
        theirs = comm.reduce_scatter(part, 0, plain.split(size), plain).wait()
        torch.testing.assert_close(ours, theirs)


def test_exchange_and_reduce_scatter_agree() -> None:
    world.run(4, _exact_reduce_scatter)


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_move_and_its_gradient(rows: int, columns: int) -> None:
    world.run(rows * columns, move_gradients, rows, columns)


def _compiled() -> None:
    grid = Grid(grid_mesh(2, 2))
    sizes = {0: grid.col.split(7)}

    def there_and_back(x: Tensor) -> Tensor:
        whole = comm.move(x * 2, grid.col, Shard(0), Replicate(), sizes, partial_grad=True)
        return comm.move(whole * whole, grid.col, Partial(), Shard(0), sizes)

    x = mine_of(whole_of(), 0, grid.col).clone().requires_grad_()
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


@pytest.mark.gloo
def test_each_axis_has_one_worker_on_gloo() -> None:
    """Two workers of one group freed a string twice (``groups.py``), once in some hundred steps.

    The heap was corrupted long before the process died of it, so what is checked is the worker,
    not the crash; run under an address sanitizer the double free is what it reports.
    """
    world.run(4, _workers)


def _asked_beside_a_gather() -> list[int]:
    """Sizes asked for while this rank's gather waits for one of the others that comes later."""
    row, rank = Grid(grid_mesh(2, 1)).row, dist.get_rank()
    x = torch.full((3,), float(rank))
    moving = comm.all_gather(x, 0, (3, 3), row) if rank == 0 else None
    sizes = ask_sizes(rank + 5, row, x.device).wait().tolist()
    moving = comm.all_gather(x, 0, (3, 3), row) if moving is None else moving
    assert moving.wait().tolist() == [0.0] * 3 + [1.0] * 3
    return sizes


@pytest.mark.gloo
def test_a_question_does_not_wait_for_what_is_gathered() -> None:
    """It was sent after the weights gathered ahead, on the same worker, and forward waited for all.

    A third of the forward of a model without an embedding on 4 x 1, at 200 Mbit/s.
    """
    assert world.run(2, _asked_beside_a_gather) == [[5, 6]] * 2


def _groups_after_a_question() -> int:
    """One stage of two asks for sizes; then all ranks make the groups of another mesh."""
    names = ("stage", "tp_row", "tp_col")
    stages = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=names)
    col = Grid(stages["tp_row", "tp_col"]).col
    if dist.get_rank() < 2:
        ask_sizes(3, col, torch.device("cpu")).wait()
    return Grid(grid_mesh(2, 2)).row.size


def test_ranks_that_asked_and_ranks_that_did_not_make_groups_together() -> None:
    """torch names a group by how many the process has, and one was made for the first question.

    The others waited for a group of another name until the timeout.
    """
    assert world.run(4, _groups_after_a_question, fresh=True) == [2] * 4


def test_the_interface_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts our groups listened on the loopback interface, and nobody could connect."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        groups._devices_of(None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(groups._devices_of(None)) == 2


def _threads_that_poll() -> list[int]:
    """How many before a grid is made, with one, and with three."""
    counts = []
    for more in (0, 1, 2):
        for _ in range(more):
            Grid(grid_mesh(2, 2))
        names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
        counts.append(sum("tcp_loop" in name for name in names))
    return counts


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_groups_share_the_thread_that_looks_for_what_to_send() -> None:
    """Each group had one, which woke a hundred times a second, used or not."""
    for before, one, three in world.run(4, _threads_that_poll, fresh=True):
        assert one <= before + 1 and three == one
