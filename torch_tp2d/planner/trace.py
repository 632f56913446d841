"""Records what a step of a model does while it runs on tensors without values.

Each collective and each kept tensor is attributed to a module. In forward it is the module that
runs. In backward it is told by the sequence number of the autograd node that runs, since the nodes
that a module makes have consecutive numbers. Work that is done ahead of a module, or deferred, is
attributed by :meth:`Context.on_behalf_of`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.tensors import (
    TorchDispatchMode,
    c10d_collective_of,
    collective_of,
    flops_of,
    local_tensor,
    nodes_made,
    number_of_node,
    tree_leaves,
)
from ..comm.counter import AxisNames, crossing
from ..runtime.context import OnBehalf, context_of, in_backward

__all__ = ["Compute", "Event", "Kept", "Recorder", "Start", "Wait"]

_COPIES = frozenset({"aten::_to_copy", "aten::cat", "aten::clone", "aten::constant_pad_nd"})
"""Operators whose result counts as parameters if all their inputs do."""

_NO_WORK = frozenset(
    {
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        # A fake tensor calls it to know its device.
        "prim::device",
    }
)
"""Operators, besides views, that read and write nothing."""

PARAMETERS, GATHERED, ACTIVATIONS, TEMPORARY = "parameters", "gathered", "activations", "temporary"
"""Kinds of memory: parameters, weights gathered from them, and what forward and backward make."""


@dataclass(frozen=True)
class Compute:
    """Work of this rank: a product, or all other operators between two transfers or products.

    Args:
        flops: multiplications and additions in products.
        touched: bytes that are read and written.
        ops: how many operators are called.
    """

    flops: int
    touched: int
    ops: int = 1


@dataclass(frozen=True)
class Start:
    """The start of a transfer."""

    axis: str
    op: str
    bytes: int
    """How many bytes this rank receives."""
    of_fsdp: bool = False
    """Whether it is FSDP2's own transfer, which has no :class:`Wait`."""


@dataclass(frozen=True)
class Wait:
    """The point at which the result of a transfer is needed."""

    start: int
    """The index of the event that started the transfer."""


Event = Compute | Start | Wait


@dataclass
class Kept:
    """Live bytes by kind of memory, now and at their peak."""

    live: Counter[str]
    peak: Counter[str]
    """The live bytes at the moment when their total was largest."""

    def add(self, kind: str, size: int) -> None:
        self.live[kind] += size
        if size > 0 and self.live.total() > self.peak.total():
            self.peak = self.live.copy()


