"""Buffers that a forward changes: a running mean is the same on every rank, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from support.one_module import Between
from torch_tp2d import Colwise2D, Local2D, Rowwise2D, parallelize_module

WIDTH, VOCAB, STEPS = 6, 11, 3


class Centred(nn.Module):
    """Takes a running mean of all tokens off, as an own norm or a balanced router does."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=self.persistent)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def of(self, x: Tensor) -> Tensor:
        return x.mean((0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * self.of(x))
                self.steps += 1
        return (x - self.mean) * self.scale


class Unsaved(Centred):
    persistent = False


class Replaced(Centred):
    """It makes a new buffer in each step."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * self.of(x).detach()
        return (x - self.mean) * self.scale


class Summed(Centred):
    """It sums over all ranks by itself; here they have as many tokens each."""

    def of(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 1))
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class Inner(nn.Module):
    """Its buffer belongs to a module that no plan entry names, as it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centred()
        self.inner.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def _values(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).double()


def _buffers(rows: int, columns: int, tokens: bool) -> dict[str, Any]:
    mesh, said = grid_mesh(rows, columns), {}
    stream = Shard(1) if tokens else Replicate()
    ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(1))
    for kind, style in (
        (Centred, Local2D),
        (Replaced, Local2D),
        (Inner, None),
        (Centred, torch_tp2d.Replicate),
        (Replaced, torch_tp2d.Replicate),
        (Unsaved, Local2D),
        (Summed, Local2D),
    ):
        reference = Between(VOCAB, WIDTH, kind).double()
        plan = {
            "embed": Rowwise2D(input_layouts=Replicate(), output_layouts=stream),
            "head": Colwise2D(input_layouts=stream, use_local_output=False),
            **({"middle": style()} if style else {}),
        }
        # A copy is looked at by itself, and what runs first without gradients is not looked at.
        model = copy.deepcopy(parallelize_module(copy.deepcopy(reference), mesh, plan))
        with torch.no_grad():
            model.eval()(ids)
        model.train()
        try:
            for _ in range(STEPS):
                if kind is not Summed:
                    reference(ids)
                model(ids)
            pairs = zip(reference.buffers(), model.buffers(), strict=True)
            told = kind in (Unsaved, Summed)
            worst = 0.0 if told else max(relative(_values(b), _values(a)) for a, b in pairs)
            answer = f"differs by {worst > 1e-12}"
        except ValueError as error:
            answer = str(error)
        said[f"{kind.__name__} {style.__name__ if style else None}"] = answer
    return said


@pytest.mark.parametrize(
    "rows,columns,tokens", [(2, 2, True), deep(2, 2, False), deep(1, 4, True), deep(4, 1, False)]
)
def test_a_buffer_is_the_same_on_every_rank(rows: int, columns: int, tokens: bool) -> None:
    """Each rank had the running mean of its own tokens, in silence, and the loss was of these.

    A norm of one's own, the bias that balances a router, the use of a codebook: what a forward
    writes on local tensors was looked at by nothing, under Local2D or without a plan entry.
    """
    along = [n for n, s in (("tp_row", rows), ("tp_col", columns if tokens else 1)) if s > 1]
    for said in world.run(rows * columns, _buffers, rows, columns, tokens):
        for name in ("Centred Local2D", "Replaced Local2D", "Inner None"):
            message = said.pop(name)
            assert ".mean', which is saved with the model, to other values" in message
            assert f"on the ranks of {' and '.join(along)}" in message
            assert "torch_tp2d.Replicate()" in message and "persistent=False" in message
        assert set(said.values()) == {"differs by False"}, said
