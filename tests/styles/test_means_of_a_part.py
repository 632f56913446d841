"""Means, maxima and the like of the tokens, samples or features that a rank has: refused.

Losses beside the main one, such as a router's balance, were each rank's own, in silence: in a
block of 4 x 9 tokens on 2 x 2 by 0.9 of the loss. So were losses over pairs of samples.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

VOCAB, HIDDEN, WIDE, EXPERTS = 11, 8, 12, 4

AUXILIARY: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda p: p.mean((0, 1)).square().sum(),
    "mean of flat tokens": lambda p: p.flatten(0, 1).mean(0).square().sum(),
    "mean of viewed tokens": lambda p: p.view(-1, p.shape[-1]).mean(dim=0).square().sum(),
    "variance": lambda p: p.var(),
    "logsumexp, then a mean": lambda p: p.logsumexp(-1).square().mean(),
    "mean of samples": lambda p: p.mean(0).square().mean(1).sum(),
    "mse_loss": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "gaussian_nll_loss": lambda p: F.gaussian_nll_loss(p, torch.zeros_like(p), torch.ones_like(p)),
    "mean of squares": lambda p: (p - 1).square().mean(),
    "detached": lambda p: p.sum() * p.detach().mean(),
    "maximum": lambda p: p.amax(1).sum(),
    "max": lambda p: p.max(1).values.sum(),
    "sum over how many": lambda p: p.square().sum() / p.numel(),
    "sum over how many tokens": lambda p: p.square().sum() * (1 / (p.shape[0] * p.shape[1])),
}
NOT_ON_DTENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum over how many": lambda p: torch.einsum("bse,bse->", p, p) / p.numel(),
    "mean of what a mask picks": lambda p: p[p > 0.2].mean(),
    "mean of tokens that a mask picks": lambda p: p[p[..., 0] > 0.2].mean(0).sum(),
}
"""What torch's DTensor cannot do, or not where sizes do not divide."""
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x + x.flip(0),
    "roll": lambda x: x + torch.roll(x, 1, dims=0),
    "softmax": lambda x: x * x.softmax(0),
    "pairs": lambda x: x + (x[:, 0] @ x[:, 0].T).log_softmax(1).sum(),
    "pairs with their own": lambda x: x + F.cross_entropy(x[:, 0] @ x[:, 0].t(), _own(x)),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "logged": lambda p: p.sum() * (0.0 if p.norm().item() >= 0 else p.detach().mean()),
    "of experts": lambda p: p.amax(-1).sum() + p.max(2).values.sum(),
    "larger of two": lambda p: torch.max(p, p * 2).sum(),
    "sum": lambda p: p.square().sum((0, 1)).sum(),
    "half a sum": lambda p: p.square().sum() / 2,
    "sum of what a mask picks": lambda p: p[p > 0.2].sum() * 0.1,
}


def _own(x: Tensor) -> Tensor:
    return torch.arange(len(x))


