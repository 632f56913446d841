"""Splitting images into patches."""

from __future__ import annotations

from torch import Tensor

__all__ = ["patches"]


def patches(images: Tensor, height: int, width: int) -> Tensor:
    """Split images ``[B, C, H, W]`` into patches of ``height`` x ``width`` pixels.

    Returns:
        ``[B, H // height, W // width, C * height * width]``, the last dim in the order of a
        Conv2d's flattened weight. As with a Conv2d, pixels left over at the far edges are not used.
    """
    batch, channels, rows, columns = images.shape
    rows, columns = rows // height, columns // width
    used = images[:, :, : rows * height, : columns * width]
    cut = used.reshape(batch, channels, rows, height, columns, width)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, columns, channels * height * width)
