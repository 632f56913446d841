"""Timing the steps of several plans in turn, and what they cost besides time."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from traffic import WireCounter, predicted_bytes
from variants import KEPT, OURS, SEED, STOCK_PLANS, Share, Sizes, Variant

# Sums of a few million fp32 terms in another order agree to about 1e-6.
TOLERANCE = 1e-5

# A step during which the host took more of the processors than this share is disturbed, and taken
# again, at most so many times in all.
MOST_STOLEN = 0.03
TRIES = 3


def stolen_seconds() -> float:
    """Processor time that this machine's host gave to others since boot; 0 where none is told."""
    try:
        figures = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return int(figures[8]) / os.sysconf("SC_CLK_TCK")


class Meter:
    """What a step costs this rank besides time."""

    def __init__(self) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
        self.counter = counter if interface and counter.is_file() else None
        self.libc = ctypes.CDLL(None)
        self.memory_before = 0
        self.sent_before = 0

    @staticmethod
    def _resident(key: str) -> int:
        """A figure of /proc/self/status, in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def sent(self) -> int:
        """Bytes this rank's interface has sent since it exists; 0 where none is known."""
        return int(self.counter.read_text()) if self.counter else 0

    def start(self) -> None:
        """Begin to count what is sent."""
        gc.collect()
        self.sent_before = self.sent()

    def stop(self) -> int:
        """Bytes sent since `start`."""
        return self.sent() - self.sent_before

    def start_memory(self) -> None:
        """Begin a step from a heap that keeps nothing of the step before."""
        gc.collect()
        self.libc.malloc_trim(0)
        # Makes the peak, VmHWM, start again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self.memory_before = self._resident("VmRSS")

    def stop_memory(self) -> int:
        """Most memory added since `start_memory`."""
        return self._resident("VmHWM") - self.memory_before


def gradient_norm(model: nn.Module) -> float:
    """The norm of the gradient of the whole model, whatever its layout."""
    total = 0.0
    for parameter in model.parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        total += float(whole.double().pow(2).sum())
    return math.sqrt(total)


def first_step(variant: Variant, elements: int) -> tuple[float, float, float]:
    """One untimed step: the loss, the gradient norm and the bytes that collectives need move.

    The bytes are the mean over ranks; what all ranks send together they also receive.
    """
    with WireCounter() as counter:
        loss = variant.step(elements)
    dist.all_reduce(loss)
    moved = torch.tensor(counter.total_bytes / dist.get_world_size(), dtype=torch.float64)
    dist.all_reduce(moved)
    norm = gradient_norm(variant.model)
    variant.model.zero_grad(set_to_none=True)
    return float(loss), norm, float(moved)


def difference(
    title: str,
    result: tuple[float, float, float],
    expected_title: str,
    expected: tuple[float, float, float],
) -> str:
    """In which of loss and gradient norm two plans differ, in words; empty where they agree."""
    for what, value, wanted in zip(("loss", "gradient norm"), result, expected, strict=False):
        if not math.isclose(value, wanted, rel_tol=TOLERANCE):
            return f"{title}: {what} {value:.9g}, but {expected_title} has {wanted:.9g}"
    return ""


def warm_up(
    variants: Sequence[Variant], elements: int
) -> tuple[dict[str, tuple[float, float, float]], dict[str, str]]:
    """The first step of each; the loss and gradient norm of each must be the first one's.

    Returns what :func:`first_step` saw, by title, and the reasons of the plans that failed.
    """
    seen: dict[str, tuple[float, float, float]] = {}
    refused: dict[str, str] = {}
    for variant in variants:
        if variant.name in refused:
            continue
        try:
            result = first_step(variant, elements)
        except NotImplementedError as error:
            if not variant.tentative:
                raise
            refused[variant.name] = f"{type(error).__name__}: {error}"
            continue
        expected = next(iter(seen.items()), (variant.title, result))
        wrong = difference(variant.title, result, *expected)
        if not wrong:
            seen[variant.title] = result
        elif variant.tentative:
            refused[variant.name] = wrong
        else:
            raise SystemExit(wrong)
    return seen, refused


class Cost(NamedTuple):
    """What a step cost this rank, and the share of the processors that its host took meanwhile."""

    stolen: float
    seconds: float
    sent: int