class Routed(nn.Module):
    """With a loss of its own, of what each token's router says."""

    def __init__(self, auxiliary: Callable[[Tensor], Tensor], middle: Callable[[Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.router = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.head, self.auxiliary, self.middle = nn.Linear(HIDDEN, VOCAB), auxiliary, middle
        self.double()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.middle(self.embed(ids))
        p = self.router(x).softmax(-1)
        gate = p.to_local() if isinstance(p, DTensor) else p
        x = x + gate[..., :1] * self.down(F.gelu(self.up(x)))
        loss = self.auxiliary(p)
        return self.head(x), loss.full_tensor() if isinstance(loss, DTensor) else loss


def _plan(**router: bool) -> dict[str, object]:
    return {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "router": torch_tp2d.Replicate(input_layouts=(Shard(0), Shard(1)), **router),
        "up": Colwise2D(input_layouts=Shard(1)),
        "down": Rowwise2D(output_layouts=Shard(1)),
        "head": Colwise2D(input_layouts=Shard(1), output_layouts=(Replicate(), Replicate())),
    }


def _ids(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _said(rows: int, columns: int) -> dict[str, str]:
    mesh = grid_mesh(rows, columns)
    said = {}
    models = {
        name: Routed(loss, _as_it_is)
        for name, loss in (AUXILIARY | NOT_ON_DTENSORS | RIGHT).items()
    }
    models |= {name: Routed(RIGHT["sum"], middle) for name, middle in BETWEEN.items()}
    for name, model in models.items():
        parallelize_module(model, mesh, _plan())
        try:
            logits, loss = model(_ids(4, 9))
            (logits.square().mean() + loss).backward()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(4, 1)])
def test_what_a_rank_s_part_is_reduced_to_is_refused(rows: int, columns: int) -> None:
    for said in world.run(rows * columns, _said, rows, columns):
        for name in AUXILIARY | NOT_ON_DTENSORS:
            if columns > 1 or "max" not in name:
                assert f"in {__file__}:" in said[name] and "full_tensor()" in said[name], name
        for name in BETWEEN:
            assert f"in {__file__}:" in said[name] and "along tp_row" in said[name], name
        assert not any(said[name] for name in RIGHT), said


def _mended(rows: int, columns: int, batch: int, length: int) -> float:
    """As the message says: the router hands on DTensors.

    Whose sharded dims torch flattens only in part.
    """
    mesh, worst = grid_mesh(rows, columns), 0.0
    for name, loss in AUXILIARY.items():
        if "tokens" in name or name == "mse_loss":
            continue
        alone = Routed(loss, _as_it_is)
        model = copy.deepcopy(alone)
        parallelize_module(model, mesh, _plan(use_local_output=False))
        for one in (alone, model):
            logits, auxiliary = one(_ids(batch, length))
            (logits.square().mean() + auxiliary).backward()
        for wanted, ours in zip(alone.parameters(), model.parameters(), strict=True):
            assert wanted.grad is not None and ours.grad is not None
            worst = max(worst, relative(ours.grad, wanted.grad))
    return worst


def _losses_of_dtensors() -> dict[str, str]:
    mesh, said = grid_mesh(2, 2), {}
    for name, loss in OF_DTENSORS.items():
        model = Routed(loss, _as_it_is)
        parallelize_module(model, mesh, _plan(use_local_output=False))
        try:
            model(_ids(4, 8))
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    return said


def _classes(p: Tensor) -> Tensor:
    return p.detach().argmax(-1)


def _weights(p: Tensor) -> Tensor:
    """One for each class, on every rank, as a DTensor beside one."""
    weights = torch.linspace(0.5, 1.5, EXPERTS, dtype=p.dtype)
    if not isinstance(p, DTensor):
        return weights
    whole = [Replicate()] * p.device_mesh.ndim
    return DTensor.from_local(weights, p.device_mesh, whole, run_check=False)


def _of_classes(p: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(p.transpose(1, 2), _classes(p), **kwargs)


def _in_parallel(p: Tensor, **kwargs: Any) -> Tensor:
    with torch_tp2d.loss_parallel():
        return _of_classes(p, **kwargs)


OF_DTENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "huber_loss": lambda p: F.huber_loss(input=p, target=torch.zeros_like(p)),
    "class weights": lambda p: _of_classes(p, weight=_weights(p)),
    "ignored": lambda p: _of_classes(p, ignore_index=1),
    "module": lambda p: nn.CrossEntropyLoss(ignore_index=1)(p.transpose(1, 2), _classes(p)),
    "nll_loss": lambda p: F.nll_loss(p.log().transpose(1, 2), _classes(p), _weights(p)),
    "none is ignored": lambda p: _of_classes(p),
    "summed": lambda p: _of_classes(p, weight=_weights(p), reduction="sum"),
    "within loss_parallel": lambda p: _in_parallel(p, weight=_weights(p), ignore_index=1),
    "sum": lambda p: F.mse_loss(p, torch.zeros_like(p), reduction="sum"),
    "l1_loss": lambda p: F.l1_loss(p, torch.zeros_like(p)),
    "whole": lambda p: F.mse_loss(p.full_tensor(), torch.zeros(p.shape, dtype=p.dtype)),
}


def test_means_that_torch_has_wrong_for_dtensors() -> None:
    """Gradients four times too large on 2 x 2, with stock tensor parallelism too.

    And values of cross_entropy, whose gradients are right: torch averages the means of the parts,
    also where class weights and padding let them count differently (off by 0.05 for 8 tokens on
    four ranks, one of whose classes is ignored). With stock tensor parallelism no rank has a part
    of the tokens.
    """
    of_all = world.run(4, _losses_of_dtensors)
    for name in ("mse_loss", "huber_loss", "class weights", "ignored", "module", "nll_loss"):
        said_of = [said.pop(name) for said in of_all]
        # Where a rank's own tokens are not ignored, it hears of it from another.
        assert all(said_of) and any(f"in {__file__}:" in said for said in said_of), said_of
    assert not any(said for named in of_all for said in named.values()), of_all


@pytest.mark.parametrize(
    "rows,columns,size", [(2, 2, (5, 9)), deep(2, 2, (4, 8)), deep(4, 1, (5, 9))]
)
def test_what_the_message_says_is_right(rows: int, columns: int, size: tuple[int, int]) -> None:
    for worst in world.run(rows * columns, _mended, rows, columns, *size):
        assert worst < 1e-12


class Keeps(Routed):
    """Keeps its loss for the training loop, as routers and codebooks do."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        logits, self.loss = super().forward(ids)
        return logits


KEPT: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mean": (lambda p: p.square().mean(), True),
    "sum over how many": (lambda p: p.square().sum() / p.numel(), True),
    "sum": (lambda p: p.square().sum(), False),
    "detached": (lambda p: p.detach().square().mean(), False),
}


def _kept(rows: int, columns: int, used: bool) -> dict[str, list[str]]:
    mesh, told = grid_mesh(rows, columns), {}
    for name, (loss, _) in KEPT.items():
        model = parallelize_module(Keeps(loss, _as_it_is), mesh, _plan())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = model(_ids(4, 9)).square().mean()
            (total + model.loss if used else total).backward()
        told[name] = [str(one.message) for one in caught]
    return told


def _averaged(rows: int, columns: int) -> list[str]:
    """What is said of a mean that the ranks average before it is used."""
    model = Keeps(KEPT["mean"][0], _as_it_is)
    parallelize_module(model, grid_mesh(rows, columns), _plan())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = model(_ids(4, 8)).square().mean()
        with torch.no_grad():
            dist.all_reduce(model.loss)
        (total + model.loss / (rows * columns)).backward()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(4, 1)])
def test_a_mean_that_is_kept_for_the_loss_is_warned_of(rows: int, columns: int) -> None:
    """``self.loss = p.mean()``, as routers and codebooks have it, was each rank's own in silence.

    Only what a forward returned, or went on with, was looked at. That the ranks do not average it
    before they use it nothing tells, so it is a warning, in the backward that takes it.
    """
    ranks = rows * columns
    for told in world.run(ranks, _kept, rows, columns, True):
        for name, (_, wrong) in KEPT.items():
            said = told[name]
            assert len(said) == wrong, (name, said)
            assert all("test_means_of_a_part.py:" in one for one in said), said
            assert all("only if the ranks have averaged it" in one for one in said), said
    for told in world.run(ranks, _kept, rows, columns, False):
        assert not any(told.values()), told
    assert not any(world.run(ranks, _averaged, rows, columns))
