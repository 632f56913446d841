"""Real gloo processes for the tests: ``run(4, body, arg)`` runs ``body(arg)`` on four ranks.

A body is a function of a test module; it finds a process group over its ranks, and its results
come back in rank order. The ranks of a size are started once and run the bodies of a test module
one after the other, since the first collective, the first DTensor and the first compiled graph of
a process take longer than most tests. What a body leaves behind (seed, default dtype, compiled
graphs, assumed rates, sizes of pieces) is put back; a body that fails, or ends the process group,
costs its ranks. One that needs ranks of its own, or harms them, asks for them by ``fresh=True``.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 240.0
"""Seconds after which a body is taken to hang: others may run beside it."""
GROUPS = 60
"""Process groups that ranks may have gathered; each has threads and sockets."""

DEVICE_OF_RANKS = os.environ.get("TP2D_TEST_DEVICE", "cpu")
START = "forkserver" if DEVICE_OF_RANKS == "cpu" else "spawn"
"""How ranks are made: what a process does on a GPU does not survive a fork."""

_server = mp.get_context(START)
_preloaded = ["support.preload"]
_server.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Have the server import a module too. To be called before the first run, on import."""
    if module not in _preloaded:
        _preloaded.append(module)
        _server.set_forkserver_preload(_preloaded)


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


@contextlib.contextmanager
def _as_found() -> Any:
    """Puts back what a body may change of its process."""
    import torch

    from torch_tp2d import planner
    from torch_tp2d.comm import axis

    environment, seed = dict(os.environ), torch.initial_seed()
    pieces = axis.PIECE_BYTES, axis.FAST_PIECE_BYTES
    # What "auto" stands for must not depend on how busy this machine is.
    planner.assume(None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        # What was measured, or said, of the links between the ranks.
        axis._links.clear()
        axis.PIECE_BYTES, axis.FAST_PIECE_BYTES = pieces
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()


def _rank(rank: int, world_size: int, store: str, pipe: Connection, patience: float) -> None:
    import torch
    import torch.distributed as dist

    from . import device

    torch.set_num_threads(1)
    # Of what the server has imported nothing is garbage: looking took a tenth of all time.
    gc.freeze()
    device.join(rank, world_size, store, timedelta(seconds=patience / 2))
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            break
        try:
            with _as_found():
                answer = True, body(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        groups = len(dist.distributed_c10d._world.pg_map)
        pipe.send((*answer, 0 < groups < GROUPS))
        sys.stdout.flush()
        if not answer[0]:
            # As a program ends that fails: its peers are to hear of it.
            break
    # Nothing of the interpreter's own shutdown is under test, and it is slow.
    os._exit(0)


class Ranks:
    """A process group's worth of processes, waiting for bodies."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = _server.Pipe()
            process = _server.Process(
                target=_rank, args=(rank, size, store, there, TIMEOUT), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, body: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        """Have each rank run ``body`` with arguments of its own."""
        for pipe, given in zip(self.pipes, args, strict=True):
            pipe.send((body, given))

    def answers(self) -> dict[int, tuple[bool, Any, bool]]:
        """What each rank answered; those that a failure left waiting have no answer."""
        answers: dict[int, tuple[bool, Any, bool]] = {}
        until = time.monotonic() + TIMEOUT
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            failed = any(not good for good, *_ in answers.values())
            ready = wait(waiting, timeout=5.0 if failed else until - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "the process died", False)
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


_waiting: dict[int, Ranks] = {}
"""By their number, ranks that wait for their next body."""


def close() -> None:
    """End all ranks."""
    while _waiting:
        _waiting.popitem()[1].close()


def run(world_size: int, body: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Any]:
    """Run ``body(*args)`` on every rank; raises what made the first of them fail."""
    ranks = None if fresh else _waiting.pop(world_size, None)
    if ranks is None:
        ranks = Ranks(world_size)
    keep = False
    try:
        ranks.start(body, [args] * world_size)
        answers = ranks.answers()
        whole = len(answers) == world_size
        keep = not fresh and whole and all(good and kept for good, _, kept in answers.values())
    finally:
        if keep:
            _waiting[world_size] = ranks
        else:
            ranks.close()
    failures = [(rank, value) for rank, (good, value, _) in answers.items() if not good]
    if failures:
        # One that lost its peer is a consequence; the cause is with the peer.
        rank, value = min(failures, key=lambda failure: "closed by peer" in failure[1])
        raise RankFailed(f"rank {rank} of {world_size}:\n{value}")
    if len(answers) < world_size:
        silent = [rank for rank in range(world_size) if rank not in answers]
        raise RankFailed(f"ranks {silent} of {world_size} did not answer in {TIMEOUT} s")
    return [answers[rank][1] for rank in range(world_size)]
