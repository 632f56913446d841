"""Modules that mix the tokens of a sample, or samples, in a stream that is split by tokens.

A convolution over the sequence waited for ever on a mesh of two dims: DTensor exchanges the edges
of its shards by ranks of the world, and takes a rank without samples for one that has all. A
recurrence, GroupNorm, BatchNorm and MultiheadAttention met errors of torch's that named no module,
and TransformerEncoderLayer passed by all that is inside when it evaluates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh
from support.one_module import feed, join, whole
from torch_tp2d import Colwise2D, Replicate, Rowwise2D, parallelize_module
from torch_tp2d.plans import plan_for

WIDTH, VOCAB = 16, 11
TOLERANCE = 1e-10


class CausalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., : x.shape[1]].mT


class OwnConv(nn.Module):
    """With the weight of a convolution, but no module that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3 * WIDTH).view(WIDTH, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x.mT, self.weight, padding=1, groups=WIDTH).mT


class Recurrence(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.inner = kind(WIDTH, WIDTH, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.inner(x)[0]
        y, _ = self.inner(x.transpose(0, 1))
        return y.transpose(0, 1)


class Channels(nn.Module):
    """A norm that takes ``[batch, channels, length]``."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).cumsum(1) / x.shape[1] + torch.roll(x, 1, 1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attn(x, x, x)
        return y + weights.mean()


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "a causal Conv1d": CausalConv,
    "conv1d": OwnConv,
    "GRU": lambda: Recurrence(nn.GRU, True),
    "LSTM, sequence first": lambda: Recurrence(nn.LSTM, False),
    "BatchNorm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "GroupNorm": lambda: Channels(nn.GroupNorm(4, WIDTH)),
    "InstanceNorm": lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True)),
    "cumsum and roll": Sums,
    "MultiheadAttention": Heads,
}


class Model(nn.Module):
    """A block for each mixer, and a plan derived from what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleDict({name: make() for name, make in MIXERS.items()})
        self.norms = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in MIXERS})
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for name, mixer in self.mixers.items():
            x = x + mixer(self.norms[name](x))
        return self.head(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """torch's own layers, as its tutorials stack them."""

    def __init__(self, decodes: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0, **options)
            for _ in range(2)
        )
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0)
        self.decoder = layer if decodes else None
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        ends = torch.arange(ids.shape[1])[None] > 1 + torch.arange(len(ids))[:, None]
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=causal, src_key_padding_mask=ends)
        if self.decoder is not None:
            x = self.decoder(self.embed(ids[:, :2]), x, memory_key_padding_mask=ends)
        return self.head(x)


def _by_hand() -> dict[str, Any]:
    """The MLPs split, all else whole: tensors between modules are local ones."""
    plan: dict[str, Any] = {"embed": Replicate(), "head": Replicate(use_local_output=False)}
    plan |= {"layers.*.linear1": Colwise2D(), "layers.*.linear2": Rowwise2D()}
    return plan | {f"layers.*.{name}": Replicate() for name in ("norm1", "norm2", "self_attn")}


def _value(x: Tensor) -> Tensor:
    return whole(x) if isinstance(x, DTensor) else x.detach()


def _train(kind: str, rows: int, columns: int, batch: int, length: int) -> dict[str, float]:
    """The largest differences of outputs, parameters and buffers: three steps, then at rest."""
    torch.manual_seed(0)
    makes: dict[str, Callable[[], nn.Module]] = {
        "mixers": Model,
        "encoder": lambda: Encoder(decodes=False),
        "encoder, norms first": lambda: Encoder(norm_first=True),
    }
    reference = makes[kind]().double()
    model, mesh = copy.deepcopy(reference), grid_mesh(rows, columns)
    ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    by_hand = kind == "encoder"
    with pytest.warns(UserWarning, match="whole on every rank"):
        plan = plan_for(model, mesh, inputs=(ids,))
    parallelize_module(model, mesh, _by_hand() if by_hand else plan)
    found = {}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(4):
        if step == 3:
            model.eval()
            reference.eval()
        with torch.set_grad_enabled(step < 3):
            ours, wanted = model(ids), reference(ids)
        found[f"output {step}"] = (_value(ours) - wanted).abs().max().item()
        if step < 3:
            for y, optimizer in zip((ours, wanted), optimizers, strict=True):
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    pairs = [*zip(model.named_parameters(), reference.parameters(), strict=True)]
    pairs += [*zip(model.named_buffers(), reference.buffers(), strict=True)]
    for (name, mine), truth in pairs:
        found[name] = (_value(mine) - truth).abs().max().item()
    return found


