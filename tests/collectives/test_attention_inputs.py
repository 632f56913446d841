"""What an attention module is given beside its hidden states: biases, masks, tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import spread, whole
from torch_tp2d import Attention2D, attention_projections, parallelize_module

HEADS, WIDTH, SEQUENCE = 4, 16, 6
TOLERANCE = 1e-12


class Rotation(NamedTuple):
    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Its further argument is used as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.num_heads = how, HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Any) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        mask: Tensor | None = None
        if self.how == "of each head":
            mask = more[None]
        elif self.how == "of each sample":
            mask = more[:, None]
        elif self.how == "padding":
            mask = more[:, None, None]
        elif self.how == "slopes":
            at = torch.arange(SEQUENCE, dtype=x.dtype)
            mask = more[:, None, None] * (at[None] - at[:, None])
        elif self.how == "named":
            q, k = (y * more.cos[:, None] + y.flip(-1) * more.sin[:, None] for y in (q, k))
        elif self.how == "dict":
            mask = more["bias"]
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.o(y.transpose(1, 2).flatten(2))


def _plan(columns: int, **options: Any) -> dict[str, Any]:
    queries, keys, output = attention_projections(HEADS, HEADS, columns)
    return {"": Attention2D(**options), "q": queries, "[kv]": keys, "o": output}


def _more(how: str, batch: int) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "of each head": lambda: noise(HEADS, SEQUENCE, SEQUENCE, seed=2),
        "of each sample": lambda: noise(batch, SEQUENCE, SEQUENCE, seed=2),
        "padding": lambda: torch.arange(SEQUENCE)[None] < SEQUENCE - torch.arange(batch)[:, None],
        "slopes": lambda: noise(HEADS, seed=2),
        "named": lambda: Rotation(*(noise(batch, SEQUENCE, 4, seed=seed) for seed in (2, 3))),
        "dict": lambda: {"bias": noise(batch, HEADS, SEQUENCE, SEQUENCE, seed=2)},
    }
    return kinds[how]()


def _rank(rows: int, columns: int, how: str, batch: int, options: dict[str, Any]) -> list[float]:
    mesh = grid_mesh(rows, columns)
    one = Attention(how).double()
    ours = parallelize_module(copy.deepcopy(one), mesh, _plan(columns, **options))
    x, more = noise(batch, SEQUENCE, WIDTH), _more(how, batch)
    y = ours(spread(x, mesh, (Shard(0), Replicate())), more)
    expected = one(x, more)
    y.square().sum().full_tensor().backward()
    expected.square().sum().backward()
    found = [relative(whole(y), expected.detach())]
    for param, other in zip(ours.parameters(), one.parameters(), strict=True):
        found.append(relative(whole(param.grad), other.grad))
    return found


GRIDS = [(2, 2), deep(1, 4), deep(4, 1)]


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
@pytest.mark.parametrize("how", ["padding", "slopes", "named", "dict"])
def test_what_sizes_tell(rows: int, columns: int, how: str) -> None:
    """Padding masks ``[batch, keys]`` were taken for ``[queries, keys]`` and slopes ``[heads]`` for
    positions: torch's error of shapes that do not fit. A named tuple raised, and tensors in a dict
    were not cut."""
    for found in world.run(rows * columns, _rank, rows, columns, how, 4, {}):
        assert max(found) < TOLERANCE, found


def _own_part_rank(rows: int, columns: int, how: str, batch: int) -> list[float]:
    mesh, samples = grid_mesh(rows, columns), (Shard(0), Replicate())
    one = Attention(how).double()
    ours = parallelize_module(copy.deepcopy(one), mesh, _plan(columns))
    x, more = noise(batch, SEQUENCE, WIDTH), _more(how, batch)

    def own(value: Tensor) -> Tensor:
        return spread(value, mesh, samples).to_local()

    y = ours(own(x), {"bias": own(more["bias"])} if how == "dict" else own(more))
    one(x, more).square().sum().backward()
    y.square().sum().backward()
    pairs = zip(ours.parameters(), one.parameters(), strict=True)
    return [relative(whole(param.grad), other.grad) for param, other in pairs]


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), deep(2, 2)])
@pytest.mark.parametrize(
    ("how", "batch"),
    [("of each sample", 3), ("dict", 3), ("of each sample", 2 * HEADS - 1), ("padding", 11)],
)
def test_this_rows_part_without_an_embedding(rows: int, columns: int, how: str, batch: int) -> None:
    """Of three samples on two rows one row has one. It took that for a dim to broadcast, and did
    not ask how many samples there are; the other row waited for its answer. So it was where one
    row has as many samples as there are heads, or tokens."""
    for found in world.run(rows * columns, _own_part_rank, rows, columns, how, batch):
        assert max(found) < TOLERANCE, found


def _as_many_heads_as_samples_rank() -> str:
    with pytest.raises(ValueError, match="whole_inputs") as caught:
        _rank(2, 2, "of each head", HEADS, {})
    return str(caught.value)


def test_a_bias_of_as_many_heads_as_samples() -> None:
    """A bias ``[heads, queries, keys]`` was cut by samples where there were as many: outputs and
    gradients were wrong by a half, in silence, at that batch size alone."""
    assert all("of each head" in said for said in world.run(4, _as_many_heads_as_samples_rank))
    for dims, how in (
        (("heads", "sequence", None), "of each head"),
        (("batch", "sequence", None), "of each sample"),
    ):
        options = {"whole_inputs": {"more": dims}}
        for found in world.run(4, _rank, 2, 2, how, HEADS, options):
            assert max(found) < TOLERANCE, found


def _learned_rank(rows: int, columns: int) -> list[float]:
    mesh = grid_mesh(rows, columns)
    one = Attention("of each sample").double()
    ours = parallelize_module(copy.deepcopy(one), mesh, _plan(columns))
    x = noise(2, SEQUENCE, WIDTH)
    bias = noise(2, SEQUENCE, SEQUENCE, seed=2).requires_grad_()
    placed = spread(bias.detach(), mesh, (Replicate(), Replicate())).requires_grad_()
    y = ours(spread(x, mesh, (Shard(0), Replicate())), placed)
    expected = one(x, bias)
    y.square().sum().full_tensor().backward()
    expected.square().sum().backward()
    return [relative(whole(y), expected.detach()), relative(whole(placed.grad), bias.grad)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2)])
def test_a_bias_of_each_sample_that_learns(rows: int, columns: int) -> None:
    """A DTensor ``[batch, queries, keys]`` was taken for states to attend to, as hidden states of
    an encoder are: its gradient was one column's part, in silence."""
    for found in world.run(rows * columns, _learned_rank, rows, columns):
        assert max(found) < TOLERANCE, found


