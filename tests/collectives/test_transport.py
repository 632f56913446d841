"""What other transports than gloo's do, on gloo processes: NCCL's ways, against one device.

Bodies of other tests are run as they are, by :func:`_off_gloo`. Any part of the suite can be:
``TP2D_TRANSPORT=nccl python -m pytest tests/models/test_transformer.py``, say. What fails then is
about gloo: sums by exchange, pieces, groups of our own, and ``"auto"`` that goes by rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from support import compiled, losses, moves, pipelined, products, stationary, world
from support.marks import deep
from support.models import EVEN, UNEVEN, grid_mesh, plan_2d, train_by, train_with_algorithm
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, comm, parallelize_module, planner
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.mesh.layouts import TP_COL, TP_ROW
from torch_tp2d.runtime.deferred import Transfer

TOLERANCE = 1e-11
GRIDS = [(2, 2), deep(4, 1), deep(1, 2), deep(3, 2)]


def _off_gloo(body: Callable[..., Any], *args: Any) -> Any:
    os.environ["TP2D_TRANSPORT"] = "nccl"
    return body(*args)


def off_gloo(ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """``world.run`` on NCCL's transport."""
    return world.run(ranks, _off_gloo, body, *args)


def _collectives() -> tuple[set[str], set[bool]]:
    """Which collectives a large sum by shards takes, and whether groups are the mesh's own."""
    mesh = grid_mesh(2, 2)
    grids = [Grid(mesh), Grid(mesh, TP_ROW), Grid(mesh, (TP_ROW, TP_COL))]
    axes = [axis for grid in grids for axis in (grid.row, grid.col) if axis.size > 1]
    assert len({axis.transport for axis in axes}) == 1
    with CommCounter(mesh) as counter:
        for axis in axes:
            extent = 2**17 * axis.size
            comm.reduce_scatter(torch.ones(extent), 0, axis.split(extent), axis).wait()
    own = {mesh.get_group(dim).group_name for dim in (0, 1)}
    return {op for _, op in counter.calls}, {axis.group in own for axis in axes[:4]}


@pytest.mark.gloo
def test_the_switch() -> None:
    assert world.run(4, _collectives) == [({"all_to_all_single"}, {False})] * 4
    assert off_gloo(4, _collectives) == [({"reduce_scatter_tensor"}, {True})] * 4


def test_a_transport_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP2D_TRANSPORT", "mpi")
    with pytest.raises(ValueError, match="TP2D_TRANSPORT is \"nccl\" or not set, not 'mpi'"):
        comm.transport_of(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows,columns", moves.GRIDS)
def test_collectives(rows: int, columns: int) -> None:
    off_gloo(rows * columns, moves.raw_collectives, rows, columns, 16, 2)
    off_gloo(rows * columns, moves.move_gradients, rows, columns)


@pytest.mark.parametrize("sizes", [products.SIZES[0], *map(deep, products.SIZES[1:])])
def test_every_algorithm(sizes: tuple[int, int, int]) -> None:
    for worst in off_gloo(4, products.products, 2, 2, sizes):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), (1, 2), deep(4, 1), deep(3, 2)])
def test_a_plan_trains_as_on_one_device(rows: int, columns: int) -> None:
    for sizes in (EVEN, UNEVEN):
        answers = off_gloo(rows * columns, train_by, plan_2d, rows, columns, sizes)
        assert max(difference for difference, _ in answers) < TOLERANCE


@pytest.mark.parametrize("algorithm", [deep("pipelined"), deep("summa"), deep("cannon")])
def test_an_algorithm_trains_as_one_device(algorithm: str) -> None:
    differences = off_gloo(4, train_with_algorithm, algorithm, 2, 2)
    assert max(differences) < TOLERANCE


def _pipelined(rows: int, columns: int) -> float:
    options: dict[str, Any]
    worst = 0.0
    for options in (
        {"touches": True},
        {"reshard_after_forward": True, "steps": ("recomputed", "inference", "stepped", "plain")},
        {"regather_input": True, "steps": ("recomputed", "plain")},
    ):
        given = {"algorithm": "pipelined", **options}
        for sizes in ((rows * 2, columns * 4, 24, 48), (rows + 1, columns * 3 + 1, 10, 14)):
            found = pipelined.beside_one_device(rows, columns, sizes, dict(given))
            worst = max(worst, found)
    return worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(4, 1), deep(1, 3)])
