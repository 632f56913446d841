"""Vocab-parallel embedding on local shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["embedding2d"]


def embedding2d(
    ids: Tensor, weight: Tensor, vocab_start: int, padding_idx: int | None = None
) -> Tensor:
    """Look up the ids that are in this rank's shard of the vocabulary; zeros for the others.

    Args:
        ids: ``[*]``, the same on every rank.
        weight: ``[Vj, Hi]``, the rows from ``vocab_start`` on.
        padding_idx: the global id whose row gets no gradient.

    Returns:
        ``[*, Hi]``: a partial sum over the ranks that shard the vocabulary. The gradient of the sum
        is replicated on these, so the weight's gradient needs no communication.
    """
    rows = weight.shape[0]
    if rows == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
    local = ids - vocab_start
    elsewhere = (local < 0) | (local >= rows)
    mine = None
    if padding_idx is not None and 0 <= padding_idx - vocab_start < rows:
        mine = padding_idx - vocab_start
    found = F.embedding(local.masked_fill(elsewhere, 0), weight)
    if mine is not None:
        # Not by F.embedding's padding_idx: masked ids look up row 0, which may be the padding row.
        found = torch.where((local == mine).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)