def _masks_rank() -> list[str]:
    mesh = grid_mesh(2, 2)
    placed: tuple[Placement, Placement] = (Shard(0), Shard(1))
    q, k, v = (spread(noise(4, 4, 6, 4, seed=seed), mesh, placed) for seed in range(3))
    whole_q, whole_k, whole_v = (noise(4, 4, 6, 4, seed=seed) for seed in range(3))
    said = []
    for shape, on in (
        ((4, 1, 6, 6), (Replicate(), Shard(0))),
        ((4, 4, 6, 6), (Shard(1), Shard(0))),
        ((4, 1, 6, 6), (Replicate(), Replicate())),
    ):
        mask = noise(*shape, seed=7)
        expected = F.scaled_dot_product_attention(whole_q, whole_k, whole_v, mask)
        with pytest.raises(RuntimeError, match="redistribute the mask") as caught:
            F.scaled_dot_product_attention(q, k, v, spread(mask, mesh, on))
        said.append(str(caught.value))
        wanted = [p if shape[p.dim] > 1 else Replicate() for p in placed]
        y = F.scaled_dot_product_attention(q, k, v, spread(mask, mesh, wanted))
        assert isinstance(y, DTensor)
        assert relative(whole(y), expected) < TOLERANCE
    return said


def test_a_mask_placed_otherwise_than_the_query() -> None:
    """DTensor moves positional arguments to where a rule wants them, and the mask goes by keyword:
    a mask split by heads beside a query split by samples gave outputs wrong by a half, in silence,
    and a replicated one an error of shapes."""
    assert all(len(said) == 3 for said in world.run(4, _masks_rank))
