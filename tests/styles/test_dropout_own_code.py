"""Dropout in a module's own code, and in the code of modules that torch or a style runs whole."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from support import models, world
from support.dropout import Feeds, Layer, differences, feeds_plan, on_one_device
from support.marks import deep
from support.models import UNEVEN, batch, grid_mesh
from torch_tp2d import Colwise2D, Local2D, Rowwise2D
from torch_tp2d.styles.own_dropout import CodeReader, Drops

TOLERANCE = 1e-12


class _Own(Layer):
    """A layer that drops by its own code, twice."""

    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__(hidden, inner, 0.0)
        self.p = p
        self.config = SimpleNamespace(hidden_rate=p)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.wo(self.drop(self.wi(self.norm(x)).relu())))


class _OfAttribute(_Own):
    def drop(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self.p, self.training)


class _OfConfig(_Own):
    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.config.hidden_rate, training=self.training)


def _dropped(x: Tensor, rate: float) -> Tensor:
    return F.dropout(x, rate)


class _OfFunction(_Own):
    def drop(self, x: Tensor) -> Tensor:
        return _dropped(x, 0.2)


class _Drops(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class _Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class _OfModules(_Own):
    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__(hidden, inner, p)
        self.one, self.other = _Drops(p), nn.Sequential(nn.ReLU(), nn.Sequential(_Dropout(p)))
        self.third = nn.Sequential(nn.Identity(), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.third(self.one(self.wo(self.other(self.wi(self.norm(x))))))


def _layers(rows: int, columns: int) -> dict[str, float]:
    mesh, seen = grid_mesh(rows, columns), {}
    for layer in (_Own, _OfAttribute, _OfConfig, _OfFunction, _OfModules):
        model = Feeds(UNEVEN[2], layer, inner=7)
        reference = on_one_device(model)
        torch_tp2d.parallelize_module(model, mesh, feeds_plan(0, tokens=False))
        seen[layer.__name__] = differences(reference, model, UNEVEN)
    return seen


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2)])
def test_rates_of_any_name_and_of_none(rows: int, columns: int) -> None:
    """Gradients were 0.2 to 1.1 off, and copies of the stream differed, in silence.

    A module's own dropout was seen by a float among its attributes with "drop" in its name. A rate
    in the code, under another name or of a module without Linears was not, nor a subclass of
    nn.Dropout, nor any dropout in a container inside, nor ``torch.dropout``.
    """
    for seen in world.run(rows * columns, _layers, rows, columns):
        assert max(seen.values()) < TOLERANCE, seen


class _Attends(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.rate = nn.Dropout(0.5), rate

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.scaled_dot_product_attention(x, x, x, is_causal=True))


class _AttendsWith(_Attends):
    def forward(self, x: Tensor) -> Tensor:
        p = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(x, x, x, None, p)


def _passed(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _of_table(x: Tensor, dropout: float = 0.0) -> Tensor:
    return F.dropout(x, p=dropout)


class _ByTable(_Attends):
    """As Hugging Face calls attention: by a table, beside a function to fall back to."""

    @_passed
    def forward(self, x: Tensor) -> Tensor:
        return {"one": _of_table}.get("one", _of_table)(x, dropout=self.rate)


class _Imports(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.alpha_dropout(x, 0.0 if x.ndim else 0.5)


class _Above(_Attends):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _AttendsWith.forward(self, x)


def test_what_code_says_of_dropout() -> None:
    """Where a rate is an attribute, a module whose rates are 0 runs without a mode."""
    read = CodeReader().drops_of
    assert read(_Attends()) is None and read(nn.Linear(2, 2)) is None
    for kind in (_AttendsWith, _ByTable):
        drops = read(kind())
        assert drops == Drops(("rate",), False)
        assert not drops.may(kind()) and drops.may(kind(0.5))
    assert read(_Imports()) == Drops((), True)
    assert read(_Own(2, 2, 0.5)) == Drops((), True)
    assert read(_OfConfig(2, 2, 0.5)) == Drops(("config.hidden_rate",), False)
    assert read(nn.MultiheadAttention(4, 2)) == Drops(("dropout",), False)
    given = _Attends()
    given.drops = functools.partial(F.dropout, p=0.1)
    assert read(given) == Drops((), True) and read(_Attends()) is None


class _Other(_Own):
    """By another function of torch."""

    function: Any = staticmethod(F.dropout1d)
    rate = 0.5

    def drop(self, x: Tensor) -> Tensor:
        if self.function is F.dropout1d:
            return F.dropout1d(x, self.rate, self.training)
        return torch.feature_alpha_dropout(x, self.rate, self.training)


class _Draws(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1).bernoulli_(self.p)


def _refused() -> None:
    mesh, x = grid_mesh(1, 2), torch.ones(2, 3, 4)
    for function in (F.dropout1d, torch.feature_alpha_dropout):
        layer = _Other(4, 8, 0.5)
        layer.function = function
        torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})
        with pytest.raises(ValueError, match=rf"_Other.*tp_col=2.*{function.__name__}.*F.dropout"):
            layer(x)
        layer.eval()(x)
        layer.train().rate = 0.0
        layer(x)
    layer = _Own(4, 8, 0.5)
    layer.dropout = _Draws(0.5)
    with pytest.raises(ValueError, match="'dropout'.*_Draws.*forward of its own"):
        torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})


def test_other_functions_that_drop_are_refused() -> None:
    """Losses on 1x1 and 2x1 differed: the modules of these functions were refused, not they."""
    world.run(2, _refused)


class _Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x, x, x, need_weights=self.weights)[0]
        return y


class _Scales(_Drops):
    def __init__(self) -> None:
        super().__init__(0.4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class _Whole(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        for param in middle.parameters():
            nn.init.normal_(param, std=0.3)
        self.middle = middle
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.tok(ids)))


def _whole(rows: int, columns: int, tokens: bool) -> dict[str, list[float]]:
    """Losses, sums of squares of gradients, and the next number of the generator."""
    mesh, seen = grid_mesh(rows, columns), {}
    stream: Any = Shard(1) if tokens else Replicate()
    local = {"Local2D": (_Scales(), Local2D())}
    cases: dict[str, tuple[nn.Module, Any]] = {
        "own": (_Scales(), torch_tp2d.Replicate()),
        "attention": (_Attention(False), torch_tp2d.Replicate()),
        "attention and its weights": (_Attention(True), torch_tp2d.Replicate()),
        "layer": (
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
            torch_tp2d.Replicate(),
        ),
        **({"SequenceParallel": (_Scales(), SequenceParallel())} if tokens else local),
    }
    for name, (middle, style) in cases.items():
        model = _Whole(middle)
        on = isinstance(style, Local2D)
        plan = {
            "tok": Rowwise2D(output_layouts=stream, use_local_output=on),
            "middle": style,
            "head": Colwise2D(input_layouts=stream, use_local_output=False),
        }
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids, target = batch(4, 6, 11)
        torch.manual_seed(5)
        loss = models.loss_of(model(ids), target)
        loss.backward()
        grads = sum(param.grad.full_tensor().square().sum().item() for param in model.parameters())
        seen[name] = [loss.item(), grads, torch.rand(()).item()]
    return seen


@pytest.mark.parametrize("tokens", [False, deep(True)])
@pytest.mark.deep
def test_dropout_of_modules_that_a_style_runs_whole(tokens: bool) -> None:
    """One seed gave other losses on 1x1, 1x2 and 2x1, and the ranks' generators diverged.

    Under Replicate() dropout was DTensor's own, in nn.MultiheadAttention and
    nn.TransformerEncoderLayer too, whose rate is 0.1 by default; under Local2D it was each rank's.
    """
    (wanted,) = world.run(1, _whole, 1, 1, tokens)
    for rows, columns in ((1, 2), (2, 1)):
        for seen in world.run(2, _whole, rows, columns, tokens):
            for name, values in wanted.items():
                assert seen[name] == pytest.approx(values, rel=1e-10), (rows, columns, name)
