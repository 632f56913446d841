"""The plainest correct version of what the library computes, all blocks on one device.

``scatter`` cuts a matrix into its grid of blocks, the algorithms turn grids of blocks into grids
of blocks, one line of the paper a line here, and nothing overlaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_tp2d.mesh.layouts import chunk_sizes

Blocks = list[list[Tensor]]


def scatter(matrix: Tensor, rows: int, columns: int) -> Blocks:
    """``blocks[i][j]`` is block (i, j) of ``matrix`` cut as torch.chunk cuts it."""
    strips = matrix.split(chunk_sizes(matrix.shape[0], rows), 0)
    return [list(strip.split(chunk_sizes(matrix.shape[1], columns), 1)) for strip in strips]


def gather(blocks: Blocks) -> Tensor:
    return torch.cat([torch.cat(strip, 1) for strip in blocks], 0)


def bmr(a: Blocks, b: Blocks) -> Blocks:
    """Algorithm 1 of TP2D: broadcast A[i, k] along the row, multiply, roll B up its column."""
    n = len(a)
    c = [
        [a[i][0].new_zeros(a[i][0].shape[0], b[0][j].shape[1]) for j in range(n)] for i in range(n)
    ]
    held = [list(strip) for strip in b]
    for t in range(n):
        for i in range(n):
            k = (i + t) % n
            for j in range(n):
                c[i][j] = c[i][j] + a[i][k] @ held[i][j]
        held = held[1:] + held[:1]
    return c


def cannon(a: Blocks, b: Blocks) -> Blocks:
    """Skew A by its row and B by its column, then multiply and roll both, n times."""
    n = len(a)
    c = [
        [a[i][0].new_zeros(a[i][0].shape[0], b[0][j].shape[1]) for j in range(n)] for i in range(n)
    ]
    a = [strip[i:] + strip[:i] for i, strip in enumerate(a)]
    b = [[b[(i + j) % n][j] for j in range(n)] for i in range(n)]
    for _ in range(n):
        c = [[c[i][j] + a[i][j] @ b[i][j] for j in range(n)] for i in range(n)]
        a = [strip[1:] + strip[:1] for strip in a]
        b = b[1:] + b[:1]
    return c


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """``y = x W^T + bias`` and the gradients of x, W and bias, on one device."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    if bias is not None:
        leaves.append(bias.detach().clone().requires_grad_())
    y = torch.nn.functional.linear(*leaves)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]
