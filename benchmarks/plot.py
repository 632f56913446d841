#!/usr/bin/env python3
"""Draw the results of compare.py: time against link rate, and against tokens / hidden.

    python benchmarks/plot.py benchmarks/results/NAME.json --out NAME.png

One panel for each number of ranks, and one for the sizes. Points are medians, bars reach from the
fastest round to the slowest. Dashed: the same plan with an efficient reduce-scatter under it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Where links that are not shaped stand on the axis: right of the fastest rate.
UNSHAPED_MBIT = 10_000.0

Point = tuple[float, dict[str, Any]]


def megabits(rate: str) -> float:
    """A link rate as tc writes it, in Mbit/s."""
    if rate == "none":
        return UNSHAPED_MBIT
    return float(rate[:-4]) * {"k": 1e-3, "m": 1.0, "g": 1e3}[rate[-4]]


def tokens_per_hidden(case: dict[str, Any]) -> float:
    """m: the tokens of the whole batch / hidden."""
    return case["batch"] * case["seq"] / case["hidden"]


def sizes(case: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal for cases to be in one panel of rates."""
    return tuple(case[key] for key in ("ranks", "layers", "hidden", "heads", "seq", "batch"))


def panels(cases: Sequence[dict[str, Any]]) -> list[tuple[str, str, list[tuple[float, Any]]]]:
    """For each panel its title, the name of its axis, and its cases with their place on it."""
    by_sizes: dict[tuple[Any, ...], list[tuple[float, Any]]] = defaultdict(list)
    by_network: dict[tuple[Any, ...], list[tuple[float, Any]]] = defaultdict(list)
    for case in cases:
        by_sizes[sizes(case)].append((megabits(case["rate"]), case))
        network = tuple(case[key] for key in ("ranks", "rate", "layers", "hidden", "heads"))
        by_network[network].append((tokens_per_hidden(case), case))
    drawn = []
    for group in by_sizes.values():
        first = group[0][1]
        title = f"{first['ranks']} ranks, m = {tokens_per_hidden(first):g}"
        drawn.append((title, "link rate, Mbit/s", group))
    for group in by_network.values():
        first = group[0][1]
        title = f"{first['ranks']} ranks, links of {first['rate']}"
        drawn.append((title, "m = tokens / hidden", group))
    # One case alone makes no line.
    return [
        (title, axis, sorted(group, key=lambda item: item[0]))
        for title, axis, group in drawn
        if len({place for place, _ in group}) > 1
    ]


def lines(group: Sequence[tuple[float, Any]]) -> dict[tuple[str, bool], list[Point]]:
    """The records of each plan, by name and whether its reduce-scatter was replaced."""
    found: dict[tuple[str, bool], list[Point]] = defaultdict(list)
    for place, case in group:
        for record in case["plans"]:
            found[record["plan"], record["efficient_reduce_scatter"]].append((place, record))
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a picture of the results, in the format that the path's ending names."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install 'torch_tp2d[bench]'") from None

    done = [case for case in results["cases"].values() if "failed" not in case]
    drawn = panels(done)
    if not drawn:
        raise SystemExit("nothing to draw: no two cases differ in the rate or the tokens alone")
    figure, axes = pyplot.subplots(
        1, len(drawn), figsize=(6 * len(drawn), 5.5), squeeze=False, layout="constrained"
    )
    names = dict.fromkeys(r["plan"] for case in done for r in case["plans"])
    palette = pyplot.get_cmap("tab20")
    colors = {name: palette(number % 20) for number, name in enumerate(names)}
    legend: dict[str, Any] = {}
    for axis, (title, label, group) in zip(axes[0], drawn, strict=True):
        for (name, efficient), points in lines(group).items():
            legend_name = f"{name}, efficient reduce-scatter" if efficient else name
            legend[legend_name] = draw_line(axis, points, colors[name], efficient)
        axis.set(title=title, xlabel=label, xscale="log", yscale="log")
        places = sorted({place for place, _ in group})
        axis.set_xticks(places, [tick(place, label) for place in places])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds of a step")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5, fontsize=8)
    machine = results["machine"]
    figure.suptitle(
        f"{machine['cores']} cores {machine['cpu']}, torch {results['torch']}, "
        f"{results['date'][:10]}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_line(axis: Any, points: Sequence[Point], color: Any, efficient: bool) -> Any:
    """One plan in one panel; returns what the legend shows of it."""
    middle = [record["seconds"] for _, record in points]
    rounds = [record["rounds"]["seconds"] for _, record in points]
    below = [value - min(seen) for value, seen in zip(middle, rounds, strict=True)]
    above = [max(seen) - value for value, seen in zip(middle, rounds, strict=True)]
    return axis.errorbar(
        [place for place, _ in points],
        middle,
        yerr=[below, above],
        color=color,
        marker="o",
        markersize=3,
        capsize=2,
        linestyle="--" if efficient else "-",
    )


def tick(place: float, label: str) -> str:
    """How a place on an axis is written."""
    return "not shaped" if place == UNSHAPED_MBIT and "rate" in label else f"{place:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one file of results; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the results of compare.py.")
    parser.add_argument("results", type=Path, help="JSON that compare.py wrote")
    parser.add_argument("--out", type=Path, help="picture, .png or .svg (beside the results)")
    args = parser.parse_args(argv)
    out = args.out or args.results.with_suffix(".png")
    draw(json.loads(args.results.read_text()), out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
