"""Taking up parameters before they are needed: the next modules', during this one.

Their weights are gathered then, as FSDP2 does. And in backward the nodes that wait for the
gradients of parameters come late, since autograd runs first what was made last: what those wait
for has arrived by then.

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
from torch.distributed.tensor import DTensor

from .comm import Pending

__all__ = ["AHEAD", "GATHERED_AHEAD", "Ready", "Regather", "end", "gather_ahead", "take_up"]

AHEAD = 8
"""How many modules ahead: those of a transformer's layer."""

GATHERED_AHEAD = 4
"""The most gathered weights that wait for their turn."""


@dataclass
class Ready:
    """A module's parameters as its op takes them.

    Args:
        gather: starts the gather of the weight, where one is to be gathered.
    """

    weight: Tensor | None
    bias: Tensor | None
    gather: Callable[[], Pending] | None = None
    made_from: tuple[Any, ...] = ()
    _moving: Pending | None = None

    def start(self) -> None:
        """Start the gather, if there is one to be started."""
        if self._moving is None and self.gather is not None:
            self._moving = self.gather()

    @property
    def moving(self) -> Pending:
        """The weight's gather."""
        assert self._moving is not None
        return self._moving

    def drop(self) -> None:
        """Nobody will take it."""
        if self._moving is not None:
            self._moving.wait()


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
        for _ in range(GATHERED_AHEAD):
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
    """What taken-up parameters depend on: if it changed since, they are of no use."""
    named = (getattr(module, name, None) for name in ("weight", "bias"))
    params = [param for param in named if param is not None]
    # What was made in inference mode has no version.
    versions = [(id(p), None if p.is_inference() else p._version) for p in params]
    made = torch.is_grad_enabled(), *versions
    if not params:
        return made
    device = params[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return *made, autocast


def drop() -> None:
    """Forget what was taken up ahead: the order is broken."""
    for ready in _ready.values():
        ready.drop()
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


def take_up(module: nn.Module, prepare: Callable[[nn.Module], Ready]) -> Ready:
    """What ``prepare`` makes of a module that is about to run, ahead of time if it was foreseen.

    Args:
        prepare: takes up a module's parameters; the method of that name of the module's runner.
    """
    global _last
    if torch.compiler.is_compiling():
        return prepare(module)
    last = None if _last is None else _last()
    foreseen = _after(last) is module
    if not foreseen:
        # Not the order of last time: what was taken up ahead may never be asked for.
        drop()
    ready = _ready.pop(ref(module), None)
    if ready is not None and ready.made_from != _made_from(module):
        ready.drop()
        ready = None
    if ready is None:
        ready = prepare(module)
    ready.start()
    mine = _position.setdefault(module, next(_positions))
    if last is not None and _position[last] < mine:
        _following[last] = ref(module)
    _last = ref(module)
    # Recomputation in backward goes over a part of the modules only.
    if torch._C._current_graph_task_id() == -1:
        _look_ahead(module)
        if not foreseen:
            # A pass begins, and nothing is under way.
            gather_ahead()
    return ready


def _look_ahead(module: nn.Module) -> None:
    """Take up the parameters of the modules that follow."""
    # Those that wait are the next ones, in their order.
    ahead = next(reversed(_ready))() if _ready else module
    while len(_ready) < AHEAD:
        ahead = _after(ahead)
        if ahead is None:
            break
        runner: Any = ahead._tp2d
        weight = getattr(ahead, "weight", None)
        if isinstance(weight, DTensor) and weight.device_mesh != runner.grid.mesh:
            # FSDP2 has not gathered its part yet.
            break
        ready = runner.prepare(ahead)
        ready.made_from = _made_from(ahead)
        _ready[ref(ahead)] = ready


def gather_ahead() -> None:
    """Gather the weights that are needed next: best when no other transfer is under way."""
    waiting = [ready for ready in _ready.values() if ready.gather is not None]
    for ready in waiting[:GATHERED_AHEAD]:
        ready.start()
