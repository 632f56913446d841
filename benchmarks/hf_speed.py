#!/usr/bin/env python3
"""Compare GPT-2, BERT and T5 under stock tensor parallelism and on a grid: the paper's Table 4.

    sudo python benchmarks/hf_speed.py --out benchmarks/results/NAME.json
    sudo python benchmarks/hf_speed.py --out trial.json --hidden 256 --seq 64 --layers 2 --repeats 2

For each kind of model netlab.py makes four hosts joined by links of 200 Mbit/s, and
``hf_step.py`` times on them, in one run and in turn, a training step (forward, backward and AdamW,
fp32) of

tp          torch's ColwiseParallel and RowwiseParallel on a line of all ranks, vocab-parallel
            embedding and loss, whole norms; GPT-2 with its fused projections taken apart, since
            torch's styles take no Conv1D
tp-input    the same, attention's input prepared by PrepareModuleInput: four all-reduces for a
            layer, which is what the paper counts for its TP
fsdp        FSDP2 over all ranks, block by block; and with an efficient reduce-scatter (+rs), which
            gloo's is not
fsdp-tp     FSDP2 likewise over a grid's rows, tp-input over its columns
tp2d        the ready plan of torch_tp2d on each grid, the models as they are; it gathers a weight
            again for backward where that is larger than the input beside it
...-kept    the same with gathered weights kept for backward: less to send, more memory

All plans start from the same weights and the same batch, and a plan whose loss or gradient norm
differs from the first one's ends the run.

The models have the paper's shapes (heads of 64), made small: hidden 512, 4 layers (T5: 2 and 2),
8 sequences of 512 (T5: 512 read and 512 written), so that tokens / hidden is 8, as in the paper's
2.5 B model (8.5). The vocabulary is small in proportion (1000), so that its matrix is 4 % of the
blocks', as there.

What is printed and stored: seconds of a step, that of the slowest rank, the median over rounds;
how many times as long as on tp2d's best grid, within a round, median (least..most); MB sent in a
step by the rank that sends most, as its network interface counts; MB that NCCL's collectives would
move; the resident memory that a step adds; and the paper's ratio of hours for its TP on 4 GPUs.
Below stand the best grid against the best stock plan, as it is, with an efficient reduce-scatter,
and of those that need no more memory; and what ``torch_tp2d.suggest`` would have taken of these
plans, told what the ranks measured of their machine beforehand.

Results are written after every kind, and the same command again runs what is missing. Needs Linux,
root and iproute2, as netlab.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import netlab
from compare import HERE, ROOT, commit, grids, is_done, load, now, run_to_its_end, save

PAPER = {"gpt2": 1.84, "bert": 1.80, "t5": 1.64}
"""Hours of TP over hours of TP2D on 4 GPUs (doi 10.11992/tis.202411023, Table 4)."""

Settings = dict[str, Any]


def command(kind: str, settings: Settings, report: Path) -> list[str]:
    """The command line that times one kind of model, and writes its report there."""
    arguments = [
        *(sys.executable, str(HERE / "netlab.py"), "-n", str(settings["ranks"])),
        *("--rate", settings["rate"], "--", sys.executable, str(HERE / "hf_step.py")),
        *("--kind", kind, "--grid", ",".join(settings["grids"]), "--backend", settings["backend"]),
    ]
    for name in ("layers", "hidden", "batch", "seq", "vocab", "repeats"):
        arguments += [f"--{name}", str(settings[name])]
    return [*arguments, "--json", str(report)]


def run_kind(kind: str, settings: Settings) -> dict[str, Any]:
    """Time one kind; returns its report, or says what failed."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT))))
    began = time.monotonic()
    result: dict[str, Any] = {"settings": settings, "date": now(), "commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        for _ in range(2):
            status = run_to_its_end(command(kind, settings, report), env)
            # gloo's rare race ends a process by a signal: netlab says 128 + n. See compare.py.
            if status <= 128:
                break
        if status == 0:
            result |= json.loads(report.read_text())
        else:
            result["failed"] = f"exit status {status}"
    return result | {"took_seconds": round(time.monotonic() - began, 1)}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """A line for each plan of each kind."""
    heads = ("model", "plan", "seconds", "/ tp2d", "MB sent", "NCCL MB", "peak MB", "paper's TP")
    rows = [heads]
    for kind, case in cases.items():
        if "failed" in case:
            rows.append((kind, case["failed"], *[""] * 6))
            continue
        for record in case["plans"]:
            sent = record["sent_bytes"]
            spread = f"({record['times_ours_min']:.2f}..{record['times_ours_max']:.2f})"
            rows.append(
                (
                    kind,
                    record["plan"] + " +rs" * record.get("efficient_reduce_scatter", False),
                    f"{record['seconds']:.3f}",
                    f"{record['times_ours']:.2f} {spread}",
                    "-" if sent is None else f"{sent / 1e6:.1f}",
                    f"{record['nccl_bytes'] / 1e6:.1f}",
                    f"{record['step_peak_bytes'] / 1e6:.1f}",
                    f"{PAPER[kind]:.2f}" if record["plan"] == "tp-input" else "",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for kind, case in cases.items():
        for which, line in case.get("headlines", {}).items():
            lines.append(
                f"{kind}: {line['grid']} against the {which}: {line['stock']} takes "
                f"{line['ratio']:.2f} ({line['least']:.2f}..{line['most']:.2f}) times as long"
            )
        suggested = case.get("suggested")
        if suggested:
            seconds = {record["plan"]: record["seconds"] for record in case["plans"]}
            took = seconds[suggested["plan"]]
            lines.append(
                f"{kind}: suggest takes {suggested['plan']}, {took / min(seconds.values()):.2f} of "
                f"the fastest's time; predicted {suggested['predicted_seconds']:.2f} s for "
                f"{took:.2f}, without the optimizer"
            )
    return "\n".join(line.rstrip() for line in lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Compare GPT-2, BERT and T5 under stock tensor parallelism and on a grid."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the results, JSON; what is there is kept"
    )
    parser.add_argument("--kinds", default=",".join(PAPER), help="joined by commas (all)")
    parser.add_argument("--rate", default="200mbit", help="of the links, as tc writes it (200mbit)")
    parser.add_argument("--ranks", type=int, default=4, help="hosts (4)")
    parser.add_argument("--grids", help="RxC[,RxC...] of as many ranks (all)")
    parser.add_argument("--layers", type=int, default=4, help="blocks; T5 has half on a side (4)")
    parser.add_argument("--hidden", type=int, default=512, help="width, a multiple of 64 (512)")
    parser.add_argument("--batch", type=int, default=8, help="sequences, all ranks together (8)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence (512)")
    parser.add_argument("--vocab", type=int, default=1000, help="tokens there are (1000)")
    parser.add_argument("--repeats", type=int, default=4, help="timed steps of each plan (4)")
    parser.add_argument("--backend", default="gloo", help="see block.py (gloo)")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    unknown = [kind for kind in args.kinds if kind not in PAPER]
    if unknown:
        parser.error(f"no models {unknown}: choose from {list(PAPER)}")
    known = grids(args.ranks)
    args.grids = args.grids.split(",") if args.grids else list(known)
    if not {*args.grids} <= {*known}:
        parser.error(f"--grids {','.join(args.grids)}: {args.ranks} ranks make {', '.join(known)}")
    if args.hidden % 64 or (args.hidden // 64) % args.ranks:
        parser.error(
            f"--hidden {args.hidden} makes {args.hidden / 64:g} heads of 64, which do not split "
            f"over a line of {args.ranks} ranks"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Time the kinds; returns the exit status, 1 when one of them failed."""
    args = parse(argv)
    try:
        netlab.check_machine()
    except netlab.NetlabError as error:
        print(f"hf_speed: {error}", file=sys.stderr)
        return 2
    for signum in netlab.STOP_SIGNALS:
        signal.signal(signum, netlab.stop_on_signal)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "kinds")}
    results = load(args.out)
    cases = results["cases"]
    for kind in args.kinds:
        if is_done(cases.get(kind), settings):
            print(f"{kind}: in {args.out} already", flush=True)
            continue
        try:
            cases[kind] = run_kind(kind, settings)
        except netlab.Stopped as stopped:
            print(f"hf_speed: stopped by {stopped}; the same command resumes", file=sys.stderr)
            return 128 + stopped.signum
        save(results, args.out)
        print(f"{kind}: took {cases[kind]['took_seconds']:.0f} s", flush=True)
    print(table({kind: cases[kind] for kind in args.kinds}))
    return 1 if any("failed" in cases[kind] for kind in args.kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
