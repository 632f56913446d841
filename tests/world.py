"""Real gloo processes for the tests, started once and lent to one function at a time.

``run(4, body, arg)`` runs ``body(arg)`` on four ranks, each in a process of its own with a fresh
process group, and returns the four results in rank order. A body is a function of a test module.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0
"""Seconds after which a body is taken to hang."""


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


def _serve(rank: int, jobs: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        world_size, store, body, args = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT / 2),
            )
            answer = (True, body(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        jobs.send(answer)


class _Workers:
    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch_tp2d"])
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self, count: int) -> None:
        while len(self.processes) < count:
            here, there = self.context.Pipe()
            process = self.context.Process(
                target=_serve, args=(len(self.processes), there), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes, self.pipes = [], []


_workers = _Workers()
atexit.register(_workers.stop)


def run(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(*args)`` on every rank; raises what the first rank that failed raised."""
    _workers.start(world_size)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = _workers.pipes[:world_size]
        for pipe in pipes:
            pipe.send((world_size, store, body, args))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            failed = any(not good for good, _ in answers.values())
            ready = wait(waiting, timeout=5.0 if failed else TIMEOUT)
            if not ready:
                # A failed rank leaves the others waiting for it: nothing more will come.
                _workers.stop()
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
    failures = [(rank, value) for rank, (good, value) in answers.items() if not good]
    if failures:
        # One that lost its peer is a consequence; the cause is with the peer.
        rank, value = min(failures, key=lambda failure: "closed by peer" in failure[1])
        raise RankFailed(f"rank {rank} of {world_size}:\n{value}")
    if len(answers) < world_size:
        silent = [rank for rank in range(world_size) if rank not in answers]
        raise RankFailed(f"ranks {silent} of {world_size} did not answer in {TIMEOUT} s")
    return [answers[rank][1] for rank in range(world_size)]
