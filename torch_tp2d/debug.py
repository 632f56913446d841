"""Debug mode: what the ranks are about to do is compared before they do it, and copies after.

``TP2D_DEBUG=1`` in the environment of every rank, or :func:`enable` on every rank, turns it on.

1. Before a collective of ours starts, the ranks of its axis tell each other which it is: op,
   sizes, dtype, and the layer that it is for. If they differ, or a rank does not come (it raised,
   ended or was stopped), every rank raises :class:`RanksDisagree` within the process group's
   timeout, which names the rank, the layer and the collective.
2. At the end of the first backward, and of every n-th after it with ``TP2D_DEBUG=n``, parameters
   that are whole along an axis are compared over the ranks of that axis, and so are their
   gradients: those of a parameter that some layer forgets to sum differ, and the copies of it
   drift apart while the loss looks right.

It costs a round trip between the ranks for each collective. What runs inside a compiled graph, on
fake tensors or on a fake process group is not compared; nor are collectives of DTensor and FSDP.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ._torch_compat import (
    active_fake_mode,
    at_end_of_backward,
    collective_of,
    current_autograd_node,
    current_graph_task_id,
    resolve_process_group,
    timeout_of,
    tree_leaves,
)
from .comm import Axis, pending
from .comm.wires import Message, Wires, name_ranks
from .mesh.grid import Grid
from .mesh.layouts import TP_COL, TP_ROW
from .styles.module_kinds import describe_module

__all__ = ["RanksDisagree", "disable", "enable", "is_on", "run_as_layer"]

_GRACE = 5.0
"""At most so many seconds are spent on finding out, after waiting in vain, who it is for."""

_every = 0


class RanksDisagree(RuntimeError):
    """The ranks are about to do different things, or one of them does nothing."""


def enable(every: int = 1) -> None:
    """Turn debug mode on. To be called by every rank, before what is to be watched.

    Args:
        every: of how many backward passes one is followed by a comparison of copies.

    Raises:
        ValueError: unless ``every`` is positive.

    Example::

        >>> torch_tp2d.debug.enable()
        >>> model(ids).sum().backward()
    """
    global _every
    if every < 1:
        raise ValueError(f"of every how many backward passes one is checked, not {every}")
    _every = every
    pending.watch = _watched


def disable() -> None:
    """Turn debug mode off, on every rank."""
    global _every
    _every = 0
    pending.watch = None


def is_on() -> bool:
    """Whether debug mode is on."""
    return _every > 0


# The layer under way


class _Layers(threading.local):
    """Names of the layers whose forward runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[str] = []


_layers = _Layers()
_LABEL = "tp2d_layer"