class Recorder(TorchDispatchMode):
    """Records a step: transfers and their bytes by module, the order of events, memory.

    It is entered within a fake mode.

    Args:
        model: the model that is going to run; its modules get hooks.
        mesh: the mesh by whose axes transfers are counted.
        plain: the class of the local tensors. Operators on other classes, such as DTensor, are not
            recorded themselves, but what these run on local tensors is.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, plain: type) -> None:
        super().__init__()
        self._axes, self._plain = AxisNames(mesh), plain
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._marks: list[tuple[int, str]] = [(-1, "")]
        self._instead: list[str] = []
        self.calls: Counter[tuple[str, bool, str, str]] = Counter()
        """Number of collectives, by module, whether in backward, axis and operator."""
        self.bytes: Counter[tuple[str, bool, str, str]] = Counter()
        self.shapes: dict[str, list[tuple[int, ...] | None]] = {}
        """By module, the local shapes of its first input and its output."""
        self.flops: Counter[str] = Counter()
        self.events: list[Event] = []
        self.memory = Kept(Counter(), Counter())
        self._storages: dict[int, tuple[Any, str, str, int]] = {}
        self._moving: dict[int, int] = {}
        self._paused = False
        for param in model.parameters():
            self._hold(local_tensor(param), PARAMETERS, "")
        for module in model.modules():
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        context_of(mesh).attribute = self.attribute

    def forget(self) -> None:
        """Clear what was recorded, but keep track of the tensors that live."""
        for counted in (self.calls, self.bytes, self.flops):
            counted.clear()
        self.events.clear()
        self._moving.clear()
        self.memory.peak = self.memory.live.copy()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of what runs within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # Which module an operator is attributed to

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self._running.append(name)
        self._mark(name)
        self.shapes[name] = [_shape((args, kwargs)), None]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._running.pop()
        self._mark(self._running[-1] if self._running else "")
        self.shapes[name][1] = _shape(output)

    def _mark(self, name: str) -> None:
        """Attribute the autograd nodes that are made from now on to this module."""
        made = nodes_made()
        if self._marks[-1][0] == made:
            self._marks.pop()
        self._marks.append((made, name))

    def current(self) -> str:
        """The name of the module that what runs now is attributed to."""
        if self._instead:
            return self._instead[-1]
        if self._running:
            return self._running[-1]
        node = number_of_node()
        if node is None:
            return ""
        return self._marks[bisect_right(self._marks, node, key=lambda mark: mark[0]) - 1][1]

    def attribute(self, module: nn.Module | None) -> OnBehalf:
        """See :meth:`torch_tp2d.runtime.context.Context.on_behalf_of`."""
        name = self.current() if module is None else self._names.get(module, "")
        return partial(self._on_behalf, name)

    def _on_behalf(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        with self._as(name):
            return function(*args)

    @contextmanager
    def _as(self, name: str) -> Iterator[None]:
        self._instead.append(name)
        self._mark(name)
        try:
            yield
        finally:
            self._instead.pop()
            self._mark(self.current())

    # What is recorded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not self._plain and kind is not nn.Parameter for kind in types):
            # A DTensor, for example, then runs operators on its shards, which are recorded.
            return NotImplemented
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        op, of_fsdp = collective_of(func), c10d_collective_of(func)
        if func.name().endswith("::wait_tensor"):
            # The real operator returns its own argument, but a fake one would make a copy.
            out = args[0]
            start = self._moving.pop(_storage_id(out), None)
            if start is not None:
                self.events.append(Wait(start))
            return out
        out = func(*args, **kwargs)
        if op:
            group, received = crossing(op, args)
            self._start(group, op, received)
            start = len(self.events) - 1
            if func.namespace == "symm_mem":
                # The fused operator alternates between sending and multiplying.
                self._compute(func, args, kwargs, out)
                self.events.append(Wait(start))
            else:
                self._moving[_storage_id(out)] = start
        elif of_fsdp:
            self._start(*_crossing_of_c10d(of_fsdp, args), of_fsdp=True)
            self._measure_again()
        elif not func.is_view:
            self._compute(func, args, kwargs, out)
        if of_fsdp or func.namespace == "fsdp":
            self._gathered_by_fsdp((args, kwargs))
        self._allocate(func, args, kwargs, out, bool(op))
        return out

    def _start(self, group: ProcessGroup, op: str, received: int, of_fsdp: bool = False) -> None:
        axis = self._axes.of(group)
        key = self.current(), in_backward(), axis, op
        self.calls[key] += 1
        self.bytes[key] += received
        self.events.append(Start(axis, op, received, of_fsdp))

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.name().partition(".")[0] in _NO_WORK:
            return
        flops = flops_of(func, args, kwargs, out)
        touched = sum(x.numel() * x.element_size() for x in _tensors((args, kwargs, out)))
        self.flops[self.current()] += flops
        before = self.events[-1] if self.events else None
        if isinstance(before, Compute) and not (before.flops or flops):
            self.events[-1] = Compute(0, before.touched + touched, before.ops + 1)
        else:
            self.events.append(Compute(flops, touched))

    # Memory

    def _allocate(self, func: Any, args: Any, kwargs: Any, out: Any, moved: bool) -> None:
        made = [x for x in _tensors(out) if id(x.untyped_storage()) not in self._storages]
        if not made:
            return
        kind = TEMPORARY if in_backward() else ACTIVATIONS
        if moved or func.name() in _COPIES:
            sources = {self._kind(x) for x in _tensors((args, kwargs))}
            if sources <= {PARAMETERS, GATHERED}:
                kind = GATHERED
        for x in made:
            self._hold(x, kind, self.current())

    def _gathered_by_fsdp(self, given: Any) -> None:
        """Count the buffers that FSDP2 gathers and copies weights into as gathered weights.

        They were allocated before, and so were counted as activations.
        """
        found = [id(x.untyped_storage()) for x in _tensors(given)]
        held = [self._storages[key] for key in found if key in self._storages]
        if not any(kind in (PARAMETERS, GATHERED) for _, kind, _, _ in held):
            return
        for key in found:
            if key in self._storages and self._storages[key][1] == ACTIVATIONS:
                reference, kind, module, size = self._storages[key]
                self._storages[key] = reference, GATHERED, module, size
                self.memory.add(kind, -size)
                self.memory.add(GATHERED, size)

    def _kind(self, x: Tensor) -> str:
        known = self._storages.get(id(x.untyped_storage()))
        return ACTIVATIONS if known is None else known[1]

    def _hold(self, x: Tensor, kind: str, module: str) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return
        reference = weakref.ref(storage, lambda _: self._release(key))
        self._storages[key] = reference, kind, module, size
        self.memory.add(kind, size)

    def _release(self, key: int) -> None:
        _, kind, _, size = self._storages.pop(key)
        self.memory.add(kind, -size)

    def _measure_again(self) -> None:
        """Update the sizes of storages, which FSDP2 resizes while their tensors live."""
        for key, (reference, kind, module, size) in list(self._storages.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._storages[key] = reference, kind, module, storage.nbytes()
                self.memory.add(kind, storage.nbytes() - size)

    def kept(self) -> dict[str, Counter[str]]:
        """By module, the live bytes of each kind of memory but parameters."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for _, kind, module, size in self._storages.values():
            if kind != PARAMETERS:
                found[module][kind] += size
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _shape(tree: Any) -> tuple[int, ...] | None:
    """The local shape of the first tensor."""
    for x in _tensors(tree):
        return tuple(local_tensor(x).shape)
    return None


def _storage_id(x: Tensor) -> int:
    return id(x.untyped_storage())


def _crossing_of_c10d(op: str, args: Sequence[Any]) -> tuple[ProcessGroup, str, int]:
    """The group, operator and received bytes of a collective that FSDP2 calls.

    As :func:`torch_tp2d.comm.counter.crossing`, for torch.distributed's own operators.
    """
    sizes = [sum(x.numel() * x.element_size() for x in _tensors(args[at])) for at in (0, 1)]
    boxed = args[1] if op.startswith("allreduce") else args[2]
    group = ProcessGroup.unbox(boxed)
    received: dict[str, Callable[[], int]] = {
        "allgather_base": lambda: sizes[0] - sizes[1],
        "reduce_scatter_base": lambda: sizes[1] - sizes[0],
        "allreduce": lambda: 2 * (group.size() - 1) * sizes[0] // group.size(),
    }
    if op not in received:
        raise ValueError(f"the bytes of torch.distributed's {op} are not known")
    return group, op, received[op]()
