#!/usr/bin/env python3
r"""Time the same step by this tree's library and by another checkout's, in turn.

    git worktree add /tmp/before COMMIT
    python benchmarks/netlab.py -n 4 --rate 200mbit -- \
        python benchmarks/pair.py --before /tmp/before
    torchrun --nproc-per-node 4 benchmarks/pair.py --before /tmp/before --compile
    python benchmarks/pair.py --before /tmp/before --pretend 4

Each rank keeps two processes, one for each tree, which import that tree's library and its
``variants.py`` and build the same blocks, weights and plan on every grid. They step in turn, in
another, shuffled order each round; while one steps, the other waits. What is printed for each plan
is the median time of a step in both, and the ratio of this tree's to the other's, taken within a
round: the median (least..most). ``--before .`` says how far two equal trees seem apart.

With ``--pretend N`` there are no other ranks: rank 0 steps blocks too small to compute, in a fake
process group of N whose collectives return at once. What is left is the library's own Python.

Both are told the sizes of the tokens, where they can be; older trees assumed that all ranks hold
the same.

With ``--keep`` both keep gathered weights for backward. By default this tree gathers them again on
other backends than gloo, and older ones did not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FAKE = "fake"
# Of a step without transfers: few enough tokens and features that Python is what takes time.
SMALL = {"layers": 1, "hidden": 64, "heads": 4, "batch": 4, "seq": 16}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--plans", default="tp2d", help="tp2d or tp2d:ALGORITHM, joined by commas")
    parser.add_argument("--grid", help="RxC[,RxC...] (every grid of the ranks)")
    for name, value in (("layers", 2), ("hidden", 512), ("heads", 8), ("batch", 8), ("seq", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, help="timed steps of a plan (9; pretended: 300)")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--keep", action="store_true", help="keep gathered weights for backward")
    parser.add_argument("--pretend", type=int, help="ranks of a fake process group")
    parser.add_argument("--json", type=Path, help="write what was printed there too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.pretend:
        vars(args).update(SMALL)
    args.repeats = args.repeats or (300 if args.pretend else 9)
    return args


def steps_of(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The steps of every plan on every grid, by the library that this process imports."""
    import torch
    import torch.distributed as dist
    from variants import Sizes, build

    import torch_tp2d

    if os.environ.get("RANK", "0") == "0":
        # An installed package, found first, would be timed twice and seem as fast.
        print(f"library: {torch_tp2d.__file__}", file=sys.stderr)
    if args.keep:
        for style in ("Colwise2D", "Rowwise2D"):
            kept = partial(getattr(torch_tp2d, style), reshard_after_forward=False)
            setattr(torch_tp2d, style, kept)
    torch.set_num_threads(1)
    if args.pretend:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(FAKE, store=FakeStore(), rank=0, world_size=args.pretend)
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    grids = [(r, world // r) for r in range(1, world + 1) if world % r == 0]
    if args.grid:
        grids = [tuple(map(int, one.split("x"))) for one in args.grid.split(",")]
    sizes = Sizes(args.layers, args.hidden, args.heads, args.batch, args.seq)
    variants, refused = build(args.plans.split(","), grids, sizes)
    if refused:
        raise SystemExit(f"{refused}")
    for variant in variants:
        if hasattr(torch_tp2d, "token_sizes"):
            mesh = next(variant.model.parameters()).device_mesh
            torch_tp2d.token_sizes(mesh, (args.batch, args.seq))
        if args.compile:
            for layer in variant.model.layers:
                layer.compile()

    def step(variant: Any) -> None:
        variant.step(sizes.elements)
        variant.model.zero_grad(set_to_none=True)

    return {variant.name: lambda variant=variant: step(variant) for variant in variants}


def serve(args: argparse.Namespace) -> None:
    """Take the step whose name comes in, and say its seconds, until no more names come."""
    import torch.distributed as dist

    steps = steps_of(args)
    for step in steps.values():
        for _ in range(20 if args.pretend else 3):
            step()
    print(json.dumps(list(steps)), flush=True)
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        steps[line.strip()]()
        seconds = time.perf_counter() - began
        dist.barrier()
        print(seconds, flush=True)


def start(tree: Path, port: int, argv: Sequence[str]) -> subprocess.Popen[str]:
    """This rank's process for one tree."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "benchmarks"))),
        "MASTER_PORT": str(int(os.environ.get("MASTER_PORT", "29500")) + port),
        # torchrun's own store has another port.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return subprocess.Popen(
        # Without -P Python would look for modules beside this file first.
        [sys.executable, "-P", __file__, *argv, "--serve"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(served: subprocess.Popen[str], line: str | None = None) -> str:
    """Send a line to a process, and read its answer."""
    assert served.stdin and served.stdout
    if line is not None:
        served.stdin.write(line + "\n")
        served.stdin.flush()
    answer = served.stdout.readline()
    if not answer:
        raise SystemExit(f"a process of {served.args} ended with {served.wait()}")
    return answer


def orders(names: Sequence[str], repeats: int) -> Iterator[list[tuple[str, str]]]:
    """Who steps what, round by round: the same on every rank."""
    for turn in range(repeats):
        order = [(tree, name) for name in names for tree in ("before", "now")]
        random.Random(turn).shuffle(order)
        yield order


def main(argv: Sequence[str] | None = None) -> int:
    """Time both trees' steps on this rank; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.serve:
        serve(args)
        return 0
    trees = {"before": args.before.resolve(), "now": HERE}
    served: dict[str, subprocess.Popen[str]] = {}
    names: list[str] = []
    for port, (tree, path) in enumerate(trees.items(), 1):
        # One after the other: each measures its links, and goes by what it finds.
        served[tree] = start(path, port, argv)
        names = json.loads(ask(served[tree]))
    seconds: dict[tuple[str, str], list[float]] = {}
    for order in orders(names, args.repeats):
        for key in order:
            tree, name = key
            seconds.setdefault(key, []).append(float(ask(served[tree], name)))
    for process in served.values():
        assert process.stdin
        process.stdin.close()
        process.wait()
    if os.environ.get("RANK", "0") != "0":
        return 0
    report = {}
    print(f"{'plan':28} {'before':>10} {'now':>10}   now / before, {args.repeats} rounds")
    for name in names:
        before, now = seconds["before", name], seconds["now", name]
        ratios = [mine / other for mine, other in zip(now, before, strict=True)]
        report[name] = {"before": before, "now": now, "ratio": statistics.median(ratios)}
        print(
            f"{name:28} {statistics.median(before):10.6f} {statistics.median(now):10.6f}   "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
