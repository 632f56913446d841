"""Ranks that are not given, or do not do, the same: an error on all of them, never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

import torch_tp2d
from support import world
from support.device import DEVICE
from support.marks import deep
from support.models import grid_mesh
from torch_tp2d import (
    Block2DParallel,
    Colwise2D,
    Replicate,
    Rowwise2D,
    debug,
    parallelize_module,
)
from torch_tp2d.comm.wires import name_ranks


def _model(
    hidden: int = 8, dtype: torch.dtype = torch.float64, order: tuple[str, ...] = ("up", "down")
) -> nn.Module:
    model = nn.Module()
    for name in order:
        model.add_module(name, nn.Linear(8, 8, dtype=dtype))
    model.add_module("norm", nn.LayerNorm(8, dtype=dtype))
    model.add_module("last", nn.Linear(hidden, 8, dtype=dtype))
    return model


def _plan(**changed: Any) -> dict[str, Any]:
    plan = {"up": Colwise2D(), "down": Rowwise2D(), "norm": SequenceParallel(), "last": Colwise2D()}
    return {name: style for name, style in {**plan, **changed}.items() if style is not None}


class _OwnStyle(Colwise2D):
    """One of the user's, which prints where it lies in memory."""

    __repr__ = object.__repr__


class _OwnCheck(Colwise2D):
    fails = False

    def check(self, module: nn.Module, grid: Any) -> None:
        if _OwnCheck.fails:
            raise RuntimeError("only here")


def _frozen() -> nn.Module:
    model = _model()
    model.get_submodule("norm").requires_grad_(False)
    return model


def _styled() -> nn.Module:
    """As if the module had a style from before, on this rank alone."""
    model = _model()
    torch_tp2d.styles.base.put_on_grid(model.get_submodule("up"), torch_tp2d.styles.base.Runner())
    return model


torch_tp2d.styles.base.Runner.style = "Earlier"

# What differs, and what rank 2 of 4 and the others are given; what is said.
Case = tuple[Callable[[], tuple[nn.Module, Any]], Callable[[], tuple[nn.Module, Any]], str]
_usual: Callable[[], tuple[nn.Module, Any]] = lambda: (_model(), _plan())  # noqa: E731
CASES: dict[str, Case] = {
    "an entry less": (
        lambda: (_model(), _plan(down=None)),
        _usual,
        "rank 2 has no entry for 'down' (Rowwise2D(",
    ),
    "an entry more": (
        _usual,
        lambda: (_model(), _plan(last=None)),
        "rank 2 has an entry for 'last' (Colwise2D(",
    ),
    "another style": (
        lambda: (_model(), _plan(up=Colwise2D(algorithm="summa"))),
        _usual,
        "entry for 'up' is Colwise2D(",
    ),
    "another order of entries": (
        lambda: (_model(), {"down": Rowwise2D(), **_plan()}),
        _usual,
        "rank 2 has an entry for 'down' where ranks 0-1, 3 have an entry for 'up'",
    ),
    "another shape": (
        lambda: (_model(hidden=12), _plan()),
        _usual,
        "parameter 'last.weight' is (8, 12) torch.float64 on rank 2, but (8, 8) torch.float64 on "
        "ranks 0-1, 3",
    ),
    "another dtype": (
        lambda: (_model(dtype=torch.float32), _plan()),
        _usual,
        "parameter 'up.weight' is (8, 8) torch.float32 on rank 2, but",
    ),
    "another order of modules": (
        lambda: (_model(order=("down", "up")), _plan()),
        _usual,
        "rank 2 has a parameter 'down.weight' where ranks 0-1, 3 have a parameter 'up.weight'",
    ),
    "another option that only one style has": (
        lambda: (
            _model(),
            {**_plan(), "last": torch_tp2d.Replicate(grad_layouts=(Shard(0), Partial()))},
        ),
        lambda: (_model(), {**_plan(), "last": torch_tp2d.Replicate()}),
        "grad_layouts=(",
    ),
    "frozen": (lambda: (_frozen(), _plan()), _usual, "torch.float64, frozen on rank 2, but"),
    "a plan that one rank refuses": (
        lambda: (_model(), _plan(missing=Colwise2D())),
        _usual,
        "On rank 2: ValueError: plan key 'missing' matches no module",
    ),
    "a module that one rank refuses": (
        lambda: (_styled(), _plan()),
        _usual,
        "On rank 2: ValueError: 'up': EarlierLinear",
    ),
}


