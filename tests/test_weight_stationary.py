"""The weight-stationary dataflow: against one device in fp64, and what it moves, counted.

No weight moves, forward or backward, so what crosses the wire is in proportion to the tokens. The
bytes are counted on a fake process group, as in ``test_bytes.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import world
from models import grid_mesh
from test_styles import Conv1D, Layout, compare, covering, no_difference, noise, randomized
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torch_tp2d import Block2DParallel, Colwise2D, Rowwise2D

TOLERANCE = 1e-10
STATIONARY = "weight_stationary"
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 1), (1, 4)]

SIZES = [(4, 6, 12, 24), (3, 5, 7, 11), (1, 2, 3, 2), (1, 1, 7, 11), (1, 1, 3, 2)]
"""Batch, sequence, features in and out: even, odd, smaller than the grid, and a single token."""


LAYOUTS = [
    "token",
    "feature",
    "row",
    "whole",
    "transposed",
    "transposed batch",
    "transposed whole",
    "columns",
]


def layout_of(name: str, row_dim: int) -> Layout:
    row = Shard(row_dim)
    return {
        "token": (row, Shard(1)),
        "feature": (row, Shard(-1)),
        "row": (row, Replicate()),
        "whole": (Replicate(), Replicate()),
        "transposed": (Shard(-1), Shard(1)),
        "transposed batch": (Shard(-1), Shard(0)),
        "transposed whole": (Shard(-1), Replicate()),
        "columns": (Replicate(), Shard(-1)),
    }[name]


def _linear(kind: str, k: int, n: int) -> nn.Module:
    module = Conv1D(n, k) if kind == "conv1d" else nn.Linear(k, n, bias=kind == "bias")
    return randomized(module)


def _linears(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    cases = covering(
        {
            "style": [Colwise2D, Rowwise2D, Block2DParallel],
            "module": ["bias", "no bias", "conv1d"],
            "kind": ["local", "mesh"],
            "given": LAYOUTS,
            "out": LAYOUTS,
            "local_output": [True, False],
            "row_dim": [0, 1],
            "sizes": SIZES,
        }
    )
    worst = {}
    for case in cases:
        batch, sequence, k, n = case["sizes"]
        given, out = (layout_of(case[part], case["row_dim"]) for part in ("given", "out"))
        style = case["style"](
            input_layouts=given,
            output_layouts=out,
            use_local_output=case["local_output"],
            row_dim=case["row_dim"],
            dataflow=STATIONARY,
        )
        found = compare(
            _linear(case["module"], k, n),
            style,
            mesh,
            noise(batch, sequence, k, seed=1),
            noise(batch, sequence, n, seed=2),
            given,
            out,
            kind=case["kind"],
            local_output=case["local_output"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_linears_equal_one_device(rows: int, columns: int) -> None:
    """Every style, module, layout and size, each with every value of every other."""
    no_difference(world.run(rows * columns, _linears, rows, columns), TOLERANCE)
