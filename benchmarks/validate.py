#!/usr/bin/env python3
"""What the planner says of the benchmark's steps, beside what they took.

    python benchmarks/compare.py --out results.json --case 4ranks-200mbit
    python benchmarks/validate.py results.json

Each case is predicted from what its ranks measured of their machine before anything else ran
(``planner.machine.calibrate``: products, copies, calls, the link), from no step of the case. Beside
each plan stand the seconds that it took and those that were predicted, and of each case the plan
that would have been chosen by prediction, and how much longer it took than the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model import Model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from variants import (
    AGAIN,
    FSDP_PLANS,
    GRID_PLANS,
    KEPT,
    OURS,
    is_ours,
    line_input_plan,
    sequence_plan,
)

from torch_tp2d import Colwise2D, Rowwise2D
from torch_tp2d.planner.machine import Machine
from torch_tp2d.planner.simulate import simulate
from torch_tp2d.planner.step import NO_PLAN, Case, run_step
from torch_tp2d.planner.trace import Event, Start

WITHIN = 0.15


class Predicted(NamedTuple):
    """A plan of a case."""

    name: str
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        """By how much of what was measured."""
        return self.predicted / self.measured - 1


def on_a_line(model: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """Stock TP with prepared input, by the styles that move the same."""
    styles = {"ColwiseParallel": Colwise2D, "RowwiseParallel": Rowwise2D}
    plan = line_input_plan()
    for name, style in plan.items():
        ours = styles.get(type(style).__name__)
        if ours is not None:
            plan[name] = ours(algorithm="collective")
    return plan


def in_sequences(model: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """TP+SP, by the styles that move the same."""
    return sequence_plan(
        partial(Colwise2D, dataflow="output_stationary", algorithm="collective"),
        partial(Rowwise2D, dataflow="input_stationary", algorithm="collective"),
    )


def on_a_grid(
    model: nn.Module, mesh: DeviceMesh, algorithm: str, *, again: bool
) -> dict[str, ParallelStyle]:
    """Ours."""
    options: dict[str, Any] = {"algorithm": algorithm, "reshard_after_forward": again}
    return sequence_plan(partial(Colwise2D, **options), partial(Rowwise2D, **options))


def step_of(name: str, ranks: int) -> tuple[tuple[int, ...], Any]:
    """The mesh of one of the benchmark's plans, and the plan as the planner takes it.

    Raises:
        KeyError: for one that the planner does not know.
    """
    base, _, grid = name.partition(" ")
    rows, columns = map(int, grid.split("x")) if grid else (2, ranks // 2)
    kind, _, algorithm = base.partition(":")
    again = kind.endswith(AGAIN)
    plans: dict[str, tuple[tuple[int, ...], Any]] = {
        "tp-input": ((1, ranks), on_a_line),
        "tp-sp": ((1, ranks), in_sequences),
        "fsdp": ((ranks, 1, 1), NO_PLAN),
        "fsdp-tp": ((rows, 1, columns), on_a_line),
        "fsdp-sp": ((rows, 1, columns), in_sequences),
        OURS: ((rows, columns), partial(on_a_grid, algorithm=algorithm or "auto", again=again)),
    }
    return plans[kind.removesuffix(KEPT).removesuffix(AGAIN)]


def predict(
    name: str,
    case: dict[str, Any],
    machine: Machine,
    dtype: torch.dtype = torch.float32,
    *,
    efficient: bool = False,
) -> float:
    """The seconds of a plan's step.

    Args:
        efficient: with an efficient reduce-scatter under a stock plan.
    """
    stock = not is_ours(name)
    shape, plan = step_of(name, case["ranks"])
    with torch.device("meta"):
        model = Model(case["layers"], case["hidden"], case["heads"]).to(dtype)
    kept = name.partition(" ")[0].endswith(KEPT)
    step = run_step(
        model,
        Case(
            shape,
            plan,
            case["batch"],
            case["seq"],
            transport="nccl" if stock else machine.transport,
            loss=lambda out: out.float().pow(2).sum(),
            reshard=not kept,
            rates=None if stock else machine.rates,
        ),
    )
    events = [by_exchange(event) if efficient else event for event in step.recorder.events]
    return simulate(events, machine, step.mesh, stock=stock).seconds


def by_exchange(event: Event) -> Event:
    """A reduce-scatter that costs what it moves, which gloo's does not."""
    if isinstance(event, Start) and event.op.startswith("reduce_scatter"):
        return replace(event, op="all_to_all_single")
    return event


def validate(case: dict[str, Any]) -> list[Predicted]:
    """All plans of a case that the planner knows."""
    machine = Machine(**case["calibrated"])
    found = []
    for record in case["plans"]:
        known = {*FSDP_PLANS, *GRID_PLANS, "tp-input", "tp-sp"}
        name, efficient = record["plan"], record["efficient_reduce_scatter"]
        if name.partition(" ")[0] in known or is_ours(name):
            seconds = predict(name, case, machine, efficient=efficient)
            found.append(Predicted(name + " +rs" * efficient, record["seconds"], seconds))
    return found


def chosen(found: Sequence[Predicted]) -> tuple[Predicted, Predicted]:
    """What prediction would have taken of the plans as they are, and what was fastest."""
    plain = [each for each in found if not each.name.endswith(" +rs")]
    return (
        min(plain, key=lambda each: each.predicted),
        min(plain, key=lambda each: each.measured),
    )


def report(cases: dict[str, list[Predicted]]) -> str:
    """As Markdown."""
    lines = ["| case | plan | seconds | predicted | off |", "|---|---|---|---|---|"]
    for name, found in cases.items():
        for each in found:
            lines.append(
                f"| {name} | {each.name} | {each.measured:.2f} | {each.predicted:.2f} | "
                f"{each.off:+.0%} |"
            )
    offs = [abs(each.off) for found in cases.values() for each in found]
    near = sum(off <= WITHIN for off in offs)
    lines += ["", f"{near} of {len(offs)} within {WITHIN:.0%}", ""]
    for name, found in cases.items():
        choice, fastest = chosen(found)
        lines.append(
            f"{name}: by prediction {choice.name}, which took "
            f"{choice.measured / fastest.measured:.2f} of the fastest's time ({fastest.name})"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a file of results."""
    parser = argparse.ArgumentParser(description="The planner's seconds beside measured ones.")
    parser.add_argument("results", type=Path, nargs="+", help="what compare.py wrote")
    args = parser.parse_args(argv)
    cases = {}
    for path in args.results:
        for name, case in json.loads(path.read_text())["cases"].items():
            if "calibrated" in case:
                cases[name] = validate(case)
    if not cases:
        parser.error("no case there has what its ranks measured of their machine: run it anew")
    print(report(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
