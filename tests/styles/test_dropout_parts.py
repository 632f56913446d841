"""Dropout that no plan names, where it has to be found out which part of a whole a rank has.

The batch, the heads or the features may be split there or not, and the widths alone do not tell.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import torch_tp2d
from support import models, world
from support.dropout import OnOneDevice, on_one_device
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, Dropout2D, Rowwise2D

TOLERANCE = 1e-12


class _Attention(nn.Module):
    """Attention as a user writes it, of a vision model say: no embedding tells its batch."""

    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout_p = 0.4
        self.q, self.k, self.v = (nn.Linear(8, inner) for _ in range(3))
        self.o = nn.Linear(inner, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = (y(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout_p)
        return self.o(y.transpose(1, 2).flatten(2))


def _uneven_batch() -> float:
    model = _Attention()
    reference = on_one_device(model)
    plan = {"[qkv]": Colwise2D(), "o": Rowwise2D(output_layouts=Replicate())}
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), plan)
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row = model.q._tp2d.grid.row.index
    outputs = []
    for part, given in ((reference, x), (model, x.chunk(2)[row])):
        torch.manual_seed(7)
        with OnOneDevice() if part is reference else contextlib.nullcontext():
            outputs.append(part(given))
    return relative(outputs[1].detach(), outputs[0].detach().chunk(2)[row])


def test_a_batch_that_does_not_divide_and_that_nothing_tells() -> None:
    """A random program found other masks than one device's: of 5 samples rows have 3 and 2.

    Where no embedding tells the batch, each rank took its own part times the number of rows for
    it, so that the second row's samples began with the first row's last one.
    """
    assert max(world.run(4, _uneven_batch)) < TOLERANCE


def _whole_heads(recorded: bool) -> float:
    """Both heads are on every rank, ``[B, S, 4]``; a rank's part of the stream is as wide."""
    model = _Attention(inner=4)
    reference = on_one_device(model)
    stream, whole = Shard(-1), Replicate()
    plan = {
        "[qkv]": Rowwise2D(input_layouts=stream, output_layouts=whole),
        "o": Rowwise2D(input_layouts=whole, output_layouts=stream),
    }
    mesh = grid_mesh(2, 2)
    torch_tp2d.parallelize_module(model, mesh, plan)
    x = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row, column = mesh.get_coordinate()
    outputs = []
    for part, given in ((reference, x), (model, x.chunk(2)[row].chunk(2, -1)[column])):
        torch.manual_seed(7)
        with (
            OnOneDevice() if part is reference else contextlib.nullcontext(),
            torch.set_grad_enabled(recorded or part is reference),
        ):
            outputs.append(part(given))
    wanted = outputs[0].detach().chunk(2)[row].chunk(2, -1)[column]
    return relative(outputs[1].detach(), wanted)


