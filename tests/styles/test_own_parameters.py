"""Parameters of a module's own, applied to what modules inside it hand on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import differences_of_row, grid_mesh, relative
from torch_tp2d import Attention2D, Colwise2D, Local2D, Rowwise2D

HIDDEN, HEAD, VOCAB = 8, 2, 11


class Swish(nn.Module):
    """A feed-forward with a number that is applied inside, and a vector that is at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.beta = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.sigmoid(self.beta * y)) * self.scale


class Tempered(nn.Module):
    """Attention with a temperature, and a scale of a head's features."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.features = nn.Parameter(torch.randn(HEAD))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        v = v * self.features
        y = F.scaled_dot_product_attention(q * self.temperature.exp(), k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Scaled(Tempered):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Streams(nn.Module):
    """A model with gates of its own for its residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.gates = nn.Parameter(torch.randn(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keep, add = self.gates.sigmoid()
        return self.head(keep * x + add * self.down(self.up(x).sin()))


INSIDE = {"up": Colwise2D(), "down": Rowwise2D()}
HEADS = {"[qkv]": Colwise2D(), "o": Rowwise2D()}
WHOLE = {"input_layouts": Replicate()}

Case = tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]

RIGHT: list[Case] = [
    (Swish, lambda: Local2D(**WHOLE, params={"beta": Partial()}), INSIDE),
    (
        Tempered,
        lambda: Local2D(**WHOLE, params={"temperature": Partial(), "features": Partial()}),
        HEADS,
    ),
    (Tempered, lambda: Attention2D(own_parameters={"temperature": (), "features": (None,)}), HEADS),
]

REFUSED: list[tuple[Case, str]] = [
    ((Swish, lambda: Local2D(**WHOLE), INSIDE), r"'beta'.* each rank has a part.*'beta': Partial"),
    (
        (Swish, lambda: Local2D(**WHOLE, params={n: Partial() for n in ("beta", "scale")}), INSIDE),
        "'scale' to a tensor that is whole along tp_col",
    ),
    ((Tempered, lambda: Local2D(**WHOLE), HEADS), "'features' to a tensor of which each rank has"),
    (
        (
            Scaled,
            lambda: Attention2D(
                own_parameters={"temperature": (), "features": (None,), "scale": (None,)}
            ),
            HEADS,
        ),
        "'scale' to a tensor that is whole along tp_col",
    ),
]


class Inside(nn.Module):
    """A case's module, given what a style has handed out, so that its layout is known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module = nn.Linear(HIDDEN, HIDDEN), module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.first(x))


def _seen(case: Case, rows: int, columns: int) -> dict[str, float]:
    make, style, inside = case
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = Inside(make()).double()
    model = copy.deepcopy(reference)
    plan = {"first": Colwise2D(output_layouts=Replicate()), "module": style()}
    plan |= {f"module.{key}": copy.deepcopy(one) for key, one in inside.items()}
    torch_tp2d.parallelize_module(model, mesh, plan)
    return differences_of_row(model, reference, rows, mesh.get_local_rank("tp_row"))


def _right(rows: int, columns: int) -> list[dict[str, float]]:
    return [_seen(case, rows, columns) for case in RIGHT]


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4)), deep((4, 1))])
def test_partial_gradients_are_summed(grid: tuple[int, int]) -> None:
    """Of what is whole on each rank, and applied to features or heads of which it has a part."""
    for cases in world.run(grid[0] * grid[1], _right, *grid):
        for seen in cases:
            assert not {k: v for k, v in seen.items() if not v < 1e-12}


def _refused(rows: int, columns: int) -> None:
    for case, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            _seen(case, rows, columns)


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4))])
def test_gradients_that_would_be_wrong(grid: tuple[int, int]) -> None:
    """They were one column's part, or as many times too large as there are columns, in silence.

    Along which axes they are summed was told by the module's own input alone.
    """
    world.run(grid[0] * grid[1], _refused, *grid)


def _streams(rows: int, columns: int, stream: Any) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = Streams().double()
    model = copy.deepcopy(reference)
    plan = {
        "": Local2D(),
        "embed": Rowwise2D(output_layouts=stream),
        "up": Colwise2D(input_layouts=stream),
        "down": Rowwise2D(output_layouts=stream),
        "head": Colwise2D(input_layouts=stream, use_local_output=False),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    ids = torch.randint(0, VOCAB, (4, 8))
    wanted, found = reference(ids), model(ids).full_tensor()
    wanted.sin().sum().backward()
    found.sin().sum().backward()
    seen = {"logits": relative(found.detach(), wanted.detach())}
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        seen[name] = relative(b.grad, a.grad)
    return seen


def _streams_of_both(rows: int, columns: int) -> dict[str, float]:
    with pytest.raises(ValueError, match=r"'gates' to a tensor .* part along tp_col"):
        _streams(rows, columns, Shard(1))
    return _streams(rows, columns, Replicate())


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4))])
def test_gates_of_a_stream_that_is_split(grid: tuple[int, int]) -> None:
    """The model is given ids, which are whole; the stream inside, to which they apply, was not."""
    for seen in world.run(grid[0] * grid[1], _streams_of_both, *grid):
        assert not {k: v for k, v in seen.items() if not v < 1e-12}


def test_a_style_for_all_of_a_module_and_styles_inside_it() -> None:
    """It was said that its weights are tied to another module's."""
    plan = {"": torch_tp2d.Replicate(), "up": Colwise2D(), "down": Rowwise2D()}
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match=r"inside .*Local2D\(\)"):
        torch_tp2d.parallelize_module(Swish(), mesh, plan)
