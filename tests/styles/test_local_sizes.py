"""What the user's code makes by the sizes that a rank sees: right, or refused by file and line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import torch_tp2d
from support import world
from support.dropout import WholeDropout
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh
from support.one_module import Between, gradients
from torch_tp2d import (
    Attention2D,
    Colwise2D,
    Dropout2D,
    Local2D,
    Rowwise2D,
    attention_projections,
    parallelize_module,
)
from torch_tp2d._torch_compat.modules import forward_hooks, forward_pre_hooks

WIDTH, HEADS, VOCAB = 24, 4, 11


class Sines(nn.Module):
    """PositionalEncoding as tutorials have it: a table that is cut to the tokens that it sees."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(32)[:, None] * torch.linspace(0.1, 2, WIDTH)
        self.register_buffer("table", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.first : self.first + x.shape[1]]


class DroppedSines(Sines):
    """Drops from the whole table, before it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return x + self.drop(self.table[None])[:, self.first : self.first + x.shape[1]]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return x + torch.rand_like(x)


class DropPath(nn.Module):
    """Drops samples, as a stochastic depth does; or asks a generator of its own."""

    def __init__(self, seed: int | None = None, *, anew: bool = False) -> None:
        super().__init__()
        self.seed, self.anew = seed, anew

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        own = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        if self.anew:
            drawn = x.new_empty(len(x), 1, 1).bernoulli_(0.9, generator=own)
        else:
            drawn = (0.9 + torch.rand(len(x), 1, 1, generator=own)).floor_()
        return x / 0.9 * drawn if own is None else x + 0 * drawn


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if kind == "learned":
            self.slopes = nn.Parameter(torch.linspace(0.1, 0.7, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mask = None
        length = torch.arange(q.shape[2])
        if self.kind == "rotary":
            angles = (length[:, None] * torch.tensor([1.0, 0.1, 0.01])).repeat(1, 2)
            q, k = (y * angles.cos() + _turned(y) * angles.sin() for y in (q, k))
        elif self.kind == "slopes":
            slopes = 2.0 ** -(torch.arange(self.num_heads) + 1.0)
            mask = slopes[:, None, None] * -(length[:, None] - length).abs()
        elif self.kind == "learned":
            hidden = torch.full(2 * (len(length),), -torch.inf, dtype=x.dtype).triu(1)
            mask = self.slopes[:, None, None] * (length - length[:, None]) + hidden
        elif self.kind == "written out":
            slopes = 2.0 ** -(torch.arange(q.shape[1]) + 1.0)
            weights = q @ k.transpose(2, 3) - slopes[:, None, None] * (length[:, None] - length)
            y = weights.softmax(-1) @ v
            return self.o(y.transpose(1, 2).flatten(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


def _turned(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([-other, one], -1)


def _between(
    stream: Any, style: Any = None, name: str = "table"
) -> Callable[[DeviceMesh], dict[str, Any]]:
    def plan(mesh: DeviceMesh) -> dict[str, Any]:
        return {
            "embed": Rowwise2D(input_layouts=Replicate(), output_layouts=stream),
            "head": Colwise2D(input_layouts=stream, use_local_output=False),
            **({} if style is None else {f"middle.{name}": style()}),
        }

    return plan


def _attention(row_dim: int, **own: Any) -> Callable[[DeviceMesh], dict[str, Any]]:
    def plan(mesh: DeviceMesh) -> dict[str, Any]:
        q, kv, o = attention_projections(HEADS, HEADS, mesh["tp_col"].size(), row_dim=row_dim)
        stream = Shard(1) if row_dim == 0 else Shard(0)
        embed = Rowwise2D(
            input_layouts=Replicate(),
            output_layouts=stream,
            use_local_output=False,
            row_dim=row_dim,
        )
        return {
            "embed": embed,
            "head": Colwise2D(use_local_output=False, row_dim=row_dim),
            "middle": Attention2D(row_dim=row_dim, **own),
            "middle.q": q,
            "middle.[kv]": kv,
            "middle.o": o,
        }

    return plan


def _whole_dropout() -> Dropout2D:
    return Dropout2D(input_layouts=(Replicate(), Replicate()))


def _applied_to_a_part() -> Local2D:
    return Local2D(params={"weight": Partial()})


def _said(rows: int, columns: int, length: int) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    split, whole = Shard(1), Replicate()

    def own(kind: Callable[[], Sines] = Sines) -> Sines:
        """One that knows the first of this rank's tokens, and goes on from there."""
        module = kind()
        chunk = -(-length // columns)
        module.first = min(length, chunk * mesh.get_local_rank("tp_col"))
        return module

    for name, kind, plan in (
        ("sines", Sines, _between(split)),
        ("sines of all", Sines, _between(whole)),
        ("sines of one's own part", own, _between(split)),
        ("dropped", lambda: own(DroppedSines), _between(split, _whole_dropout, "drop")),
        ("positions", Positions, _between(split, _applied_to_a_part)),
        ("positions of all", Positions, _between(whole, torch_tp2d.Replicate)),
        ("noise", Noise, _between(split)),
        ("drops", DropPath, _between(split)),
        ("drops anew", lambda: DropPath(anew=True), _between(split)),
        ("drops by itself", lambda: DropPath(mesh.get_local_rank("tp_row")), _between(split)),
        (
            "drops anew by itself",
            lambda: DropPath(mesh.get_local_rank("tp_row"), anew=True),
            _between(split),
        ),
        *(
            (f"{kind} {row_dim}", lambda kind=kind: Attention(kind), _attention(row_dim))
            for kind, row_dim in (
                *(("plain", 0), ("plain", 1), ("rotary", 0), ("rotary", 1)),
                *(("slopes", 0), ("written out", 0)),
            )
        ),
        (
            "learned",
            lambda: Attention("learned"),
            _attention(0, own_parameters={"slopes": ("heads",)}),
        ),
    ):
        model = Between(VOCAB, WIDTH, kind).double()
        reference = copy.deepcopy(model)
        if isinstance(model.middle, Sines):
            reference.middle.first = 0
        if isinstance(model.middle, DroppedSines):
            reference.middle.drop = WholeDropout(model.middle.drop.p)
        ids = torch.randint(0, VOCAB, (4, length), generator=torch.Generator().manual_seed(1))
        try:
            parallelize_module(model, mesh, plan(mesh))
            for y in (model(ids).full_tensor(), reference(ids)):
                F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
            worst = max(gradients(reference, model).values())
            said[name] = f"differs by {worst > 1e-10}"
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(
    "rows,columns,length",
    [
        (2, 2, 8),
        (2, 1, 9),
        *(deep(*one) for one in ((2, 2, 9), (1, 4, 12), (1, 4, 7), (4, 1, 9), (2, 3, 9))),
    ],
)
def test_what_is_made_by_the_sizes_of_a_part(rows: int, columns: int, length: int) -> None:
    """Each rank took the first part's positions, or the first heads' slopes, in silence.

    A table cut to the tokens that a module sees, a rotary embedding of as many queries as a row
    has, ALiBi of as many heads as a column has: sizes fit, and loss and gradients were others.

    Slopes that are learned, each rank's own, were refused where a mask hides tokens by the least
    number there is: beside it they were rounded away. So were T5 and Swin.

    What was made of a style's dropout counted as random numbers that are the same on all ranks.

    Samples dropped by a row's own random numbers were those of all rows alike.

    Where a rank has a single token, the same random numbers on all were no match.

    ``x.new_empty(len(x), 1, 1).bernoulli_(p)`` was refused, as a function of all samples, whatever
    the ranks had drawn.

    With heads that do not divide, and with one column, a mask in single precision beside queries in
    double was given another dim, and of four dims torch 2.13 reads such a mask wrong on a CPU. (The
    latter had passed here on another machine than the one with AVX2 alone where it failed.)
    """
    refused = {"sines", "positions"} if columns > 1 else set()
    # A row with one sample may draw for all.
    refused |= {"drops", "drops anew"} if rows == 2 else set()
    refused |= {"noise"} if rows == 2 or columns > 1 else set()
    refused |= {"rotary 1"} if rows > 1 else set()
    # One head on each column: nothing tells its slope from a number.
    refused |= {"slopes 0", "written out 0"} if columns == 2 else set()
    for said in world.run(rows * columns, _said, rows, columns, length):
        for name in refused:
            message = said.pop(name)
            # A rank with a single token, or none, may only know it from the others.
            there = "test_local_sizes.py:" in message and "each rank has a part along" in message
            assert there or (length == 9 and "the sizes of a rank's part along" in message), name
            assert "the same values on these ranks" in message
        for name in ("noise", "drops", "drops anew"):
            said.pop(name, None)
        if HEADS % columns:
            assert "divide" in said.pop("written out 0") and "divide" in said.pop("learned")
        if columns == HEADS:
            said = {k: v for k, v in said.items() if not k.startswith(("slopes", "written"))}
        assert set(said.values()) == {"differs by False"}, "\n".join(map(str, said.items()))


def test_the_hooks_of_a_first_forward_are_gone_after_it() -> None:
    """On a fake process group they stayed, and were called in each step that was timed on one."""
    with fake_grid(2, 2) as mesh:
        plan = {"0": Colwise2D(), "2": Rowwise2D()}
        mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        model = parallelize_module(mlp, mesh, plan)
        model(torch.randn(2, 3, WIDTH)).sum().backward()
        hooks = [*forward_pre_hooks(model).values(), *forward_hooks(model).values()]
        owners = {type(getattr(hook, "__self__", hook)).__name__ for hook in hooks}
    assert owners == {"Forward", "DenseParameters"}
