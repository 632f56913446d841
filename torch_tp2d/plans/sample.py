"""Copies of models without values, and sample inputs to try a model on."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat.distributed import dtensor_of, spec_of
from .._torch_compat.tensors import (
    TorchDispatchMode,
    disable_current_modes,
    local_tensor,
    tree_leaves,
)

__all__ = ["ConstantsHaveValues", "Inputs", "copy_without_values", "sample_inputs"]


def copy_without_values(model: nn.Module, mode: Any = None) -> nn.Module:
    """A copy of a model whose tensors have shapes and no values; the model is not changed.

    Args:
        model: on any device, with or without a plan applied.
        mode: the fake mode in which the copy's tensors are made; None for the meta device.
    """
    memo: dict[int, Any] = {}
    device = "meta" if mode is None else "cpu"

    def empty(x: Tensor) -> Tensor:
        local = local_tensor(x)
        with nullcontext() if mode is None else mode:
            made = torch.empty_strided(
                local.shape, local.stride(), dtype=local.dtype, device=device
            )
        spec = spec_of(x)
        if spec is not None:
            made = dtensor_of(made, spec)
        if isinstance(x, nn.Parameter):
            return nn.Parameter(made, requires_grad=x.requires_grad)
        return made

    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        held += [x for x in vars(module).values() if isinstance(x, Tensor)]
        for x in held:
            if id(x) not in memo:
                memo[id(x)] = empty(x)
    return copy.deepcopy(model, memo)


class ConstantsHaveValues(TorchDispatchMode):
    """Inside a fake mode, gives values to tensors made of sizes alone, such as a causal mask.

    ``nn.TransformerEncoder`` reads the values of its mask to tell whether it is causal.
    """

    def __init__(self) -> None:
        super().__init__()
        # Holds the tensors, so that the id of a freed one is not taken by another.
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        if is_random or elsewhere or any(id(x) not in self._made for x in given):
            return func(*args, **kwargs)
        with disable_current_modes():
            out = func(*args, **kwargs)
        self._made |= {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


@dataclass
class Inputs:
    """Arguments of a model's forward, and the token ids among them."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    ids: Tensor | None = None

    def given_to(self, model: nn.Module) -> Any:
        """The model's output for these inputs."""
        return model(*self.args, **(self.kwargs or {}))

    def each(self, change: Callable[[Any], Any]) -> Inputs:
        """These inputs with each argument changed."""
        kwargs = {name: change(x) for name, x in (self.kwargs or {}).items()}
        return Inputs(tuple(map(change, self.args)), kwargs, change(self.ids))

    def has_one_of(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is among the inputs."""
        given = (*self.args, *(self.kwargs or {}).values())
        return any(isinstance(x, Tensor) and x.shape == shape for x in given)

    def without_cache(self, model: nn.Module) -> Inputs:
        """These inputs, with the model told not to return its cached keys and values."""
        if "use_cache" not in inspect.signature(_own_forward(model)).parameters:
            return self
        return replace(self, kwargs={**(self.kwargs or {}), "use_cache": False})


def sample_inputs(
    model: nn.Module, given: Any, batch: int, seq: int, *, values: bool = False
) -> Inputs | None:
    """Inputs to try a model on: the given ones, else made up from the signature of its forward.

    Args:
        given: a dict of keyword arguments, a tuple of arguments, or one argument; None to make
            inputs up.
        batch, seq: sizes of the inputs that are made up.
        values: keep the values of given inputs, and make inputs up with values: small ids, and
            noise for images and sounds. Else inputs have shapes only, and ids are zeros.

    Returns:
        The inputs, or None for a model that takes no ids, images or sounds, or whose config does
        not tell their size.
    """
    if isinstance(given, Mapping):
        made = {name: x if values else _without_values(x) for name, x in given.items()}
        return Inputs((), made, made.get("input_ids"))
    if given is not None:
        args = given if isinstance(given, tuple) else (given,)
        args = args if values else tuple(map(_without_values, args))
        return Inputs(args, None, next((x for x in args if _is_ids(x)), None))
    generator = torch.Generator().manual_seed(0)
    takes = inspect.signature(_own_forward(model)).parameters
    made = {}
    try:
        if "pixel_values" in takes:
            made = _images(model, takes, batch, generator if values else None)
        if "input_features" in takes and "decoder_input_ids" in takes:
            return _sounds(model, batch, seq, generator if values else None)
    except AttributeError:
        return None  # The config does not say how large images or sounds are.
    if made and "input_ids" not in takes:
        return Inputs((), made)
    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if rows:
        ids = torch.zeros(batch, seq, dtype=torch.int64, device="cpu")
        if values:
            ids.random_(min(rows), generator=generator)
        if "input_ids" in takes:
            labels = {"labels": _labels(model, ids)} if "labels" in takes else {}
            return Inputs((), {"input_ids": ids, **labels, **made}, ids)
        return Inputs((ids,), None, ids)
    return None


def _labels(model: nn.Module, ids: Tensor) -> Tensor:
    """Labels for the ``loss_type`` that a model of transformers names; else the ids themselves."""
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    if kind == "ForSequenceClassification":
        return ids[:, 0] % config.num_labels  # type: ignore[union-attr]
    if kind == "ForTokenClassification":
        return ids % config.num_labels  # type: ignore[union-attr]
    return ids


def _images(
    model: nn.Module, takes: Container[str], batch: int, noise: torch.Generator | None
) -> dict[str, Tensor]:
    """Images, and a class label for each if the forward takes labels.

    Raises:
        AttributeError: if the model's config does not say how large images are.
    """
    config: Any = model.config
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "num_channels", 3)
    images = torch.zeros(batch, channels, *_pair(config.image_size), device="cpu")
    if noise is not None:
        images.normal_(generator=noise)
    made = {"pixel_values": images.to(_dtype_of(model))}
    if "labels" in takes:
        made["labels"] = torch.zeros(batch, dtype=torch.int64, device="cpu")
    return made


def _sounds(model: nn.Module, batch: int, seq: int, noise: torch.Generator | None) -> Inputs:
    """Spectra for an encoder, whose length follows from its positions and strides, and labels.

    Raises:
        AttributeError: if the model's config does not say how large they are.
    """
    config: Any = model.config
    strides = [m.stride[0] for m in model.modules() if isinstance(m, nn.Conv1d)]
    length = config.max_source_positions * math.prod(strides)
    sounds = torch.zeros(batch, config.num_mel_bins, length, device="cpu")
    labels = torch.zeros(batch, seq, dtype=torch.int64, device="cpu")
    if noise is not None:
        sounds.normal_(generator=noise)
        labels.random_(config.vocab_size, generator=noise)
    return Inputs((), {"input_features": sounds.to(_dtype_of(model)), "labels": labels})


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _own_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward of a model's own class, below any class that a style put in front of it."""
    kinds: list[Any] = [kind for kind in type(model).__mro__ if "forward" in vars(kind)]
    return next(kind for kind in kinds if not kind.__module__.startswith("torch_tp2d.")).forward


def _without_values(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_like(x, device="cpu", requires_grad=x.requires_grad)


def _is_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point()


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
