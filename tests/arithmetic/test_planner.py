"""What ``"auto"`` chooses, from sizes, the grid and rates; and that any choice trains alike."""

from __future__ import annotations

import copy
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, parallelize, plan_2d, relative, train_beside, transformer
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, planner
from torch_tp2d.mesh import layouts
from torch_tp2d.mesh.layouts import STATIONARY
from torch_tp2d.planner import Rates, choice
from torch_tp2d.planner.choice import LinearCase, choose_algorithm, choose_dataflow
from torch_tp2d.planner.cost import linear_traffic

SLOW = Rates(row=25e6, col=25e6, flops=2e10)
"""Links of 200 Mbit/s between CPUs."""
HIDDEN = 64


def _case(columns: int = 2, rows: int = 2, rule: Any = layouts.COLWISE, **args: Any) -> LinearCase:
    stream, features = (Shard(0), Shard(1)), (Shard(0), Shard(-1))
    takes, gives = (stream, features) if rule is layouts.COLWISE else (features, stream)
    given = {"in_features": 512, "out_features": 512}
    return LinearCase(rule, takes, gives, rows=rows, columns=columns, **{**given, **args})


@pytest.mark.parametrize("rule", [layouts.COLWISE, layouts.ROWWISE])
@pytest.mark.parametrize("backward", [False, True])
def test_few_tokens_move_instead_of_the_weight(rule: Any, backward: bool) -> None:
    case = _case(rule=rule)
    chosen = [choose_dataflow(case, tokens, 4, SLOW, backward=backward) for tokens in (1, 16, 4096)]
    assert chosen == [STATIONARY, STATIONARY, rule.dataflow]


def test_a_weight_that_never_moves_is_left_where_it_is() -> None:
    """On one row every dataflow keeps the weight; the style's own is the plain one."""
    for tokens in (1, 4096):
        case = _case(rows=1, columns=4)
        assert choose_dataflow(case, tokens, 4, SLOW, backward=True) == "output_stationary"


def test_the_slower_axis_decides() -> None:
    """Weights move along tp_row: a fast tp_row takes them, a slow one does not."""
    case, tokens = _case(), 192
    fast_row, slow_row = SLOW._replace(row=math.inf), SLOW._replace(row=2.5e6)
    assert choose_dataflow(case, tokens, 4, fast_row, backward=True) == "output_stationary"
    assert choose_dataflow(case, tokens, 4, slow_row, backward=True) == STATIONARY


def test_rounds_pay_where_the_link_is_slow() -> None:
    assert choose_algorithm(4, True, SLOW) == "pipelined"
    assert choose_algorithm(4, True, None) == "pipelined"
    assert choose_algorithm(4, True, Rates(5e9, 5e9, 1e10)) == "collective"
    # One slow axis is reason enough.
    assert choose_algorithm(4, True, Rates(5e9, 25e6, 1e10)) == "pipelined"
    assert choose_algorithm(4, False, SLOW) == "pipelined"
    assert choose_algorithm(1, True, SLOW) == "collective"


def _measured() -> tuple[Any, bool]:
    planner.rates._assumed.clear()
    mesh = grid_mesh(2, 2)
    linear = nn.Linear(8, 8)
    torch_tp2d.parallelize_module(linear, mesh, Colwise2D())
    runner: Any = linear._tp2d
    again = planner.rates.measured(mesh, runner.grid.row, runner.grid.col)
    return tuple(runner.rates), again is runner.rates


@pytest.mark.gloo
def test_rates_are_measured_once_and_agreed_on() -> None:
    answers = world.run(4, _measured)
    assert len(set(answers)) == 1
    rates, once = answers[0]
    assert once and all(0 < rate < math.inf for rate in rates)


def _named() -> str:
    planner.assume(SLOW)
    linear = nn.Linear(8, 8)
    torch_tp2d.parallelize_module(linear, grid_mesh(2, 1), Colwise2D(algorithm="summa"))
    return type(linear._tp2d).__name__


def test_a_named_algorithm_is_what_runs() -> None:
    """It is a way of moving the weight: ``auto`` must not choose the dataflow that moves none."""
    assert set(world.run(2, _named)) == {"LinearRunner"}


