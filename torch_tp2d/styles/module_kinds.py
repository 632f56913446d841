"""Recognizes kinds of modules by what they do, without importing the libraries they come from."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat.modules import parameters_of

__all__ = [
    "HEADS",
    "HEAD_SIZES",
    "KEY_HEADS",
    "NormKind",
    "describe_module",
    "embeds",
    "forward_of",
    "head_counts",
    "input_width",
    "is_conv1d",
    "is_embedding",
    "is_linear",
    "is_patch_embedding",
    "needs_input",
    "norm_of",
    "projects",
]


def describe_module(module: nn.Module) -> str:
    """A module in one line, with its shapes, for messages."""
    text = repr(module).splitlines()
    patched = " with another forward put on it" if "forward" in vars(module) else ""
    if len(text) == 1 and text[0] != f"{type(module).__name__}()":
        return text[0] + patched
    shapes = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()]
    listed = ", ".join(shapes[:4]) + (", ..." if len(shapes) > 4 else "")
    return f"{type(module).__name__}({listed}){patched}"


def forward_of(module: nn.Module) -> Any:
    """A module's forward: that of its class, or the one that was put on the module itself.

    Libraries patch modules so, to wrap their forward or to have a faster one.
    """
    return vars(module).get("forward", type(module).forward)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear that computes ``x W^T + b``.

    A subclass with a forward of its own does not count.
    """
    return isinstance(module, nn.Linear) and forward_of(module) is nn.Linear.forward


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an Embedding that only looks up rows of its weight.

    A subclass with a forward of its own does not count.
    """
    return isinstance(module, nn.Embedding) and forward_of(module) is nn.Embedding.forward


def embeds(module: nn.Module) -> bool:
    """Whether a module is an Embedding without other parameters. Its forward may do more."""
    return isinstance(module, nn.Embedding) and {n for n, _ in module.named_parameters()} == {
        "weight"
    }


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D, a Linear that stores its weight ``[in, out]``."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    if "forward" in vars(module):
        return False
    # Of a module with a style the first forward is the style's.
    forwards = (kind for kind in type(module).__mro__ if "forward" in vars(kind))
    own = next(kind.__name__ for kind in forwards if not kind.__module__.startswith("torch_tp2d."))
    return own == "Conv1D" and weight.shape[1] == getattr(module, "nf", None)


def projects(module: nn.Module) -> bool:
    """Whether a module is a Linear or a Conv1D."""
    return is_linear(module) or is_conv1d(module)


def input_width(module: nn.Module) -> int:
    """The features that a module that :func:`projects` takes."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0 if is_conv1d(module) else 1])


def is_patch_embedding(module: nn.Module) -> bool:
    """Whether a module is a Conv2d that applies a Linear to patches that do not overlap."""
    return (
        isinstance(module, nn.Conv2d)
        and forward_of(module) is nn.Conv2d.forward
        and module.stride == module.kernel_size
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")
"""The usual names of the attributes by which attention modules describe their heads."""


def needs_input(module: nn.Module) -> bool:
    """Whether the backward of a norm or a Linear, or Conv1D, needs the values of its input.

    That of a Linear whose weight does not learn needs none.
    """
    weight = parameters_of(module).get("weight")
    return weight is None or weight.ndim != 2 or weight.requires_grad


def head_counts(module: nn.Module) -> tuple[int | None, int | None]:
    """Numbers of query heads and of key heads, from the attributes of the module or its config."""
    return _count(module, HEADS), _count(module, KEY_HEADS)


def _count(module: nn.Module, names: Iterable[str]) -> int | None:
    """The first of these attributes that is a positive int, of the module or else its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None


@dataclass(frozen=True)
class NormKind:
    """What a norm computes over its last dim of ``hidden`` elements.

    ``eps`` is None for the machine epsilon of the input's dtype. ``weight_offset`` is 1 for
    modules that store the weight minus one.
    """

    hidden: int
    eps: float | None
    centered: bool
    weight_offset: float = 0.0

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm of ``x``, unsharded: the reference that a module's forward is compared with."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            y = y * (weight + self.weight_offset)
        return y if bias is None else y + bias


def norm_of(module: nn.Module) -> NormKind:
    """What kind of norm a module is, found by running a copy of it on a few numbers on the CPU.

    Raises:
        TypeError: if it is not a LayerNorm or RMSNorm over one last dim.
    """
    refusal = TypeError(
        f"Norm2D is for a LayerNorm or RMSNorm over the last dim, not {describe_module(module)}: "
        f"use SequenceParallel or Replicate for it"
    )
    params: dict[str, Any] = dict(module.named_parameters())
    shapes = {tuple(p.shape) for p in params.values()}
    if not set(params) <= {"weight", "bias"} or len(shapes) > 1:
        raise refusal
    if shapes:
        (shape,) = shapes
    else:
        shape = tuple(getattr(module, "normalized_shape", ()))
    if len(shape) != 1:
        raise refusal
    names = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")
    eps = next((getattr(module, name) for name in names if hasattr(module, name)), 0.0)

    # Whatever torch.set_default_device says.
    generator = torch.Generator("cpu").manual_seed(0)
    on_cpu: Any = {"dtype": torch.float64, "device": "cpu"}
    probe = copy.deepcopy(module).to_empty(device="cpu").double()
    values = {}
    for name, param in probe.named_parameters():
        values[name] = torch.randn(param.shape, generator=generator, **on_cpu)
        param.data.copy_(values[name])
    # Inputs so small that a wrong epsilon would change the result.
    scale = 1.0 if not eps else 3 * eps**0.5
    x = torch.randn(3, *shape, generator=generator, **on_cpu) * scale + scale
    try:
        with torch.no_grad():
            seen = probe(x)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise refusal from error
    if not isinstance(seen, Tensor) or seen.shape != x.shape:
        raise refusal
    for centered in (True, False):
        for offset in (0.0, 1.0):
            kind = NormKind(shape[0], eps, centered, offset)
            wanted = kind(x, values.get("weight"), values.get("bias"))
            # Some norms compute in fp32 whatever their input is, so fp32's rounding is allowed.
            if torch.allclose(seen.double(), wanted, rtol=1e-4, atol=1e-4):
                return kind
    raise refusal