def timed_step(variant: Variant, elements: int, meter: Meter) -> Cost:
    """One step; all ranks agree on what was stolen."""
    meter.start()
    dist.barrier()
    stolen, began = stolen_seconds(), time.perf_counter()
    variant.step(elements)
    seconds = time.perf_counter() - began
    # What a rank has handed to its socket is not yet sent; by here it is.
    dist.barrier()
    sent = meter.stop()
    share = (stolen_seconds() - stolen) / seconds / (os.cpu_count() or 1)
    variant.model.zero_grad(set_to_none=True)
    return Cost(largest_over_ranks([share])[0], seconds, sent)


def measure(variants: Sequence[Variant], repeats: int, elements: int) -> None:
    """Step all variants in turn, ``repeats`` times, noting what each step cost this rank.

    And once more for the memory: from a heap given back to the system a step is slower, as every
    page of it is asked for again.
    """
    meter = Meter()
    for turn in range(repeats):
        order = list(variants)
        random.Random(SEED + turn).shuffle(order)
        for variant in order:
            tries: list[Cost] = []
            while not tries or (tries[-1].stolen > MOST_STOLEN and len(tries) < TRIES):
                tries.append(timed_step(variant, elements, meter))
            best = min(tries, key=lambda cost: cost.stolen)
            variant.seconds.append(best.seconds)
            variant.sent.append(best.sent)
            variant.stolen.append(best.stolen)
            variant.again += len(tries) - 1
    for variant in variants:
        meter.start_memory()
        dist.barrier()
        variant.step(elements)
        variant.step_memory.append(meter.stop_memory())
        variant.model.zero_grad(set_to_none=True)


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """Elementwise maximum over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def held(model: nn.Module) -> int:
    """Bytes of parameters this rank keeps."""
    return sum(
        local.numel() * local.element_size()
        for p in model.parameters()
        for local in [p.to_local() if isinstance(p, DTensor) else p]
    )


def bytes_per_second(rate: str | None) -> float:
    """Read a link rate as tc writes it, in bits: "200mbit"; None or "none" is infinity."""
    if rate is None or rate == "none":
        return math.inf
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise ValueError(f"rate {rate!r}: write it as in 200mbit or 1gbit, or none")


def undisturbed(values: Sequence[float], *stolen: Sequence[float]) -> list[float]:
    """The values of the rounds in which nothing was disturbed; all of them where none was calm."""
    calm = [
        value for value, *shares in zip(values, *stolen, strict=True) if max(shares) <= MOST_STOLEN
    ]
    return calm or list(values)


def summarize(
    variants: Sequence[Variant],
    shares: dict[Share, Variant],
    seen: dict[str, tuple[float, float, float]],
    sizes: Sizes,
    rate: str | None,
) -> list[dict[str, Any]]:
    """One record per variant; the same on every rank."""
    base = next((v for v in variants if v.name == "tp"), variants[0])
    for variant in (*variants, *shares.values()):
        variant.seconds = largest_over_ranks(variant.seconds)
        variant.sent = largest_over_ranks(variant.sent)
        variant.step_memory = largest_over_ranks(variant.step_memory)
    has_counter = Meter().counter is not None
    records = []
    for variant in variants:
        ratios = undisturbed(
            [own / other for own, other in zip(variant.seconds, base.seconds, strict=True)],
            variant.stolen,
            base.stolen,
        )
        loss, norm, moved = seen[variant.title]
        kind = variant.name.partition(" ")[0].partition(":")[0]
        predicted = predicted_bytes(kind, variant.share, sizes)
        least = moved if predicted is None else predicted
        share = shares[variant.share]
        alone = statistics.median(undisturbed(share.seconds, share.stolen))
        limit = max(alone, least / bytes_per_second(rate))
        seconds = statistics.median(undisturbed(variant.seconds, variant.stolen))
        records.append(
            {
                "plan": variant.name,
                "efficient_reduce_scatter": variant.efficient,
                "base": base.name,
                "seconds": seconds,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "sent_bytes": statistics.median(variant.sent) if has_counter else None,
                "predicted_bytes": predicted,
                "nccl_bytes": moved,
                "step_peak_bytes": statistics.median(variant.step_memory),
                "parameter_bytes": largest_over_ranks([held(variant.model)])[0],
                "compute_seconds": alone,
                "limit_seconds": limit,
                "times_limit": seconds / limit,
                "loss": loss,
                "gradient_norm": norm,
                "rounds": {
                    "seconds": variant.seconds,
                    "compute_seconds": share.seconds,
                    "compute_stolen": share.stolen,
                    "sent_bytes": variant.sent if has_counter else None,
                    "step_peak_bytes": variant.step_memory,
                    "stolen": variant.stolen,
                    "steps_taken_again": variant.again,
                },
            }
        )
    return records


class Headline(NamedTuple):
    """How many times as long as a grid's step a stock plan's takes, within the same rounds."""

    grid: str
    stock: str
    ratio: float
    least: float
    most: float


def best(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of the fastest plan."""
    return min(records, key=lambda record: record["seconds"])


