"""Dropout whose mask depends on an element's global index, not on the rank that holds it.

Whether an element is dropped is a function of a key and of its index in the global tensor, dim by
dim. So different shards have different masks, replicas have the same one, and any grid drops the
same elements as one rank does. No mask has to be stored: it can be computed from the key and the
index, for any part of the tensor in any order.

The hash is counter-based in the sense of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (doi 10.1145/2063384.2063405): a state of 64 bits for each index of all dims but the last,
by the finalizer of SplitMix64 (Steele et al., doi 10.1145/2714064.2660195), and for each element
two rounds of multiply and shift in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .._torch_compat.tensors import dispatch_modes
from .._tracing import in_graph

__all__ = ["draw_key", "drop", "dropout", "dropped", "fused", "recomputed"]

# SplitMix64's constants as signed int64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Odd multipliers for 32 bits, found by search for little bias (github.com/skeeto/hash-prospector).
_MIX32 = 0x2C1B3C6D, 0x297A2D39


def draw_key() -> Tensor:
    """The key of one call of dropout: an int64 from torch's default CPU generator.

    That generator, because ``torch.manual_seed`` seeds it whatever the device, and because
    ``torch.utils.checkpoint`` restores its state before it recomputes a layer.

    Raises:
        RuntimeError: while a CUDA graph is captured, which would replay this one key.
    """
    if not in_graph() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout on a grid draws its key on the CPU: a captured CUDA graph would drop the same "
            "elements each time it is replayed. Capture the model without dropout (p=0, or .eval())"
        )
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")


def _mix(h: Tensor) -> Tensor:
    """SplitMix64's finalizer: every bit of the result depends on every bit of ``h``."""
    h = (h ^ ((h >> 30) & (2**34 - 1))) * _MIX[0]
    h = (h ^ ((h >> 27) & (2**37 - 1))) * _MIX[1]
    return h ^ ((h >> 31) & (2**33 - 1))


def dropped(key: Tensor, p: float, index: Sequence[Tensor]) -> Tensor:
    """Which elements dropout drops: true with probability ``p``, to the nearest ``2**-32``.

    Args:
        key: a 0-dim int64, as :func:`draw_key` gives it.
        p: 0 to 1.
        index: for each dim of the tensor, the global indices of the elements on this rank: 1-dim
            int64 tensors, in any order. A part of the tensor has the mask that its elements have in
            the global tensor, so it can be masked block by block.

    Returns:
        Booleans of shape ``[len(i) for i in index]``, on the device of ``index``.

    Example::

        >>> rows, columns = torch.arange(4), torch.arange(6)
        >>> mask = dropped(key, 0.1, [rows, columns])
        >>> assert dropped(key, 0.1, [rows[2:], columns]).equal(mask[2:])
    """
    hashed = _hashed(key, index)
    return hashed < _threshold(p) if p < 1 else torch.ones_like(hashed, dtype=torch.bool)


def _hashed(key: Tensor, index: Sequence[Tensor]) -> Tensor:
    """A uniformly distributed int32 for each element."""
    *outer, last = index
    state = _mix(key.to(last.dtype) + _STEP)
    for positions in outer:
        state = _mix(_for_each(state) + (positions + 1) * _STEP)
    # Each row of the last dim has a key of two halves: one is combined by xor, one by product.
    added, factor = state.to(torch.int32), (state >> 32).to(torch.int32) | 1
    column = _mix((last + 1) * _STEP).to(torch.int32)
    # The operations below run for each element, hence in 32 bits and in place.
    h = _for_each(added) ^ column
    h *= _for_each(factor)
    for shift, multiplier in zip((15, 12), _MIX32, strict=True):
        # >> shifts the sign in, so h and ~h give the same: the 31 bits of state left are enough.
        h ^= h >> shift
        h *= multiplier
    return h


def _threshold(p: float) -> int:
    """The int32 below which elements are dropped. A comparison uses the high bits, the best."""
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


def _for_each(state: Tensor) -> Tensor:
    # The key itself stays 0-dim: a CPU scalar can be combined with tensors on any device.
    return state.unsqueeze(-1) if state.ndim else state


def drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """``x`` with the elements in ``mask`` set to zero, the others scaled by ``1 / (1 - p)``."""
    return x.masked_fill(mask, 0.0) * (1.0 / (1.0 - p) if p < 1 else 0.0)


def dropout(x: Tensor, key: Tensor, p: float, index: Sequence[Tensor]) -> Tensor:
    """``drop(x, dropped(key, p, index), p)``, which on a GPU keeps no mask for backward.

    There the mask is computed as it is used (:func:`fused`), and recomputed for the gradient. A CPU
    keeps it, one byte per element, since it computes it in many steps that take longer than reading
    it.
    """
    if x.device.type == "cpu":
        return drop(x, dropped(key, p, index), p)
    return recomputed(x, key, p, index)


def recomputed(x: Tensor, key: Tensor, p: float, index: Sequence[Tensor]) -> Tensor:
    """:func:`dropout` as on a GPU: the mask is recomputed for the gradient."""
    # Without a graph not by the node: see sum_grads in styles/local_math.py.
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _kernel_for(x)(x, key, p, index)
    result: Tensor = _Dropout.apply(x, key, p, *index)
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, p: float, *index: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(key, *index)
        return _kernel_for(x)(x, key, p, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        key, *index = ctx.saved_tensors
        return recomputed(grads[0], key, ctx.p, index), None, None, *(None for _ in index)


def _kernel_for(x: Tensor) -> Callable[..., Tensor]:
    """The function that computes a mask and applies it, compiled where that is possible.

    It is not under a dispatch mode, which would not see the operators of a compiled function.
    """
    plain = in_graph() or dispatch_modes() or not x.is_cuda
    return _mask_and_drop if plain or not _has_triton() else fused


def _mask_and_drop(x: Tensor, key: Tensor, p: float, index: Sequence[Tensor]) -> Tensor:
    return drop(x, dropped(key, p, index), p)


def fused(x: Tensor, key: Tensor, p: float, index: Sequence[Tensor]) -> Tensor:
    """``drop(x, dropped(key, p, index), p)`` in two kernels, one of them for the rows' keys.

    Compiled once for all sizes and rates. The rate is passed as tensors: Dynamo takes the rounded
    value of a number for a constant, so that every rate would drop as the first one did.
    """
    if p >= 1:
        return _mask_and_drop(x, key, p, index)
    threshold = torch.tensor(_threshold(p), dtype=torch.int32, device="cpu")
    scale = torch.tensor(1.0 / (1.0 - p), dtype=torch.float64, device="cpu")
    return _compiled()(x, key, threshold, scale, index)


@cache
def _compiled() -> Callable[..., Tensor]:
    def mask_and_drop(
        x: Tensor, key: Tensor, threshold: Tensor, scale: Tensor, index: Sequence[Tensor]
    ) -> Tensor:
        return x.masked_fill(_hashed(key, index) < threshold, 0.0) * scale

    compiled: Callable[..., Tensor] = torch.compile(mask_and_drop, dynamic=True)
    return compiled


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