def _trained(rows: int, columns: int, sizes: tuple[int, int, int], plan: Any) -> float:
    planner.assume(SLOW)
    choice.ADVANTAGE = math.inf
    size, sequence, vocab = sizes
    reference = transformer(vocab)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(rows, columns), plan())
    worst = train_beside(reference, model, vocab, size, sequence)
    assert set(model.layers[0].attention.wq._tp2d.chosen.values()) == {STATIONARY}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(3, 2), deep(4, 1), deep(1, 4), deep(2, 4)])
def test_a_plan_trains_as_on_one_device_if_no_weight_moves(rows: int, columns: int) -> None:
    """Uneven tokens, in the tutorial's plan: what is chosen where tokens are few."""
    sizes = (3, 13, 33)
    assert max(world.run(rows * columns, _trained, rows, columns, sizes, plan_2d)) < 1e-11


def _decoded() -> tuple[float, int, int]:
    """One token through an MLP, chosen for; what it differs by, and bytes by either dataflow."""
    planner.assume(SLOW)
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 96), nn.Linear(96, 32)).double()
    moved, differs = [], 0.0
    for dataflow in ("auto", None):
        style = {} if dataflow is None else {"dataflow": dataflow}
        plan = {
            "0": Rowwise2D(output_layouts=Replicate()),
            "1": Colwise2D(**(style or {"dataflow": "output_stationary"})),
            "2": Rowwise2D(**(style or {"dataflow": "input_stationary"}), use_local_output=False),
        }
        model = copy.deepcopy(one)
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids = torch.tensor([[3], [5]])
        for prompt in (torch.arange(8).expand(2, 8).repeat(1, 64), ids):
            with torch.no_grad(), CommCounter(mesh) as counted:
                y = model(prompt)
            differs = max(differs, relative(y.full_tensor(), one(prompt)))
        moved.append(counted.total_bytes)
    return differs, moved[0], moved[1]


def test_it_changes_between_a_prompt_and_a_token() -> None:
    for differs, chosen, own in world.run(4, _decoded):
        assert differs < 1e-12
        assert 4 * chosen < own


def _half_moves(
    inner: tuple[int, int], tokens: int, grid: tuple[int, int], keep_weight: bool
) -> float:
    """Elements that half of a block receives for hidden size ``HIDDEN``, forward and backward.

    Args:
        inner: features that its Colwise2D gives and that its Rowwise2D takes, by hidden size.
    """
    stream, split = (Shard(0), Shard(1)), (Shard(0), Shard(-1))
    given = {
        "tokens": tokens,
        "rows": grid[0],
        "columns": grid[1],
        "keep_weight": keep_weight,
    }
    up, down = layouts.COLWISE, layouts.ROWWISE
    return sum(
        linear_traffic(
            rule,
            rule.dataflow,
            takes=takes,
            gives=gives,
            in_features=ins * HIDDEN,
            out_features=outs * HIDDEN,
            **given,
        ).total
        for rule, takes, gives, ins, outs in (
            (up, stream, split, 1, inner[0]),
            (down, split, stream, inner[1], 1),
        )
    )


@pytest.mark.parametrize("keep_weight", [True, False])
def test_a_grid_for_each_half_of_a_block_would_save_little(keep_weight: bool) -> None:
    """Why ``suggest`` gives a model one grid: with two a block moves at most 6 % fewer bytes.

    Attention has half of feed-forward's weights for as many activations, so its best grid may have
    more rows. But close to its least, what a grid moves hardly depends on the grid, and the
    residual stream has to change between the two, in forward and backward.
    """
    saved = []
    for ranks, step in product((4, 8, 16, 32, 64), range(64)):
        tokens = round(HIDDEN * 2 ** (step / 8))
        grids = [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
        halves = [
            {grid: _half_moves(inner, tokens, grid, keep_weight) for grid in grids}
            for inner in ((3, 1), (4, 4))
        ]
        one = min(sum(half[grid] for half in halves) for grid in grids)
        best = [min(half, key=half.__getitem__) for half in halves]
        # They differ by a factor of two: half of what a rank holds goes to another, four times.
        changes = 0 if best[0] == best[1] else 4 * tokens * HIDDEN / ranks / 2
        two = sum(half[grid] for half, grid in zip(halves, best, strict=True)) + changes
        saved.append(1 - two / one)
    assert 0.02 < max(saved) < 0.06
