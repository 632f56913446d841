"""What the user's code makes of what styles hand out: whole, split, and whose gradient it has.

Found with a gate of each token beside split features: its gradient was one column's part, with no
error and the right loss, 55 to 110 % off, and what the gate is computed from was wrong with it. So
were the rotary keys that all heads of a latent attention share (DeepSeek's), and a condition that
modulates split tokens (DiT's).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel

import torch_tp2d
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.world import run
from torch_tp2d import Attention2D, Colwise2D, Local2D, Rowwise2D, attention_projections

HIDDEN, VOCAB, HEADS = 24, 11, 4
WHOLE = Replicate(), Replicate()
SUMMED = Shard(0), Partial()
Plan = dict[str, Any]


class _Gated(nn.Module):
    """A gate of each token beside the features of a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(HIDDEN, 30), nn.Linear(HIDDEN, 1)
        self.down = nn.Linear(30, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.gate(x).sigmoid())

    @staticmethod
    def plan(mesh: DeviceMesh, gate: Any) -> Plan:
        prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return {
            "block": prepare,
            "block.up": Colwise2D(),
            "block.gate": gate,
            "block.down": Rowwise2D(output_layouts=Shard(1)),
        }


class _Latent(nn.Module):
    """Keys and values of a latent, and rotary keys of no head, as in DeepSeek's models."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.latent = (nn.Linear(HIDDEN, n, bias=False) for n in (HEADS * 6, 8 + 2))
        self.norm, self.kv = nn.RMSNorm(8), nn.Linear(8, HEADS * (4 + 6), bias=False)
        self.o = nn.Linear(HEADS * 6, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.latent(x).split([8, 2], -1)
        q, kv = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.q(x), self.kv(self.norm(latent)))
        )
        k, v = kv.split([4, 6], -1)
        k = torch.cat([k, shared.sin()[:, None].expand(-1, self.num_heads, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    @staticmethod
    def plan(mesh: DeviceMesh, latent: Any) -> Plan:
        columns, out = mesh["tp_col"].size(), Shard(1)
        q, kv, o = attention_projections(
            HEADS, HEADS, columns, output_layouts=out, use_local_output=True
        )
        return {
            "block": Attention2D(input_layouts=Shard(1)),
            "block.q": q,
            "block.latent": latent,
            "block.norm": torch_tp2d.Replicate(),
            "block.kv": kv,
            "block.o": o,
        }


class _Conditioned(nn.Module):
    """Tokens modulated by a condition of each sample, as in DiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.change = nn.Embedding(3, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 30), nn.Linear(30, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(4) % 3
        shift, scale = self.change(self.classes(count).sin()).chunk(2, -1)
        scale, shift = (y.chunk(self.rows)[self.row] for y in (scale, shift))
        return self.down(self.up(x * scale[:, None] + shift[:, None]).sin())

    row, rows = 0, 1

    @staticmethod
    def plan(mesh: DeviceMesh, classes: Any) -> Plan:
        return {
            "block.classes": classes,
            "block.change": torch_tp2d.Replicate(input_layouts=WHOLE),
            "block.up": Colwise2D(input_layouts=Shard(1)),
            "block.down": Rowwise2D(output_layouts=Shard(1)),
        }


class _Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.before = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.block, self.head = block(), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.block(self.before(x)))


def _steps(block: Callable[[], nn.Module], entries: Plan, mesh: DeviceMesh) -> dict[str, float]:
    """The largest difference of each gradient from one device's, its copies on a rank included."""
    plan = {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "before": SequenceParallel(use_local_output=True),
        **entries,
        "head": Colwise2D(input_layouts=Shard(1), output_layouts=WHOLE),
    }
    one = _Model(block).double()
    several = torch_tp2d.parallelize_module(copy.deepcopy(one), mesh, plan)
    if isinstance(several.block, _Conditioned):
        several.block.row, several.block.rows = mesh.get_local_rank("tp_row"), mesh.shape[0]
    if isinstance(getattr(several.block, "way", None), _Summing):
        several.block.way.group = mesh.get_group("tp_col")
    ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
    found = {}
    for _ in range(2):
        wanted, y = one(ids), several(ids)
        wanted.sin().sum().backward()
        y.sin().sum().backward()
        found["output"] = relative(y, wanted)
        for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
            copies = [b.grad.full_tensor(), b.grad.to_local()]
            same = [relative(x, a.grad) for x in copies if x.shape == a.grad.shape]
            found[name] = max(*same, found.get(name, 0.0))
        for model in (one, several):
            model.zero_grad()
    return found


