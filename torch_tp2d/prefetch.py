"""Gathering weights before they are needed, as FSDP2 does: the next modules' during this one.

Which modules come next is what followed last time; in backward, what ran before in this pass.
Every rank has seen the same, so every rank starts the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from .comm import Pending

__all__ = ["AHEAD", "Ready", "Regather", "end", "fetch"]

AHEAD = 4
"""How many modules ahead: the most gathered weights that wait for their turn."""


@dataclass
class Ready:
    """A module's parameters as its op takes them, and its weight's gather."""

    weight: Tensor
    bias: Tensor | None
    moving: Pending
    made_from: tuple[Any, ...] = ()


class Regather:
    """A weight's gather for backward, if the forward's was not kept.

    Those of one pass are a chain, from each to that of the module before it.
    """

    def __init__(self, shard: Tensor, gather: Callable[[Tensor], Pending]) -> None:
        global _tail
        self._shard, self._gather = shard.detach(), gather
        self._moving: Pending | None = None
        self._taken = False
        module = None if _last is None else _last()
        self._position = -1 if module is None else _position[module]
        before = None if _tail is None else _tail()
        # Weakly: the graph of a pass holds its chain, and nothing else does.
        self._before = _tail if before is not None and before._position < self._position else None
        _tail = ref(self)

    def _start(self) -> bool:
        if self._moving is None:
            if self._taken or not self._shard.untyped_storage().size():
                # FSDP2 has not gathered its part yet.
                return False
            self._moving = self._gather(self._shard)
        return True

    def take(self) -> Pending:
        """This gather, started by now."""
        moving, self._moving, self._taken = self._moving, None, True
        return self._gather(self._shard) if moving is None else moving

    def start_those_before(self) -> None:
        """Start what backward comes to next: its gathers travel while this module computes."""
        link: Regather | None = self
        for _ in range(AHEAD):
            link = None if link is None or link._before is None else link._before()
            if link is None or not link._start():
                break

    def __del__(self) -> None:
        if self._moving is not None:
            # Backward has not come here; the collective has been started on every rank.
            self._moving.wait()


_tail: ref[Regather] | None = None

_position: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_following: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
_ready: dict[ref[nn.Module], Ready] = {}
_positions = count()
_last: ref[nn.Module] | None = None


def _after(module: nn.Module | None) -> nn.Module | None:
    following = None if module is None else _following.get(module)
    return None if following is None else following()


def _made_from(module: Any) -> tuple[Any, ...]:
    """What a gathered weight depends on: if it changed since, the gather is of no use."""
    weight = module.weight
    device = weight.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return id(weight), weight._version, torch.is_grad_enabled(), autocast


def drop() -> None:
    """Forget what was gathered ahead: the order is broken."""
    for ready in _ready.values():
        ready.moving.wait()
    _ready.clear()


def end() -> None:
    """The pass has ended, and backward begun: what runs next does not follow on it.

    A weight may change without a sign (FSDP2 gathers into the same storage again and again), so
    nothing is kept from one pass for the next. Nor is an order: the next pass may be of another
    model, whose weights the end of this one would gather in vain.
    """
    global _last
    drop()
    _last = None


def fetch(module: nn.Module, prepare: Callable[[nn.Module], Ready | None]) -> Ready:
    """What ``prepare`` makes of a module that is about to run, ahead of time if it was foreseen.

    Args:
        prepare: starts a module's gather; None if the weight is not at hand yet (FSDP2 has not
            gathered it).
    """
    global _last
    last = None if _last is None else _last()
    if _after(last) is not module:
        # Not the order of last time: what was gathered ahead may never be asked for.
        drop()
    ready = _ready.pop(ref(module), None)
    if ready is not None and ready.made_from != _made_from(module):
        ready.moving.wait()
        ready = None
    if ready is None:
        ready = prepare(module)
    assert ready is not None
    mine = _position.setdefault(module, next(_positions))
    if last is not None and _position[last] < mine:
        _following[last] = ref(module)
    _last = ref(module)
    # Recomputation in backward goes over a part of the modules only.
    if torch._C._current_graph_task_id() == -1:
        ahead: nn.Module | None = module
        for _ in range(AHEAD):
            ahead = _after(ahead)
            if ahead is None:
                break
            if ref(ahead) not in _ready:
                runner: Any = ahead._tp2d
                early = runner.prepare(ahead)
                if early is None:
                    break
                early.made_from = _made_from(ahead)
                _ready[ref(ahead)] = early
    return ready
