"""Compares the copies of replicated parameters, and their gradients, after a backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .._torch_compat.tensors import at_end_of_backward, current_graph_task_id
from .._tracing import eager_only
from ..comm import Axis
from ..comm.wires import Message, name_ranks
from ..mesh.grid import Grid
from ..mesh.layouts import TP_COL, TP_ROW
from .collectives import give_up, is_real, meet, watch_of

__all__ = ["compare_every", "runs_backward"]

_every = 0
"""One of this many backward passes is followed by a comparison; 0 turns comparisons off."""

_passes: dict[int, dict[nn.Module, None]] = {}
"""Modules whose backward ran, keyed by the id of autograd's graph task.

A key is needed because autograd runs backward passes in threads of its own.
"""


def compare_every(passes: int) -> None:
    """Set how many backward passes there are to one comparison; 0 turns comparisons off."""
    global _every
    _every = passes


@eager_only
def runs_backward(module: nn.Module, grad: Tensor) -> None:
    """Hook on a module's output: compare the module's parameters when this backward pass ends."""
    task = current_graph_task_id()
    if _every == 0 or task == -1:
        return
    if task not in _passes:
        while len(_passes) > 8:
            # Entries of backward passes that raised are never popped otherwise.
            del _passes[min(_passes)]
        _passes[task] = {}
        # Queued twice, so that it runs after others' callbacks: FSDP2 assigns gradients in its own.
        at_end_of_backward(lambda: at_end_of_backward(partial(_compare_copies, task)))
    _passes[task][module] = None


@dataclass
class _Copy:
    """This rank's copy of a parameter that is replicated along an axis."""

    name: str
    param: DTensor


def _compare_copies(task: int) -> None:
    modules = _passes.pop(task, {})
    with torch.no_grad():
        for axis, copies in _copies(modules):
            _compare_along(axis, copies)


def _copies(modules: Iterable[nn.Module]) -> list[tuple[Axis, list[_Copy]]]:
    """For each axis, those of the modules' parameters that are replicated along it."""
    found: dict[str, tuple[Axis, dict[int, _Copy]]] = {}
    for module in modules:
        runner: Any = module.__dict__.get("_tp2d")
        for name, param in module.named_parameters():
            names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else None
            if not isinstance(param, DTensor) or names is None or TP_ROW not in names:
                continue
            if names != (TP_ROW, TP_COL) and tuple(names[-2:]) != (TP_ROW, TP_COL):
                continue
            layer = "" if runner is None else runner.name or type(module).__name__
            grid = Grid(param.device_mesh[TP_ROW, TP_COL])
            for axis in (grid.col, grid.row):
                if axis.size == 1 or not is_real(param.to_local(), axis.group):
                    continue
                if isinstance(param.placements[names.index(axis.name)], Replicate):
                    copy = _Copy(f"{layer}.{name}" if layer else name, param)
                    copies = found.setdefault(axis.group, (axis, {}))[1]
                    known = copies.get(id(param), copy)
                    copies[id(param)] = min(known, copy, key=lambda one: one.name)
    # Sorted by name, since a row without samples gets its gradients in a different order.
    return [
        (axis, sorted(copies.values(), key=lambda copy: copy.name))
        for axis, copies in sorted(found.values(), key=lambda of: of[0].name)
    ]


def _compare_along(axis: Axis, copies: list[_Copy]) -> None:
    watch = watch_of(axis.group, copies[0].param.to_local().device)
    watch.backwards += 1
    if (watch.backwards - 1) % _every:
        return
    facts = [[copy.name, _fact(copy.param, axis), _fact(copy.param.grad, axis)] for copy in copies]
    what = f"the comparison of copies after backward number {watch.backwards}"
    with watch.lock:
        heard = meet(watch, {"op": "copies", "copies": facts, "text": what}, what)
    ranks = watch.wires.ranks
    lists = [[name for name, _, _ in message.get("copies", [])] for message in heard]
    if any(names != lists[0] for names in lists):
        counts = "; ".join(
            f"rank {rank}: {message['text']} of {len(names)} parameters"
            for rank, message, names in zip(ranks, heard, lists, strict=True)
        )
        give_up(f"the ranks do different things at the end of a backward pass. On {counts}")
    largest = max(
        (grad["norm"] for m in heard for _, _, grad in m["copies"] if grad and grad["norm"]),
        default=0.0,
    )
    said: list[str] = []
    for at, copy in enumerate(copies):
        for which, kind, floor in (("", 1, 0.0), ("the gradient of ", 2, largest)):
            said += _difference(
                f"{which}{copy.name!r}", [message["copies"][at][kind] for message in heard], floor
            )
    if said:
        more = f", and {len(said) - 5} more" if len(said) > 5 else ""
        give_up(
            f"after backward number {watch.backwards}, what is to be the same on "
            f"{name_ranks(ranks)} along {axis.name} differs: {', '.join(said[:5])}{more}. A sum "
            f"over ranks is missing, or they started from different values"
        )


_CHUNK = 1 << 20


def _fact(x: Any, axis: Axis) -> Message | None:
    """A few numbers that identify a tensor's values; None if it is not replicated on ``axis``."""
    if not isinstance(x, DTensor):
        return None
    names = x.device_mesh.mesh_dim_names or ()
    if axis.name not in names or not isinstance(x.placements[names.index(axis.name)], Replicate):
        return None
    local = x.to_local().flatten()
    total, square, odd = 0.0, 0.0, 0
    for start, part in zip(range(0, len(local), _CHUNK), local.split(_CHUNK), strict=False):
        finite = part.isfinite()
        values = torch.where(finite, part, 0).double()
        # Weights of different sizes, so that a permutation or a change of sign changes the total.
        weights = torch.arange(start, start + len(part), device=part.device, dtype=torch.float64)
        weights = 0.5 + (weights * 0.6180339887498949).frac_()
        total += float(values @ weights)
        square += float(values @ values)
        odd += int((~finite).sum())
    eps = torch.finfo(local.dtype).eps
    return {"total": total, "norm": math.sqrt(square), "odd": odd, "eps": eps}


def _difference(what: str, facts: list[Message | None], largest: float) -> list[str]:
    """A description of a difference that exceeds rounding, in a list; empty if there is none.

    In places each rank computes its copy by itself, and then the copies agree up to rounding only.
    The tolerance is half of the dtype's digits, relative to the copy's own norm, plus rounding
    relative to ``largest``, the largest norm of any gradient.
    """
    there = [fact for fact in facts if fact is not None]
    if not there:
        return []
    if len(there) < len(facts):
        return [f"{what} (which some ranks have not)"]
    if len({fact["odd"] for fact in there}) > 1:
        return [f"{what} ({', '.join(str(fact['odd']) for fact in there)} of it not finite)"]
    size, eps = max(fact["norm"] for fact in there), there[0]["eps"]
    totals = [fact["total"] for fact in there]
    apart = max(totals) - min(totals)
    if apart <= math.sqrt(eps) * size + 64 * eps * largest:
        return []
    return [f"{what} (by {apart / max(size, 1e-300):.1e} of its size)"]
