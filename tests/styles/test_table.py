"""The table of the layouts that a plan was resolved to: how it reads, and that it is true."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

import torch_tp2d
from support.fake import fake_grid
from support.models import plan_2d, plan_without_sequence_parallel, transformer
from torch_tp2d import (
    Colwise2D,
    Dropout2D,
    Lifted,
    Local2D,
    Norm2D,
    Rowwise2D,
    layouts_of,
)

BATCH, SEQUENCE = 4, 8


class _Unnamed(nn.Module):
    """A norm and a dropout that no entry names, where the plan tells their layouts and not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.down(self.up(self.norm(x)).relu())))


class TestTable(TestCase):
    maxDiff = None

    def test_the_tutorials_plan(self) -> None:
        with fake_grid(2, 2) as mesh:
            model = transformer(n_layers=1)
            torch_tp2d.parallelize_module(model, mesh, plan_2d())
            shown = str(layouts_of(model))
            self.assertExpectedInline(
                shown,
                """\
mesh (tp_row=2, tp_col=2), layouts (on tp_row, on tp_col)
module                               style               input                 output                                weight        dataflow           algorithm  told by
tok_embeddings                       Rowwise2D           (R, R)                (S(0), S(1)), of positions (R, S(1))  (S(1), S(0))  weight_stationary             entry
pos_embeddings                       Rowwise2D           (R, R)                (S(0), S(0)), of positions (R, S(0))  (S(1), S(0))  weight_stationary             entry
dropout                              Dropout2D           (S(0), S(1))          as the input                                                                      plan
layers.0.attention_norm              SequenceParallel    (S(0), S(1))          as the input                          (R, R)                                      entry
layers.0.attention                   DropoutInside       at the first forward  as the input                                                                      sizes
layers.0.attention                   PrepareModuleInput  (S(0), S(1))          (S(0), R)                                                                         entry
layers.0.attention.resid_dropout     Dropout2D           at the first forward  as the input                                                                      sizes
layers.0.attention.wq                Colwise2D           (S(0), R)             (S(0), S(-1))                         (S(1), S(0))  output_stationary  pipelined  entry
layers.0.attention.wk                Colwise2D           (S(0), R)             (S(0), S(-1))                         (S(1), S(0))  output_stationary  pipelined  entry
layers.0.attention.wv                Colwise2D           (S(0), R)             (S(0), S(-1))                         (S(1), S(0))  output_stationary  pipelined  entry
layers.0.attention.wo                Rowwise2D           (S(0), S(-1))         (S(0), S(1))                          (S(0), S(1))  input_stationary   pipelined  entry
layers.0.ffn_norm                    SequenceParallel    (S(0), S(1))          as the input                          (R, R)                                      entry
layers.0.feed_forward.w1             Colwise2D           (S(0), S(1))          (S(0), S(-1))                         (S(1), S(0))  output_stationary  pipelined  entry
layers.0.feed_forward.w2             Rowwise2D           (S(0), S(-1))         (S(0), S(1))                          (S(0), S(1))  input_stationary   pipelined  entry
layers.0.feed_forward.resid_dropout  Dropout2D           at the first forward  as the input                                                                      sizes
norm                                 SequenceParallel    (S(0), S(1))          as the input                          (R, R)                                      entry
output                               Colwise2D           (S(0), S(1))          (S(0), S(-1))                         (S(1), S(0))  output_stationary  pipelined  entry""",  # noqa: E501
            )

    def test_what_no_entry_names(self) -> None:
        with fake_grid(2, 2) as mesh:
            told, untold = _Unnamed(), _Unnamed()
            plan = {
                "up": Colwise2D(input_layouts=Shard(1)),
                "down": Rowwise2D(output_layouts=Shard(1)),
                "last": Rowwise2D(output_layouts=Shard(1)),
            }
            torch_tp2d.parallelize_module(told, mesh, plan)
            # One gives tokens that are split over tp_col, and the other whole ones.
            torch_tp2d.parallelize_module(untold, mesh, {**plan, "last": Rowwise2D()})
            shown = f"{layouts_of(told)}\n\n{layouts_of(untold)}"
            self.assertExpectedInline(
                shown,
                """\
mesh (tp_row=2, tp_col=2), layouts (on tp_row, on tp_col)
module   style      input                 output         weight        dataflow           algorithm  told by
norm     Replicate  (S(0), S(1))          as the input   (R, R)                                      plan
dropout  Dropout2D  at the first forward  as the input                                               sizes
up       Colwise2D  (S(0), S(1))          (S(0), S(-1))  (S(1), S(0))  output_stationary  pipelined  entry
down     Rowwise2D  (S(0), S(-1))         (S(0), S(1))   (S(0), S(1))  input_stationary   pipelined  entry
last     Rowwise2D  (S(0), S(-1))         (S(0), S(1))   (S(0), S(1))  input_stationary   pipelined  entry

mesh (tp_row=2, tp_col=2), layouts (on tp_row, on tp_col)
module   style      input                 output         weight        dataflow           algorithm  told by
norm     Replicate  at the first forward  as the input   (R, R)                                      sizes
dropout  Dropout2D  at the first forward  as the input                                               sizes
up       Colwise2D  (S(0), S(1))          (S(0), S(-1))  (S(1), S(0))  output_stationary  pipelined  entry
down     Rowwise2D  (S(0), S(-1))         (S(0), S(1))   (S(0), S(1))  input_stationary   pipelined  entry
last     Rowwise2D  (S(0), S(-1))         (S(0), R)      (S(0), S(1))  input_stationary   pipelined  entry""",  # noqa: E501
            )

    def test_other_styles(self) -> None:
        with fake_grid(2, 2) as mesh:
            model = nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(8),
                    "dropout": nn.Dropout(0.1),
                    "other axes": nn.Linear(8, 8),
                    "line": nn.Linear(8, 8),
                    "still": nn.Linear(8, 8),
                    "local": nn.Linear(8, 8),
                    "whole": nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
                }
            )
            plan = {
                "norm": Norm2D(output_layouts=Replicate()),
                "dropout": Dropout2D(input_layouts=Shard(1)),
                "other axes": Lifted(ColwiseParallel(), axes="tp_row"),
                "line": Lifted(ColwiseParallel(), axes=("tp_row", "tp_col")),
                "still": Colwise2D(dataflow="weight_stationary"),
                "local": Local2D(params={"weight": Shard(1)}),
                "whole": torch_tp2d.Replicate(input_layouts=Shard(1)),
            }
            torch_tp2d.parallelize_module(model, mesh, plan)
            shown = str(layouts_of(model))
            self.assertExpectedInline(
                shown,
                """\
mesh (tp_row=2, tp_col=2), layouts (on tp_row, on tp_col)
module      style                              input          output          weight        dataflow           algorithm   told by
norm        Norm2D                             (S(0), S(-1))  (S(0), R)       (R, S(0))                                    entry
dropout     Dropout2D                          (S(0), S(1))   as the input                                                 entry
other axes  Colwise2D on tp_row                (R, S(0))      (S(-1), S(0))   (S(0), R)     output_stationary  pipelined   entry
line        Colwise2D on ('tp_row', 'tp_col')  (R, R)         (S(-1), S(-1))  (S(0), S(0))  output_stationary  pipelined   entry
still       Colwise2D                          (S(0), R)      (S(0), S(-1))   (S(1), S(0))  weight_stationary  collective  entry
local       Local2D                            (S(0), R)      (S(0), R)       (R, S(1))                                    entry
whole       Replicate                          (S(0), S(1))   as the input    (R, R)                                       entry""",  # noqa: E501
            )