def _each_case() -> list[tuple[str, str, float]]:
    mesh = grid_mesh(2, 2)
    rank = dist.get_rank()
    said = []
    for name, (on_two, elsewhere, _) in CASES.items():
        model, plan = on_two() if rank == 2 else elsewhere()
        before = {key: type(module) for key, module in model.named_modules()}
        dist.barrier()
        start = time.monotonic()
        try:
            parallelize_module(model, mesh, plan)
            said.append((name, "nothing", 0.0))
        except ValueError as error:
            said.append((name, str(error), time.monotonic() - start))
        assert {key: type(module) for key, module in model.named_modules()} == before
    return said


def test_ranks_that_are_given_different_plans() -> None:
    """Found by hand: with a plan entry missing on one rank the others hung for half an hour.

    They waited in the scatter of that entry's weight, on a group of the mesh's, which
    ``init_device_mesh`` gives torch's default timeout and not that of the process.
    """
    for rank, said in enumerate(world.run(4, _each_case)):
        for name, message, seconds in said:
            wanted = CASES[name][2]
            if rank == 2:
                # Its own error, which needs no rank.
                wanted = wanted.removeprefix("On rank 2: ValueError: ")
            assert wanted in message, (rank, name, message)
            assert seconds < 5.0, (rank, name, seconds)


def _other_ways() -> None:
    mesh = grid_mesh(2, 2)
    rank = dist.get_rank()

    model = _model()
    try:
        parallelize_module(model, mesh, _plan(), src_data_rank=None if rank == 1 else 0)
        raise AssertionError("nothing was said")
    except ValueError as error:
        assert "src_data_rank is None on rank 1, but 0 on ranks 0, 2-3" in str(error), error

    was_on = debug.is_on()
    (debug.enable if rank == 1 else debug.disable)()
    try:
        parallelize_module(model, mesh, _plan())
        raise AssertionError("nothing was said")
    except ValueError as error:
        assert "debug mode is on on rank 1, but off on ranks 0, 2-3" in str(error), error
    (debug.enable if was_on else debug.disable)()

    _OwnCheck.fails = rank == 3
    try:
        parallelize_module(model, mesh, _plan(up=_OwnCheck()))
        raise AssertionError("nothing was said")
    except (ValueError, RuntimeError) as error:
        wanted = "only here" if rank == 3 else "On rank 3: RuntimeError: only here"
        assert wanted in str(error), error

    wanted_timeout = timedelta(seconds=world.TIMEOUT / 2)
    parallelize_module(model, mesh, _plan(up=_OwnStyle()))
    for group in mesh.get_all_groups():
        assert group._get_backend(torch.device("cpu")).options._timeout == wanted_timeout

    with torch.device("meta"):
        model = _model()
        parallelize_module(model, mesh, _plan(), src_data_rank=None)
    assert all(param.is_meta for param in model.parameters())

    # Two stages of a pipeline: only the ranks of a stage have to have the same.
    stages = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=("pp", "tp_row", "tp_col"))
    first = rank < 2
    plan = _plan() if first else _plan(up=Rowwise2D(), last=None)
    parallelize_module(_model(8 if first else 16), stages["tp_row", "tp_col"], plan)


def test_what_else_is_compared_and_what_is_not() -> None:
    """A style of the user's that prints its address, and a model on meta, are no difference."""
    world.run(4, _other_ways)


def test_ranks_in_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 2, 1]) == "ranks 0-2, 5"


TIMEOUT = 6.0
"""Seconds, of the process group of the ranks that are treated badly."""

FAULTY = 3


def _raises() -> None:
    raise ArithmeticError("of this rank's own")


def _lingers() -> None:
    """Raises, in a program that takes its time to end."""
    time.sleep(TIMEOUT * 3)
    _raises()


def _signals(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _nothing() -> None:
    """What differs is in :func:`_train`."""


FAULTS: dict[str, Callable[[], None]] = {
    "batch": _nothing,
    "order": _nothing,
    "no backward": _nothing,
    "raises": _raises,
    "lingers": _lingers,
    "killed": partial(_signals, signal.SIGKILL),
    "stopped": partial(_signals, signal.SIGSTOP),
}


def _train(fault: str, watched: bool) -> None:
    """Three steps; in the second something happens to one rank before its ``b`` runs."""
    assert dist.group.WORLD is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    if watched:
        debug.enable()
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b")}).double()
    parallelize_module(model, mesh, {"*": Block2DParallel()})
    here = dist.get_rank() == FAULTY

    def step(a: nn.Module, b: nn.Module, sequence: int = 6, backward: bool = True) -> None:
        loss = b(a(torch.ones(2, sequence, 4, dtype=torch.float64))).square().sum()
        if backward:
            loss.backward()

    a, b = model["a"], model["b"]
    step(a, b)
    if here:
        b.register_forward_pre_hook(lambda module, args: FAULTS[fault]())
    if here and fault == "order":
        a, b = b, a
    step(a, b, 7 if here and fault == "batch" else 6, not (here and fault == "no backward"))
    step(a, b)


def _survivors(fault: str, watched: bool) -> dict[int, tuple[str, float]]:
    """What the other ranks end with, and after how many seconds."""
    ranks = world.Ranks(4)
    ranks.start(_train, [(fault, watched)] * 4)
    pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(ranks.pipes)}
    said: dict[int, tuple[str, float]] = {}
    start = time.monotonic()
    while len(said) < 3 and time.monotonic() < start + world.TIMEOUT:
        for pipe in wait(list(pipes), timeout=1.0):
            rank = pipes.pop(pipe)
            try:
                good, value, _ = pipe.recv()
            except EOFError:
                good, value = False, "the process died"
            if rank != FAULTY:
                said[rank] = "no error" if good else value, time.monotonic() - start
    ranks.close()
    return said


