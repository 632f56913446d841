"""Narrows a BlockMask of torch's ``flex_attention`` to this row's and this column's part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Share", "own_blocks"]


class Share(NamedTuple):
    """A rank's part of a dim of size ``whole``: ``size`` elements from index ``first`` on."""

    first: int
    size: int
    whole: int


def own_blocks(mask: BlockMask, batch: Share, heads: Share) -> BlockMask:
    """A rank's part of a mask that was made for the full batch and all heads.

    Args:
        mask: of shape ``[batch, heads, queries, keys]``. Each of the first two is the global size,
            or 1 for a mask that is the same for all, or this rank's size, which is left as it is.

    Raises:
        ValueError: for any other batch or heads.
    """
    index, offsets = [], []
    for name, size, share in zip(("batch", "heads"), mask.shape, (batch, heads), strict=False):
        if size not in (1, share.whole, share.size):
            raise ValueError(
                f"a BlockMask of shape {mask.shape} is for {size} in its {name}, of which there "
                f"are {share.whole}, and {share.size} on this rank"
            )
        cuts = size == share.whole != share.size
        index.append(slice(share.first, share.first + share.size) if cuts else slice(None))
        # A mask of size 1 is not narrowed, but its function is called with indices all the same.
        offsets.append(share.first if cuts or size == 1 else 0)
    if not any(offsets) and index == [slice(None)] * 2:
        return mask
    own = copy.copy(mask) if index == [slice(None)] * 2 else mask[index[0], index[1]]
    own.mask_mod = _shifted(mask.mask_mod, *offsets)
    return own


_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _shifted(function: _MaskFunction, first: int, head: int) -> _MaskFunction:
    """A mask's function for this rank's batch and head indices, which start at 0."""

    def shifted(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(b + first, h + head, query, key)

    return shifted
