"""A compiled block with ``overlap_options()``: the same numbers, and one order on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.fx import GraphModule

from support import world
from support.compiled import Recorder, check_one_order, recorded
from support.marks import deep, from_torch
from support.models import grid_mesh, parallelize, plan_2d, train_beside, transformer
from torch_tp2d.integrations import inductor

TOLERANCE = 1e-11


class _Overlapped(Recorder):
    """Runs graphs in the order that Inductor would be given."""

    def record(self, graph: GraphModule, inputs: Any) -> Any:
        inductor.reorder(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return super().record(graph, inputs)


def _overlapped(*args: Any, **options: Any) -> tuple[float, list[str]]:
    return recorded(*args, recorder_of=_Overlapped, **options)


@pytest.mark.gloo
@pytest.mark.parametrize("rows,columns", [(4, 1), deep(2, 2)])
def test_order_of_events(rows: int, columns: int) -> None:
    """See ``test_rounds_in_the_graph`` in ``test_compile.py``, of which this is another order.

    Five weights (the fifth and the last in three pieces) are on their way before the first product
    (``GGGGGGG.x``), on 2 x 2 behind the tokens that it needs (``Ggg``), and the last before the
    second. In backward the sums before the last eight are awaited where others start, and those at
    the end.
    """
    wanted = {
        (4, 1): ["GGGGGGG.xGGG.x.x.x...x...x", "xSSSRxxSSSRxx.S.Rxx.S.Rxx.Sxx.S.Rx........"],
        (2, 2): [
            "GggGGGGGG..x.xGGG.x.x.xsxs..gg....x.x...xsxs..",
            "gg.x.xSSSRxxsxsxSSSR..gg.x.x.S.Rxx.S.Rxx.Sxx.sx.sx.S.R........",
        ],
    }
    for differs, graphs in world.run(4, _overlapped, rows, columns, (4, 8, 24, 48), 2 * 2 * 24 * 8):
        assert differs < TOLERANCE
        assert graphs == wanted[rows, columns]


def _uneven(
    rows: int, columns: int, sizes: tuple[int, int, int, int], again: bool
) -> tuple[float, list[str]]:
    return _overlapped(rows, columns, sizes, 2 * 10 * 8, reshard_after_forward=again)


@pytest.mark.parametrize(
    "rows,columns,batch,sequence",
    [deep(4, 1, 3, 5), deep(3, 1, 2, 4), deep(2, 2, 1, 3), deep(2, 3, 3, 7), deep(1, 4, 3, 5)],
)
@pytest.mark.parametrize("again", [False, True])
def test_uneven_sizes(rows: int, columns: int, batch: int, sequence: int, again: bool) -> None:
    """Some ranks have no tokens. All that send to each other start the same, in the same order.

    Where weights are gathered again, backward has gathers to move as well.
    """
    sizes = batch, sequence, 10, 14
    answers = world.run(rows * columns, _uneven, rows, columns, sizes, again)
    assert max(differs for differs, _ in answers) < TOLERANCE
    check_one_order([graphs for _, graphs in answers], columns)


def _by_inductor(rows: int, columns: int) -> float:
    reference = transformer(8, n_layers=1)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(rows, columns), plan_2d())
    for layer in model.layers:
        layer.compile(fullgraph=True, options=inductor.overlap_options())
    return train_beside(reference, model, 8, 4, 8)


@pytest.mark.deep
@from_torch("2.13", "Inductor's backward of attention in fp64 raises, on one device too")
@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=str)
def test_inductor_takes_the_order(grid: tuple[int, int]) -> None:
    rows, columns = grid
    assert max(world.run(rows * columns, _by_inductor, rows, columns)) < TOLERANCE