REFUSED: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gate": (_Gated, torch_tp2d.Replicate),
    "gate, local": (_Gated, Local2D),
    "gate, by columns": (_Gated, lambda: Colwise2D(output_layouts=Replicate())),
    "latent": (_Latent, torch_tp2d.Replicate),
    "latent, local": (_Latent, Local2D),
    "condition": (_Conditioned, torch_tp2d.Replicate),
}
RIGHT: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gate": (_Gated, lambda: torch_tp2d.Replicate(grad_layouts=SUMMED)),
    "gate, by columns": (
        _Gated,
        lambda: Colwise2D(output_layouts=Replicate(), grad_layouts=SUMMED),
    ),
    "latent": (_Latent, lambda: torch_tp2d.Replicate(grad_layouts=SUMMED)),
    "latent, by columns": (
        _Latent,
        lambda: Colwise2D(output_layouts=Replicate(), grad_layouts=SUMMED),
    ),
    "condition": (_Conditioned, lambda: torch_tp2d.Replicate(grad_layouts=(Partial(), Partial()))),
}


class _Chain(nn.Module):
    """A vector of each token, by way of another module, beside split features."""

    def __init__(self, way: nn.Module) -> None:
        super().__init__()
        self.up, self.first = nn.Linear(HIDDEN, 30), nn.Linear(HIDDEN, 6)
        self.way, self.down = way, nn.Linear(30, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.way(self.first(x).sin() * 2)
        return self.down(self.up(x) * y.mean(-1, keepdim=True))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin())


class _Summing(nn.Module):
    """The user's own sum of the gradient, as Megatron-LM's functions have it."""

    group: Any = None

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            total = grads[0].clone()
            dist.all_reduce(total, group=ctx.group)
            return total, None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.group is None else self.Sum.apply(x, self.group)


PARTS = torch_tp2d.Replicate(grad_layouts=SUMMED)
BY_COLUMNS = Rowwise2D(output_layouts=Replicate(), grad_layouts=SUMMED)
HANDED_ON = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
WAYS: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "a module of whole parameters": (
        lambda: nn.Linear(6, 6),
        {"first": PARTS, "way": torch_tp2d.Replicate(input_layouts=Replicate())},
    ),
    "a module of its own": (
        lambda: nn.Linear(6, 6),
        {"first": PARTS, "way": Local2D(input_layouts=Replicate())},
    ),
    "one that opens, one that closes": (
        _Two,
        {"first": PARTS, "way.a": Colwise2D(), "way.b": BY_COLUMNS},
    ),
    "one that takes its part of the features": (
        lambda: nn.Linear(6, 6),
        {
            "first": PARTS,
            "way": Rowwise2D(
                input_layouts=Replicate(), output_layouts=Replicate(), grad_layouts=SUMMED
            ),
        },
    ),
    "by a hook that changes nothing": (
        _Two,
        {"first": PARTS, "way": HANDED_ON, "way.a": Colwise2D(), "way.b": BY_COLUMNS},
    ),
    "the user's own sum": (_Summing, {"first": torch_tp2d.Replicate()}),
}


def _by_ways(rows: int, columns: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    for name, (way, entries) in WAYS.items():
        plan = {f"block.{module}": style for module, style in entries.items()}
        plan |= {k: v for k, v in _Gated.plan(mesh, None).items() if k != "block.gate"}

        def block(way: Any = way) -> nn.Module:
            return _Chain(way())

        steps = _steps(block, plan, mesh)
        found |= {f"{name}: {parameter}": value for parameter, value in steps.items()}
    return found


def _of_both_kinds(rows: int, columns: int) -> str:
    """The message for a sum of what is given whole gradients and of what is given parts."""

    class Both(_Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = self.way(self.first(x) + x[..., :6])
            return self.down(self.up(x) * y.mean(-1, keepdim=True))

    mesh = grid_mesh(rows, columns)
    plan = {k: v for k, v in _Gated.plan(mesh, None).items() if k != "block.gate"}
    plan |= {"block.first": PARTS, "block.way": torch_tp2d.Replicate(input_layouts=Replicate())}
    with pytest.raises(ValueError) as error:
        _steps(lambda: Both(nn.Linear(6, 6)), plan, mesh)
    return str(error.value)


def _refusals(rows: int, columns: int) -> dict[str, str]:
    mesh, messages = grid_mesh(rows, columns), {}
    for name, (block, style) in REFUSED.items():
        try:
            messages[name] = repr(_steps(block, block.plan(mesh, style()), mesh))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def _right(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    found = {}
    for name, (block, style) in RIGHT.items():
        for parameter, difference in _steps(block, block.plan(mesh, style()), mesh).items():
            found[f"{name}: {parameter}"] = difference
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4)])
def test_a_gradient_that_nobody_would_sum_is_refused(rows: int, columns: int) -> None:
    for messages in run(rows * columns, _refusals, rows, columns):
        for name, message in messages.items():
            assert "which that module does not sum" in message, (name, message)
            assert "Partial()" in message and "tp_col" in message, message
        assert "that Linear(in_features=24, out_features=1, bias=True) has" in messages["gate"]
        assert "grad_layouts=(Shard(dim=0), Partial())" in messages["gate"]


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_what_the_refusal_asks_for_is_right(rows: int, columns: int) -> None:
    """Before, the latent's part of the gradient by way of its norm and Linear was summed twice."""
    for found in run(rows * columns, _right, rows, columns):
        assert max(found.values()) < 1e-11, {k: v for k, v in found.items() if v > 1e-11}


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(2, 3)])
def test_what_asks_for_a_part_is_not_given_a_sum(rows: int, columns: int) -> None:
    """A Linear that took such a tensor summed its gradient, and so did its maker: once too often.

    Only the very tensor that a style had handed out was known, and by whole modules alone.
    """
    for found in run(rows * columns, _by_ways, rows, columns):
        assert max(found.values()) < 1e-11, {k: v for k, v in found.items() if v > 1e-11}


