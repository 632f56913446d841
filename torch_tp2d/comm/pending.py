"""A transfer under way, which every collective of this library returns.

Importing this module registers an operator with torch, ``torch_tp2d::arrived``, for compiled
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch_compat.tensors import AutoDispatchBelowAutograd
from .._torch_compat.tensors import c10d_functional as _c10d
from .._tracing import in_graph

__all__ = ["Pending", "Started", "nothing"]

Started = Sequence[partial[Tensor]]

watch: Callable[[Started], Callable[[], AbstractContextManager[Any]]] | None = None
"""In debug mode: takes the pieces that a transfer is about to start, returns the context for them.

Set by :mod:`torch_tp2d.debug`.
"""


class Pending:
    """A transfer under way. ``wait()`` returns the tensor; what runs before it overlaps.

    A transfer consists of one or more pieces, each a function that starts a collective on its first
    argument. ``finish`` makes the result of what the pieces bring.
    """

    __slots__ = ("_around", "_finish", "_pieces", "_value", "_wires")

    def __init__(
        self,
        value: Tensor | None,
        pieces: Started = (),
        finish: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> None:
        self._value = value
        self._finish = finish
        self._pieces = pieces
        self._wires: list[Tensor] = []
        if pieces:
            self._around = _surroundings(pieces)
            with self._around():
                self._wires = [pieces[0]()] if len(pieces) == 1 else [start() for start in pieces]

    def wait(self, *, if_used: bool = False) -> Tensor:
        """Wait for the transfer and return its tensor.

        Args:
            if_used: let a compiled graph drop the wait if nothing uses the tensor.
        """
        if self._finish is None:
            assert self._value is not None
            return self._value
        if not self._pieces:
            return self._finish([])
        if not if_used:
            with self._around():
                wires = [_c10d.wait_tensor.default(wire) for wire in self._wires]
            return self._finish(wires)
        sent = [piece.args[0] for piece in self._pieces]
        return self._finish(list(map(_arrived, self._wires, sent)))


def nothing(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without elements, that ``x`` comes to where nothing is sent.

    In a graph it depends on ``x``: a sum of gradients that depended on nothing of backward would be
    sent in forward, by the ranks without tokens alone.
    """
    return x.flatten()[:0].view(shape) if in_graph() else x.new_empty(shape)


def _surroundings(pieces: Started) -> Callable[[], AbstractContextManager[Any]]:
    """The context for the ops of a transfer, entered when it starts and when it is awaited.

    It skips the autograd kernels of these ops, which are Python since torch 2.13 and take longer
    than the ops themselves. They are not needed, since :func:`~torch_tp2d.comm.move` has a backward
    of its own.
    """
    if in_graph():
        return nullcontext
    if watch is None:
        return AutoDispatchBelowAutograd
    watched = watch(pieces)

    @contextmanager
    def both() -> Iterator[None]:
        with AutoDispatchBelowAutograd(), watched():
            yield

    return both


@torch.library.custom_op("torch_tp2d::arrived", mutates_args=())
def _arrived(wire: Tensor, sent: Tensor) -> Tensor:
    """``wait_tensor`` without the side effect that makes a graph keep it when nothing uses it.

    ``sent`` is an argument so that its memory is not reused before the transfer has ended.
    """
    return _c10d.wait_tensor.default(wire).clone()


@_arrived.register_fake
def _(wire: Tensor, sent: Tensor) -> Tensor:
    return torch.empty_like(wire)
