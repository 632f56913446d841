"""Dropout on shards: the mask of one device, whatever the grid."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import metrics
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_tp2d
from support import models, world
from support.dropout import OnOneDevice, on_one_device
from support.marks import deep
from support.models import (
    EVEN,
    UNEVEN,
    batch,
    grid_mesh,
    loss_of,
    parallelize,
    relative,
    transformer,
)
from torch_tp2d import Colwise2D, Dropout2D, Rowwise2D
from torch_tp2d.ops.dropout import draw_key, drop, dropped, fused, recomputed

TOLERANCE = 1e-12


class Layer(nn.Module):
    """A feed-forward layer as T5 has it: dropout on the features too."""

    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.wi = nn.Linear(hidden, inner)
        self.inner_dropout = nn.Dropout(p)
        self.wo = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.wo(self.inner_dropout(self.wi(self.norm(x)).relu())))


class FunctionalLayer(Layer):
    """The same by ``F.dropout``, as BART has it."""

    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__(hidden, inner, 0.0)
        self.dropout_rate = p

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(self.wi(self.norm(x)).relu(), self.dropout_rate, self.training)
        return x + F.dropout(self.wo(inner), p=self.dropout_rate, training=self.training)


class Feeds(nn.Module):
    """Embedding, feed-forward layers and a head."""

    def __init__(
        self,
        vocab: int,
        layer: type[Layer] = Layer,
        hidden: int = 6,
        inner: int = 10,
        p: float = 0.2,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(vocab, hidden)
        self.drop = nn.Dropout(p)
        self.layers = nn.ModuleList(layer(hidden, inner, p) for _ in range(2))
        self.head = nn.Linear(hidden, vocab)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tok(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def feeds_plan(row_dim: int, *, tokens: bool, local: bool = True) -> dict[str, Any]:
    """Residual stream in the token layout or the row layout; features local or DTensors."""
    stream = Shard(1) if tokens else Replicate()
    norm: Any = SequenceParallel() if tokens else torch_tp2d.Replicate(row_dim=row_dim)
    if tokens and row_dim:
        norm = torch_tp2d.Lifted(norm, row_dim=row_dim)
    on = {"row_dim": row_dim}
    return {
        "tok": Rowwise2D(output_layouts=stream, **on),
        "layers.*.norm": norm,
        "layers.*.wi": Colwise2D(input_layouts=stream, use_local_output=local, **on),
        "layers.*.wo": Rowwise2D(output_layouts=stream, **on),
        "head": Colwise2D(input_layouts=stream, use_local_output=False, **on),
    }


def differences(
    reference: nn.Module, model: nn.Module, sizes: tuple[int, int, int], seed: int = 5
) -> float:
    """Loss and gradients of two steps from one seed; the largest relative difference."""
    size, sequence, vocab = sizes
    worst = 0.0
    for step in range(2):
        ids, target = batch(size, sequence, vocab, seed=step)
        losses = []
        for part in (reference, model):
            part.zero_grad()
            torch.manual_seed(seed + step)
            on_one = OnOneDevice() if part is reference else contextlib.nullcontext()
            with on_one:
                losses.append(loss_of(part(ids), target))
            losses[-1].backward()
        worst = max(worst, relative(losses[1].detach(), losses[0].detach()))
        for param, ours in zip(reference.parameters(), model.parameters(), strict=True):
            # A key's bias has none: softmax does not see it.
            if param.grad.norm() > 1e-12:
                worst = max(worst, relative(ours.grad, param.grad))
            else:
                worst = max(worst, ours.grad.full_tensor().norm().item())
    return worst


def _transformer(sizes: tuple[int, int, int]) -> nn.Module:
    return transformer(sizes[2], dropout_p=0.2)


def _on_a_grid(plan: str, rows: int, columns: int) -> float:
    worst = 0.0
    mesh = grid_mesh(rows, columns)
    for sizes in (EVEN, UNEVEN):
        model = _transformer(sizes)
        reference = on_one_device(model)
        parallelize(model, mesh, getattr(models, plan)())
        worst = max(worst, differences(reference, model, sizes))
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 1), deep(2, 2), deep(1, 4), deep(4, 1), deep(3, 2)])
def test_every_grid_drops_what_one_device_drops(rows: int, columns: int) -> None:
    """Dropouts that no plan entry names, on local tensors in the token layout."""
    assert max(world.run(rows * columns, _on_a_grid, "plan_2d", rows, columns)) < TOLERANCE


@pytest.mark.parametrize(
    "plan", [deep("plan_mixed"), "plan_dtensor", deep("plan_without_sequence_parallel")]
)
def test_in_other_plans(plan: str) -> None:
    assert max(world.run(4, _on_a_grid, plan, 2, 2)) < TOLERANCE


def _gpt2(rows: int, columns: int) -> float:
    """The tutorial's model and plan, its dropout 0.1 in and around attention."""
    from gpt2 import GPT2, GPT2Config
    from plans import plan_2d

    sizes = 3, 13, 33
    config = GPT2Config(33, n_positions=16, n_embd=16, n_layer=2, n_head=4, dropout=0.1)
    model = GPT2(config).double()
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), plan_2d())
    return differences(reference, model, sizes)


