"""Dropout on one device that drops what it would on a grid."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
        if func is F.dropout:
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
