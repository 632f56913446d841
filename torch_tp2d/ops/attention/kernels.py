"""torch's fused attention kernels, applied to one block of keys.

The forward of each returns the output and the lse, the logarithms of the sums of exponentials. Its
backward takes the output and lse over all blocks. The padding and the contiguous copies that
``scaled_dot_product_attention`` makes around the kernels are made here, as they are called
directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ..._torch_compat.tensors import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
)

__all__ = ["EFFICIENT", "FLASH", "FOR_CPU", "Block", "Kernel", "kernel_for"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16
_MASK_COLUMNS = 16
"""The efficient kernel requires the rows of a mask to begin at multiples of this."""
_LOG_ROWS = 32
"""The efficient kernel pads the lse to a multiple of this."""


@dataclass(frozen=True)
class Block:
    """Queries and one block of keys: ``[batch, heads, length, features]``, of equally many heads.

    Args:
        bias: added to the scores, ``[batch, heads, queries, keys]``; the first two dims may be
            broadcast.
        causal: no query attends to later keys; queries and keys are then at the same positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


class Kernel(Protocol):
    """A kernel for attention to one block of keys."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """The output, and the lse ``[batch, heads, queries]``.

        They are 0 and ``-inf`` for a query that attends to no key.
        """
        ...

    def backward(
        self, block: Block, grad: Tensor, out: Tensor, log: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value that come from this block of keys."""
        ...


class _ForCpu:
    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, log = flash_attention_for_cpu(
            *(block.query, block.key, block.value, 0.0, block.causal),
            attn_mask=block.bias,
            scale=block.scale,
        )
        if block.bias is not None:
            # The kernel returns 0 for queries that attend to no key.
            log = log.masked_fill(_nothing_seen(block.bias), -torch.inf)
        return out, log

    def backward(
        self, block: Block, grad: Tensor, out: Tensor, log: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = flash_attention_for_cpu_backward(
            *(grad, block.query, block.key, block.value, out, log, 0.0, block.causal),
            attn_mask=block.bias,
            scale=block.scale,
        )
        return grads


class _Flash:
    """Half precision, without a bias."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        query, key, value = map(_aligned, (block.query, block.key, block.value))
        out, log, *_ = flash_attention(
            query, key, value, 0.0, block.causal, False, scale=block.scale
        )
        return out, log

    def backward(
        self, block: Block, grad: Tensor, out: Tensor, log: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (grad, block.query, block.key, block.value, out)
        # The random state of dropout, which is not used.
        state = torch.empty(0, dtype=torch.uint64, device=grad.device)
        query_grad, key_grad, value_grad = flash_attention_backward(
            *(*map(_aligned, given), log.contiguous(), None, None),
            *(block.query.shape[-2], block.key.shape[-2], 0.0, block.causal, state, state),
            scale=block.scale,
        )
        return query_grad, key_grad, value_grad


class _Efficient:
    """Also single precision, and a bias."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        query, key, value = map(_aligned, (block.query, block.key, block.value))
        out, log, *_ = efficient_attention(
            *(query, key, value, _whole_bias(block), True, 0.0, block.causal), scale=block.scale
        )
        log = log.narrow(-1, 0, query.shape[-2])
        if block.bias is not None:
            nothing = _nothing_seen(block.bias)
            log = log.masked_fill(nothing, -torch.inf)
            out = out.masked_fill(nothing.unsqueeze(-1), 0.0)
        return out, log

    def backward(
        self, block: Block, grad: Tensor, out: Tensor, log: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value = map(_aligned, (grad, block.query, block.key, block.value))
        out = _heads_side_by_side(out)
        # Padding beyond the last query must contribute nothing: exp(score - inf) is 0.
        log = F.pad(log, (0, -log.shape[-1] % _LOG_ROWS), value=torch.inf).contiguous()
        # The random state of dropout, which is not used. It is on the CPU, as the forward kernel
        # returns it unless a graph is captured.
        seed = offset = torch.zeros((), dtype=torch.int64, device="cpu")
        query_grad, key_grad, value_grad, _ = efficient_attention_backward(
            *(grad, query, key, value, _whole_bias(block), out, log, seed, offset),
            *(0.0, [True, True, True, False], block.causal),
            scale=block.scale,
        )
        return query_grad, key_grad, value_grad


def _aligned(x: Tensor) -> Tensor:
    """``x`` as the CUDA kernels need it: features contiguous, rows at multiples of 16 bytes."""
    size = x.element_size()
    steps = [stride * size for stride in x.stride()[:-1]]
    at = x.storage_offset() * size
    fits = x.stride(-1) == 1 and not any(step % _ALIGNED_BYTES for step in (at, *steps))
    return x if fits else x.contiguous()


def _heads_side_by_side(x: Tensor) -> Tensor:
    """``x`` in memory as the efficient kernel returns it, position after position.

    In half precision its backward reads the output so, whatever the strides.
    """
    by_position = x.transpose(1, 2)
    if by_position.is_contiguous():
        return x
    return by_position.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _nothing_seen(bias: Tensor) -> Tensor:
    return (bias == -torch.inf).all(-1)


def _whole_bias(block: Block) -> Tensor | None:
    """A bias as the efficient kernel requires: its rows' stride in memory, one for each head."""
    bias, keys = block.bias, block.key.shape[-2]
    if bias is None:
        return None
    if keys % _MASK_COLUMNS:
        bias = F.pad(bias, (0, -keys % _MASK_COLUMNS)).narrow(-1, 0, keys)
    return bias.expand(*block.query.shape[:-1], keys)


FOR_CPU, FLASH, EFFICIENT = _ForCpu(), _Flash(), _Efficient()


def kernel_for(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Kernel | None:
    """The fused kernel for these tensors, if there is one.

    On CUDA ``torch.backends.cuda`` decides, by the device and by what
    ``torch.nn.attention.sdpa_kernel`` allows.
    """
    same = query.shape[-1] == value.shape[-1] and query.dtype in _FLOATS
    if not same or not (query.numel() and key.numel()):
        return None
    if query.device.type == "cpu":
        return FOR_CPU
    if not query.is_cuda:
        return None
    params = SDPAParams(query, key, value, None, 0.0, False, False)
    if not masked and query.shape[-1] % 8 == 0 and can_use_flash_attention(params):
        return FLASH
    return EFFICIENT if can_use_efficient_attention(params) else None
