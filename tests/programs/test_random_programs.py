"""Random models under random plans in random use, on a grid beside one device in fp64.

A program is right, or it is refused by a clear error on all ranks (``programs.ranks.REFUSED``);
a wrong number, a hang, an error on some ranks only and any other error fail the test. The failing
program is printed as data, simplified; ``check(Program(...))`` makes a plain test of it.

``TP2D_PROGRAMS=2000 TP2D_SEED=7`` draws that many others; ``python -m programs`` in ``tests/``
goes on after a failure, and sorts what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from programs import Program
from programs.data import simpler
from programs.draw import DEEP_GRIDS, GRIDS, programs
from programs.ranks import Worlds, shrink

COUNT = 50
DEEP_COUNT = 500
SHRINKING = 60.0
"""Seconds spent on simplifying a failing program."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as opened:
        yield opened


def check(program: Program, worlds: Worlds) -> None:
    outcome = worlds.play(program)
    if not outcome.failed:
        return
    again = worlds.play(program, fresh=True)
    if not again.failed:
        pytest.fail(
            f"{program!r}\nfailed only after others in the same processes: {outcome.kind}\n"
            f"{outcome.text}"
        )

    def fails(candidate: Program) -> bool:
        return worlds.play(candidate).signature == again.signature

    small = shrink(program, fails, simpler, SHRINKING)
    outcome = worlds.play(small, fresh=True)
    pytest.fail(
        f"{outcome.kind}: {outcome.text}\n\nworlds.play(\n    {small!r}\n)\n", pytrace=False
    )


def _run(worlds: Worlds, grids: tuple[tuple[int, int], ...], count: int) -> None:
    chosen = "TP2D_SEED" in os.environ

    @hypothesis.settings(
        max_examples=int(os.environ.get("TP2D_PROGRAMS", count)),
        derandomize=not chosen,
        # Simplified by ourselves, as data: a hang takes too long for hypothesis to meet it often.
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(grids))
    def draw(program: Program) -> None:
        check(program, worlds)

    if chosen:
        draw = hypothesis.seed(int(os.environ["TP2D_SEED"]))(draw)
    draw()


def test_random_programs(worlds: Worlds) -> None:
    _run(worlds, GRIDS, COUNT)


@pytest.mark.deep
def test_more_random_programs_on_larger_grids(worlds: Worlds) -> None:
    _run(worlds, DEEP_GRIDS, DEEP_COUNT)
