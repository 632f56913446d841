"""Draws programs and runs them: ``python -m programs --count 200 --seed 3`` from ``tests/``.

Goes on after a failure. Failures are gathered by what they have in common; ``--shrink`` simplifies
one of each kind. ``--program "Program(...)"`` runs a single one, as it was printed. ``TP2D_ROOT``
is where torch_tp2d is taken from, if not from beside ``tests/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time

_here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_root = os.environ.get("TP2D_ROOT", os.path.dirname(_here))
sys.path[:0] = [_here, _root]
os.environ["PYTHONPATH"] = os.pathsep.join([_here, _root])

import hypothesis  # noqa: E402

from programs import data  # noqa: E402
from programs.data import Program, simpler  # noqa: E402
from programs.draw import DEEP_GRIDS, GRIDS, programs  # noqa: E402
from programs.ranks import Outcome, Worlds, shrink  # noqa: E402
from support import world  # noqa: E402

Kinds = dict[str, list[tuple[Program, Outcome]]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deep", action="store_true", help="grids of up to 9 ranks")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds for each kind")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        help="skip programs in whose repr one of these patterns is",
    )
    parser.add_argument("--program", help="run (and shrink) this one alone, given as printed")
    return parser.parse_args()


def _shrunk(worlds: Worlds, program: Program, kind: str, seconds: float) -> None:
    """Simplify a program and print it, with what it does in fresh processes."""
    small = shrink(program, lambda less: worlds.play(less).signature == kind, simpler, seconds)
    outcome = worlds.play(small, fresh=True)
    print(f"{small!r}\n{outcome.kind}: {outcome.text}", flush=True)


def _search(worlds: Worlds, options: argparse.Namespace) -> Kinds:
    """Run programs; the failures by kind, of each of which the first is printed."""
    kinds: Kinds = {}
    drawn = 0
    start = time.monotonic()

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=options.count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(DEEP_GRIDS if options.deep else GRIDS))
    def draw(program: Program) -> None:
        nonlocal drawn
        program = dataclasses.replace(program, compiled=options.compiled)
        if any(re.search(pattern, repr(program)) for pattern in options.without):
            return
        drawn += 1
        outcome = worlds.play(program)
        kind = outcome.signature
        if outcome.failed and kind not in kinds:
            print(f"\n--- {drawn}: {kind}\n{program!r}\n{outcome.text}", flush=True)
        if outcome.kind != "right":
            kinds.setdefault(kind, []).append((program, outcome))

    draw()
    print(f"\n=== {drawn} programs in {time.monotonic() - start:.0f} s")
    for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):4} {kind}", flush=True)
    return kinds


def main() -> None:
    options = _options()
    if options.compiled:
        world.preload("torch._inductor.compile_fx")
    with Worlds() as worlds:
        if options.program:
            program = eval(options.program, vars(data))
            outcome = worlds.play(program)
            print(f"{outcome.kind}: {outcome.text}\n")
            if outcome.failed and options.shrink:
                _shrunk(worlds, program, outcome.signature, options.shrink)
            return
        for kind, found in _search(worlds, options).items():
            if options.shrink and found[0][1].failed:
                print(f"\n--- {kind} ({len(found)})")
                program, _ = min(found, key=lambda pair: len(repr(pair[0])))
                _shrunk(worlds, program, kind, options.shrink)


if __name__ == "__main__":
    main()
