"""Starts a grid of CPU processes, for what has to be tried with values."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import PicklingError
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..mesh.layouts import TP_COL, TP_ROW

__all__ = ["on_processes"]

_GRACE = 5.0
"""Seconds to wait, after one rank has failed, for other ranks to report a failure too."""


def on_processes(shape: tuple[int, ...], body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(mesh, *args)`` on each rank of a grid of gloo processes.

    Returns:
        What ``body`` returned, by rank.

    Raises:
        ValueError: if ``body`` raises on a rank, with the message of the lowest such rank, or
            ends its process; for a shape that is not ``(R, C)``; and for arguments, or an answer,
            that cannot be pickled.
    """
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"a mesh to try a plan on is a DeviceMesh or (R, C), not {shape}")
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank, args=(rank, shape, store, answers, body, args), daemon=True
            )
            for rank in range(shape[0] * shape[1])
        ]
        try:
            for process in processes:
                process.start()
            found = _collected(answers, processes)
        except (PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the model or the plan cannot be handed to other processes ({error}): define them "
                f"in a module, or call this with a DeviceMesh on every rank"
            ) from error
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
    failed = sorted((rank, str(said)) for rank, good, said in found if not good)
    if failed:
        rank, text = failed[0]
        mesh = f"({TP_ROW}={shape[0]}, {TP_COL}={shape[1]})"
        raise ValueError(f"on rank {rank} of mesh {mesh}: {text}")
    return [said for _, _, said in sorted(found, key=lambda answer: answer[0])]


def _collected(answers: Any, processes: Sequence[Any]) -> list[tuple[int, bool, Any]]:
    """The answers of the ranks, without those of ranks that wait for one that failed."""
    found: list[tuple[int, bool, Any]] = []
    while len(found) < len(processes):
        failed = not all(good for _, good, _ in found)
        # What a process has answered lies in the queue before it ends, so one that has ended before
        # a wait in which nothing came has answered nothing, whatever its exit code.
        answered = {rank for rank, _, _ in found}
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        try:
            found.append(answers.get(timeout=_GRACE if failed else 1.0))
        except Empty:
            if failed:
                break
            found += [
                (rank, False, f"its process ended with {code} and without an answer")
                for rank, code in codes.items()
                if code is not None and rank not in answered
            ]
    return found


def _rank(
    rank: int,
    shape: tuple[int, int],
    store: str,
    answers: Any,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=shape[0] * shape[1]
    )
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=(TP_ROW, TP_COL))
        found = body(mesh, *args)
        # The queue pickles in a thread of its own, which would only print what is wrong.
        pickle.dumps(found)
        answers.put((rank, True, found))
    except (Exception, SystemExit) as error:
        # Any error is the caller's to see, and so is an exit that the model asks for.
        answers.put((rank, False, f"{type(error).__name__}: {error}"))
    finally:
        dist.destroy_process_group()
