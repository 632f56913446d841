"""What the notebooks draw and count; each function takes what was measured and knows no plan."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_tp2d import CommCounter

Block = tuple[tuple[int, int], ...]
"""From where to where a rank's part reaches, in each dim of the whole."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")
FSDP_COLLECTIVES = {
    "c10d._allgather_base_": "all_gather_into_tensor",
    "c10d._reduce_scatter_base_": "reduce_scatter_tensor",
}


def local(value: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under a header, in columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


# --- what lies where ---------------------------------------------------------------------------


@contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """What this rank sees of the activations of a forward pass.

    Args:
        names: of modules, ``"layers.0.attention.wq"`` for a module's output and
            ``"> layers.0.attention.wq"`` for its input.
    """
    seen: dict[str, Tensor] = {}
    handles = []
    for name in names:
        module = model.get_submodule(name.removeprefix("> "))

        def keep_input(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            seen[name] = local(args[0].detach()).clone()

        def keep_output(_: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
            seen[name] = local(out.detach()).clone()

        if name.startswith("> "):
            handles.append(module.register_forward_pre_hook(keep_input))
        else:
            handles.append(module.register_forward_hook(keep_output))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def block_of(part: Tensor, whole: Tensor) -> Block:
    """Where in ``whole`` the values of ``part`` stand.

    Raises:
        ValueError: if they stand nowhere, as those of a partial sum.
    """
    corners = torch.isclose(whole, part.flatten()[0], rtol=1e-9, atol=1e-12).nonzero().tolist()
    for corner in corners:
        block = tuple((at, at + size) for at, size in zip(corner, part.shape, strict=True))
        there = whole[tuple(slice(*reach) for reach in block)]
        if there.shape == part.shape and torch.allclose(there, part, rtol=1e-9, atol=1e-12):
            return block
    raise ValueError(f"a part of shape {tuple(part.shape)} is no block of {tuple(whole.shape)}")


def draw_blocks(
    halves: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[Block], Sequence[Block]]]],
) -> Any:
    """Which block of each tensor lies on which rank, of a line and of a 2 x 2 grid.

    Args:
        halves: title of a half of the picture to its tensors: label to the whole's shape and the
            ranks' blocks on the line and on the grid.
    """
    from matplotlib import pyplot

    rows = max(len(tensors) for tensors in halves.values())
    figure, axes = pyplot.subplots(
        1, len(halves), figsize=(4.9 * len(halves), 1.08 * rows + 0.5), layout="constrained"
    )
    for axis, (title, tensors) in zip(axes, halves.items(), strict=True):
        axis.set(xlim=(-3.2, 7.6), ylim=(-2.5 * rows + 0.2, 1.15), aspect="equal")
        axis.axis("off")
        axis.text(-3.2, 0.85, title, fontweight="bold", fontsize=9)
        axis.text(2.2, 0.3, "line of 4", ha="center", fontsize=8)
        axis.text(6.35, 0.3, "2 x 2 grid", ha="center", fontsize=8)
        for row, (label, (shape, line, grid)) in enumerate(tensors.items()):
            top = -2.5 * row
            axis.text(-3.2, top - 0.8, label, fontsize=8.5, va="center")
            axis.text(-3.2, top - 1.35, _layout(grid), fontsize=7.5, va="center", color="#666666")
            for rank in range(4):
                _draw_part(axis, 1.13 * rank, top - 1.55, 1.0, shape, line[rank], rank)
                right, down = rank % 2, rank // 2
                corner = 5.3 + 1.13 * right, top - 1 - 1.13 * down
                _draw_part(axis, *corner, 1.0, shape, grid[rank], rank)
    return figure


def _layout(grid: Sequence[Block]) -> str:
    """The placements on a 2 x 2 grid that give these blocks, as DTensor abbreviates them."""

    def placement(first: Block, second: Block) -> str:
        dims = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
        return f"S({dims[0]})" if dims else "R"

    return f"({placement(grid[0], grid[2])}, {placement(grid[0], grid[1])})"


def _draw_part(
    axis: Any, x: float, y: float, size: float, shape: Sequence[int], block: Block, rank: int
) -> None:
    """The whole as an outline with one rank's block filled; a batch as bands, one a sequence."""
    from matplotlib.patches import Rectangle

    # A vector is a row; a matrix is one sequence of a batch of one.
    missing = 3 - len(shape)
    (batch, height, width) = (1,) * missing + tuple(shape)
    (first, last), (top, bottom), (left, right) = ((0, 1),) * missing + tuple(block)
    band = size / batch
    gap = 0.08 * size if batch > 1 else 0.0
    if len(shape) == 1:
        y, band = y + 0.35 * size, 0.3 * size
    for index in range(batch):
        base = y + size - (index + 1) * band if len(shape) > 1 else y
        tall = band - gap
        outline = Rectangle((x, base), size, tall, fill=False, edgecolor="#aaaaaa", linewidth=0.5)
        axis.add_patch(outline)
        if first <= index < last:
            corner = x + size * left / width, base + tall * (1 - bottom / height)
            extent = size * (right - left) / width, tall * (bottom - top) / height
            axis.add_patch(Rectangle(corner, *extent, color=COLORS[rank], linewidth=0))


# --- what a rank holds -------------------------------------------------------------------------


