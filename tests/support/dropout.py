"""Dropout on one device that drops what it would on a grid, and models to compare the two by."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.overrides import TorchFunctionMode

import torch_tp2d
from support.models import batch, loss_of, relative
from torch_tp2d import Colwise2D, Rowwise2D
from torch_tp2d.ops.dropout import draw_key, drop, dropped


class WholeDropout(nn.Module):
    """What the styles have to give, on one device: every index of every dim."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return drop(x, dropped(draw_key(), self.p, [torch.arange(n) for n in x.shape]), self.p)


def attention_on_one_device(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, p: float, causal: bool = False
) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    index = [torch.arange(n) for n in scores.shape]
    return drop(scores.softmax(-1), dropped(draw_key(), p, index), p) @ value


class OnOneDevice(TorchFunctionMode):
    """What a model's own code drops, as WholeDropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return WholeDropout(kwargs["p"] if "p" in kwargs else args[1])(args[0])
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "mask", "p", "causal")
            given = dict(zip(names, args, strict=False))
            given["p"] = kwargs.get("dropout_p", given.get("p", 0.0))
            given["causal"] = kwargs.get("is_causal", given.get("causal", False))
            if given["p"]:
                return attention_on_one_device(**{"mask": None, **given})
        return func(*args, **kwargs)


def on_one_device(model: nn.Module) -> nn.Module:
    """A copy of a model with every nn.Dropout in it replaced."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, WholeDropout(module.p))
    return model


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
