"""Saying the sizes of the tokens under way, where no embedding does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..runtime.context import context_of
from .grid import check_mesh

__all__ = ["token_sizes"]


class token_sizes:
    """Say of how many tokens the local tensors on a mesh are a part, as an embedding does.

    A style on a local tensor has to know the sizes of the whole. An embedding, which is handed
    whole ids, tells them to all that follow. In a model without one (a block or a pipeline stage
    by itself, or one whose inputs are embeddings) each style asks the other ranks instead, in a
    transfer and a wait for every call, or raises where the sizes are to tell a layout; and
    ``dataflow`` and ``reshard_after_forward`` choose nothing. For ``[batch, sequence, hidden]`` =
    ``[B, S, H]`` on an R x C grid:

    ==========================  =====================  ========
    local tensor                layout                 sizes
    ==========================  =====================  ========
    ``[B/R, S, H]``             row layout             ``B, S``
    ``[B/R, S/C, H]``           token layout           ``B, S``
    ``[B/R, S, H/C]``           feature layout         ``B, S``
    ``[B/R, ...]``, of images   ``(Shard(0), ...)``    ``B``
    ==========================  =====================  ========

    Called, it holds until an embedding on the mesh, or another call, says otherwise. As a context
    manager it holds for what is run inside, and for its backward, and then what was known before
    holds again.

    Args:
        mesh: the one that the plan was applied on.
        sizes: ``(batch, sequence)``, of the whole batch; ``(batch,)`` where the number of tokens
            changes on the way; None: not known, as in a model without an embedding that runs
            beside one that has one. The same on every rank: what is asked of the other ranks
            goes by it.

    Raises:
        TypeError: for sizes that are no integers, or another kind of mesh.
        ValueError: for more than two sizes, or one that is less than 1; for a mesh that is not
            ``("tp_row", "tp_col")``. In a forward, of a local tensor that is not this rank's part.

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