def run_as_layer(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, the forward of ``module``, with its transfers known as its own.

    Those of its backward too: the nodes of the graph that it made are labelled.
    """
    runner: Any = module.__dict__["_tp2d"]
    name = repr(runner.name) if runner.name else describe_module(module)
    _layers.running.append(name)
    try:
        result = run(*args, **kwargs)
    finally:
        _layers.running.pop()
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]
    given = {x.grad_fn for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    nodes = [x.grad_fn for x in made if x.grad_fn not in given]
    for x in made:
        if x.grad_fn not in given:
            x.register_hook(partial(_runs_backward, module))
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in given or _LABEL in node.metadata:
            continue
        node.metadata[_LABEL] = name
        nodes += [following for following, _ in node.next_functions]
    return result


def _where() -> str:
    if _layers.running:
        return f"the forward of {_layers.running[-1]}"
    if current_graph_task_id() == -1:
        return "what runs between the layers"
    node: Any = current_autograd_node()
    name = None if node is None else node.metadata.get(_LABEL)
    return "a backward" if name is None else f"the backward of {name}"


# Before a collective


@dataclass(eq=False)
class _Watch:
    """What is known of one group."""

    wires: Wires
    patience: float
    grace: float
    backwards: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_watches: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Watch]] = WeakKeyDictionary()


def _watch_of(group_name: str, device: torch.device) -> _Watch:
    world = dist.group.WORLD
    assert world is not None
    watches = _watches.setdefault(world, {})
    if group_name not in watches:
        group = resolve_process_group(group_name)
        given = timeout_of(world, device)
        limit = 1800.0 if given is None else given.total_seconds()
        grace = min(_GRACE, limit / 4)
        try:
            wires = Wires(group, device, limit)
        except (OSError, RuntimeError) as error:
            ranks = name_ranks(dist.get_process_group_ranks(group))
            raise RanksDisagree(
                f"{ranks} were not all there to be connected, before what runs in {_where()}: "
                f"{error}"
            ) from error
        watches[group_name] = _Watch(wires, limit - grace, grace)
    return watches[group_name]


def _is_real(x: Tensor, group_name: str) -> bool:
    """Whether something travels."""
    group = resolve_process_group(group_name)
    if x.is_meta or dist.get_backend(group) == "fake":
        return False
    return active_fake_mode() is None


def _watched(pieces: Sequence[partial[Tensor]]) -> Callable[[], Any]:
    """Compare a transfer with the other ranks' before it starts.

    Returns:
        What makes a context for starting it and for waiting, in which its failures are put into
        words.
    """
    first, group_name = pieces[0].args[0], pieces[0].args[-1]
    if not _is_real(first, group_name):
        return nullcontext
    mine = _described(pieces)
    watch = _watch_of(group_name, first.device)
    with watch.lock:
        heard = _meet(watch, mine, mine["text"])
    if any(not _fits(a, b, i, j) for i, a in enumerate(heard) for j, b in enumerate(heard)):
        texts = defaultdict(list)
        for rank, message in zip(watch.wires.ranks, heard, strict=True):
            texts[message["text"]].append(rank)
        said = ", but ".join(f"{name_ranks(which)}: {text}" for text, which in texts.items())
        _give_up(f"the ranks are about to do different things. On {said}")
    return partial(_in_words, watch, mine["text"])


def _described(pieces: Sequence[partial[Tensor]]) -> Message:
    func: Any = pieces[0].func
    op = collective_of(func)
    x = pieces[0].args[0]
    sizes = [list(piece.args[0].shape) for piece in pieces]
    others = [list(map(str, piece.args[1:-1])) for piece in pieces]
    dtype, where = str(x.dtype).removeprefix("torch."), _where()
    shown = sizes[0] if len(sizes) == 1 else sizes
    text = f"{op} of {dtype} {shown} in {where}"
    message = {"op": op, "dtype": dtype, "where": where}
    if op != "all_to_all_single":
        return {**message, "alike": [sizes, others], "text": text}
    receives, sends = ([piece.args[at] for piece in pieces] for at in (1, 2))
    shown = sends[0] if len(sends) == 1 else sends
    return {**message, "sends": sends, "receives": receives, "text": f"{text}, {shown} to each"}


def _fits(a: Message, b: Message, i: int, j: int) -> bool:
    """Whether what rank ``i`` of a group does is the counterpart of what rank ``j`` does."""
    if any(a.get(key) != b.get(key) for key in ("op", "dtype", "where", "alike")):
        return False
    if "sends" not in a:
        return True
    return len(a["sends"]) == len(b["sends"]) and all(
        sends[j] == receives[i] for sends, receives in zip(a["sends"], b["receives"], strict=True)
    )


def _meet(watch: _Watch, mine: Message, what: str) -> list[Message]:
    """Every rank's message, in the group's order."""
    wires = watch.wires
    heard = wires.exchange(mine, watch.patience)
    for rank, message in heard.items():
        _heed(rank, message)
    gone = wires.closed - heard.keys()
    if gone:
        _give_up(f"{name_ranks(gone)} ended (or left the process group) before {what}")
    silent = set(wires.ranks) - heard.keys()
    if silent:
        _find_missing(watch, silent, f"{what}, within {watch.patience:.0f} s")
    return [heard[rank] for rank in wires.ranks]


def _heed(rank: int, message: Message) -> None:
    """Give up if another rank has."""
    if "failed" in message:
        _give_up(message["failed"])
    if "stuck" in message:
        missing = {missed for missed, _ in message["missing"]} - set(message["waiting"])
        _give_up(f"{name_ranks(missing or {rank})} did not come to {message['stuck']}")


def _give_up(why: str, cause: Exception | None = None) -> NoReturn:
    """Raise, and have every rank that this one meets raise too."""
    _tell_all({"failed": why})
    raise RanksDisagree(why) from cause


def _all_wires() -> list[Wires]:
    world = dist.group.WORLD
    return [] if world is None else [watch.wires for watch in _watches.get(world, {}).values()]


def _tell_all(message: Message) -> None:
    for wires in _all_wires():
        wires.tell(message)


def _find_missing(watch: _Watch, silent: set[int], what: str) -> NoReturn:
    """Raise for ranks that did not come, and not for those that wait in vain themselves.

    Every rank that is stuck tells the ranks that it has wires to what it knows, until nobody
    learns anything new: so it is known of ranks in another row and column too.
    """
    waited = {rank: what for rank in silent}
    stuck = {watch.wires.rank}

    def tell() -> None:
        _tell_all({"stuck": what, "missing": sorted(waited.items()), "waiting": sorted(stuck)})

    tell()
    end = time.monotonic() + watch.grace
    while time.monotonic() < end:
        known = len(waited), len(stuck)
        for wires in _all_wires():
            for rank, message in wires.listen(min(end, time.monotonic() + 0.05)):
                if "failed" in message:
                    _give_up(message["failed"])
                if "stuck" in message:
                    stuck |= {rank, *message["waiting"]}
                    waited = {**dict(message["missing"]), **waited}
        if known != (len(waited), len(stuck)):
            tell()
    # Where all wait for one another nobody is to blame more than the others.
    missing = waited.keys() - stuck or silent
    _give_up(f"{name_ranks(missing)} did not come to {waited[min(missing)]}")


@contextmanager
def _in_words(watch: _Watch, what: str) -> Iterator[None]:
    try:
        yield
    except RanksDisagree:
        raise
    except RuntimeError as error:
        _find_cause(watch, what, error)


def _find_cause(watch: _Watch, what: str, error: RuntimeError) -> NoReturn:
    """Raise for a collective that all ranks had come to, and that failed under way."""
    wires = watch.wires
    said = str(error).splitlines()[0]
    _tell_all({"stuck": f"the end of {what}", "missing": [], "waiting": [wires.rank]})
    quiet = set(wires.peers)
    end = time.monotonic() + watch.grace
    while quiet and not wires.closed and time.monotonic() < end:
        for rank, message in wires.listen(min(end, time.monotonic() + 0.05)):
            if "failed" in message:
                _give_up(message["failed"], error)
            quiet.discard(rank)
    if wires.closed:
        who = f"{name_ranks(wires.closed)} ended (or left the process group)"
    else:
        who = f"{name_ranks(quiet)} did not answer" if quiet else "every rank is there, but"
    _give_up(f"{who} in {what}: {said}", error)


# After backward


_passes: dict[int, dict[nn.Module, None]] = {}
"""The modules whose backward ran, of each backward pass under way (autograd has its own threads).
"""


def _runs_backward(module: nn.Module, grad: Tensor) -> None:
    task = current_graph_task_id()
    if _every == 0 or task == -1 or torch.compiler.is_compiling():
        return
    if task not in _passes:
        while len(_passes) > 8:
            # Of passes that raised.
            del _passes[min(_passes)]
        _passes[task] = {}
        # After what others have to do at the end: FSDP2 puts the gradients in their places.
        at_end_of_backward(lambda: at_end_of_backward(partial(_compare_copies, task)))
    _passes[task][module] = None


@dataclass
class _Copy:
    """This rank's copy of a parameter that is whole along an axis."""

    name: str
    param: DTensor


def _compare_copies(task: int) -> None:
    modules = _passes.pop(task, {})
    with torch.no_grad():
        for axis, copies in _copies(modules):
            _compare_along(axis, copies)


def _copies(modules: Iterable[nn.Module]) -> list[tuple[Axis, list[_Copy]]]:
    """Of the modules' parameters those that are whole along an axis, for each axis."""
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
                if axis.size == 1 or not _is_real(param.to_local(), axis.group):
                    continue
                if isinstance(param.placements[names.index(axis.name)], Replicate):
                    copy = _Copy(f"{layer}.{name}" if layer else name, param)
                    found.setdefault(axis.group, (axis, {}))[1].setdefault(id(param), copy)
    return [(axis, list(copies.values())) for axis, copies in found.values()]


def _compare_along(axis: Axis, copies: list[_Copy]) -> None:
    watch = _watch_of(axis.group, copies[0].param.to_local().device)
    watch.backwards += 1
    if (watch.backwards - 1) % _every:
        return
    facts = [[copy.name, _fact(copy.param, axis), _fact(copy.param.grad, axis)] for copy in copies]
    what = f"the comparison of copies after backward number {watch.backwards}"
    with watch.lock:
        heard = _meet(watch, {"op": "copies", "copies": facts, "text": what}, what)
    ranks = watch.wires.ranks
    lists = [[name for name, _, _ in message.get("copies", [])] for message in heard]
    if any(names != lists[0] for names in lists):
        counts = "; ".join(
            f"rank {rank}: {message['text']} of {len(names)} parameters"
            for rank, message, names in zip(ranks, heard, lists, strict=True)
        )
        _give_up(f"the ranks do different things at the end of a backward pass. On {counts}")
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
        _give_up(
            f"after backward number {watch.backwards}, what is to be the same on "
            f"{name_ranks(ranks)} along {axis.name} differs: {', '.join(said[:5])}{more}. A sum "
            f"over ranks is missing, or they started from different values"
        )


_CHUNK = 1 << 20


def _fact(x: Any, axis: Axis) -> Message | None:
    """A few numbers that tell a tensor from another; None if there is none to compare."""
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
        # Weights that no permutation and no change of sign leaves the same.
        weights = torch.arange(start, start + len(part), device=part.device, dtype=torch.float64)
        weights = 0.5 + (weights * 0.6180339887498949).frac_()
        total += float(values @ weights)
        square += float(values @ values)
        odd += int((~finite).sum())
    eps = torch.finfo(local.dtype).eps
    return {"total": total, "norm": math.sqrt(square), "odd": odd, "eps": eps}


def _difference(what: str, facts: list[Message | None], largest: float) -> list[str]:
    """What differs by more than rounding, in words; nothing if nothing does.

    Copies are computed by each rank for itself in places, and then agree to rounding only: up to
    half of the digits, of what is not itself rounding in the gradient of another parameter.
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


def _from_environment() -> None:
    given = os.environ.get("TP2D_DEBUG", "")
    if not given.isdecimal() and given:
        raise ValueError(
            f"TP2D_DEBUG is 0, 1 or of every how many backward passes one is checked, not {given!r}"
        )
    if int(given or 0):
        enable(int(given))


_from_environment()
