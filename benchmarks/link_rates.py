#!/usr/bin/env python3
"""Time a step at link rates from slow to fast: the figures that tutorials/gpt2_tp2d.ipynb draws.

    sudo python benchmarks/link_rates.py --out benchmarks/results/link_rates.json

One GPT block, forward and backward, hidden 512, on 4 ranks, under the stock plans that a careful
user would take, weights kept, and on the grids 2 x 2 and 4 x 1, as they come and by
broadcast-multiply-roll. A quarter of an hour on two cores. The first cases have
m = tokens / hidden = 4 at five link rates; the last ones have ever fewer tokens, where weights are
larger than what they multiply. How a case is run and what is written:
``compare.py`` and ``block.py``; the same command again runs what is not there yet. Needs Linux,
root and iproute2.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import compare
import netlab
from compare import Case

PLANS = ("tp-input", "fsdp-kept", "fsdp-tp-kept", "fsdp-sp-kept", "tp2d", "tp2d:bmr")
RATES = ("100mbit", "200mbit", "500mbit", "1gbit", netlab.UNSHAPED)
# Sequences and their length, by m = tokens / hidden at hidden 512.
FEWER_TOKENS = {0.25: (4, 32), 1: (4, 128), 2: (4, 256)}


def link_rate_cases() -> list[Case]:
    """A case for each link rate, then one for each smaller number of tokens."""
    block = {"ranks": 4, "grids": ("2x2", "4x1"), "layers": 1}
    cases = [
        Case(compare.label(rate), rate=rate, batch=8, seq=256, **block)  # type: ignore[arg-type]
        for rate in RATES
    ]
    cases += [
        Case(f"m{m:g}", rate="200mbit", batch=batch, seq=seq, **block)  # type: ignore[arg-type]
        for m, (batch, seq) in FEWER_TOKENS.items()
    ]
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit status, 1 when one of them failed."""
    parser = argparse.ArgumentParser(description="Time a step at link rates from slow to fast.")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--repeats", type=int, default=4, help="rounds (4)")
    args = parser.parse_args(argv)
    try:
        netlab.check_machine()
    except netlab.NetlabError as error:
        print(f"link_rates: {error}", file=sys.stderr)
        return 2
    sys.path.append(str(compare.ROOT))
    for signum in netlab.STOP_SIGNALS:
        signal.signal(signum, netlab.stop_on_signal)
    results = compare.load(args.out)
    try:
        failed = compare.run_cases(
            link_rate_cases(), PLANS, args.repeats, "gloo", results, args.out
        )
    except netlab.Stopped as stopped:
        print(f"link_rates: stopped by {stopped}; the same command resumes", file=sys.stderr)
        return 128 + stopped.signum
    if failed:
        print(f"link_rates: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
