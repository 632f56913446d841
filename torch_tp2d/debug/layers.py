"""Which layer's forward or backward is running, so that a transfer can be attributed to it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from .._torch_compat.tensors import current_autograd_node, current_graph_task_id

__all__ = ["current_layer", "forward_of", "label"]


class _Layers(threading.local):
    """Names of the layers whose forward runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[str] = []


_layers = _Layers()
_LABEL = "tp2d_layer"


@contextmanager
def forward_of(name: str) -> Iterator[None]:
    """Context in which transfers belong to the forward of the layer of this name."""
    _layers.running.append(name)
    try:
        yield
    finally:
        _layers.running.pop()


def label(nodes: list[Any], given: Collection[Any], name: str) -> None:
    """Note the layer's name on its autograd nodes.

    Walks back from ``nodes``, those of the layer's outputs, to ``given``, those of its inputs.
    """
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in given or _LABEL in node.metadata:
            continue
        node.metadata[_LABEL] = name
        nodes += [following for following, _ in node.next_functions]


def current_layer() -> str:
    """A description, for messages, of the layer that runs in this thread."""
    if _layers.running:
        return f"the forward of {_layers.running[-1]}"
    if current_graph_task_id() == -1:
        return "what runs between the layers"
    node: Any = current_autograd_node()
    name = None if node is None else node.metadata.get(_LABEL)
    return "a backward" if name is None else f"the backward of {name}"
