#!/usr/bin/env python3
"""Compare all plans at many link rates, rank counts and sizes: the whole benchmark.

    sudo python benchmarks/compare.py --out benchmarks/results/NAME.json
    sudo python benchmarks/compare.py --out quick.json --quick
    python benchmarks/compare.py --list

A case is a number of ranks, a link rate and the sizes of the model and its batch. For each case
netlab.py makes the network and ``block.py``, whose docstring explains the table, times all plans
on it in one run. The results are written after every case; the same command again runs what is
not there yet, and a case again whose plans, repeats or sizes are not those asked for. Each plan
runs on every grid of the ranks; ``--plans tp-sp,tp2d,tp2d:summa`` compares algorithms.

Cases:
    4ranks-200mbit ...         two GPT blocks, hidden 512, sequence 512, batch 8, fp32, on 4, 8 and
                               16 ranks, links of 100 Mbit/s, 200 Mbit/s, 1 Gbit/s and not shaped
    16ranks-200mbit-batch16    the same tokens in 16 sequences, which FSDP can split over 16 ranks
    m0.5 ... m32               4 ranks, 200 Mbit/s, m = tokens / hidden (m = 8 is 4ranks-200mbit)
    quick-200mbit ...          4 ranks, hidden 256, sequence 128: --quick, two minutes for three

torch's gloo has a rare race that ends a process by a signal (see torch_tp2d/comm/groups.py), and
the plans run on gloo as users have it, so a case in which that happens is run once more.

Needs Linux, root and iproute2, as netlab.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import netlab

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RATES = ("100mbit", "200mbit", "1gbit", netlab.UNSHAPED)
RANKS = (4, 8, 16)
# Sequences and their length, by tokens / hidden at hidden 512. Four ranks split either.
TOKENS = {0.5: (4, 64), 1: (4, 128), 2: (4, 256), 4: (4, 512), 16: (16, 512), 32: (32, 512)}


@dataclass(frozen=True)
class Case:
    """A network and the sizes of what is trained on it."""

    name: str
    ranks: int
    rate: str
    grids: tuple[str, ...]
    batch: int = 8
    seq: int = 512
    hidden: int = 512
    heads: int = 8
    layers: int = 2


def grids(ranks: int) -> tuple[str, ...]:
    """Every grid of so many ranks."""
    return tuple(f"{rows}x{ranks // rows}" for rows in range(1, ranks + 1) if ranks % rows == 0)


def all_cases() -> dict[str, Case]:
    """Every case of the full benchmark by name, in the order in which they run."""
    cases = [
        # Tensor parallelism on a line splits the heads over all the ranks.
        Case(f"{ranks}ranks-{label(rate)}", ranks, rate, grids(ranks), heads=max(8, ranks))
        for ranks in RANKS
        for rate in RATES
    ]
    cases.append(Case("16ranks-200mbit-batch16", 16, "200mbit", grids(16), 16, 256, heads=16))
    cases += [
        Case(f"m{m:g}", 4, "200mbit", grids(4), batch, seq) for m, (batch, seq) in TOKENS.items()
    ]
    return {case.name: case for case in cases}


def quick_cases() -> dict[str, Case]:
    """A small version of the benchmark."""
    cases = [
        Case(f"quick-{label(rate)}", 4, rate, grids(4), seq=128, hidden=256) for rate in RATES[1:]
    ]
    return {case.name: case for case in cases}


def label(rate: str) -> str:
    """A link rate in a case's name."""
    return "unshaped" if rate == netlab.UNSHAPED else rate


def default_plans() -> list[str]:
    """The stock plans, and ours as it comes."""
    # Here, because torch takes seconds to import and --list does not need it.
    from variants import OURS, STOCK_PLANS

    return [*STOCK_PLANS, OURS]


def command(
    case: Case, plans: Sequence[str], repeats: int, backend: str, report: Path
) -> list[str]:
    """The command line that runs one case, and writes its report there."""
    return [
        *(sys.executable, str(HERE / "netlab.py"), "-n", str(case.ranks), "--rate", case.rate),
        *("--", sys.executable, str(HERE / "block.py"), "--plans", ",".join(plans)),
        *("--grid", ",".join(case.grids), "--batch", str(case.batch), "--seq", str(case.seq)),
        *("--hidden", str(case.hidden), "--heads", str(case.heads)),
        *("--layers", str(case.layers), "--repeats", str(repeats)),
        *("--backend", backend, "--json", str(report)),
    ]


def run_to_its_end(arguments: Sequence[str], env: dict[str, str]) -> int:
    """Run a program; when this one is asked to end, wait until that one has cleaned up."""
    process = subprocess.Popen(arguments, env=env)
    try:
        return process.wait()
    except netlab.Stopped:
        process.terminate()
        process.wait()
        raise