@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2)])
def test_the_tutorials_gpt2(rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _gpt2, rows, columns)) < TOLERANCE


def _feeds(rows: int, columns: int, layer: type[Layer]) -> dict[Any, float]:
    seen = {}
    mesh = grid_mesh(rows, columns)
    for row_dim in (0, 1):
        for tokens in (True, False):
            for local in (True, False):
                for sizes in (EVEN, UNEVEN):
                    model = Feeds(sizes[2], layer)
                    reference = on_one_device(model)
                    plan = feeds_plan(row_dim, tokens=tokens, local=local)
                    torch_tp2d.parallelize_module(model, mesh, plan)
                    seen[row_dim, tokens, local, sizes] = differences(reference, model, sizes)
    return seen


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 3), deep(3, 2)])
def test_tokens_rows_and_features_even_or_not(rows: int, columns: int) -> None:
    """Both axes on the sequence (row_dim 1) too, where shards are chunks of chunks."""
    for seen in world.run(rows * columns, _feeds, rows, columns, Layer):
        assert max(seen.values()) < TOLERANCE, seen


def _lifted_feeds() -> float:
    """Nothing but lifted styles says that rows hold parts of sequences."""
    model = Feeds(UNEVEN[2])
    reference = on_one_device(model)

    def lifted(kind: Any, **layouts: Any) -> torch_tp2d.Lifted:
        return torch_tp2d.Lifted(kind(**layouts), row_dim=1)

    plan = {
        "tok": lifted(RowwiseParallel, input_layouts=Replicate()),
        "layers.*.wi": lifted(ColwiseParallel),
        "layers.*.wo": lifted(RowwiseParallel),
        "head": lifted(ColwiseParallel, use_local_output=False),
    }
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), plan)
    return differences(reference, model, UNEVEN)


def test_rows_hold_parts_of_sequences_by_lifted_styles_alone() -> None:
    """Of a plan of lifted styles the ``row_dim`` was not seen.

    Dropouts that it does not name took rows to hold samples: refused where an embedding tells the
    sizes, and dropping others than one device does where none is.
    """
    assert max(world.run(4, _lifted_feeds)) < TOLERANCE


def _features_over_both_axes(inner: int) -> float:
    everywhere = Shard(-1), Shard(-1)
    model = Feeds(8, inner=inner)
    reference = on_one_device(model)
    plan = feeds_plan(0, tokens=False) | {
        "layers.*.wi": Colwise2D(output_layouts=everywhere),
        "layers.*.inner_dropout": Dropout2D(input_layouts=everywhere),
        "layers.*.wo": Rowwise2D(input_layouts=everywhere),
    }
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), plan)
    return differences(reference, model, EVEN)