def test_what_is_made_of_both_kinds_is_refused() -> None:
    for message in run(4, _of_both_kinds, 2, 2):
        assert "whose maker sums its gradient along tp_col, and of one that" in message, message


class _Pooled(nn.Module):
    """What is made of tokens before the Linear that takes it."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 30), nn.Linear(30, HIDDEN)
        self.pooler, self.out, self.pool = nn.Linear(HIDDEN, 9), nn.Linear(9, 5), pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).sin())
        return self.out(self.pooler(self.pool(x)).tanh())


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first": lambda x: x[:, :1],
    "the first, without its dim": lambda x: x[:, 0],
    "a mean": lambda x: x.mean(1, keepdim=True),
    "all of them": lambda x: 2 * x,
}


def _pooled(rows: int, columns: int, out: Any, *, embeds: bool) -> dict[str, str]:
    """What comes of each: an error, or the largest difference."""
    mesh, found = grid_mesh(rows, columns), {}
    tokens = noise(4, 8, HIDDEN)
    for name, pool in POOLS.items():
        torch.manual_seed(0)
        one = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), _Pooled(pool)).double()
        whole: Any = torch.arange(32).view(4, 8) % VOCAB
        given = whole
        plan: Plan = {
            "0": Rowwise2D(output_layouts=Replicate()),
            "1.up": Colwise2D(),
            "1.down": Rowwise2D(output_layouts=out),
            "1.pooler": Colwise2D(),
            "1.out": Rowwise2D(output_layouts=WHOLE),
        }
        if not embeds:
            one, whole = nn.Sequential(one[1]), tokens
            given = tokens.chunk(rows)[mesh.get_local_rank("tp_row")].clone()
            plan = {f"0.{key[2:]}": style for key, style in plan.items() if key != "0"}
        several = torch_tp2d.parallelize_module(copy.deepcopy(one), mesh, plan)
        try:
            y, wanted = several(given), one(whole)
            y.sin().sum().backward()
            wanted.sin().sum().backward()
        except ValueError as error:
            found[name] = str(error)
            continue
        pairs = zip(one.parameters(), several.parameters(), strict=True)
        worst = max(relative(b.grad.full_tensor(), a.grad) for a, b in pairs)
        found[name] = f"{max(worst, relative(y, wanted)):.0e}"
    return found


@pytest.mark.parametrize("embeds", [True, False])
def test_what_is_made_of_some_tokens_is_not_taken_for_whole(embeds: bool) -> None:
    """``x[:, 0]`` of a split sequence was another token on each column, and taken for the first.

    By the sizes of the tokens that an embedding has noted only a tensor of as many dims and tokens
    could be told, so that a pooler, a mean and even ``2 * x`` gave another loss, without an error.
    """
    for found in run(4, partial(_pooled, embeds=embeds), 2, 2, Shard(1)):
        for name, message in found.items():
            assert "of which each rank has a part along tp_col" in message, (name, message)
            assert "Linear(in_features=30, out_features=24, bias=True) has handed out" in message
    for found in run(4, partial(_pooled, embeds=embeds), 2, 2, Replicate()):
        for name, message in found.items():
            assert float(message) < 1e-11, (name, message)
