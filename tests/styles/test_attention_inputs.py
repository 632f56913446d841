"""Biases of scores that learn, given to an attention as plain tensors.

Their gradients were one rank's own, in silence: each row has the tokens of its samples and each
column its heads, and nothing summed what they hand back for what all of them hold.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from support.one_module import whole
from torch_tp2d import Attention2D, Rowwise2D, attention_projections, parallelize_module

BATCH, LENGTH, WIDTH, HEADS = 3, 5, 8, 4
SHAPES: dict[str, tuple[int, ...]] = {
    "for all": (LENGTH, LENGTH),
    "of each head": (1, HEADS, LENGTH, LENGTH),
    "of each sample": (BATCH, 1, LENGTH, LENGTH),
    "of each key": (1, 1, 1, LENGTH),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A bias by distance from a table, too, as in T5: its embedding sums its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.table_alone = nn.Embedding(2 * LENGTH, HEADS), True
        self.attention = Attention()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        far = self.table((at[:, None] - at + LENGTH).flatten())
        learned = far.unflatten(0, (LENGTH, LENGTH)).permute(2, 0, 1)[None]
        return self.attention(x, learned + (bias.detach() if self.table_alone else bias))


def _biases(rows: int, columns: int, with_table: bool) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    q, kv, o = attention_projections(
        HEADS, HEADS, columns, output_layouts=Replicate(), use_local_output=True
    )
    plan: dict[str, Any] = {"": Attention2D(), "q": q, "k": kv, "v": kv, "o": o}
    found = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        reference = (Model() if with_table else Attention()).double()
        model = copy.deepcopy(reference)
        if with_table:
            inside = {f"attention.{key}".rstrip("."): style for key, style in plan.items()}
            table = Rowwise2D(output_layouts=(Replicate(), Replicate()))
            parallelize_module(model, mesh, {"table": table, **inside})
        else:
            parallelize_module(model, mesh, plan)
        x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
        truth = torch.randn(shape, dtype=torch.float64).requires_grad_()
        bias = truth.detach().clone().requires_grad_()
        part = x.tensor_split(_ends(rows))[mesh.get_local_rank("tp_row")]
        wanted, y = reference(x, truth), model(part, bias)
        torch.tanh(wanted).square().sum().backward()
        torch.tanh(y).square().sum().backward()
        if not with_table:
            assert bias.grad is not None and truth.grad is not None
            found[f"bias {name}"] = relative(bias.grad, truth.grad)
        elif rows > 1:
            model.table_alone = False
            with pytest.raises(ValueError, match="partial gradient along tp_row.*that learns"):
                model(part, bias)
        for (param, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if not param.endswith("k.bias"):  # Which softmax takes away.
                assert ours.grad is not None and theirs.grad is not None
                found[f"{param}, {name}"] = relative(whole(ours.grad), theirs.grad)
    return found


def _ends(rows: int) -> list[int]:
    """Where the rows' samples end, as torch.chunk has it."""
    longest = -(-BATCH // rows)
    return [min(BATCH, longest * row) for row in range(1, rows)]


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4)), deep((1, 2)), deep((3, 1)), deep((2, 1))])
def test_the_gradient_of_a_bias_is_that_of_all_ranks(
    grid: tuple[int, int], with_table: bool
) -> None:
    for seen in world.run(grid[0] * grid[1], _biases, *grid, with_table):
        assert len(seen) > 4 * len(SHAPES)
        assert not {name: far for name, far in seen.items() if not far < 1e-12}