def headlines(records: Sequence[dict[str, Any]]) -> dict[str, Headline]:
    """Our best grid against the best that stock torch does, by what stock plans count.

    Those as they are, and those with an efficient reduce-scatter under them as well; and of either
    only those whose step needs no more memory than ours (a hundredth is not told apart).
    """
    ours = [record for record in records if record["plan"].partition(" ")[0] in (OURS, OURS + KEPT)]
    stock = [record for record in records if record["plan"].partition(" ")[0] in STOCK_PLANS]
    if not ours or not stock:
        return {}
    chosen = best(ours)
    found: dict[str, Headline] = {}
    for which, counted in (
        ("as it is", [record for record in stock if not record["efficient_reduce_scatter"]]),
        ("with an efficient reduce-scatter", stock),
    ):
        limit = 1.01 * chosen["step_peak_bytes"]
        small = [record for record in counted if record["step_peak_bytes"] <= limit]
        for memory, among in (("", counted), (", in no more memory", small)):
            if among:
                other = best(among)
                ratios = undisturbed(
                    [
                        theirs / own
                        for theirs, own in zip(
                            other["rounds"]["seconds"], chosen["rounds"]["seconds"], strict=True
                        )
                    ],
                    other["rounds"]["stolen"],
                    chosen["rounds"]["stolen"],
                )
                name = other["plan"] + (" +rs" if other["efficient_reduce_scatter"] else "")
                found[f"best stock {which}{memory}"] = Headline(
                    chosen["plan"], name, statistics.median(ratios), min(ratios), max(ratios)
                )
    return found


def spread(record: dict[str, Any]) -> str:
    """The ratio of a record with the least and most of its rounds."""
    return f"{record['ratio']:.2f} ({record['ratio_min']:.2f}..{record['ratio_max']:.2f})"


def megabytes(value: float | None) -> str:
    """A count of bytes in millions."""
    return "-" if value is None else f"{value / 1e6:.1f}"


def table(records: Sequence[dict[str, Any]], refused: dict[str, str]) -> str:
    """The records, a line for each plan, and the reasons of the plans that did not run.

    The last three columns are of the plan with an efficient reduce-scatter under it.
    """
    efficient = {r["plan"]: r for r in records if r["efficient_reduce_scatter"]}
    header = [
        "plan",
        "seconds",
        f"/ {records[0]['base']}",
        "MB sent",
        "arithmetic",
        "NCCL",
        "peak MB",
        "compute s",
        "/ limit",
        "| eff. rs: seconds",
        f"/ {records[0]['base']}",
        "MB sent",
        "/ limit",
    ]
    rows = [header]
    for record in records:
        if record["efficient_reduce_scatter"]:
            continue
        row = [
            record["plan"],
            f"{record['seconds']:.3f}",
            spread(record),
            megabytes(record["sent_bytes"]),
            megabytes(record["predicted_bytes"]),
            megabytes(record["nccl_bytes"]),
            megabytes(record["step_peak_bytes"]),
            f"{record['compute_seconds']:.3f}",
            f"{record['times_limit']:.2f}",
        ]
        other = efficient.get(record["plan"])
        if other is None:
            row += ["|", "", "", ""]
        else:
            row += [
                f"| {other['seconds']:.3f}",
                spread(other),
                megabytes(other["sent_bytes"]),
                f"{other['times_limit']:.2f}",
            ]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    stolen = [share for record in records for share in record["rounds"]["stolen"]]
    again = sum(record["rounds"]["steps_taken_again"] for record in records)
    lines.append(
        f"the host took at most {max(stolen):.0%} of the processors during a step; "
        f"{again} steps were taken again for that"
    )
    for which, line in headlines(records).items():
        lines.append(
            f"{line.grid} against the {which}: {line.stock} takes {line.ratio:.2f} "
            f"({line.least:.2f}..{line.most:.2f}) times as long"
        )
    lines += [f"{plan.ljust(widths[0])}  not runnable: {why}" for plan, why in refused.items()]
    return "\n".join(line.rstrip() for line in lines)
