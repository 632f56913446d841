"""Draws programs and runs them: ``python -m programs --count 200 --seed 3`` from ``tests/``.

Failures are gathered by what they have in common, and the first of each kind is shrunk.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

_here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_root = os.environ.get("TP2D_ROOT", os.path.dirname(_here))
sys.path[:0] = [_here, _root]
os.environ["PYTHONPATH"] = os.pathsep.join([_here, _root])

import hypothesis  # noqa: E402

from programs.data import Program, simpler  # noqa: E402
from programs.draw import DEEP_GRIDS, GRIDS, programs  # noqa: E402
from programs.ranks import Outcome, Worlds, _server, shrink  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deep", action="store_true", help="grids of up to 9 ranks")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds for each kind")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        help="skip programs in whose repr one of these patterns is",
    )
    options = parser.parse_args()
    _server.set_forkserver_preload(["preload"])
    kinds: dict[str, list[tuple[Program, Outcome]]] = {}
    drawn = 0
    start = time.monotonic()
    with Worlds() as worlds:
        strategy = programs(DEEP_GRIDS if options.deep else GRIDS)

        @hypothesis.seed(options.seed)
        @hypothesis.settings(
            max_examples=options.count,
            phases=[hypothesis.Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def draw(program: Program) -> None:
            nonlocal drawn
            if any(re.search(pattern, repr(program)) for pattern in options.without):
                return
            drawn += 1
            outcome = worlds.play(program)
            if outcome.kind == "refused":
                kinds.setdefault("refused: " + outcome.text[:60], []).append((program, outcome))
            if outcome.failed:
                if outcome.signature not in kinds:
                    print(
                        f"\n--- {drawn}: {outcome.signature}\n{program!r}\n{outcome.text}",
                        flush=True,
                    )
                kinds.setdefault(outcome.signature, []).append((program, outcome))

        draw()
        print(f"\n=== {drawn} programs in {time.monotonic() - start:.0f} s")
        for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1])):
            print(f"{len(found):4} {kind}")
        if options.shrink:
            for kind, found in kinds.items():
                if kind.startswith("refused"):
                    continue
                program, outcome = min(found, key=lambda pair: len(repr(pair[0])))

                def fails(candidate: Program, kind: str = kind) -> bool:
                    return worlds.play(candidate).signature == kind

                small = shrink(program, fails, simpler, options.shrink)
                again = worlds.play(small, fresh=True)
                print(
                    f"\n--- {kind} ({len(found)})\n{small!r}\n{again.kind} {again.text}", flush=True
                )


if __name__ == "__main__":
    main()
