"""How many functions of the library a step of one Linear calls, where the products are small.

On a GPU, and wherever a layer has little to compute, a step takes as long as its Python. What is
found out once must not be found out in each call: in the place of a table of routes a step once
compared placements, which took 4 us each and, with contexts and wrappers around deferred work, a
third of a Linear's time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

import torch_tp2d
from support.fake import fake_grid
from torch_tp2d import Colwise2D, parallelize_module, token_sizes

PACKAGE = str(Path(torch_tp2d.__file__).parent)


def _calls(rows: int, columns: int, style: ParallelStyle, features: int) -> int:
    """Calls of a second step, of the Linear alone: without its model's hooks."""
    count, root = 0, nn.Sequential(nn.Linear(16, 32))

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    with fake_grid(rows, columns) as mesh, token_sizes(mesh, (4, 8)):
        parallelize_module(root, mesh, {"0": style})
        linear = root[0]
        x = torch.ones(4 // rows, 8 // columns if features == 16 else 8, features)
        x.requires_grad_()
        for profiler in (None, None, profile):
            sys.setprofile(profiler)
            try:
                linear(x * 1).sum().backward()
            finally:
                sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("rows", "columns", "name", "most"),
    [(1, 1, "collective", 150), (1, 1, "pipelined", 200), (2, 2, "pipelined", 370)],
)
def test_a_linear_calls_no_more_than_it_has_to(
    rows: int, columns: int, name: str, most: int
) -> None:
    colwise = Colwise2D(algorithm=name, input_layouts=Shard(1))
    assert _calls(rows, columns, colwise, 16) <= most