@pytest.mark.parametrize("inner", [2, 7])
def test_declared_features_over_both_axes(inner: int) -> None:
    """A random program hung: two features over four ranks, one on each rank of one column.

    The ranks that hold none asked the others how many there are in all; the others thought to know
    it from the Linear beside, as one is what each rank of a column holds of its two.
    """
    assert max(world.run(4, _features_over_both_axes, inner)) < TOLERANCE


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


@pytest.mark.deep
def test_what_a_modules_own_code_drops() -> None:
    for seen in world.run(4, _feeds, 2, 2, FunctionalLayer):
        assert max(seen.values()) < TOLERANCE, seen


def test_what_is_dropped_looks_like_chance() -> None:
    """Rates, pairs of neighbours in each dim, and two keys, each within five deviations."""
    torch.manual_seed(0)
    index = [torch.arange(4), torch.arange(100), torch.arange(300)]
    for p in (0.01, 0.1, 0.5, 0.9):
        mask, other = (dropped(draw_key(), p, index).double() - p for _ in range(2))
        deviation = (p * (1 - p)) ** 0.5
        pairs = [mask, mask * other / deviation]
        for dim, size in enumerate(mask.shape):
            for step in (1, 2, 3, 8, 64):
                if step < size:
                    ahead = mask.narrow(dim, step, size - step)
                    pairs.append(mask.narrow(dim, 0, size - step) * ahead / deviation)
        for pair in pairs:
            assert abs(pair.mean().item()) < 5 * deviation / pair.numel() ** 0.5, (p, pair.shape)


def test_a_part_has_the_mask_of_the_whole() -> None:
    """A block, and positions in another order, as sequences cut in zigzag have them."""
    key = draw_key()
    index = [torch.arange(3), torch.arange(8), torch.arange(5)]
    whole = dropped(key, 0.3, index)
    order = torch.tensor([0, 1, 6, 7])
    part = dropped(key, 0.3, [index[0][1:], order, index[2][2:]])
    assert part.equal(whole[1:, order, 2:])
    assert not dropped(key, 0.0, index).any() and dropped(key, 1.0, index).all()
    x = torch.ones(3, 8, 5, requires_grad=True)
    y = drop(x, whole, 0.3)
    assert y.equal((~whole) / 0.7)
    y.sum().backward()
    assert x.grad is not None and x.grad.equal(y.detach())
    assert drop(x, torch.ones_like(whole), 1.0).eq(0).all()


