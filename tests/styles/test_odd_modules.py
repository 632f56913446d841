"""Modules that are written another way than most: right on the grid, or refused in words."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.utils import parametrizations, parametrize

import torch_tp2d
from support import world
from support.device import DEVICE
from support.fake import fake_grid
from support.marks import deep
from support.models import differences_of_row, grid_mesh, noise, relative
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Norm2D,
    Rowwise2D,
    attention_projections,
)

BATCH, SEQUENCE, HIDDEN, HEADS = 4, 16, 32, 4


class FlexAttention(nn.Module):
    """Attention by ``flex_attention``, which has no backward on the CPU."""

    def __init__(self, kept: BlockMask | None = None) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.kept = kept
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        size, sequence, _ = x.shape
        q, k, v = (
            y.view(size, sequence, -1, HIDDEN // HEADS).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        mask = self.kept if block_mask is None else block_mask
        y = flex_attention(q, k, v, block_mask=mask)
        return self.o(y.transpose(1, 2).reshape(size, sequence, -1))


def _blocks(size: int | None, heads: int | None) -> BlockMask:
    """Causal within documents of each sequence's own, and within another window for each head."""
    generator = torch.Generator().manual_seed(3)
    documents = torch.randint(0, 3, (BATCH, SEQUENCE), generator=generator)
    windows = torch.tensor([16, 3, 5, 9])

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[b, query] == documents[b, key] if size else query >= 0
        near = query - key < windows[h] if heads else query >= 0
        return (query >= key) & same & near

    return create_block_mask(seen, size, heads, SEQUENCE, SEQUENCE, device="cpu", BLOCK_SIZE=4)


def _flex_plan(columns: int) -> dict[str, Any]:
    q, kv, o = attention_projections(HEADS, None, columns)
    return {"": Attention2D(input_layouts=Replicate()), "q": q, "[kv]": kv, "o": o}


def _flex_rank(rows: int, columns: int) -> None:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = FlexAttention().double()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    row, _ = mesh.get_coordinate()
    own = x.chunk(rows)[row] if row < len(x.chunk(rows)) else x[:0]
    with torch.no_grad():
        for size, heads in ((BATCH, None), (BATCH, HEADS), (None, HEADS), (None, None)):
            mask = _blocks(size, heads)
            wanted = reference(x, mask)
            module = copy.deepcopy(reference)
            torch_tp2d.parallelize_module(module, mesh, _flex_plan(columns))
            for given in (mask, mask):
                y = module(own, block_mask=given)
                assert relative(y.full_tensor(), wanted) < 1e-12
        # A mask that the module keeps is not known to be one of the whole batch.
        keeps = copy.deepcopy(reference)
        keeps.kept = _blocks(BATCH, HEADS)
        torch_tp2d.parallelize_module(keeps, mesh, _flex_plan(columns))
        with pytest.raises(ValueError, match="BlockMask that was made for another batch"):
            keeps(own)
        with pytest.raises(ValueError, match="(?s)block_mask.*for 3 in its batch.*are 4"):
            module(own, create_block_mask(_any, 3, None, SEQUENCE, SEQUENCE, device="cpu"))


