"""torch's fused attention kernels, as they take and give one block of keys.

Each has a forward, whose output comes with the logarithms of the sums of exponentials, and a
backward that takes the output and logarithms of all blocks together. What torch does around them in
``scaled_dot_product_attention``, padding and contiguity, is done here where they are called
directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ..._torch_compat import (
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
"""The efficient kernel wants the rows of a mask to begin at multiples of this."""
_LOG_ROWS = 32
"""Its logarithms come padded to a multiple of this."""


@dataclass(frozen=True)
class Block:
    """Queries and one block of keys: ``[batch, heads, length, features]``, of as many heads.

    Args:
        bias: added to the scores, ``[batch, heads, queries, keys]`` or broadcast but for the last
            two dims.
        causal: no look at keys behind the query; both are then at the same positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


class Kernel(Protocol):
    """Attention to one block."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """The output, and ``[batch, heads, queries]`` the logarithms.

        They are 0 and ``-inf`` where nothing is seen.
        """
        ...

    def backward(
        self, block: Block, grad: Tensor, out: Tensor, log: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of query, key and value, a block's share of the gradients."""
        ...


class _ForCpu:
    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, log = flash_attention_for_cpu(
            *(block.query, block.key, block.value, 0.0, block.causal),
            attn_mask=block.bias,
            scale=block.scale,
        )
        if block.bias is not None:
            # The kernel says 0.
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
        # Of dropout, which there is none of.
        state = torch.empty(0, dtype=torch.uint64, device=grad.device)
        query_grad, key_grad, value_grad = flash_attention_backward(
            *(*map(_aligned, given), log.contiguous(), None, None),
            *(block.query.shape[-2], block.key.shape[-2], 0.0, block.causal, state, state),
            scale=block.scale,
        )
        return query_grad, key_grad, value_grad


class _Efficient:
    """Single precision and masks, too."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        query, key, value = map(_aligned, (block.query, block.key, block.value))
        out, log, *_ = efficient_attention(
            *(query, key, value, _padded(block.bias), True, 0.0, block.causal), scale=block.scale
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
        grad, query, key, value, out = map(
            _aligned, (grad, block.query, block.key, block.value, out)
        )
        # What stands behind the last query is to count for nothing: exp(-inf).
        log = F.pad(log, (0, -log.shape[-1] % _LOG_ROWS), value=torch.inf).contiguous()
        # Of dropout, which there is none of: where the kernel itself gives them, without a graph.
        seed = offset = torch.zeros((), dtype=torch.int64)
        query_grad, key_grad, value_grad, _ = efficient_attention_backward(
            *(grad, query, key, value, _padded(block.bias), out, log, seed, offset),
            *(0.0, [True, True, True, False], block.causal),
            scale=block.scale,
        )
        return query_grad, key_grad, value_grad


def _aligned(x: Tensor) -> Tensor:
    """``x`` as the CUDA kernels read it: features in a row, every row at a multiple of 16 bytes."""
    size = x.element_size()
    steps = [stride * size for stride in x.stride()[:-1]]
    at = x.storage_offset() * size
    fits = x.stride(-1) == 1 and not any(step % _ALIGNED_BYTES for step in (at, *steps))
    return x if fits else x.contiguous()


def _nothing_seen(bias: Tensor) -> Tensor:
    return (bias == -torch.inf).all(-1)


def _padded(bias: Tensor | None) -> Tensor | None:
    """A bias in memory whose rows are as long as the efficient kernel wants them."""
    if bias is None or bias.shape[-1] % _MASK_COLUMNS == 0:
        return bias
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % _MASK_COLUMNS)).narrow(-1, 0, keys)


FOR_CPU, FLASH, EFFICIENT = _ForCpu(), _Flash(), _Efficient()


def kernel_for(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Kernel | None:
    """The fused kernel for these, if there is one.

    On CUDA as ``torch.backends.cuda`` says of its devices and of what
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
