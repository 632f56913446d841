"""Embeddings, and positions that are added to them."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import (
    FEW,
    LARGE,
    TOLERANCE,
    WHOLE,
    Layout,
    collect,
    covering,
    feed,
    gradients,
    join,
    layout_of,
    no_difference,
    one_device,
    randomized,
    spread,
)
from torch_tp2d import Colwise2D, Lifted, Rowwise2D, parallelize_module


def _embedding(
    style: ParallelStyle,
    mesh: DeviceMesh,
    ids: Tensor,
    out: Layout,
    *,
    vocab: int = 33,
    hidden: int = 7,
    padding_idx: int | None = None,
    local_output: bool = True,
    given: Layout | None = None,
    dtensor: bool = False,
) -> dict[str, float]:
    reference = randomized(nn.Embedding(vocab, hidden, padding_idx=padding_idx))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh, style)
    grad = noise(*ids.shape, hidden, seed=3)
    wanted = reference(ids)
    wanted.backward(grad)
    fed: Tensor = ids
    if dtensor or given is not None:
        fed = spread(ids, mesh, given or WHOLE)
        fed = fed if dtensor else fed.to_local()
    y = model(fed)
    assert isinstance(y, DTensor) is not local_output
    share = spread(grad, mesh, out)
    if local_output:
        # A rank without tokens gets one of zeros, for the user's code: nothing comes of it.
        y = y[tuple(slice(extent) for extent in share.to_local().shape)]
    y.backward(share.to_local() if local_output else share)
    found = collect(y.detach(), mesh, out, "local" if local_output else "mesh", wanted.shape)
    return {"output": relative(found, wanted.detach())} | gradients(reference, model)


def _embeddings(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    generator = torch.Generator().manual_seed(5)
    cases = covering(
        {
            "style": [Rowwise2D, Colwise2D, torch_tp2d.Replicate, RowwiseParallel, ColwiseParallel],
            "out": ["default", "token", "feature", "row"],
            "local_output": [True, False],
            "padding_idx": [None, 0, 17, 32],
            "row_dim": [0, 1],
            "size": [(4, 6), (3, 5)],
            "ids": ["plain", "dtensor", "this row's", "dtensor of this row's"],
        }
    )
    worst = {}
    for case in cases:
        stock = case["style"] in (RowwiseParallel, ColwiseParallel)
        row_dim = case["row_dim"]
        out = layout_of(case["out"], row_dim) if case["out"] != "default" else None
        pair = (Shard(row_dim), Replicate()) if "row" in case["ids"] else None
        if stock:
            pair = None
            options = {} if out is None else {"output_layouts": out[1]}
            single = case["style"](
                input_layouts=Replicate(), use_local_output=case["local_output"], **options
            )
            style: ParallelStyle = Lifted(single, row_dim=row_dim)
        else:
            style = case["style"](
                input_layouts=pair,
                output_layouts=out,
                use_local_output=case["local_output"],
                row_dim=row_dim,
            )
        if out is None:
            by_column = case["style"] in (Colwise2D, ColwiseParallel)
            out = layout_of("feature" if by_column else "row", row_dim)
        ids = torch.randint(0, 33, case["size"], generator=generator)
        ids[0, 0], ids[0, 1] = 32, case["padding_idx"] or 0
        found = _embedding(
            style,
            mesh,
            ids,
            out,
            padding_idx=case["padding_idx"],
            local_output=case["local_output"],
            given=pair,
            dtensor="dtensor" in case["ids"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}

    # Whole on every row, each of which hands back the whole gradient: an override.
    ids = torch.randint(0, 33, (3, 5), generator=generator)
    style = Rowwise2D(output_layouts=WHOLE, grad_layouts=WHOLE)
    found = _embedding(style, mesh, ids, WHOLE)
    worst |= {f"{what}, override": value for what, value in found.items()}
    # The stock ids: every id falls into one rank's part, so that the others find none.
    found = _embedding(Rowwise2D(), mesh, torch.zeros_like(ids), layout_of("row", 0))
    worst |= {f"{what}, one id": value for what, value in found.items()}
    # Fewer rows of vocabulary than ranks.
    for kind in (Rowwise2D, Colwise2D):
        out = layout_of("token", 0)
        found = _embedding(
            kind(output_layouts=out), mesh, ids % 2, out, vocab=2, hidden=3, padding_idx=1
        )
        worst |= {f"{what}, small {kind.__name__}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*FEW, *LARGE])
def test_embeddings_equal_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _embeddings, rows, columns))


def _big_vocab() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    ids = torch.tensor([[0, 50256, 25128, 25129, 1], [12, 50255, 7, 25129, 0], [3, 3, 3, 3, 3]])
    out = layout_of("token", 0)
    found = {}
    for kind in (Rowwise2D, Colwise2D):
        one = _embedding(
            kind(output_layouts=out), mesh, ids, out, vocab=50257, hidden=5, padding_idx=50256
        )
        found |= {f"{what} {kind.__name__}": value for what, value in one.items()}
    return found


def test_a_vocabulary_of_50257() -> None:
    no_difference(world.run(4, _big_vocab))


class _Positions(nn.Module):
    """Positions are added to tokens: the same position to other tokens in each row."""

    def __init__(self, learned: nn.Module) -> None:
        super().__init__()
        self.learned = learned

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        return h * self.learned(positions)


def _positions(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    kinds: list[Any] = [Rowwise2D, Colwise2D, torch_tp2d.Replicate]
    batch, sequence = 3, 5
    for kind, name, local, row_dim in product(
        kinds, ("token", "row", "feature"), (True, False), (0, 1)
    ):
        layout = layout_of(name, row_dim)
        row: Placement = Replicate() if row_dim == 0 else Shard(0)
        on_positions = {"token": Shard(0), "row": Replicate(), "feature": Shard(-1)}[name]
        reference = _Positions(randomized(nn.Embedding(11, 7)))
        model = copy.deepcopy(reference)
        style = kind(
            output_layouts=on_positions if kind is not Colwise2D else (row, on_positions),
            use_local_output=local,
            row_dim=row_dim,
        )
        parallelize_module(model, mesh, {"learned": style})
        h, grad = noise(batch, sequence, 7, seed=1), noise(batch, sequence, 7, seed=2)
        positions = torch.arange(sequence)
        wanted, dh = one_device(lambda x: reference(x, positions), h, grad)  # noqa: B023
        mode = "local" if local else "mesh"
        leaf = feed(h, mesh, layout, mode)
        y = model(leaf, positions)
        share = spread(grad, mesh, layout)
        y.backward(share.to_local() if local else share)
        assert leaf.grad is not None
        key = f"{kind.__name__} {name} {local=} {row_dim=}"
        worst[f"output {key}"] = relative(collect(y.detach(), mesh, layout, mode, h.shape), wanted)
        worst[f"grad of h {key}"] = relative(collect(leaf.grad, mesh, layout, mode, h.shape), dh)
        found = gradients(reference, model)
        worst |= {f"{what} {key}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", FEW)
def test_positions_have_a_share_of_the_gradient_in_each_row(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _positions, rows, columns))


class _Cross(nn.Module):
    """An encoder's tokens in a decoder, whose own are fewer, as in T5."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(11, 7), nn.Embedding(11, 7)
        self.q, self.k = nn.Linear(7, 6), nn.Linear(7, 6)
        self.scale = scale

    def forward(self, long: Tensor, short: Tensor) -> Tensor:
        h, g = self.encoder(long), self.decoder(short)
        if self.scale is not None:
            h = h * self.scale
        return self.q(g) * self.k(h).mean(1, keepdim=True)