def test_a_gpu_keeps_no_mask() -> None:
    """It is made again for the gradient, and for the gradient's: the same elements."""
    key, p = draw_key(), 0.3
    index = [torch.arange(3), torch.arange(8), torch.arange(5)]
    x = torch.randn(3, 8, 5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = recomputed(x, key, p, index)
    assert sum(saved.numel() for saved in kept) == 1 + 3 + 8 + 5
    assert y.equal(drop(x, dropped(key, p, index), p))
    grad = torch.randn_like(y).requires_grad_()
    (got,) = torch.autograd.grad(y, x, grad, create_graph=True)
    assert got.equal(drop(grad, dropped(key, p, index), p))
    (again,) = torch.autograd.grad(got, grad, torch.ones_like(got))
    assert again.equal(drop(torch.ones_like(y), dropped(key, p, index), p))


@pytest.mark.deep
def test_compiled_dropout() -> None:
    """What a GPU is given, compiled for a CPU: any sizes, rates and keys by the same two kernels.

    Every rate dropped as many as the first one: what Dynamo saw rounded was a constant to it.
    """
    metrics.reset()
    for seed, (p, sizes) in enumerate(
        ((0.1, (4, 6, 8)), (0.5, (3, 7, 5)), (0.25, (9, 2, 33)), (0.0, (5, 5, 5)), (1.0, (2, 3, 4)))
    ):
        torch.manual_seed(seed)
        key, index = draw_key(), [torch.arange(2, 2 + size) for size in sizes]
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(sizes, dtype=dtype)
            wanted = drop(x, dropped(key, p, index), p)
            torch.testing.assert_close(fused(x, key, p, index), wanted, rtol=1e-6, atol=0)
    assert metrics.generated_kernel_count == 2 * 2, "of two dtypes"


def test_a_key_goes_with_tensors_of_any_device() -> None:
    """On a GPU the first dropout died: the key, drawn on the CPU, had been given a dim."""
    key = draw_key()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for sizes in ((5,), (8, 5), (3, 8, 5)):
            mask = dropped(key, 0.3, [torch.arange(size, device="cuda") for size in sizes])
            assert mask.shape == sizes and mask.device.type == "cuda"


def _recomputed() -> tuple[float, float]:
    """Layers computed again in backward, against layers that are not; and two kinds of seed."""
    vocab = 33
    model = Feeds(vocab)
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), feeds_plan(0, tokens=True))
    for layer in model.layers:
        inner = layer.forward
        layer.forward = partial(checkpoint, inner, use_reentrant=False)
    again = differences(reference, model, (3, 13, vocab))
    ids, target = batch(3, 13, vocab)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses += [loss_of(model(ids), target).item() for _ in range(2)]
    assert losses[:2] == losses[2:4]
    assert len(set(losses)) == 4
    return again


def test_recomputation_repeats_the_mask() -> None:
    assert max(world.run(4, _recomputed)) < TOLERANCE


def _without() -> None:
    """Neither eval nor p = 0 draws a number or changes a tensor."""
    mesh = grid_mesh(2, 2)
    layer = Layer(6, 10, 0.5)
    torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})
    assert isinstance(layer.dropout, nn.Dropout)
    x = torch.ones(2, 4, 6)
    state = torch.get_rng_state()
    assert layer.eval().dropout(x) is x
    layer.train().dropout.p = 0.0
    assert layer.dropout(x).equal(x)
    assert torch.get_rng_state().equal(state)


def test_without_dropout_nothing_is_drawn() -> None:
    world.run(4, _without)


def _astray(first: int) -> str:
    """Rank 1 draws a number of its own before call ``first``."""
    mesh = grid_mesh(2, 2)
    layer = Layer(6, 10, 0.5)
    torch_tp2d.parallelize_module(layer, mesh, {"wi": Colwise2D(), "wo": Rowwise2D()})
    torch.manual_seed(0)
    for call in range(first + 1):
        if call == first and torch.distributed.get_rank() == 1:
            torch.rand(())
        try:
            layer.dropout(torch.ones(2, 4, 6))
        except ValueError as error:
            assert call == first
            return str(error)
    return ""


def test_generators_that_differ_are_refused() -> None:
    """On every rank, at the first call or at one of the later checks."""
    for first in (0, 1, 3):
        for message in world.run(4, _astray, first):
            assert "call torch.manual_seed(seed) with one seed on every rank" in message


def _replicas(seeds: tuple[int, int]) -> float:
    """Two replicas, each with its share of the batch and a seed, under FSDP2."""
    vocab = 33
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp_row", "tp_col"))
    model = Feeds(vocab)
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], feeds_plan(0, tokens=True))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ids, target = batch(6, 13, vocab)
    for replica, seed in enumerate(seeds):
        torch.manual_seed(seed)
        share = slice(3 * replica, 3 * replica + 3)
        (loss_of(reference(ids[share]), target[share]) / 2).backward()
    here = mesh.get_local_rank("dp")
    torch.manual_seed(seeds[here])
    share = slice(3 * here, 3 * here + 3)
    loss_of(model(ids[share]), target[share]).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(relative(ours.grad, param.grad) for ours, param in pairs)