def test_gathered_ahead_and_summed_late(rows: int, columns: int) -> None:
    assert max(off_gloo(rows * columns, _pipelined, rows, columns)) < TOLERANCE


def _order(again: bool | None) -> tuple[str, ...]:
    pipelined.LETTERS["reduce_scatter_tensor"] = "s"
    return pipelined.order_of_events(algorithm="pipelined", reshard_after_forward=again)


def test_the_order_of_events() -> None:
    """As on gloo (``test_pipelined``), but each transfer whole.

    Both weights are gathered ahead (``GG``). A rank's own rows are multiplied while the others'
    travel, of the input (``g.x.x``, the first wait being the weight's), of its gradient
    (``gx.xx``, the last product being the weight's gradient) and of a sum (``xsx.``). The sums for
    bias and weight leave (``RS``) before the input's gradient is multiplied, and the other weight's
    is multiplied (``Rx``) and sent (``S``) as on gloo. If nothing is said, weights are gathered
    again in backward, as FSDP2 does, both at its beginning (``GgG``).
    """
    backward = {
        None: ("GgG.x.xxRS...xsxRx.S..", "GgG.x.xxRS.xsxRx...S.."),
        False: ("gx.xxRS..xsxRx.S..", "gx.xxRSxsxRx...S.."),
    }
    for again, (first, second) in backward.items():
        wanted = "Gg.g.x.xG.xsx.", first, "GGg.g.x.x.xsx.", second
        assert off_gloo(4, _order, again) == [wanted] * 4


def _regathered() -> tuple[int, int]:
    plan = partial(pipelined.plan, algorithm="pipelined")
    # The body puts another __init__ in its place, which later ones would have too.
    own = mock.patch.object(Transfer, "__init__", Transfer.__init__)
    with own, mock.patch.object(pipelined, "plan", plan):
        return pipelined.regathered()


def test_inputs_gathered_again_are_not_kept() -> None:
    """Symptom: off gloo ``regather_input`` kept the inputs that PrepareModuleInput gathers.

    Cause: there they were gathered at once, as plain tensors, of which no shard is known.
    """
    assert set(off_gloo(4, _regathered)) == {(0, 4 * 1536)}


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4)])
def test_weights_that_stay(rows: int, columns: int) -> None:
    for worst in off_gloo(rows * columns, stationary.mlps, rows, columns):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(3, 1)])
def test_losses(rows: int, columns: int) -> None:
    for found in off_gloo(rows * columns, losses.losses, rows, columns):
        bad = {case: pair for case, pair in found.items() if not losses.close(pair)}
        assert found and not bad, bad


@pytest.mark.deep
def test_a_compiled_block() -> None:
    for differs, graphs in off_gloo(4, compiled.recorded, 2, 2, (3, 7, 10, 14), 256):
        assert differs < TOLERANCE and graphs


def _sent() -> tuple[int, int, bool]:
    """Collectives in making runners, and in applying a plan; whether links were measured once."""
    planner.rates._assumed.clear()
    mesh = grid_mesh(2, 2)
    grid = Grid(mesh)
    with CommCounter(mesh) as making:
        for style in (Colwise2D(), Rowwise2D(dataflow="weight_stationary")):
            style.runner(nn.Linear(8, 8), grid)
    with CommCounter(mesh) as applying:
        for _ in range(2):
            plan = {"0": Colwise2D(input_layouts=Shard(1)), "1": Rowwise2D(output_layouts=Shard(1))}
            parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh, plan)
    gathers = sum(count for (_, op), count in applying.calls.items() if op.startswith("all_gather"))
    rates = planner.rates.known(mesh)
    return sum(making.calls.values()), gathers, rates is None


@pytest.mark.gloo
def test_a_runner_is_made_without_collectives() -> None:
    """Rates were measured in making the first that asked for them. Three gathers for each axis."""
    for made, gathers, unknown in world.run(4, _sent):
        assert (made, unknown) == (0, False) and gathers > 0
    for made, gathers, unknown in off_gloo(4, _sent):
        assert (made, gathers, unknown) == (0, 0, True)