def _any(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@pytest.mark.parametrize("grid", [deep((2, 2)), deep((2, 1)), deep((1, 2))])
def test_a_block_mask_is_cut_to_the_row_and_the_heads(grid: tuple[int, int]) -> None:
    """A BlockMask made for the whole batch was handed on as it was.

    flex_attention took its first rows for the second row of the mesh, a wrong mask without an
    error; compiled it ended the process with SIGFPE.
    """
    world.run(grid[0] * grid[1], _flex_rank, *grid)


class WrittenOut(nn.Module):
    """Grouped-query attention as Hugging Face's "eager" has it."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, key_heads
        self.n_rep = heads // key_heads
        self.head_dim = HIDDEN // heads
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, key_heads * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        k, v = (y.repeat_interleave(self.n_rep, 1) for y in (k, v))
        y = (q @ k.mT).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


def test_written_out_attention_is_refused_before_it_fails_by_itself() -> None:
    """Key heads that do not divide, and a module that multiplies queries and keys itself.

    The message that says so came after the module had run, and it never got so far: torch's
    "size of tensor a (4) must match the size of tensor b (2)" came instead.
    """
    with fake_grid(1, 4) as mesh:
        q, kv, o = attention_projections(8, 2, 4)
        plan = {"": Attention2D(input_layouts=Replicate()), "q": q, "[kv]": kv, "o": o}
        module = WrittenOut(8, 2)
        torch_tp2d.parallelize_module(module, mesh, plan)
        words = "did not call scaled_dot_product_attention.*8 query and 2 key heads.*sdpa"
        with pytest.raises(ValueError, match=words) as caught:
            module(torch.randn(2, SEQUENCE, HIDDEN))
        assert isinstance(caught.value.__cause__, RuntimeError)
        # Hugging Face's own say in their config how they compute it.
        module = WrittenOut(8, 2)
        module.config = SimpleNamespace(_attn_implementation="eager")
        words = "by 'eager' and not by scaled_dot_product_attention.*8 query and 2 key heads"
        with pytest.raises(ValueError, match=words):
            torch_tp2d.parallelize_module(module, mesh, plan)


class Named(nn.Module):
    """Linears of the given features, by name, and attributes; a plan is applied to it, no more."""

    def __init__(self, linears: dict[str, tuple[int, int]], **attributes: Any) -> None:
        super().__init__()
        for name, (into, out) in linears.items():
            self.add_module(name, nn.Linear(into, out))
        for name, value in attributes.items():
            setattr(self, name, value)


def _fused_plan(module: nn.Module, **options: Any) -> dict[str, Any]:
    takers = ("o", "down")
    return {
        name: Rowwise2D() if name.rpartition(".")[2] in takers else Colwise2D(**options)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }


HEADED = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("linears", "attributes", "options", "words"),
    [
        ({"qkv": (32, 96), "o": (32, 32)}, {}, {}, "'qkv'.*96 features.*'o'.*takes 32.*parts=3"),
        ({"qkv": (32, 96), "o": (32, 32)}, {}, {"parts": 2}, "takes 32.*parts=3"),
        ({"gate_up": (32, 256), "down": (128, 32)}, {}, {}, "takes 128.*Give it parts=2,"),
        # All of a block's Linears in one module: the widest that fits is the one.
        (
            {"q": (32, 32), "gate_up": (32, 256), "down": (128, 32), "o": (32, 32)},
            {},
            {},
            "'gate_up'.*'down'.*takes 128.*parts=2",
        ),
        (
            {"qkv": (32, 48), "o": (32, 32)},
            HEADED,
            {},
            "2 key heads of 4.*parts=.32, 8, 8.",
        ),
        ({"qkv": (32, 48), "o": (32, 32)}, HEADED, {"parts": 3}, "8 query and 2 key heads"),
        ({"q": (32, 32), "kv": (32, 16), "o": (32, 32)}, HEADED, {}, "keys and values.*parts=2"),
    ],
)
def test_fused_projections_are_told_by_what_takes_their_output(
    linears: Any, attributes: Any, options: Any, words: str
) -> None:
    """A plain Colwise2D of queries, keys and values in one weight, or with wrong ``parts``.

    Outputs and gradients were wrong by 10 to 190 %, in silence: a shard has the right shape, and
    the module splits it as if it were a share of each projection.
    """
    with fake_grid(2, 2) as mesh:
        module = Named(linears, **attributes)
        with pytest.raises(ValueError, match=words):
            torch_tp2d.parallelize_module(module, mesh, _fused_plan(module, **options))
        assert not any(isinstance(p, DTensor) for p in module.parameters())
        # In a module of its own, as in a gate that holds its projection.
        name = next(n for n in linears if n not in ("q", "o", "down"))
        inner = Named({name: linears[name]}, **attributes)
        outer = Named({n: s for n, s in linears.items() if n in ("o", "down")}, inner=inner)
        if "num_heads" not in attributes:
            with pytest.raises(ValueError, match=words.replace(f"'{name}'", f"'inner.{name}'")):
                torch_tp2d.parallelize_module(outer, mesh, _fused_plan(outer, **options))
        for right in (Colwise2D(parts=1), Colwise2D(output_layouts=Replicate())):
            plan = {n: Rowwise2D() if n in ("o", "down") else right for n in linears}
            torch_tp2d.parallelize_module(Named(linears, **attributes), mesh, plan)


def test_fused_stock_projections_and_lines() -> None:
    linears = {"qkv": (32, 96), "o": (32, 32)}
    with fake_grid(2, 2) as mesh:
        plan = {"qkv": ColwiseParallel(), "o": RowwiseParallel()}
        with pytest.raises(ValueError, match="parts=3 of a Colwise2D in its place"):
            torch_tp2d.parallelize_module(Named(linears), mesh, plan)
        # A Colwise may take what attention gives too: wrong in silence, in a random program.
        for kind in (ColwiseParallel, Colwise2D):
            plan = {"qkv": kind(), "o": kind(input_layouts=Shard(-1))}
            with pytest.raises(ValueError, match="takes 32.*parts=3"):
                torch_tp2d.parallelize_module(Named(linears), mesh, plan)
        # Both may be given one stream of features.
        plan = {"qkv": Colwise2D(input_layouts=Shard(-1)), "o": Colwise2D(input_layouts=Shard(-1))}
        torch_tp2d.parallelize_module(Named(linears), mesh, plan)
        plan = {"qkv": ColwiseParallel(use_local_output=False), "o": RowwiseParallel()}
        torch_tp2d.parallelize_module(Named(linears), mesh, plan)
    with fake_grid(2, 1) as mesh:
        torch_tp2d.parallelize_module(Named(linears), mesh, _fused_plan(Named(linears)))


@pytest.mark.parametrize(
    ("linears", "attributes"),
    [
        ({"q": (32, 32), "k": (32, 8), "v": (32, 8), "o": (32, 32)}, HEADED),
        ({"q": (32, 32), "up": (32, 128), "down": (128, 32), "o": (32, 32)}, {}),
        ({"w1": (32, 88), "w3": (32, 88), "down": (88, 32), "router": (32, 4)}, {}),
        # Fused or not cannot be told: as many features as queries have.
        ({"kv": (32, 32), "o": (32, 32)}, HEADED | {"num_kv_heads": 4}),
    ],
)
def test_projections_that_are_not_fused(linears: Any, attributes: Any) -> None:
    with fake_grid(2, 2) as mesh:
        module = Named(linears, **attributes)
        torch_tp2d.parallelize_module(module, mesh, _fused_plan(module))


class Conv1D(nn.Module):
    """Hugging Face's: a Linear that stores ``[in, out]``, and calls its input ``x``."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.nf = out
        self.weight, self.bias = (
            nn.Parameter(torch.randn(into, out)),
            nn.Parameter(torch.randn(out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ByKeyword(nn.Module):
    """Calls what it holds by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.norm, self.split_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.dropout = nn.Dropout(0.0)
        self.up, self.mid, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.conv = Conv1D(HIDDEN, HIDDEN)
        self.stock = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(input=self.norm(input=self.embed(input=ids)))
        y = self.split_norm(input=self.mid(input=self.up(input=x)))
        return self.stock(input=self.conv(x=self.down(input=y)))


def _keywords_rank() -> None:
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    reference = ByKeyword().double()
    model = copy.deepcopy(reference)
    plan = {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "up": Colwise2D(input_layouts=Shard(1)),
        "mid": Block2DParallel(),
        "split_norm": Norm2D(),
        "down": Rowwise2D(),
        "conv": Colwise2D(),
        "stock": RowwiseParallel(use_local_output=False),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    ids = torch.arange(12).view(4, 3) % 11
    wanted = reference(ids)
    wanted.sin().sum().backward()
    y = model(ids)
    y.sin().sum().backward()
    assert relative(y.full_tensor(), wanted) < 1e-12
    for (name, ours), param in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative(ours.grad.full_tensor(), param.grad) < 1e-12, name


def test_modules_called_by_keyword() -> None:
    """``linear(input=x)`` was "run() got an unexpected keyword argument 'input'"."""
    world.run(4, _keywords_rank)


class _Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.tanh()


def _by_scale(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _Scaled())


PARAMETRIZED = {
    "function": _by_scale,
    "spectral": parametrizations.spectral_norm,
    "weight": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "old_weight": torch.nn.utils.weight_norm,
    "old_spectral": torch.nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_parametrized_modules_are_refused(kind: str) -> None:
    """They failed half-way: "found non-leaf tensor", or that 'weight' exists already."""
    with fake_grid(2, 2) as mesh:
        module = Named({"up": (8, 16), "down": (16, 8)})
        PARAMETRIZED[kind](module.up)
        plan = {"up": Colwise2D(), "down": Rowwise2D()}
        with pytest.raises(ValueError, match="'up'.*weight is no parameter.*plan first"):
            torch_tp2d.parallelize_module(module, mesh, plan)
        assert not any(isinstance(p, DTensor) for p in module.parameters())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin())


def _parametrized_after_rank() -> list[dict[str, float]]:
    mesh = grid_mesh(2, 2)
    row, _ = mesh.get_coordinate()
    seen = []
    for way in (_by_scale, parametrizations.spectral_norm):
        for name in ("up", "down"):
            torch.manual_seed(0)
            reference = Mlp().double()
            model = copy.deepcopy(reference)
            torch_tp2d.parallelize_module(model, mesh, {"up": Colwise2D(), "down": Rowwise2D()})
            for part in (reference, model):
                torch.manual_seed(1)
                way(part.get_submodule(name))
            seen.append(differences_of_row(model, reference, 2, row))
    return seen


def test_parametrizing_after_the_plan_is_right() -> None:
    """As the message to those who parametrize before it says."""
    for seen in world.run(4, _parametrized_after_rank):
        assert max(max(one.values()) for one in seen) < 1e-12, seen


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 2))])
def test_inputs_without_tokens_are_refused(grid: tuple[int, int]) -> None:
    """``[features]`` was an IndexError from within, or an invalid gradient in backward."""
    with fake_grid(*grid) as mesh:
        for dataflow in ("auto", "weight_stationary"):
            model = Mlp()
            style = Colwise2D(dataflow=dataflow)
            torch_tp2d.parallelize_module(model, mesh, {"up": style, "down": Rowwise2D()})
            with pytest.raises(ValueError, match=r"shape \(8,\).*at least one dim of tokens"):
                model(torch.zeros(8))
        norm = torch_tp2d.parallelize_module(nn.LayerNorm(8), mesh, Norm2D())
        with pytest.raises(ValueError, match=r"shape \(4,\).*at least one dim of tokens"):
            norm(torch.zeros(4))
        table = torch_tp2d.parallelize_module(nn.Embedding(8, 8), mesh, Rowwise2D())
        with pytest.raises(ValueError, match=r"shape \(\).*ids \[tokens\]"):
            table(torch.tensor(3))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


def _attention_on_few_samples(row_dim: int) -> dict[str, float]:
    mesh = grid_mesh(4, 1)
    torch.manual_seed(0)
    reference = nn.Sequential(_Attention(), nn.Linear(8, 5)).double()
    model = copy.deepcopy(reference)
    on: dict[str, Any] = {"row_dim": row_dim}
    plan: dict[str, Any] = {
        "0": Attention2D(**on),
        "0.[qkv]": Colwise2D(**on),
        "0.o": Rowwise2D(**on),
        "1": Colwise2D(output_layouts=Replicate(), use_local_output=False, **on),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    x = torch.randn(3, 3, 8, dtype=torch.float64)
    wanted = reference(x)
    y = model(distribute_tensor(x, mesh, (Shard(row_dim), Replicate())))
    assert y.shape == wanted.shape
    wanted.sin().sum().backward()
    y.sin().sum().backward()
    seen = {
        name: relative(ours.grad.full_tensor(), param.grad)
        for (name, ours), param in zip(
            model.named_parameters(), reference.parameters(), strict=True
        )
        if name != "0.k.bias"  # Zero, as softmax does not see it.
    }
    return seen | {"output": relative(y.full_tensor(), wanted)}


@pytest.mark.parametrize("row_dim", [0, deep(1)])
def test_attention_on_a_row_without_tokens_in_a_model_without_an_embedding(row_dim: int) -> None:
    """What stood in for none left the attention with its output and was taken for a fourth token.

    Inside, the sizes of the DTensor that it was given tell it from others; after it nothing does.
    The loss had a token more than there are.
    """
    for seen in world.run(4, _attention_on_few_samples, row_dim):
        assert max(seen.values()) < 1e-12, seen


def _watched(row_dim: int) -> dict[str, float]:
    torch_tp2d.debug.enable()
    try:
        return _attention_on_few_samples(row_dim)
    finally:
        torch_tp2d.debug.disable()


def test_debug_mode_where_gradients_come_in_another_order() -> None:
    """To a row without tokens they do: debug mode said that the ranks did different things."""
    for seen in world.run(4, _watched, 0):
        assert max(seen.values()) < 1e-12, seen


def _functional_rank() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    row, _ = mesh.get_coordinate()
    torch.manual_seed(0)
    reference = Mlp().double()
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, mesh, {"up": Colwise2D(), "down": Rowwise2D()})
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    own, params = x.chunk(2)[row], dict(model.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (own,)).sin().sum()

    for transformed in (torch.func.grad(loss), partial(torch.func.vjp, loss)):
        with pytest.raises(NotImplementedError, match="functional_call.*torch.autograd.grad"):
            transformed(params)
    scale, left = torch.ones((), dtype=torch.float64, requires_grad=True), list[Tensor]()
    torch.func.grad(lambda z: left.append(scale * own * z.detach()) or z)(torch.ones_like(scale))
    model(left[0]).sum().backward()
    assert scale.grad is not None, "a tensor that a transform has left had no graph"
    reference(x).sin().sum().backward()
    grads = torch.autograd.grad(loss(params), list(params.values()))
    names = dict(reference.named_parameters())
    return {
        name: relative(grad.full_tensor(), names[name].grad)
        for name, grad in zip(params, grads, strict=True)
    }


def test_transforms_of_functions_are_refused_and_functional_calls_right() -> None:
    """``torch.func.grad`` raised "it must override the setup_context staticmethod"."""
    for seen in world.run(4, _functional_rank):
        assert max(seen.values()) < 1e-12, seen


def _full_state_rank() -> float:
    mesh = init_device_mesh(DEVICE, (2, 2, 1), mesh_dim_names=("dp", "tp_row", "tp_col"))
    torch.manual_seed(0)
    wanted = {name: torch.randn_like(x) for name, x in Uneven().state_dict().items()}
    model = Uneven()
    plan = {"up": Colwise2D(), "down": Rowwise2D()}
    torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    fully_shard(model, mesh=mesh["dp"])
    given = dict(wanted) if mesh.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    return max(
        relative(ours.full_tensor(), wanted[name]) for name, ours in model.state_dict().items()
    )


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


def test_a_full_state_dict_goes_onto_a_grid_under_fsdp2() -> None:
    """Without ``broadcast_from_rank0`` torch ends in a bare AssertionError.

    So it does with its own styles: distribute_tensor does not take a ``_StridedShard`` of a dim
    that does not divide over both axes.
    """
    assert world.run(4, _full_state_rank) == [0.0] * 4


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((6,), 0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def _meets_what_is_whole(rows: int, columns: int) -> float:
    mesh, reference, model = grid_mesh(rows, columns), Gained(), Gained()
    whole = Replicate(), Replicate()
    torch_tp2d.parallelize_module(model, mesh, torch_tp2d.Local2D(input_layouts=whole))
    x = noise(4, 3, 6)
    for part in (reference, model):
        part(x).square().sum().backward()
    split = distribute_tensor(x, mesh, (Shard(0), Replicate()), src_data_rank=None)
    with pytest.raises(ValueError, match="Gained.* runs on all samples, but got a DTensor"):
        model(split)
    # A module without parameters, whole on every rank, under Replicate().
    soft = torch_tp2d.parallelize_module(
        nn.Softmax(-1), mesh, torch_tp2d.Replicate(input_layouts=whole)
    )
    assert torch.equal(soft(x), x.softmax(-1))
    return relative(model.gain.grad, reference.gain.grad)


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1)])
def test_parameters_that_meet_what_is_whole_are_not_summed(rows: int, columns: int) -> None:
    """Every rank computes the same with them: a sum over the rows is as many times too large."""
    assert max(world.run(rows * columns, _meets_what_is_whole, rows, columns)) < 1e-12


class _Halved(Conv1D):
    """A Conv1D with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_conv1d_that_does_more() -> None:
    """Its own forward was passed by, in silence: it was taken for a Conv1D by its class's name."""
    with fake_grid(2, 2) as mesh, pytest.raises(TypeError, match="with their own forward.*_Halved"):
        torch_tp2d.parallelize_module(_Halved(8, 8), mesh, Colwise2D())