def run_case(case: Case, plans: Sequence[str], repeats: int, backend: str) -> dict[str, Any]:
    """Run one case, again if a process was killed; returns its report, or says what failed."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT))))
    began = time.monotonic()
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        for attempt in (1, 2):
            status = run_to_its_end(command(case, plans, repeats, backend, report), env)
            # netlab says 128 + n for a process that signal n ended.
            if status <= 128:
                break
            what = f"attempt {attempt}: a process was ended by signal {status - 128}"
            print(f"compare: {case.name}, {what}", flush=True)
            notes.append(what)
        result: dict[str, Any] = {"settings": settings(case, plans, repeats, backend)}
        if status == 0:
            result |= json.loads(report.read_text())
        else:
            result["failed"] = f"exit status {status}"
    return result | {
        "notes": notes,
        "date": now(),
        "commit": commit(),
        "took_seconds": round(time.monotonic() - began, 1),
    }


def settings(case: Case, plans: Sequence[str], repeats: int, backend: str) -> dict[str, Any]:
    """What a case was run with, as it reads after a trip through JSON."""
    wanted = {**asdict(case), "plans": list(plans), "repeats": repeats, "backend": backend}
    return json.loads(json.dumps(wanted))


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """The git commit of this directory, with "-dirty" where files differ from it."""
    said = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return said.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """What the measurements were made on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "congestion_control": netlab.CONGESTION_CONTROL,
    }


def load(path: Path) -> dict[str, Any]:
    """The results written there before; a new set where there are none.

    Raises SystemExit where they were measured on another machine or with another torch.
    """
    from torch import __version__ as torch_version

    fresh = {"date": now(), "machine": machine(), "torch": str(torch_version), "cases": {}}
    if not path.exists():
        return fresh
    found = json.loads(path.read_text())
    for key in ("machine", "torch"):
        if found[key] != fresh[key]:
            raise SystemExit(
                f"{path} has results of another {key}: {found[key]}; here it is {fresh[key]}. "
                "Choose another --out"
            )
    return found


def save(results: dict[str, Any], path: Path) -> None:
    """Write the results whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def is_done(found: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    """Whether these results of a case are of just these settings, and complete."""
    return found is not None and "failed" not in found and found["settings"] == wanted


def chosen(patterns: Sequence[str], quick: bool) -> list[Case]:
    """The cases whose names match a pattern; all of them, or the quick ones, without one."""
    if not patterns:
        return list((quick_cases() if quick else all_cases()).values())
    cases = all_cases() | quick_cases()
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in cases):
            raise SystemExit(f"no case {pattern}; --list shows them")
    return [c for c in cases.values() if any(fnmatch(c.name, pattern) for pattern in patterns)]


def run_cases(
    cases: Sequence[Case],
    plans: Sequence[str],
    repeats: int,
    backend: str,
    results: dict[str, Any],
    path: Path,
) -> list[str]:
    """Run the cases that are not in the results yet, writing each; returns those that failed."""
    failed = []
    for number, case in enumerate(cases, 1):
        print(f"\n{case.name} ({number} of {len(cases)})", flush=True)
        wanted = settings(case, plans, repeats, backend)
        if is_done(results["cases"].get(case.name), wanted):
            print(f"in {path} already", flush=True)
            continue
        result = run_case(case, plans, repeats, backend)
        results["cases"][case.name] = result
        save(results, path)
        if "failed" in result:
            print(f"compare: {case.name} failed: {result['failed']}", file=sys.stderr, flush=True)
            failed.append(case.name)
        else:
            print(f"took {result['took_seconds']:.0f} s", flush=True)
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare all plans in many cases.")
    parser.add_argument("--out", type=Path, help="the results, JSON; what is there is kept")
    parser.add_argument(
        "--case", action="append", default=[], help="only these, by name or pattern ('m*')"
    )
    parser.add_argument("--quick", action="store_true", help="only a two-minute subset")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--plans", help="instead of all, joined by commas (see block.py)")
    parser.add_argument("--repeats", type=int, help="rounds (5; 2 with --quick)")
    parser.add_argument("--hidden", type=int, help="another width of the model, for a trial")
    parser.add_argument("--seq", type=int, help="other tokens of a sequence, for a trial")
    parser.add_argument("--backend", default="gloo", help="see block.py (gloo)")
    parser.add_argument("--plot", type=Path, help="also draw the results there (see plot.py)")
    args = parser.parse_args(argv)
    if args.out is None and not args.list:
        parser.error("--out: where do the results go?")
    if args.repeats is None:
        args.repeats = 2 if args.quick else 5
    if args.repeats < 2:
        parser.error("--repeats: one round says nothing of what the next would")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit status, 1 when one of them failed."""
    args = parse(argv)
    cases = chosen(args.case, args.quick)
    trial = {k: v for k, v in (("hidden", args.hidden), ("seq", args.seq)) if v is not None}
    cases = [Case(**{**asdict(case), **trial}) for case in cases]
    if args.list:
        for case in cases:
            print(
                f"{case.name:24} {case.ranks} ranks, links {label(case.rate)}, "
                f"grids {', '.join(case.grids)}, hidden {case.hidden}, heads {case.heads}, "
                f"sequence {case.seq}, batch {case.batch}"
            )
        return 0
    try:
        netlab.check_machine()
    except netlab.NetlabError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    sys.path.append(str(ROOT))
    for signum in netlab.STOP_SIGNALS:
        signal.signal(signum, netlab.stop_on_signal)
    plans = args.plans.split(",") if args.plans else default_plans()
    results = load(args.out)
    try:
        failed = run_cases(cases, plans, args.repeats, args.backend, results, args.out)
    except netlab.Stopped as stopped:
        print(f"compare: stopped by {stopped}; the same command resumes", file=sys.stderr)
        return 128 + stopped.signum
    if args.plot:
        from plot import draw

        draw(results, args.plot)
    if failed:
        print(f"compare: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
