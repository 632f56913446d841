"""Real gloo processes for the tests: ``run(4, body, arg)`` runs ``body(arg)`` on four ranks.

A body is a function of a test module; it finds a process group of its own, and its results come
back in rank order. The ranks are forked from a server that has imported torch already, so that a
run costs a fraction of a second; every run has fresh ones, since DTensor caches meshes by value
and would meet the process groups of an earlier run in them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0
"""Seconds after which a body is taken to hang."""

_server = mp.get_context("forkserver")
_preloaded = ["preload"]
_server.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Have the server import a module too. To be called before the first run, on import."""
    if module not in _preloaded:
        _preloaded.append(module)
        _server.set_forkserver_preload(_preloaded)


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


def _rank(
    rank: int,
    world_size: int,
    store: str,
    answer: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from torch_tp2d import planner
    from torch_tp2d.comm.groups import BACKEND

    # What "auto" stands for must not depend on how busy this machine is.
    planner.assume(None)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            # Stock collectives on plain gloo lose a process now and then; see that module.
            BACKEND,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT / 2),
        )
        answer.send((True, body(*args)))
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
    sys.stdout.flush()
    # Nothing of the interpreter's own shutdown is under test, and it is slow.
    os._exit(0)


def run(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(*args)`` on every rank; raises what made the first of them fail."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = _server.Pipe(duplex=False)
            process = _server.Process(
                target=_rank, args=(rank, world_size, store, there, body, args), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        answers = _collect(pipes)
        for process in processes:
            process.join(timeout=5.0 if len(answers) == world_size else 0.0)
            process.kill()
    failures = [(rank, value) for rank, (good, value) in answers.items() if not good]
    if failures:
        # One that lost its peer is a consequence; the cause is with the peer.
        rank, value = min(failures, key=lambda failure: "closed by peer" in failure[1])
        raise RankFailed(f"rank {rank} of {world_size}:\n{value}")
    if len(answers) < world_size:
        silent = [rank for rank in range(world_size) if rank not in answers]
        raise RankFailed(f"ranks {silent} of {world_size} did not answer in {TIMEOUT} s")
    return [answers[rank][1] for rank in range(world_size)]


def _collect(pipes: list[Connection]) -> dict[int, tuple[bool, Any]]:
    """The ranks' answers; those that a failure left waiting have none."""
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        failed = any(not good for good, _ in answers.values())
        ready = wait(waiting, timeout=5.0 if failed else TIMEOUT)
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = (False, "the process died")
    return answers