def _two_sequences(rows: int, columns: int, scale: float | None) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    reference = randomized(_Cross(scale))
    model = copy.deepcopy(reference)
    plan = {
        "*coder": Rowwise2D(output_layouts=Shard(1)),
        "[qk]": Colwise2D(input_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    long, short = torch.arange(24).view(3, 8) % 11, torch.arange(15).view(3, 5) % 11
    grad, layout = noise(3, 5, 6, seed=2), (Shard(0), Shard(2))
    wanted = reference(long, short)
    wanted.backward(grad)
    y = model(long, short)
    y.backward(spread(grad, mesh, layout).to_local())
    found = {"output": relative(join(y, mesh, layout, wanted.shape), wanted.detach())}
    return found | gradients(reference, model)


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 3)])
def test_two_sequences_of_other_lengths(rows: int, columns: int) -> None:
    """A local tensor that comes from a style is known, and by the graph what the user makes of it.

    The second embedding's sizes were taken for the first one's tokens.
    """
    for scale in (None, 2.0):
        for found in world.run(rows * columns, _two_sequences, rows, columns, scale):
            assert max(found.values()) < TOLERANCE, found


class ScaledEmbedding(nn.Embedding):
    """Gemma's."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * super().forward(input)


class OffsetEmbedding(nn.Embedding):
    """OPT's table of positions, of which the first two rows are not used."""

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions + 2)


class IndexedEmbedding(nn.Embedding):
    """Whisper's table of positions, which are said in one of two ways."""

    def forward(self, positions: Tensor, sliced: bool = False) -> Tensor:
        return self.weight[1 : 1 + positions.shape[1]] if sliced else self.weight[positions]


class OddlyEmbedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = ScaledEmbedding(11, 8), OffsetEmbedding(6, 8)
        self.indexed = IndexedEmbedding(6, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        x = self.embed(ids) + self.positions(positions)
        x = x + self.indexed(positions) + self.indexed(positions, sliced=True)
        return self.down(self.up(x).sin())


class Projected(nn.Embedding):
    """One with a parameter besides its table."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))


class Unread(nn.Embedding):
    """One whose table is read in another way."""

    def forward(self, input: Tensor) -> Tensor:
        return F.one_hot(input, self.num_embeddings).to(self.weight.dtype) @ self.weight


def _oddly_embedded_rank(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    mlp = {"up": Colwise2D(), "down": Rowwise2D(use_local_output=False)}
    whole = Replicate(), Replicate()
    table = torch_tp2d.Replicate(input_layouts=whole, output_layouts=Replicate())
    seen = {}
    for style in (
        Rowwise2D(),
        Colwise2D(output_layouts=Replicate()),
        Rowwise2D(use_local_output=False),
        torch_tp2d.Replicate(),
        table,
    ):
        torch.manual_seed(0)
        reference = OddlyEmbedded().double()
        model = copy.deepcopy(reference)
        # A slice has no batch, which the layouts of ``table`` split.
        indexed = Rowwise2D() if style is table else style
        plan = {"embed": style, "positions": style, "indexed": indexed} | mlp
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids = torch.arange(12).view(4, 3) % 11
        wanted, y = reference(ids), model(ids)
        wanted.sin().sum().backward()
        y.sin().sum().backward()
        seen[f"{style}: output"] = relative(y.full_tensor(), wanted)
        for (name, ours), param in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            seen[f"{style}: {name}"] = relative(ours.grad.full_tensor(), param.grad)
    with pytest.raises(TypeError, match="(?s)other parameters too.*torch_tp2d.Replicate"):
        torch_tp2d.parallelize_module(Projected(11, 8), mesh, Rowwise2D())
    unread = torch_tp2d.parallelize_module(Unread(11, 8), mesh, Rowwise2D())
    with pytest.raises(ValueError, match="looked up its weight 0 times"):
        unread(torch.arange(3))
    return seen


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(3, 1)])
def test_embeddings_that_do_more_than_look_up(rows: int, columns: int) -> None:
    """They were refused, and Gemma's with them: what they do besides is done on the whole.

    A plain ``Replicate()`` took their ids for this row's, and refused them later.
    """
    for seen in world.run(rows * columns, _oddly_embedded_rank, rows, columns):
        assert max(seen.values()) < 1e-12, seen


class _OfOneSample(nn.Module):
    """Position ids with a batch of one, as GPT-2 writes them."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(9, 8)
        self.up, self.first = nn.Linear(8, 8), first

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])[None]
        x = self.wpe(at) + self.wte(ids) if self.first == "wpe" else self.wte(ids) + self.wpe(at)
        return self.up(x)


def _positions_of_one_sample() -> None:
    mesh = grid_mesh(2, 1)
    for first, batch in product(("wte", "wpe"), (3, 4)):
        model = _OfOneSample(first)
        plan = {"wte": Rowwise2D(), "wpe": Rowwise2D(), "up": Colwise2D()}
        parallelize_module(model, mesh, plan)
        with pytest.raises(ValueError, match=r"positions have no batch.*\[sequence\]"):
            model(torch.zeros(batch, 5, dtype=torch.long))
        # Several batches by turns are none of it, nor are positions that say how they lie.
        model = _OfOneSample(first)
        plan["wpe"] = Rowwise2D(output_layouts=(Replicate(), Replicate()))
        parallelize_module(model, mesh, plan)
        for size in (batch, 1, batch):
            model(torch.zeros(size, 5, dtype=torch.long))


def test_positions_with_a_batch_of_one() -> None:
    """Their one sample was on the first row alone: the others added zeros to their tokens.

    Loss and gradients were wrong by a half, in silence: what stands in for no sample is broadcast.
    """
    world.run(2, _positions_of_one_sample)


@pytest.mark.parametrize("style", [Rowwise2D, Colwise2D, torch_tp2d.Replicate])
def test_ids_that_are_none(style: type[Any]) -> None:
    """They were looked up as zeros, without a word; torch raises."""
    with fake_grid(2, 2) as mesh:
        model = parallelize_module(nn.Embedding(11, 8), mesh, style())
        for wrong in (11, -1):
            with pytest.raises(IndexError, match=rf"no id {wrong}: they are 0 to 10"):
                model(torch.tensor([[0, wrong], [1, 2]]))
