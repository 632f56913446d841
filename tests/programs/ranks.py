"""Ranks that run one program after the other, and are made anew only after a failure."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing as mp
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import psutil

from support import world

from .data import Program

__all__ = ["Outcome", "Worlds"]

IDLE = 10.0
"""Seconds in which ranks that do not compute are taken to hang.

Not seconds that a program takes, which are ten times as many beside other work, or to compile
blocks.
"""
LITTLE = 0.5
"""Seconds of processors in that time that are no computing: a waiting rank took 0.02."""
LIMIT = 900.0
"""Seconds after which a program is taken to hang though its ranks compute."""

_server = mp.get_context(world.START)
world.preload("programs.use")

REFUSED: tuple[str, ...] = (
    # A module without a declared layout, where heads or features may be split: to be asked for.
    "the plan does not tell its layout",
    "has fewer than .* which DTensor's own operations do not keep apart",
    "which FSDP2 does not take",
    # Another stream of tokens that ends with the user's own sum, on local tensors.
    "is not this rank's part of the tokens .* that were last embedded",
    # Fewer tokens than rows, of a sequence that row_dim=1 splits.
    "leaves some of tp_row=. without keys",
    # Dropout likewise.
    "do not tell its layout: name the nn.Dropout",
    "as wide as a part is on some rank: name the nn.Dropout",
)
"""What of a program's errors says that it has no business to run, as patterns."""


class Outcome(NamedTuple):
    kind: str
    """right, refused, wrong, error, uneven (an error on some ranks only) or hang."""
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "refused")

    @property
    def signature(self) -> str:
        """What two failures of one cause have in common, more or less."""
        if self.kind == "wrong":
            first = self.text.splitlines()[0]
            what = re.sub(r"blocks\.\d+|\d[\d.e+-]*", "#", first.rpartition("): ")[2])
            return f"wrong: {what}"
        if self.kind == "refused":
            return f"refused: {self.text[:80]}"
        if self.kind in ("error", "uneven"):
            lines = [line for line in self.text.splitlines() if line.strip()]
            error = next(
                (x for x in reversed(lines) if re.match(r"\w[\w.]*(Error|Exception)", x)), lines[-1]
            )
            places = re.findall(r'File ".*?/(torch_tp2d/[^"]*)", line \d+, in (\w+)', self.text)
            return f"{self.kind}: {re.sub(r'[0-9]+', '#', error)[:90]} {places[-1:]}"
        places = re.findall(r'File ".*?/(torch_tp2d/[^"]*)", line \d+ in (\w+)', self.text)
        return f"{self.kind}: {places[:1]}"


def _rank(rank: int, size: int, store: str, stacks: str, pipe: Connection) -> None:
    import torch

    from support import device

    from .use import play

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing|FSDP2-wrapped module")
    # Warnings that two axes are gathered one after the other.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    # Ranks collect garbage at different times: where a program says so, and in between.
    gc.disable()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        device.join(rank, size, store, timedelta(seconds=LIMIT))
        pipe.send("ready")
        while True:
            program = pipe.recv()
            try:
                answer: Any = ("done", play(program))
            except BaseException as error:
                answer = ("raised", type(error).__name__, traceback.format_exc())
            gc.collect()
            pipe.send(answer)


class _Patience:
    """How long ranks are waited for: while any of them computes."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self._processes = [psutil.Process(process.pid) for process in processes]
        self._began = self._looked = time.monotonic()
        self._computed = self._total()

    def ended(self) -> bool:
        now = time.monotonic()
        if now < self._looked + IDLE:
            return False
        before, self._computed, self._looked = self._computed, self._total(), now
        return self._computed < before + LITTLE or now > self._began + LIMIT

    def _total(self) -> float:
        return sum(map(_seconds_computed, self._processes))


def _seconds_computed(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class _Ranks:
    """One process group."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = _server.Pipe()
            process = _server.Process(
                target=_rank,
                args=(
                    rank,
                    size,
                    os.path.join(self.folder.name, "store"),
                    self._stacks(rank),
                    there,
                ),
                daemon=True,
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(world.TIMEOUT):
                raise TimeoutError(f"{size} ranks did not start in {world.TIMEOUT} s")
            pipe.recv()

    def _stacks(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"stack{rank}")

    def play(self, program: Program) -> Outcome:
        for pipe in self.pipes:
            pipe.send(program)
        answers: dict[int, Any] = {}
        patience = _Patience(self.processes)
        while len(answers) < len(self.pipes) and not patience.ended():
            awaited = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(awaited, timeout=1.0):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("raised", "Died", "the process died\nDiedError: died")
        return self._outcome(answers)

    def _outcome(self, answers: dict[int, Any]) -> Outcome:
        raised = {rank: answer[1:] for rank, answer in answers.items() if answer[0] == "raised"}
        if len(answers) < len(self.pipes):
            stacks = self._hanging([r for r in range(len(self.pipes)) if r not in answers])
            if raised:
                return Outcome("uneven", f"rank {min(raised)}:\n{raised[min(raised)][1]}\n{stacks}")
            return Outcome("hang", f"{sorted(answers)} answered; {stacks}")
        if raised:
            kinds = {kind for kind, _ in raised.values()}
            text = min(raised.values(), key=lambda r: "closed by peer" in r[1])[1]
            if len(raised) < len(answers) or len(kinds) > 1:
                return Outcome("uneven", f"ranks {sorted(raised)} raised:\n{text}")
            if kinds <= {"ValueError", "TypeError"}:
                message = text.strip().splitlines()[-1]
                if any(re.search(pattern, message) for pattern in REFUSED):
                    return Outcome("refused", message)
            return Outcome("error", text)
        for rank, (_, wrong) in sorted(answers.items()):
            if wrong:
                others = [r for r, (_, lines) in answers.items() if lines]
                return Outcome("wrong", "\n".join(wrong[:8]) + f"\n(rank {rank} of {others})")
        return Outcome("right")

    def _hanging(self, ranks: list[int]) -> str:
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = []
        for rank in ranks:
            with open(self._stacks(rank)) as file:
                lines = file.read().splitlines()
            ours = [line for line in lines if "torch_tp2d/" in line or "programs/" in line]
            texts.append("\n".join([f"rank {rank} is in", *lines[1:4], *ours]))
        return "\n".join(texts)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


class Worlds:
    """A process group for each number of ranks, made when first asked for."""

    def __init__(self) -> None:
        self.open: dict[int, _Ranks] = {}

    def play(self, program: Program, fresh: bool = False) -> Outcome:
        """Run a program; in processes that ran no other before, if ``fresh``."""
        size = program.grid[0] * program.grid[1] * (program.dp if program.fsdp else 1)
        if fresh:
            self.close(size)
        if size not in self.open:
            self.open[size] = _Ranks(size)
        outcome = self.open[size].play(program)
        if outcome.kind != "right":
            self.close(size)
        return outcome

    def close(self, size: int) -> None:
        if size in self.open:
            self.open.pop(size).close()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: Any) -> None:
        for size in list(self.open):
            self.close(size)


def shrink(
    program: Program,
    fails: Callable[[Program], bool],
    simpler: Callable[[Any], Any],
    seconds: float,
) -> Program:
    """The simplest program that still fails, as far as it is found in the time."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for candidate in simpler(program):
            if time.monotonic() > end:
                break
            if fails(candidate):
                program, found = candidate, True
                break
    return program
