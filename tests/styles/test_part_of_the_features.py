"""What the user's code makes of a part of the features, samples or tokens: right, or refused.

Sums that nobody adds up over the ranks, functions of all features, some of the features, features
of several modules side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from support.one_module import Between, gradients
from torch_tp2d import Colwise2D, Local2D, Rowwise2D, parallelize_module

WIDTH, WIDE, HEAD, VOCAB = 12, 32, 4, 11
Act = Callable[[Tensor], Tensor]


class Middle(nn.Module):
    def __init__(self, act: Act, out: int, into: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, out), nn.Linear(into, WIDTH)
        self.act = copy.deepcopy(act)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Heads(Middle):
    head_dim = HEAD


class Acts(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Scaled(nn.Module):
    """By a parameter for each feature, before what gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return _gated(x * self.scale)


def _attention(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT / 4, -1) @ x


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


SUMS: dict[str, Act] = {
    "matmul": _attention,
    "bmm": lambda x: torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x).softmax(-1) @ x,
    "sum": lambda x: x * torch.rsqrt(_sum_of_squares(x) + 1),
    "linalg_vecdot": lambda x: x * torch.linalg.vecdot(x, x)[..., None],
    "inner": lambda x: x + torch.inner(x, x[0, 0]).sigmoid()[..., None],
    "sum in place": lambda x: x * _sum_of_squares(x).sqrt_(),
    "sum of a kind": lambda x: x * torch.erfc(_sum_of_squares(x)),
    "sum twice": lambda x: x * _sum_of_squares(x).mul_(2).add_(0).sigmoid(),
    "tensordot": lambda x: x / (1 + torch.tensordot(x, x, ([2], [2])).square().mean()),
}
ALL_OF_THEM: dict[str, Act] = {
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "topk": lambda x: x * x.topk(2).values.detach().mean((0, 1, 2)),
    "sort": lambda x: x.sort().values,
    "argmax": lambda x: x * (1 + x.argmax(-1, keepdim=True)),
    "amax": lambda x: x / x.detach().abs().amax(-1, keepdim=True),
    "cdist": lambda x: torch.softmax(-torch.cdist(x, x), -1) @ x,
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x.roll(1, 1), -1)[..., None],
    "cumprod": lambda x: x.cumprod(-1),
    "std_mean": lambda x: x / torch.std_mean(x, -1, keepdim=True)[0],
    "mode": lambda x: x * x.detach().mode(-1, keepdim=True).values,
    "pad": lambda x: F.pad(x, (1, -1)),
    "tril": torch.tril,
    "histc": lambda x: x * x.detach().histc(4)[0],
    "dist": lambda x: x * torch.dist(x, x.sin()),
    "gather": lambda x: x.gather(-1, _reversed(x).expand_as(x)),
    "index_select": lambda x: x.index_select(-1, _reversed(x)),
    "__getitem__ of an index": lambda x: x[..., _reversed(x)],
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "conv1d": lambda x: F.conv1d(x, x.new_ones(5, 1, 3), padding=1, groups=5),
}


def _reversed(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1] - 1, -1, -1)