def test_whole_heads_as_wide_as_a_part_of_the_stream() -> None:
    """A random program found the masks of half of the heads for all of them.

    That a module inside hands on split features was taken to mean that the heads are split, the
    output projection's too. Which Linears a query comes from is in the graph; without one it is
    asked for where widths do not tell.
    """
    assert max(world.run(4, _whole_heads, True)) < TOLERANCE
    with pytest.raises(world.RankFailed, match="may be all or this rank's part.*Attention2D"):
        world.run(4, _whole_heads, False, fresh=True)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Between(nn.Module):
    """Modules that no plan names, of tokens that are whole where the stream's are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.drop = _Scale(), nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.up(x))
        return self.down(y), self.drop(self.scale(F.gelu(y)))


def _between(recorded: bool) -> float:
    model = _Between()
    reference = on_one_device(model)
    mesh = grid_mesh(2, 2)
    whole = Shard(0), Replicate()
    plan = {
        "up": torch_tp2d.Replicate(input_layouts=whole),
        "down": Rowwise2D(input_layouts=whole, output_layouts=Shard(1)),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    row, column = mesh.get_coordinate()
    x = models.noise(4, 6, 8)
    found = []
    for part, given in ((reference, x), (model, x.chunk(2)[row])):
        torch.manual_seed(7)
        with (
            OnOneDevice() if part is reference else contextlib.nullcontext(),
            torch.set_grad_enabled(recorded or part is reference),
        ):
            down, dropped_from = part(given)
        # Of what is whole on the columns each has the whole loss.
        (down.square().sum() + dropped_from.square().sum()).backward()
        found.append([down.detach(), dropped_from.detach()])
    found[0] = [found[0][0].chunk(2)[row].chunk(2, 1)[column], found[0][1].chunk(2)[row]]
    worst = max(relative(ours, one) for one, ours in zip(*found, strict=True))
    for param, ours in zip(reference.parameters(), model.parameters(), strict=True):
        worst = max(worst, relative(ours.grad, param.grad))
    return worst


def test_what_a_whole_linear_gave_in_a_stream_that_is_split() -> None:
    """A random program had whole tokens taken for this column's part of them.

    Beside a Linear under Replicate() a dropout that the plan does not name, and any other module,
    took what the user's code made of its output for a part of the stream, as nothing else told it:
    a style after it refused it, and where none looked each column had a mask of its own, and a
    parameter the sum of its gradients over columns that all see the same. The graph tells now;
    where there is none the module asks.
    """
    assert max(world.run(4, _between, True)) < TOLERANCE
    with pytest.raises(world.RankFailed, match="may be split over tp_col there, or whole"):
        world.run(4, _between, False, fresh=True)


class Branches(nn.Module):
    """Two feed-forwards whose parts are of one width on some columns, with different beginnings."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        # A module of the plan that takes one feature: as wide as the last column's part.
        self.scale = nn.Linear(1, 8) if scaled else None
        self.wi, self.wide = nn.Linear(8, 5), nn.Linear(8, 7)
        self.wo, self.narrow = nn.Linear(5, 8), nn.Linear(7, 8)
        self.inner_dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.scale is None else x + self.scale(x[..., :1])
        y = self.wo(self.inner_dropout(self.wi(y).relu()))
        return y + self.narrow(self.inner_dropout(self.wide(x).relu()))


def _branches(scaled: bool, recorded: bool) -> float:
    model = Branches(scaled).double()
    reference = on_one_device(model)
    up, down = Colwise2D(), Rowwise2D()
    plan = {"wi": up, "wide": up, "wo": down, "narrow": down}
    if scaled:
        plan["scale"] = Colwise2D(output_layouts=Replicate())
    torch_tp2d.parallelize_module(model, grid_mesh(1, 3), plan)
    x, outputs = models.noise(4, 3, 8), []
    for part in (reference, model):
        torch.manual_seed(7)
        with (
            OnOneDevice() if part is reference else contextlib.nullcontext(),
            torch.set_grad_enabled(recorded or part is reference),
        ):
            outputs.append(part(x).detach())
    return relative(outputs[1], outputs[0])


def _refused_branches() -> str:
    with pytest.raises(ValueError, match="may be this rank's part") as failed:
        _branches(True, False)
    return str(failed.value)


def test_parts_of_one_width_on_some_columns() -> None:
    """Of 5 and of 7 features the last of three columns holds one: which, its width does not tell.

    It took one for the other, and the mask of other features in silence. And a random program
    found that a whole feature beside them was refused there and not on the other columns, which
    waited for it.
    """
    assert max(world.run(3, _branches, False, True)) < TOLERANCE
    assert max(world.run(3, _branches, False, False)) < TOLERANCE
    assert max(world.run(3, _branches, True, True)) < TOLERANCE
    assert all("the [5, 7] features" in words for words in world.run(3, _refused_branches))