@pytest.mark.parametrize("kind", ["mixers", deep("encoder"), deep("encoder, norms first")])
@pytest.mark.parametrize(
    ("grid", "size"),
    [
        ((1, 2), (3, 5)),
        deep((2, 2), (4, 6)),
        deep((2, 1), (3, 5)),
        deep((2, 2), (3, 5)),
        deep((2, 3), (3, 7)),
        deep((3, 2), (2, 5)),
        deep((1, 4), (2, 3)),
        deep((4, 1), (2, 3)),
    ],
)
def test_a_model_that_mixes_tokens_is_right(
    kind: str, grid: tuple[int, int], size: tuple[int, int]
) -> None:
    for found in world.run(grid[0] * grid[1], _train, kind, *grid, *size):
        assert len(found) > 20
        assert not {name: value for name, value in found.items() if not value < TOLERANCE}


def _recurrence(rows: int, columns: int, layout: Any) -> dict[str, float]:
    """One GRU by hand, its states given and taken."""
    torch.manual_seed(0)
    mesh = grid_mesh(rows, columns)
    reference = nn.GRU(WIDTH, 6, num_layers=2, batch_first=True).double()
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh, Replicate(input_layouts=layout))
    x, first = torch.randn(4, 5, WIDTH).double(), torch.randn(2, 4, 6).double()
    leaf, truth = feed(x, mesh, layout, "local"), x.clone().requires_grad_()
    y, states = model(leaf, first)
    wanted, wanted_states = reference(truth, first)
    (y.square().sum() + states.square().sum()).backward()
    (wanted.square().sum() + wanted_states.square().sum()).backward()
    assert leaf.grad is not None and truth.grad is not None
    out = (layout[0], dt.Replicate()) if states.shape[1] != 4 else (dt.Replicate(),) * 2
    moved = tuple(Shard(1) if isinstance(p, Shard) else p for p in out)
    found = {
        "output": (join(y.detach(), mesh, layout, wanted.shape) - wanted).abs().max().item(),
        "states": (join(states.detach(), mesh, moved, wanted_states.shape) - wanted_states)
        .abs()
        .max()
        .item(),
    }
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        found[name] = (whole(ours.grad) - theirs.grad).abs().max().item()
    found["input"] = (join(leaf.grad, mesh, layout, x.shape) - truth.grad).abs().max().item()
    return found


@pytest.mark.parametrize(
    "layout", [(Shard(0), Shard(1)), (Shard(0), dt.Replicate()), (dt.Replicate(), dt.Replicate())]
)
def test_a_recurrence_by_hand(layout: Any) -> None:
    for found in world.run(4, _recurrence, 2, 2, layout):
        assert not {name: value for name, value in found.items() if not value < TOLERANCE}


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.GRU(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)[0]


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.polygamma(2, x * self.scale).renorm(2, 0, 1.0)


def _refused(rows: int, columns: int) -> list[str]:
    mesh = grid_mesh(rows, columns)
    layout = {"input_layouts": (Shard(0), dt.Replicate())}
    mask = torch.zeros(8, 4, 4, dtype=torch.bool)
    x = torch.ones(1, 4, WIDTH)
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    said = []
    for module, args in (
        (_Around(), (x,)),
        (_Odd(), (x,)),
        (attention, (x, x, x, None, True, mask)),
        (copy.deepcopy(attention), (x, x[:, :2], x[:, :2])),
        (nn.GRU(WIDTH, WIDTH, batch_first=True), (x, torch.ones(1, 1, WIDTH))),
    ):
        parallelize_module(module, mesh, Replicate(**layout))
        with pytest.raises(ValueError) as raised:
            module(*args)
        said.append(str(raised.value))
    return said


def test_what_cannot_be_split_is_refused_by_name() -> None:
    for said in world.run(4, _refused, 2, 2):
        around, odd, mask, memory, states = said
        assert "_Around" in around and "Replicate() of its own" in around
        # A GPU's weights are laid side by side first.
        assert "gru" in around or "_cudnn_rnn_flatten_weight" in around
        # What it raised was torch's, of an operator's internal name.
        assert "_Odd" in odd and "renorm" in odd and "Replicate() of its own" in odd
        assert "MultiheadAttention" in mask and "(8, 4, 4)" in mask
        assert "MultiheadAttention" in memory and "use_local_output=False" in memory
        assert "(1, 1, 16)" in states and "all 2 samples" in states


def test_a_recurrence_that_drops_between_its_layers_is_refused() -> None:
    """Each rank would draw masks of its own, and outputs that are whole would differ."""
    with fake_grid(2, 2) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4, num_layers=2, dropout=0.1))
        for style in (Replicate(), SequenceParallel()):
            with pytest.raises(ValueError, match=r"GRU.*dropout=0.1 between its 2 layers"):
                parallelize_module(model, mesh, {"1": style})
