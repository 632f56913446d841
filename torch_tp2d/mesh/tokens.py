"""Declaring the global sizes of the tokens where no embedding does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..runtime.context import context_of
from .grid import check_mesh

__all__ = ["token_sizes"]


class token_sizes:
    """Declare the global sizes of the tokens of which local tensors on a mesh are shards.

    A style on a local tensor has to know the global sizes. An embedding, which is given replicated
    ids, provides them to all styles after it. In a model without one (a block or a pipeline stage
    by itself, or one whose inputs are embeddings) each style asks the other ranks instead, with a
    transfer and a wait in every call, or raises where it needs the sizes to tell a layout; and
    ``dataflow`` and ``reshard_after_forward`` are not chosen by size. For
    ``[batch, sequence, hidden]`` = ``[B, S, H]`` on an R x C grid:

    ==========================  =====================  ========
    local tensor                layout                 sizes
    ==========================  =====================  ========
    ``[B/R, S, H]``             row layout             ``B, S``
    ``[B/R, S/C, H]``           token layout           ``B, S``
    ``[B/R, S, H/C]``           feature layout         ``B, S``
    ``[B/R, ...]``, of images   ``(Shard(0), ...)``    ``B``
    ==========================  =====================  ========

    Called as a function, it holds until an embedding on the mesh, or another call, sets other
    sizes. As a context manager it holds for what runs inside and for the backward of that; on exit
    the sizes known before are restored.

    Args:
        mesh: the one that the plan was applied on.
        sizes: ``(batch, sequence)`` of the global batch; ``(batch,)`` where the number of tokens
            changes within the model; None if they are not known, as in a model without an
            embedding that runs beside one that has one. The same on every rank, since they decide
            whether the ranks ask each other.

    Raises:
        TypeError: for sizes that are not integers, or another kind of mesh.
        ValueError: for more than two sizes, or one that is less than 1; for a mesh that is not
            ``("tp_row", "tp_col")``. In a forward, if a local tensor is not this rank's shard.

    Example::

        >>> x = hidden_states.chunk(R)[i].chunk(C, 1)[j]      # [8/R, 512/C, H]
        >>> with torch_tp2d.token_sizes(mesh, (8, 512)):
        ...     y = block(x)
    """

    def __init__(self, mesh: DeviceMesh, sizes: Sequence[int] | None) -> None:
        check_mesh(mesh)
        self._sizes = None if sizes is None else tuple(sizes)
        for size in self._sizes or ():
            if not isinstance(size, int):
                raise TypeError(f"token sizes are integers, (batch, sequence), not {sizes!r}")
        if self._sizes is not None and (not 1 <= len(self._sizes) <= 2 or min(self._sizes) < 1):
            raise ValueError(
                f"token sizes are (batch, sequence) or (batch,), of at least one token, not "
                f"{self._sizes}: give the sizes of the whole batch, without the features"
            )
        self._context = context_of(mesh)
        self._before = self._context.tokens
        self._context.tokens = self._sizes

    def __enter__(self) -> None:
        self._context.tokens = self._sizes

    def __exit__(self, *error: Any) -> None:
        self._context.tokens = self._before

    def __repr__(self) -> str:
        return f"token_sizes({self._sizes})"