SOME_OF_THEM: dict[str, Act] = {
    "chunk": lambda x: torch.cat([_gated(x), _gated(x)], -1),
    "split": lambda x: torch.cat(x.split([x.shape[-1] // 2] * 2, -1)[::-1], -1),
    "__getitem__": lambda x: x * x[..., :1],
    "select": lambda x: x + x.select(-1, 0)[..., None],
    "glu": lambda x: torch.cat([F.glu(x), F.glu(x)], -1),
}


class Case(NamedTuple):
    """An act between an up and a down of so many features, and entries of the plan."""

    act: Act
    out: int = WIDE
    into: int = WIDE
    up: Colwise2D | None = None
    more: dict[str, Any] | None = None
    kind: type[Middle] = Middle


def _added_up(x: Tensor) -> Tensor:
    total = funcol.all_reduce(_sum_of_squares(x).detach(), "sum", dist.group.WORLD)
    return x / (1 + total)


def _added_up_in_place(x: Tensor) -> Tensor:
    total = _sum_of_squares(x).detach() / WIDE
    dist.all_reduce(total)
    return x * torch.rsqrt(1 + total)


def _largest_of_all(x: Tensor) -> Tensor:
    largest = x.detach().abs().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return x / largest


class _Total(torch.autograd.Function):
    """A sum over the ranks, each of which has its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Total.forward(ctx, grad)


def _added_up_and_learnt(x: Tensor) -> Tensor:
    return x * torch.rsqrt(1 + _Total.apply(_sum_of_squares(x)))


FUSED = Colwise2D(parts=2)
ONE_DEVICE: dict[str, Act] = {
    "added up": lambda x: x / (1 + _sum_of_squares(x).detach()),
    "added up in place": lambda x: x * torch.rsqrt(1 + _sum_of_squares(x).detach() / WIDE),
    "largest of all": ALL_OF_THEM["amax"],
    "added up and learnt": lambda x: x * torch.rsqrt(1 + _sum_of_squares(x)),
}
RIGHT = {
    "added up": Case(_added_up),
    "added up in place": Case(_added_up_in_place),
    "added up and learnt": Case(_added_up_and_learnt),
    "largest of all": Case(_largest_of_all),
    "of a kind that nobody listed": Case(
        lambda x: torch.special.erfcx(x)[:, None].rot90(2, (1, 2))[:, 0]
    ),
    "joined tokens, taken apart": Case(
        lambda x: x.flatten(1).unflatten(1, (x.shape[1], -1)).mT.contiguous().mT
    ),
    "stacked for each": Case(lambda x: torch.stack([x, x.sin()], -1).flatten(2), WIDE, 2 * WIDE),
    "heads of a token, joined": Case(
        lambda x: F.layer_norm(_heads(x), (HEAD,)).transpose(1, 2).transpose(1, 2).flatten(2)
    ),
    "chunk of two": Case(_gated, 2 * WIDE, WIDE, FUSED),
    "glu of two": Case(lambda x: F.glu(x.tanh()), 2 * WIDE, WIDE, FUSED),
    "slices of two": Case(
        lambda x: x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :], 2 * WIDE, WIDE, FUSED
    ),
    "every second": Case(
        lambda x: x[..., ::2] * x[..., 1::2].sigmoid(), 2 * WIDE, WIDE, Colwise2D(parts=1)
    ),
    "joined and taken apart": Case(lambda x: _gated(torch.cat([x, x.sin()], -1))),
    "two in a module": Case(
        Acts(_gated), 2 * WIDE, WIDE, FUSED, {"act": Local2D(input_layouts=Shard(-1))}
    ),
    "sums of each head": Case(lambda x: (_heads(x) / (1 + _sum_of_squares(_heads(x)))).flatten(2)),
    "attention of each head": Case(
        lambda x: _attention(_heads(x).transpose(1, 2)).transpose(1, 2).flatten(2)
    ),
    "linear attention of each head": Case(
        lambda x: torch.einsum(
            "bnhd,bhde->bnhe", _heads(x), torch.einsum("bnhd,bnhe->bhde", _heads(x), _heads(x))
        ).flatten(2)
    ),
    "heads of a size": Case(
        lambda x: torch.cat([_attention(one) for one in x.split(HEAD, -1)], -1), kind=Heads
    ),
    "heads one by one": Case(
        lambda x: torch.stack([_attention(one) for one in _heads(x).unbind(2)], 2).flatten(2),
        kind=Heads,
    ),
    "whole": Case(
        _attention,
        up=Colwise2D(output_layouts=Replicate()),
        more={"down": Rowwise2D(input_layouts=Replicate(), output_layouts=Replicate())},
    ),
    "on DTensors": Case(
        lambda x: x / (1 + _sum_of_squares(x)), up=Colwise2D(use_local_output=False)
    ),
    "two of a weight in place": Case(
        Scaled(1),
        2 * WIDE,
        WIDE,
        Colwise2D(parts=2, dataflow="weight_stationary"),
        more={"act": Local2D(params={"scale": Partial()})},
    ),
}
SPLIT = Shard(0), Shard(-1)
AS_A_SHARD = {"down": Rowwise2D(input_layouts=SPLIT, output_layouts=Replicate())}
SCALED = {"act": Local2D(params={"scale": Shard(0)})}
SCALED_AS_A_SHARD = {"act": Local2D(params={"scale": Shard(0)}, input_layouts=SPLIT)}
JOINED = {
    "stacked": Case(lambda x: torch.stack([x, x.sin()], 2).flatten(2), WIDE, 2 * WIDE),
    "tokens of features": Case(lambda x: x.flatten(1)[:, None].expand(-1, 5, -1), WIDE, 5 * WIDE),
    "shuffled": Case(lambda x: x.unflatten(-1, (2, -1)).mT.flatten(2)),
    "joined": Case(lambda x: torch.cat([x, x.sin()], -1), WIDE, 2 * WIDE),
    "two that are not taken apart": Case(F.gelu, 2 * WIDE, 2 * WIDE, FUSED),
    "joined, and declared": Case(lambda x: torch.cat([x, -x], -1), WIDE, 2 * WIDE, more=AS_A_SHARD),
    "two, and declared": Case(F.gelu, 2 * WIDE, 2 * WIDE, FUSED, more=AS_A_SHARD),
    "a scale of two": Case(Scaled(2 * WIDE), 2 * WIDE, WIDE, FUSED, more=SCALED),
    "a scale of two, and declared": Case(
        Scaled(2 * WIDE), 2 * WIDE, WIDE, FUSED, more=SCALED_AS_A_SHARD
    ),
}
BY_LOCAL2D = {
    f"{name} by Local2D": Case(act, more={"act": Local2D(input_layouts=Shard(-1))})
    for name, act in {
        "softmax": nn.Softmax(-1),
        "group_norm": nn.GroupNorm(5, 5, affine=False),
    }.items()
}


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD))


def _trained(model: nn.Module, reference: nn.Module, ids: Tensor, records: bool = True) -> str:
    try:
        if not records:
            with torch.no_grad():
                return f"differs by {relative(model(ids).full_tensor(), reference(ids)) > 1e-10}"
        for y in (model(ids).full_tensor(), reference(ids)):
            F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
        return f"differs by {max(gradients(reference, model).values()) > 1e-10}"
    except ValueError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _said(rows: int, columns: int, records: bool) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    wrong = {name: Case(act) for name, act in (SUMS | ALL_OF_THEM | SOME_OF_THEM).items()}
    for name, case in (wrong | BY_LOCAL2D | RIGHT | JOINED).items():
        if ("added" in name or "of all" in name) and rows > 1:
            continue
        model = Between(VOCAB, WIDTH, lambda case=case: case.kind(*case[:3])).double()
        reference = copy.deepcopy(model)
        reference.middle.act = copy.deepcopy(ONE_DEVICE.get(name, case.act))
        ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
        plan = {
            "embed": Rowwise2D(output_layouts=Replicate()),
            "middle.up": case.up or Colwise2D(),
            "middle.down": Rowwise2D(output_layouts=Replicate()),
            "head": Colwise2D(use_local_output=False),
        }
        parallelize_module(
            model, mesh, plan | {f"middle.{key}": x for key, x in (case.more or {}).items()}
        )
        said[name] = _trained(model, reference, ids, records)
    return said


@pytest.mark.parametrize(
    "rows,columns,records", [(1, 2, True), deep(1, 2, False), deep(2, 2, True), deep(1, 4, True)]
)
def test_what_is_made_of_a_part_of_the_features(rows: int, columns: int, records: bool) -> None:
    """Attention of one head, a norm by a sum, the best two features: of a rank's own, in silence.

    Only means, maxima and the like were looked at, not what is added up in a product or by a sum,
    sorted, or cut out; and then not what no list of functions had, of fifty of a hundred tried.

    In a forward without gradients nothing learns, and a maximum of the features went on unseen.
    Functions that torch's own modules call were not looked at where these have a plan entry.

    Features of two projections, side by side, met the shards of a parameter that has a number for
    each, and a plan that declared them to be a shard was believed: in silence, too. And of those
    whose weight stays in place, as with few tokens, Local2D did not know that they are split.
    """
    for said in world.run(rows * columns, _said, rows, columns, records):
        for name in SUMS | ALL_OF_THEM | SOME_OF_THEM:
            message = said.pop(name)
            assert "test_part_of_the_features.py:" in message and f" {name.split()[0]} " in message
            assert "along tp_col" in message and "Replicate()" in message, message
        for name in BY_LOCAL2D:
            name, message = name.split()[0], said.pop(name)
            assert "in Local2D" in message and f" {name} takes " in message, message
        for name in JOINED:
            assert "side by side" in said.pop(name)
        assert set(said.values()) == {"differs by False"}, said


def _norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.mT, None, None, training=True).mT


def _halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    return torch.cat([a * b.sigmoid(), b])


def _by_experts(x: Tensor) -> Tensor:
    weight, chosen = x[:, :3].softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    pieces = x[order].split(chosen.bincount(minlength=3).tolist())
    y = torch.cat([one * at for at, one in enumerate(pieces)])
    return y[order.argsort()] * weight[:, None]


OF_SAMPLES: dict[str, Act] = {
    "sum": lambda x: x * x.sum(0, keepdim=True).sigmoid(),
    "sort": lambda x: x.sort(0).values,
    "batch_norm": _norm,
    "cdist": lambda x: x * torch.cdist(x.flatten(1), x.flatten(1)).mean(-1)[:, None, None],
    "std_mean": lambda x: x / torch.std_mean(x, 0)[0],
    "add": lambda x: x + x[:1],
    "mul": _halves,
}
OF_TOKENS: dict[str, Act] = {
    "sum": lambda x: x * x.sum(1, keepdim=True).sigmoid(),
    "matmul": lambda x: x @ (x.mT @ x),
    "argmax": lambda x: x * (1 + x.argmax(1, keepdim=True)),
    "batch_norm": _norm,
    "triu": lambda x: x.transpose(0, 2).triu().transpose(0, 2),
    "pad": lambda x: F.pad(x, (0, 0, 1, -1)),
}
ONE_BY_ONE: dict[str, Act] = {
    "slices": lambda x: torch.cat([F.gelu(one) * one for one in x.split(1)]),
    "single ones": lambda x: torch.stack([x[at] + x[at].mean(-1, True) for at in range(len(x))]),
    "by experts": lambda x: _by_experts(x.flatten(0, 1)).view_as(x),
    "sums of features": lambda x: x / (1 + _sum_of_squares(x)),
}


WHOLE_SAMPLES: dict[str, Act] = {
    "samples by experts": lambda x: x * _by_experts(x.mean(1))[:, None],
}


def _between(rows: int, columns: int) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    stream = Shard(1) if rows == 1 else Replicate()
    acts = OF_TOKENS if rows == 1 else OF_SAMPLES | WHOLE_SAMPLES
    for name, act in (acts | ONE_BY_ONE).items():
        model = Between(VOCAB, WIDTH, lambda act=act: Acts(act)).double()
        reference = copy.deepcopy(model)
        ids = torch.randint(0, VOCAB, (8, 6), generator=torch.Generator().manual_seed(1))
        plan = {
            "embed": Rowwise2D(output_layouts=stream),
            "head": Colwise2D(input_layouts=stream, use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        said[name] = _trained(model, reference, ids)
    return said


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(4, 1), (1, 2)])
def test_what_is_made_of_a_part_of_the_samples_or_tokens(rows: int, columns: int) -> None:
    """Sums of a rank's own samples, the first of them for all, and which token is largest."""
    for said in world.run(rows * columns, _between, rows, columns):
        for name in OF_TOKENS if rows == 1 else OF_SAMPLES:
            message = said.pop(name)
            assert "test_part_of_the_features.py:" in message and f" {name} " in message, message
            assert "torch_tp2d.Replicate()" in message, message
        assert set(said.values()) == {"differs by False"}, said