def held(tensors: Iterable[Any]) -> int:
    """Bytes that this rank holds of tensors; what is no tensor counts nothing."""
    parts = [local(value) for value in tensors if isinstance(value, Tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


def peak_of(step: Callable[[], object]) -> int:
    """Bytes that a call holds at most beside what was held before it, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    # It greets on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


class FSDPCounter(CommCounter):
    """A CommCounter that sees the collectives of FSDP2 too, under the axis ``fsdp``.

    They are not functional ones: ``(output, input, ...)``, an all-gather of weights or a
    reduce-scatter of gradients. A rank receives what the larger side has beyond the smaller.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            name = FSDP_COLLECTIVES.get(str(func.overloadpacket))
            if name is None:
                raise NotImplementedError(f"the bytes of {func} are not known")
            more = abs(args[0].numel() - args[1].numel())
            self.calls["fsdp", name] += 1
            self.bytes["fsdp", name] += more * args[0].element_size()
        return super().__torch_dispatch__(func, types, args, kwargs)


# --- curves ------------------------------------------------------------------------------------


def draw_training(losses: Mapping[str, Sequence[float]], reference: str) -> Any:
    """Perplexity by step, and how far each run's loss is from the reference's."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    wanted = torch.tensor(losses[reference], dtype=torch.float64)
    left.plot(wanted.exp(), label=reference, color="#cccccc", linewidth=9)
    others = {name: values for name, values in losses.items() if name != reference}
    for number, (name, values) in enumerate(others.items()):
        run = torch.tensor(values, dtype=torch.float64)
        style = {"color": COLORS[number], "label": name, "linewidth": 2}
        # They lie on each other: each is drawn at steps of its own.
        left.plot(run.exp(), linestyle=(4 * number, (4, 4 * len(others) - 4)), **style)
        right.plot((run - wanted).abs().clamp(min=1e-7), **(style | {"linewidth": 1}))
    left.set(xlabel="step", ylabel="perplexity of the training text", yscale="log")
    right.set(xlabel="step", ylabel=f"loss: distance to {reference}", yscale="log")
    lines = [left.lines[0], *right.lines]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def draw_memory(parts: Mapping[str, Mapping[str, int]]) -> Any:
    """Bars, one a plan, of the bytes of each kind on top of each other."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 2.6), layout="constrained")
    kinds = list(next(iter(parts.values())))
    left = [0.0] * len(parts)
    for number, kind in enumerate(kinds):
        widths = [of[kind] / 1e6 for of in parts.values()]
        axis.barh(list(parts), widths, left=left, label=kind, color=COLORS[number])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("MB")
    axis.legend(fontsize=8, loc="center right")
    return figure


def draw_traffic(
    measured: Mapping[str, Mapping[float, float]],
    formulas: Mapping[str, Callable[[float], tuple[float, float]]],
) -> Any:
    """Elements that a rank receives for a block, by tokens: points counted on bands by formula."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 3.4), layout="constrained")
    places = sorted({m for points in measured.values() for m in points})
    finely = torch.logspace(math.log10(places[0]), math.log10(places[-1]), 50).tolist()
    for number, (name, formula) in enumerate(formulas.items()):
        color = COLORS[number]
        low, high = zip(*map(formula, finely), strict=True)
        axis.fill_between(finely, low, high, color=color, alpha=0.25, linewidth=0)
        axis.plot(finely, low, color=color, linewidth=1, label=name)
        points = measured.get(name, {})
        axis.plot(list(points), list(points.values()), "o", color=color, markersize=5)
    axis.set(xlabel="m = tokens / hidden", ylabel="received / hidden²", xscale="log", yscale="log")
    axis.set_xticks(places, [f"{m:g}" for m in places])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def draw_link_rates(results: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Seconds of a step by link rate, and by tokens, there relative to 1-D tensor parallelism.

    A dashed line is what the products alone take, with nothing sent.

    Args:
        results: what ``benchmarks/link_rates.py`` wrote.
        names: a plan's name there to its name here.
    """
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    cases = sorted(results["cases"].values(), key=_tokens_per_hidden)
    most = _tokens_per_hidden(cases[-1])
    by_rate = [case for case in cases if _tokens_per_hidden(case) == most]
    by_tokens = [case for case in cases if case["rate"] == "200mbit"]
    for number, (plan, name) in enumerate(names.items()):
        style: dict[str, Any] = {"color": COLORS[number], "marker": "o", "markersize": 3}
        seconds = [plan_record(case, plan)["seconds"] for case in by_rate]
        left.plot(seconds, label=name, **style)
        right.plot([plan_record(case, plan)["ratio"] for case in by_tokens], **style)
    # Of the four shares at once, on all cores: what one device with these cores has to do.
    alone = [plan_record(case, next(iter(names)))["compute_seconds"] for case in by_rate]
    left.plot(alone, label="products alone", color="#999999", linestyle="--")
    rates = [case["rate"].replace("bit", "bit/s").replace("none", "not shaped") for case in by_rate]
    left.set_xticks(range(len(by_rate)), rates)
    right.set_xticks(range(len(by_tokens)), [f"{_tokens_per_hidden(c):g}" for c in by_tokens])
    left.set(xlabel=f"rate of each link, m = {most:g}", ylabel="seconds of a step", yscale="log")
    right.set(
        xlabel="m = tokens / hidden, links of 200 Mbit/s", ylabel="seconds / 1-D's", yscale="log"
    )
    left.legend(fontsize=8)
    for axis in (left, right):
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
    return figure


def plan_record(case: Mapping[str, Any], plan: str) -> Mapping[str, Any]:
    """What ``benchmarks/link_rates.py`` saw of a plan in a case, as gloo comes.

    Raises:
        KeyError: if the plan is not in it.
    """
    for record in case["plans"]:
        if record["plan"] == plan and not record["efficient_reduce_scatter"]:
            return record
    raise KeyError(plan)


def _tokens_per_hidden(case: Mapping[str, Any]) -> float:
    return case["batch"] * case["seq"] / case["hidden"]
