"""Compares each collective over the ranks before it starts, and finds the rank behind a failure."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_compat.distributed import resolve_process_group, timeout_of
from .._torch_compat.tensors import active_fake_mode, collective_of
from ..comm.wires import Message, Wires, name_ranks
from .layers import current_layer

__all__ = ["RanksDisagree", "Watch", "give_up", "is_real", "meet", "watch_of", "watched"]

_GRACE = 5.0
"""Seconds, at most, that a rank spends after a timeout on finding out which ranks are missing."""


class RanksDisagree(RuntimeError):
    """The ranks are about to run different collectives, or some rank did not reach its own."""


@dataclass(eq=False)
class Watch:
    """One process group under watch.

    ``patience`` is how many seconds to wait for the other ranks, ``grace`` how many more to spend
    on finding out which of them are missing. ``backwards`` counts the backward passes that
    reached the comparison of copies.
    """

    wires: Wires
    patience: float
    grace: float
    backwards: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_watches: WeakKeyDictionary[dist.ProcessGroup, dict[str, Watch]] = WeakKeyDictionary()


def watch_of(group_name: str, device: torch.device) -> Watch:
    """The :class:`Watch` of a group. All ranks of the group make it together, at the first call."""
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
                f"{ranks} were not all there to be connected, before what runs in "
                f"{current_layer()}: {error}"
            ) from error
        watches[group_name] = Watch(wires, limit - grace, grace)
    return watches[group_name]


def is_real(x: Tensor, group_name: str) -> bool:
    """Whether a collective on ``x`` really sends data: not on meta or fake tensors or groups."""
    group = resolve_process_group(group_name)
    if x.is_meta or dist.get_backend(group) == "fake":
        return False
    return active_fake_mode() is None


def watched(pieces: Sequence[partial[Tensor]]) -> Callable[[], Any]:
    """Compare a transfer with the other ranks' before it starts.

    Returns:
        A factory of contexts in which to start the transfer and to wait for it. A RuntimeError
        raised inside becomes a :class:`RanksDisagree` that names the ranks at fault.
    """
    first, group_name = pieces[0].args[0], pieces[0].args[-1]
    if not is_real(first, group_name):
        return nullcontext
    mine = _described(pieces)
    watch = watch_of(group_name, first.device)
    with watch.lock:
        heard = meet(watch, mine, mine["text"])
    if any(not _fits(a, b, i, j) for i, a in enumerate(heard) for j, b in enumerate(heard)):
        texts = defaultdict(list)
        for rank, message in zip(watch.wires.ranks, heard, strict=True):
            texts[message["text"]].append(rank)
        said = ", but ".join(f"{name_ranks(which)}: {text}" for text, which in texts.items())
        give_up(f"the ranks are about to do different things. On {said}")
    return partial(_in_words, watch, mine["text"])


def _described(pieces: Sequence[partial[Tensor]]) -> Message:
    func: Any = pieces[0].func
    op = collective_of(func)
    x = pieces[0].args[0]
    sizes = [list(piece.args[0].shape) for piece in pieces]
    others = [list(map(str, piece.args[1:-1])) for piece in pieces]
    dtype, where = str(x.dtype).removeprefix("torch."), current_layer()
    shown = sizes[0] if len(sizes) == 1 else sizes
    text = f"{op} of {dtype} {shown} in {where}"
    message = {"op": op, "dtype": dtype, "where": where}
    if op != "all_to_all_single":
        return {**message, "alike": [sizes, others], "text": text}
    receives, sends = ([piece.args[at] for piece in pieces] for at in (1, 2))
    shown = sends[0] if len(sends) == 1 else sends
    return {**message, "sends": sends, "receives": receives, "text": f"{text}, {shown} to each"}


def _fits(a: Message, b: Message, i: int, j: int) -> bool:
    """Whether ranks ``i`` and ``j`` of a group describe two sides of one collective."""
    if any(a.get(key) != b.get(key) for key in ("op", "dtype", "where", "alike")):
        return False
    if "sends" not in a:
        return True
    return len(a["sends"]) == len(b["sends"]) and all(
        sends[j] == receives[i] for sends, receives in zip(a["sends"], b["receives"], strict=True)
    )


def meet(watch: Watch, mine: Message, what: str) -> list[Message]:
    """Exchange messages with all ranks of the group, and return them in the group's order.

    Args:
        what: describes the meeting, for the error.

    Raises:
        RanksDisagree: if a rank has ended, has given up, or does not answer in time.
    """
    wires = watch.wires
    heard = wires.exchange(mine, watch.patience)
    for rank, message in heard.items():
        _heed(rank, message)
    gone = wires.closed - heard.keys()
    if gone:
        give_up(f"{name_ranks(gone)} ended (or left the process group) before {what}")
    silent = set(wires.ranks) - heard.keys()
    if silent:
        _find_missing(watch, silent, f"{what}, within {watch.patience:.0f} s")
    return [heard[rank] for rank in wires.ranks]


def _heed(rank: int, message: Message) -> None:
    """Give up if the message of another rank says that it has given up or is stuck."""
    if "failed" in message:
        give_up(message["failed"])
    if "stuck" in message:
        missing = {missed for missed, _ in message["missing"]} - set(message["waiting"])
        give_up(f"{name_ranks(missing or {rank})} did not come to {message['stuck']}")


def give_up(why: str, cause: Exception | None = None) -> NoReturn:
    """Raise, after telling the ranks of all groups that this one is in, so that they raise too."""
    _tell_all({"failed": why})
    raise RanksDisagree(why) from cause


def _all_wires() -> list[Wires]:
    world = dist.group.WORLD
    return [] if world is None else [watch.wires for watch in _watches.get(world, {}).values()]


def _tell_all(message: Message) -> None:
    for wires in _all_wires():
        wires.tell(message)


def _find_missing(watch: Watch, silent: set[int], what: str) -> NoReturn:
    """Raise for the ranks that did not come, but not for ranks that are themselves stuck waiting.

    Every stuck rank passes what it knows on to the ranks it is connected to, and repeats that
    whenever it learns more. So news also arrives of ranks in other mesh rows and columns.
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
                    give_up(message["failed"])
                if "stuck" in message:
                    stuck |= {rank, *message["waiting"]}
                    waited = {**dict(message["missing"]), **waited}
        if known != (len(waited), len(stuck)):
            tell()
    # If all the missing ranks are stuck themselves, no rank is more to blame than another.
    missing = waited.keys() - stuck or silent
    give_up(f"{name_ranks(missing)} did not come to {waited[min(missing)]}")


@contextmanager
def _in_words(watch: Watch, what: str) -> Iterator[None]:
    try:
        yield
    except RanksDisagree:
        raise
    except RuntimeError as error:
        _find_cause(watch, what, error)


def _find_cause(watch: Watch, what: str, error: RuntimeError) -> NoReturn:
    """Raise for a collective that all ranks had reached, and that failed while it ran."""
    wires = watch.wires
    said = str(error).splitlines()[0]
    _tell_all({"stuck": f"the end of {what}", "missing": [], "waiting": [wires.rank]})
    quiet = set(wires.peers)
    end = time.monotonic() + watch.grace
    while quiet and not wires.closed and time.monotonic() < end:
        for rank, message in wires.listen(min(end, time.monotonic() + 0.05)):
            if "failed" in message:
                give_up(message["failed"], error)
            quiet.discard(rank)
    if wires.closed:
        who = f"{name_ranks(wires.closed)} ended (or left the process group)"
    else:
        who = f"{name_ranks(quiet)} did not answer" if quiet else "every rank is there, but"
    give_up(f"{who} in {what}: {said}", error)