_COLLECTIVE = r"\w+ of float64 \[\d+\] in the (forward|backward) of"

# What every other rank says in debug mode. Those along the other axis come further.
SAID = {
    "batch": rf"different things. On ranks? \d: {_COLLECTIVE} 'a'.*, but rank 3: {_COLLECTIVE} 'a'",
    "order": rf"different things. On ranks? \d: {_COLLECTIVE} 'a'.*, but rank 3: {_COLLECTIVE} 'b'",
    "no backward": rf"On ranks? \d: {_COLLECTIVE} 'b'.*, but rank 3: {_COLLECTIVE} 'a'",
    "raises": rf"rank 3 ended .*before {_COLLECTIVE} 'b'",
    "lingers": rf"rank 3 did not come to {_COLLECTIVE} 'b'",
    "killed": rf"rank 3 ended .*before {_COLLECTIVE} 'b'",
    "stopped": rf"rank 3 did not come to {_COLLECTIVE} 'b'",
}


@pytest.mark.parametrize(
    "fault", [deep(fault) if fault in ("lingers", "stopped") else fault for fault in FAULTS]
)
def test_every_rank_hears_of_a_fault_in_words(fault: str) -> None:
    """Within the timeout each names the rank, the layer and the collective, the farthest too."""
    said = _survivors(fault, True)
    assert len(said) == 3
    for rank, (message, seconds) in said.items():
        assert "RanksDisagree" in message and re.search(SAID[fault], message), (rank, message)
        assert seconds < TIMEOUT + 10.0, (rank, seconds)


@pytest.mark.parametrize("fault", ["batch", deep("lingers"), "killed", deep("stopped")])
def test_a_fault_ends_every_rank(fault: str) -> None:
    """Without debug mode it is gloo that says something, on each axis after its timeout."""
    said = _survivors(fault, False)
    assert len(said) == 3
    for rank, (message, seconds) in said.items():
        assert message != "no error", rank
        assert seconds < 2 * TIMEOUT + 10.0, (rank, seconds)


def _message(run: Callable[[], object]) -> str:
    try:
        run()
    except debug.RanksDisagree as error:
        return str(error)
    return "nothing"


def _unsummed(which: str) -> str:
    """Train with one thing wrong about the copies of the norm's parameters."""
    rank = dist.get_rank()
    debug.enable(2)
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    modules = [("up", nn.Linear(8, 8)), ("norm", nn.LayerNorm(8)), ("down", nn.Linear(8, 8))]
    model = nn.Sequential(OrderedDict(modules)).double()
    plan = {"up": Rowwise2D(), "norm": Replicate(), "down": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        model(x).square().sum().backward()

    step()
    if which == "sum":
        # As where a module's layout is guessed wrong.
        torch_tp2d.styles.local_math.summed = lambda parts, axes, like=None: list(parts)
    if which == "value" and rank == 1:
        with torch.no_grad():
            model.norm.weight.to_local().mul_(1.01)
    # Of every two passes the first is checked.
    said = "nothing" if which == "sum" else _message(step)
    if which == "sum":
        step()
    return _message(step) if said == "nothing" else said


@pytest.mark.parametrize("which", ["sum", "value", "none"])
def test_copies_that_differ_are_named(which: str) -> None:
    """A gradient that is not summed leaves the loss right, and the replicas drift apart."""
    for message in world.run(4, _unsummed, which, fresh=True):
        if which == "none":
            assert message == "nothing"
        elif which == "sum":
            assert re.search(r"after backward number 3, .* the gradient of 'norm.weight'", message)
        else:
            assert re.search(r"differs: 'norm.weight' \(by 2.6e-02 of its size\)", message), message
