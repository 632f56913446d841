"""Derived plans of models that look again at what a plan splits: right, or refused with the reason.

Each of these was wrong in silence. A feed-forward layer or heads were split although the model also
returned them, or kept them as an attribute: each rank had a part of its own. What is the same for
every sample was split by samples, a bias of heads taken for one of samples where there are as many,
and a number of heads under an unusual name was not divided.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, relative
from support.one_module import whole
from torch_tp2d import parallelize_module
from torch_tp2d.plans import plan_for

VOCAB, WIDTH, HEADS, BATCH, LENGTH = 23, 16, 4, 4, 6
IDS = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
BIAS = torch.linspace(-1, 1, HEADS * LENGTH * LENGTH).view(HEADS, LENGTH, LENGTH).double()


class Base(nn.Module):
    inputs: tuple[Tensor, ...] = (IDS,)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.attention = Attention()


class Penalty(Base):
    """A penalty on activations beside the logits."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        x = x + self.attention(x)[0]
        hidden = torch.relu(self.up(x))
        return self.head(x + self.down(hidden)), hidden.square().mean()


class Kept(Penalty):
    """The same, kept by the model."""

    def forward(self, ids: Tensor) -> Any:
        logits, self.penalty = super().forward(ids)
        return logits


class Positions(Base):
    """Positions of one sample meet the tokens inside a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.other = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 24)

    def forward(self, ids: Tensor) -> Tensor:
        at, x = self.places(torch.arange(ids.shape[1])[None]), self.words(ids)
        x = x + self.attention(x)[0]
        return self.head(x + self.down(F.gelu(self.up(x) + self.other(at))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return self.o(y.transpose(1, 2).flatten(2)), k


class OfHeads(Base):
    """A bias of each head, of as many as there are samples, or not."""

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attention(x, bias)[0]
        return self.head(x + self.down(F.gelu(self.up(x))))


class Fewer(OfHeads):
    inputs = (IDS[:3], BIAS)


class AsMany(OfHeads):
    inputs = (IDS, BIAS)


class Keys(Base):
    """Keys beside the logits, as for a cache."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        y, keys = self.attention(x)
        x = x + y
        return self.head(x + self.down(F.gelu(self.up(x)))), keys


class Unusual(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.nh = HEADS

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:2], self.nh, -1)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return self.o(y.transpose(1, 2).flatten(2)), k


class Named(Base):
    """A number of heads that nobody knows by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Unusual()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attention(x)[0]
        return self.head(x + self.down(F.gelu(self.up(x))))


class Block(Attention):
    """Attention and a feed-forward layer in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
        )

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, keys = super().forward(self.norm(x))
        return x + y + self.down(F.gelu(self.up(x))), keys


class Flat(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.words(ids))[0]
        return self.head(x + self.down(F.gelu(self.up(x))))


def _all(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    y = model(*inputs)
    made = [*y] if isinstance(y, tuple) else [y]
    made += [model.penalty] if isinstance(model, Kept) else []
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in made]


def _train(kind: type[Base], rows: int, columns: int) -> dict[str, float]:
    torch.manual_seed(0)
    reference = kind().double()
    model, mesh = copy.deepcopy(reference), grid_mesh(rows, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of what stays whole.
        parallelize_module(model, mesh, plan_for(model, mesh, inputs=kind.inputs))
    given = [
        tuple(x.clone().requires_grad_(x.is_floating_point()) for x in kind.inputs)
        for _ in range(2)
    ]
    wanted, ours = _all(reference, given[0]), _all(model, given[1])
    for outputs in (wanted, ours):
        torch.stack([torch.tanh(y).square().sum() for y in outputs]).sum().backward()
    found = {
        f"output {i}": relative(a, b) for i, (a, b) in enumerate(zip(ours, wanted, strict=True))
    }
    for place, (mine, truth) in enumerate(zip(given[1], given[0], strict=True)):
        if truth.grad is not None:
            assert mine.grad is not None
            found[f"input {place}"] = relative(mine.grad, truth.grad)
    for (name, param), truth in zip(model.named_parameters(), reference.parameters(), strict=True):
        if truth.grad is not None and not name.endswith("k.bias"):  # Which softmax takes away.
            assert param.grad is not None, name
            found[name] = relative(whole(param.grad), truth.grad)
    return found


@pytest.mark.parametrize("kind", [Penalty, Kept, Positions, Fewer])
@pytest.mark.parametrize("grid", [(2, 2), deep((1, 2)), deep((2, 1)), deep((1, 4)), deep((4, 1))])
def test_it_is_as_on_one_device(kind: type[Base], grid: tuple[int, int]) -> None:
    for found in world.run(grid[0] * grid[1], _train, kind, *grid):
        assert not {name: far for name, far in found.items() if not far < 1e-10}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Keys, "attention that is not understood"),
        (AsMany, r"bias .* of each head or of each sample.*inputs= of another batch"),
        (Named, r"\['nh'\] may be its number of heads, 4"),
        (Flat, "it holds attention.(up|norm) beside the projections of an attention"),
    ],
)
def test_it_is_refused(kind: type[Base], words: str) -> None:
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match=words):
        plan_for(kind().double(), mesh, inputs=kind.inputs)