def test_replicas_have_seeds_of_their_own() -> None:
    assert max(world.run(4, _replicas, (7, 8))) < TOLERANCE


def _compiled() -> float:
    vocab = 33
    model = transformer(vocab, n_layers=1, dropout_p=0.2)
    reference = on_one_device(model)
    parallelize(model, grid_mesh(1, 2), models.plan_2d())
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    return differences(reference, model, (3, 13, vocab))


@pytest.mark.deep
def test_a_compiled_block_drops_the_same() -> None:
    assert max(world.run(2, _compiled)) < TOLERANCE


class Heads(nn.Module):
    """Attention weights of local heads, ``[B, H, S, S]``, under dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        self.query, self.key = nn.Linear(6, 8), nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.query, self.key)
        )
        return self.dropout(q @ k.transpose(-1, -2))


def _heads(rows: int, columns: int) -> float:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    model = Heads().double()
    reference = on_one_device(model)
    plan = {
        "query": Colwise2D(),
        "key": Colwise2D(),
        "dropout": Dropout2D(input_layouts=Shard(1)),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    x = torch.randn(2 * rows, 5, 6, dtype=torch.float64)
    row, column = mesh.get_local_rank("tp_row"), mesh.get_local_rank("tp_col")
    torch.manual_seed(1)
    wanted = reference(x).chunk(rows)[row].chunk(columns, 1)[column]
    torch.manual_seed(1)
    return relative(model(x.chunk(rows)[row]).detach(), wanted.detach())


def test_a_named_dropout_on_heads() -> None:
    assert max(world.run(4, _heads, 2, 2)) < TOLERANCE


def _refusal(case: str) -> str:
    mesh = grid_mesh(1, 2)
    layer = Layer(4, 8, 0.5)
    plan: dict[str, Any] = {"wi": Colwise2D(), "wo": Rowwise2D()}
    x = torch.ones(2, 3, 4)
    if case == "kind":
        layer.dropout = nn.AlphaDropout(0.5)
    elif case == "inplace":
        layer.dropout = nn.Dropout(0.5, inplace=True)
    elif case == "style":
        plan["norm"] = Dropout2D()
    elif case == "row_dim":
        plan["wo"] = Rowwise2D(row_dim=1)
    elif case == "heads":
        x = torch.ones(2, 3, 4, 4)
    try:
        torch_tp2d.parallelize_module(layer, mesh, plan)
        layer.dropout(x)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "case,words",
    [
        ("kind", "ValueError: 'dropout': AlphaDropout.*use nn.Dropout in its place"),
        ("inplace", "ValueError: 'dropout'.*set inplace to False"),
        ("style", "TypeError: 'norm'.*Dropout2D is for nn.Dropout, not LayerNorm"),
        ("row_dim", "ValueError: 'norm'.*row_dim 0 and others 1: name it"),
        ("heads", r"ValueError: .*\(2, 3, 4, 4\).*Dropout2D\(input_layouts=Shard\(1\)\)"),
        ("width", "ValueError: .*the .8. features of modules beside it, or a whole output"),
    ],
)
def test_what_is_refused(case: str, words: str) -> None:
    for message in world.run(2, _refusal, case):
        assert re.search(words, message), message


def _again_and_again() -> None:
    """Three forwards, the second of which draws the second and the third key of the grid."""
    mesh = grid_mesh(2, 1)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).double()
    torch_tp2d.parallelize_module(net, mesh, {"0": Colwise2D(), "2": Rowwise2D()})

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 2, 8, dtype=torch.float64).chunk(2)[mesh.get_local_rank(0)]
        checkpoint(net, x, use_reentrant=False, context_fn=contexts).sum().backward()


def test_selective_checkpointing_of_dropout() -> None:
    """Keys drawn again were counted, and compared where they had not been in forward.

    "aten.select.int encountered during backward but not found in storage", now and then.
    """
    world.run(2, _again_and_again)
