"""The layer whose forward or backward is under way, to which a transfer belongs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from .._torch_compat import current_autograd_node, current_graph_task_id

__all__ = ["current_layer", "forward_of", "label"]


class _Layers(threading.local):
    """Names of the layers whose forward runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[str] = []


_layers = _Layers()
_LABEL = "tp2d_layer"


@contextmanager
def forward_of(name: str) -> Iterator[None]:
    """While it is entered, the forward of the layer of this name runs."""
    _layers.running.append(name)
    try:
        yield
    finally:
        _layers.running.pop()


def label(nodes: list[Any], given: Collection[Any], name: str) -> None:
    """Note the layer's name on the nodes of a graph, back to those that were ``given`` to it."""
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in given or _LABEL in node.metadata:
            continue
        node.metadata[_LABEL] = name
        nodes += [following for following, _ in node.next_functions]


def current_layer() -> str:
    """What runs in this thread, in words."""
    if _layers.running:
        return f"the forward of {_layers.running[-1]}"
    if current_graph_task_id() == -1:
        return "what runs between the layers"
    node: Any = current_autograd_node()
    name = None if node is None else node.metadata.get(_LABEL)
    return "a backward" if name is None else f"the backward of {name}"