class _BatchAndHeads(nn.Module):
    """Attention weights with the batch and the heads in one dim, as fairseq has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(11, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        size, length, _ = x.shape
        q, k, v = (
            y(x).view(size, length, -1, 2).transpose(1, 2).reshape(-1, length, 2)
            for y in (self.q, self.k, self.v)
        )
        y = self.dropout((q @ k.mT).softmax(-1)) @ v
        return self.o(y.view(size, -1, length, 2).transpose(1, 2).flatten(2))


def _batch_and_heads(columns: int, recorded: bool) -> str:
    model = _BatchAndHeads()
    plan = {"tok": Rowwise2D(), "[qkv]": Colwise2D(), "o": Rowwise2D()}
    torch_tp2d.parallelize_module(model, grid_mesh(1, columns), plan)
    with (
        torch.set_grad_enabled(recorded),
        pytest.raises(ValueError, match="a batch and its heads in one dim") as failed,
    ):
        model(torch.arange(10).view(2, 5))
    return str(failed.value)


def test_a_batch_and_its_heads_in_one_dim() -> None:
    """On one row all columns dropped the same of their heads: gradients 0.7 off, in silence.

    What has three dims was taken for tokens, and where no axis splits them nothing looked at their
    number. The graph tells what it is made of, the batch where there is none.
    """
    for message in world.run(2, _batch_and_heads, 2, True) + world.run(
        2, _batch_and_heads, 2, False
    ):
        assert "Dropout" in message and "(4, 5, 5)" in message and "tp_col=2" in message
    assert all("(2, 5, 5)" in message for message in world.run(4, _batch_and_heads, 4, True))


class _Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.dropout = nn.Conv2d(3, 7, 2, 2), nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.patches(x))


def _channels() -> float:
    model = _Channels()
    reference, x = on_one_device(model), models.noise(2, 3, 4, 4)
    plan = {"patches": Colwise2D(), "dropout": Dropout2D(input_layouts=Shard(1))}
    torch_tp2d.parallelize_module(model, grid_mesh(1, 2), plan)
    outputs = []
    for part in (reference, model):
        torch.manual_seed(7)
        outputs.append(part(x).detach())
    return relative(outputs[1], outputs[0].chunk(2, 1)[model.dropout._tp2d.grid.col.index])


def _samples_of_five_dims() -> float:
    x, outputs = models.noise(3, 2, 3, 2, 2), []
    model = nn.Dropout(0.5)
    reference = on_one_device(nn.Sequential(model))
    torch_tp2d.parallelize_module(model, grid_mesh(2, 1), Dropout2D(input_layouts=Replicate()))
    row = model._tp2d.grid.row.index
    for part, given in ((reference, x), (model, x.chunk(2)[row])):
        torch.manual_seed(7)
        outputs.append(part(given))
    return relative(outputs[1], outputs[0].chunk(2)[row])


def test_declared_dims_that_do_not_divide() -> None:
    """The second rank's mask was of other elements: heads, channels and five dims were to divide.

    Of 7 channels columns hold 4 and 3, of 3 samples rows hold 2 and 1: the ranks ask each other.
    """
    assert max(world.run(2, _channels)) < TOLERANCE
    assert max(world.run(2, _samples_of_five_dims)) < TOLERANCE


def _vector() -> str:
    model, grid = nn.Dropout(0.5), grid_mesh(2, 1)
    torch_tp2d.parallelize_module(model, grid, Dropout2D())
    with pytest.raises(ValueError, match="holds no tokens") as failed:
        model(torch.ones(6))
    told = nn.Dropout(0.5)
    whole = Replicate(), Replicate()
    torch_tp2d.parallelize_module(told, grid, Dropout2D(input_layouts=whole))
    torch.manual_seed(7)
    return f"{failed.value} {told(torch.ones(6)).tolist()}"


def test_a_vector_is_no_tokens() -> None:
    """Each row dropped other elements of a vector that all have: it was taken for tokens."""
    first, second = world.run(2, _vector)
    assert first == second and "input_layouts=(Replicate(), Replicate())" in first