def _shapes(model: nn.Module, ids: Tensor) -> dict[str, list[Any]]:
    """Shapes of what each module is given first, after its hooks, and of what it gives."""
    seen: dict[str, list[Any]] = {}
    forwards = {}
    for name, module in model.named_modules():
        forwards[name] = module.forward

        def forward(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            y = forwards[_name](*args, **kwargs)
            x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            seen[_name] = [x, y]
            return y

        module.forward = forward
    model(ids)
    return seen


@pytest.mark.parametrize("plan", [plan_2d, plan_without_sequence_parallel], ids=["SP", "TP"])
def test_the_table_is_true(plan: Any) -> None:
    """Each layout in it is that of the tensor which the module is given, or gives."""
    reference = transformer(n_layers=2, dropout_p=0.1)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    wanted = _shapes(copy.deepcopy(reference), ids)
    words = {"S": Shard, "R": Replicate()}
    with fake_grid(2, 2) as mesh:
        torch_tp2d.parallelize_module(reference, mesh, plan())
        for layer in reference.layers:
            layer.attention.n_heads //= 2
        table = layouts_of(reference)
        seen = _shapes(reference, ids)
        checked = 0
        for row in table:
            if row.style in ("PrepareModuleInput", "DropoutInside"):
                continue
            for said, whole, ours in zip(
                (row.input, row.output), wanted[row.module], seen[row.module], strict=True
            ):
                layout, _, positions = said.partition(", of positions ")
                if said.startswith(("at", "as")):
                    continue
                local = list(whole.shape)
                for p in eval(positions if positions and whole.ndim < 3 else layout, words):
                    if isinstance(p, Shard):
                        local[p.dim] //= 2
                mine = ours.to_local() if isinstance(ours, DTensor) else ours
                assert list(mine.shape) == local, (row, mine.shape, local)
                checked += 1
        assert checked > 30


def test_what_has_no_style_has_no_table() -> None:
    with pytest.raises(ValueError, match="apply a plan to it first"):
        layouts_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes a module, not dict"):
        layouts_of({})  # type: ignore[arg-type]
