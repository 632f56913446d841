"""Ranks for a notebook: a cell that begins with ``%%ranks`` runs on all of them.

    from notebook_ranks import Ranks
    ranks = Ranks(4)        # what torchrun --nproc-per-node 4 and init_process_group would do

    %%ranks                 # on every rank; what rank 0 prints is shown
    total = torch.ones(1)
    dist.all_reduce(total)

    ranks["total.item()"]   # [4.0, 4.0, 4.0, 4.0]

The ranks are processes that keep their variables from cell to cell, as a notebook does. A cell
that fails on any of them, or does not end, fails in the notebook. ``%%ranks --local`` runs the
cell in the notebook's own process too.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import logging
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["RankFailed", "Ranks"]

TIMEOUT = 600.0
"""Seconds after which a cell is taken to hang."""
GRACE = 5.0
"""Seconds that the other ranks are given after one of them failed."""


class RankFailed(RuntimeError):
    """A cell failed on a rank; the message holds that rank's traceback."""


class Ranks:
    """Processes that run a notebook's cells, as members of one gloo process group.

    Adds ``%%ranks`` to the notebook. ``ranks[expression]`` is the expression's value on every
    rank, in their order. Making ranks anew ends those before them.

    Args:
        count: how many.

    Raises:
        RankFailed: if one of them cannot start.
    """

    _current: Ranks | None = None

    def __init__(self, count: int) -> None:
        if Ranks._current is not None:
            Ranks._current.close()
        Ranks._current = self
        self._scratch = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # They share the machine's cores, and torchrun sets this too.
        before = os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Spawned, not forked: a fork of a process that has used torch's threads may hang.
        context = mp.get_context("spawn")
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, self._scratch.name, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        os.environ["OMP_NUM_THREADS"] = before
        self._wait()
        _add_magic()

    def run(self, code: str) -> None:
        """Run ``code`` on every rank and show what rank 0 prints.

        Raises:
            RankFailed: if it fails on a rank or does not end; all ranks are ended then.
        """
        self._ask("run", code)

    def __getitem__(self, expression: str) -> list[Any]:
        return self._ask("evaluate", expression)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._scratch.cleanup()

    def _ask(self, what: str, text: str) -> list[Any]:
        if not self._pipes:
            raise RankFailed("the ranks have ended: make new ones and run the cells again")
        for pipe in self._pipes:
            pipe.send((what, text))
        return self._wait()

    def _wait(self) -> list[Any]:
        """The ranks' answers, or what made the first of them fail."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT
        try:
            while len(answers) < len(self._pipes) and time.monotonic() < deadline:
                waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                for rank, pipe in enumerate(self._pipes):
                    if pipe not in ready:
                        continue
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        kind, value = "failed", "the process died"
                    if kind == "printed":
                        print(value, end="", flush=True)
                        continue
                    answers[rank] = kind == "done", value
                    if kind == "failed":
                        deadline = min(deadline, time.monotonic() + GRACE)
        except BaseException:
            # Interrupted: what the ranks are in the middle of cannot be taken back.
            self.close()
            raise
        failures = [(rank, value) for rank, (good, value) in answers.items() if not good]
        silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
        if failures or silent:
            self.close()
        if failures:
            # A rank that lost its peer is a consequence; the cause is with the peer.
            rank, value = min(failures, key=lambda failure: "closed by peer" in failure[1])
            raise RankFailed(f"rank {rank}:\n{value}") from None
        if silent:
            raise RankFailed(f"ranks {silent} did not end the cell in {TIMEOUT:.0f} s") from None
        return [pickle.loads(answers[rank][1]) for rank in range(len(self._pipes))]


class _Printed(io.TextIOBase):
    """What rank 0 prints, sent to the notebook line by line."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def write(self, text: str) -> int:
        self.pipe.send(("printed", text))
        return len(text)


@contextlib.contextmanager
def _shown(pipe: Connection, rank: int) -> Iterator[None]:
    out = _Printed(pipe) if rank == 0 else io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield


def _serve(rank: int, count: int, scratch: str, pipe: Connection) -> None:
    """What each process does: run what it is sent until the notebook goes away."""
    # The notebook's own process decides what an interrupt means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    # Its advice (flatten the mesh for one reduction of a scalar) does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    variables: dict[str, Any] = {"__name__": "__main__"}
    try:
        import torch
        import torch.distributed as dist

        from torch_tp2d.comm.groups import BACKEND

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            # gloo, one worker to a group: stock styles on plain gloo lose a process now and then.
            BACKEND,
            init_method=f"file://{scratch}/store",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=TIMEOUT),
        )
        pipe.send(("done", pickle.dumps(None)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    number = 0
    while True:
        try:
            what, text = pipe.recv()
        except EOFError:
            # Nothing is worth a wait for peers that have gone too.
            os._exit(0)
        number += 1
        try:
            with _shown(pipe, rank):
                value = None
                if what == "evaluate":
                    value = eval(text, variables)
                else:
                    _execute(text, variables, f"<cell {number} on rank {rank}>")
                answer: tuple[str, str | bytes] = "done", pickle.dumps(value)
        except BaseException:
            answer = "failed", traceback.format_exc()
        pipe.send(answer)


def _execute(code: str, variables: dict[str, Any], name: str) -> None:
    # So that a traceback, and inspect, find the lines of the cell.
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    exec(compile(code, name, "exec"), variables)


def _add_magic() -> None:
    """``%%ranks``, where there is a notebook to add it to."""
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return
    shell = get_ipython()
    if shell is None:
        return

    numbers = itertools.count(1)

    def ranks(line: str, cell: str) -> None:
        options: Sequence[str] = line.partition("#")[0].split()
        if any(option != "--local" for option in options):
            raise ValueError(f"%%ranks takes --local or nothing, not {line!r}")
        if Ranks._current is None:
            raise RankFailed("there are no ranks: make some, as in Ranks(4)")
        if options:
            _execute(cell, shell.user_ns, f"<cell {next(numbers)} in the notebook>")
        Ranks._current.run(cell)

    shell.register_magic_function(ranks, magic_kind="cell")
