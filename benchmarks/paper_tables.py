"""What ``paper.py`` found, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

GIB = 2**30


def show(report: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [f"{report['device']}, torch {report['torch']}: predicted, but where it says otherwise"]
    for name, shows in SHOWN.values():
        if name in report:
            lines += ["", *shows(report[name])]
    return "\n".join(lines)


def _head(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def show_1(table: dict[str, Any]) -> list[str]:
    """Parts of one device's memory."""
    lines = ["Table 1: part of one device's memory on each of four, the 2.5 B model", ""]
    lines += _head("plan", "parameters", "gradients", "Adam", "activations")
    for name, parts in table.items():
        lines.append(f"| {name} | " + " | ".join(f"{x:.2f}" for x in parts.values()) + " |")
    lines.append("| paper: TP | 0.25 | 0.25 | 0.25 | 1 |")
    return [*lines, "| paper: TP2D | 0.25 | 0.25 | 0.25 | 0.25 |"]


def show_2(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Memory, and time as a part of TP's on as many devices."""
    lines = ["Table 2: the 2.5 B model; time as a part of TP's on as many devices", ""]
    lines += _head("devices", "paper's plan", "paper: GB", "paper: time", "plan", "GiB", "time")
    of_tp = {row["devices"]: row for row in rows if row["paper"] in ("TP=4", "TP=8")}
    for row in rows:
        size = f"{row['peak_bytes'] / GIB:.1f}"
        if row["paper"] == "DP=4":
            lines.append(f"| 4 | DP=4 | out of memory | | DP 4, too large | {size} | |")
            continue
        tp = of_tp[row["devices"]]
        paper = f"{row['GB']} | {row['hours'] / tp['hours']:.2f}" if row["paper"] else "| "
        note = ", recomputing" * row["recomputes"] + ", too large" * (not row["fits"])
        lines.append(
            f"| {row['devices']} | {row['paper'] or 'the fastest of all'} | {paper} | "
            f"{row['plan']}{note} | {size} | {row['seconds'] / tp['seconds']:.2f} |"
        )
    return lines


def show_3(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Work a second and device, of one device's."""
    one = rows[0]["rate"]["best"]
    lines = ["Table 3's models, 8 sequences a device: work a second and device, of one's", ""]
    lines += _head("devices", "parameters", "TP", "TP+SP", "2-D", "fastest of all")
    for row in rows:
        cells = [
            f"{row['rate'][kind] / one:.2f} ({row['plan'][kind]})" if kind in row["rate"] else ""
            for kind in ("TP", "TP+SP", "2-D", "best")
        ]
        lines.append(
            f"| {row['devices']} | {row['parameters'] / 1e9:.2f} B | {' | '.join(cells)} |"
        )
    return [*lines, "| paper, 4 | | 0.83 | | 0.86 | |", "| paper, 8 | | 0.74 | | 0.79 | |"]


def show_4(table: dict[str, Any]) -> list[str]:
    """How many times TP2D's time TP takes."""
    columns = "paper", "predicted TP", "predicted TP+SP", "measured TP"
    lines = ["Table 4: how many times TP2D's time TP takes on four devices", ""]
    lines += _head("model", *columns)
    for kind, cells in table.items():
        lines.append(f"| {kind} | " + " | ".join(f"{cells[name]:.2f}" for name in columns) + " |")
    return lines


def show_5(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Memory as a part of that on two devices."""
    lines = ["Table 5: a Swin-UNet's memory on a device, this library's plan on every mesh", ""]
    lines += _head("paper's plan", "paper: GB", "paper: part", "mesh", "GiB", "part")
    first = rows[0]
    for row in rows:
        lines.append(
            f"| {row['paper']} | {row['GB']} | {row['GB'] / first['GB']:.2f} | "
            f"{'x'.join(map(str, row['mesh']))} | {row['peak_bytes'] / GIB:.1f} | "
            f"{row['peak_bytes'] / first['peak_bytes']:.2f} |"
        )
    return lines


def show_figures(found: dict[str, Any]) -> list[str]:
    """Shares of a step, and perplexities."""
    lines = ["Share of a step that waits for transfers, the 2.5 B model on four devices", ""]
    lines += _head("plan", "paper", "predicted")
    for name, shares in found["waiting"].items():
        lines.append(f"| {name} | {shares['paper']:.1%} | {shares['predicted']:.1%} |")
    lines += ["", "Perplexity after 200 steps of a small model, measured; the paper, of GPT-2"]
    lines += ["after 300 iterations: 37.2 with TP, 29.1 with TP2D", ""]
    plans = next(iter(found["perplexity"].values()))
    lines += _head("model", *plans)
    for kind, cells in found["perplexity"].items():
        lines.append(f"| {kind} | " + " | ".join(f"{cells[name]:.6f}" for name in plans) + " |")
    return lines


def show_scaling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sequences an hour and device, and by which plan."""
    lines = ["0.3 T parameters, nodes of 8 H100, 400 Gbit/s: sequences an hour and device", ""]
    kinds = "stock", "2-D", "square"
    lines += _head("devices", "batch", "torch's best", "best grid", "square grid of all")
    for row in rows:
        cells = [
            f"{3600 * row[kind]['sequences']:.0f} ({row[kind]['plan']}, "
            f"{row[kind]['waiting']:.0%} waiting)"
            if kind in row
            else ""
            for kind in kinds
        ]
        lines.append(f"| {row['devices']} | {row['batch']} | {' | '.join(cells)} |")
    return lines


SHOWN: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "1": ("table 1", show_1),
    "2": ("table 2", show_2),
    "3": ("table 3", show_3),
    "4": ("table 4", show_4),
    "5": ("table 5", show_5),
    "figures": ("figures", show_figures),
    "scaling": ("scaling", show_scaling),
}
"""By what the command line calls it, the name of a table in the report, and what prints it."""
