"""Derived plans of models that mix tokens by a Linear, by torch's own encoder, or add positions.

An MLP-Mixer's Linear over the tokens was taken for one over features, and the pair of them for a
feed-forward layer: its plan raised of shapes. ``nn.TransformerEncoder``, which looks at the values
of its mask, could not be traced; and a module whose buffer holds positions was not seen between an
embedding and what follows, so that it met a DTensor with a plain table.

Activations that learn were given DTensors, for which torch has no PReLU, or not known as such: then
the Linears around them stayed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import world
from support.decoders import waved
from support.fake import fake_grid
from support.hf import Batch, causal_lm_batch, on_grid, train_beside
from support.marks import deep
from torch_tp2d import Colwise2D, Local2D
from torch_tp2d.plans import plan_for

VOCAB, WIDTH, LENGTH, BATCH = 11, 16, 6, 5
TOLERANCE = 1e-10


class Positions(nn.Module):
    """Sines, as in torch's tutorials."""

    table: Tensor

    def __init__(self, longest: int = 32) -> None:
        super().__init__()
        at, rate = torch.arange(longest)[:, None], torch.arange(0, WIDTH, 2) / WIDTH
        angles = at * torch.exp(-math.log(1e4) * rate)
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class OfTokens(nn.Module):
    """One half of an MLP-Mixer's block: a feed-forward layer over the tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LENGTH, 10), nn.Linear(10, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.mT))).mT


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), Positions()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = OfTokens()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(self.words(ids))
        x = x + self.tokens(self.first(x))
        return self.head(x + self.down(F.gelu(self.up(self.second(x)))))


class Encoder(nn.Module):
    """The language model of torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), Positions()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0)
        self.inner = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.inner(self.places(self.words(ids)), mask=causal))


class Snake(nn.Module):
    """A frequency for each feature, or one for all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.rate * x).square() / self.rate


class Tapered(nn.Module):
    """By a number for each feature that does not learn."""

    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.linspace(0.5, 1.5, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * self.by


class Learned(nn.Module):
    """Feed-forward layers whose activations learn, two of them of two projections in one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        acts = [Snake(24), Snake(1), nn.PReLU(), Tapered(), Snake(1), Snake(24)]
        self.acts = nn.ModuleList(acts)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in acts])
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 24) for _ in acts])
        self.downs = nn.ModuleList([nn.Linear(24, WIDTH) for _ in acts[:4]])
        self.halves = nn.ModuleList([nn.Linear(12, WIDTH) for _ in acts[4:]])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for norm, up, act, down in zip(
            self.norms, self.ups, self.acts, [*self.downs, *self.halves], strict=True
        ):
            y = act(up(norm(x)))
            if down in self.halves:
                a, b = y.chunk(2, -1)
                y = a * b.sigmoid()
            x = x + down(y)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixer": Mixer,
    "encoder": Encoder,
    "learned": Learned,
}


def _loss(model: nn.Module, inputs: Batch) -> Tensor:
    logits = model(inputs["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def _train(kind: str, rows: int, columns: int) -> float:
    batch = causal_lm_batch(BATCH, LENGTH, VOCAB)
    inputs = (batch(0)["input_ids"],)
    with pytest.warns(UserWarning, match="whole on every rank"):
        reference, model, _ = on_grid(
            lambda: waved(MODELS[kind]()).double(), rows, columns, inputs=inputs
        )
    return train_beside(reference, model, batch, truth=_loss, loss=_loss).worst


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(2, 2), deep(1, 4), deep(4, 1), deep(2, 3), deep(1, 2)]
)
def test_it_trains_as_on_one_device(kind: str, rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _train, kind, rows, columns)) < TOLERANCE


def test_a_linear_over_tokens_is_of_no_group() -> None:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with fake_grid(2, 2) as mesh, pytest.warns(UserWarning, match="tokens.up"):
        plan = plan_for(Mixer(), mesh, inputs=(ids,))
    split = {name for name, style in plan.items() if isinstance(style, Colwise2D)}
    assert "up" in split and "tokens.up" not in split


def test_activations_that_learn_are_split_but_for_those_of_two_projections() -> None:
    with fake_grid(2, 2) as mesh, pytest.warns(UserWarning, match=r"\['ups.5', 'halves.1'\]"):
        plan = plan_for(Learned(), mesh)
    styles = {name: plan[name] for name in plan if name.startswith("acts.")}
    assert {name for name, style in styles.items() if isinstance(style, Local2D)} == {
        f"acts.{number}" for number in (0, 1, 2, 4)
    }
