"""Runs a script on several hosts that are network namespaces of this one machine.

    sudo python tutorials/two_hosts.py tutorials/tp2d_example.py --steps 4
    sudo python tutorials/two_hosts.py --nproc-per-node 4 --rate 1gbit \\
        tutorials/fsdp_tp2d_example.py

Each has an interface and an address of its own and a link to the others, and runs the torchrun
line that the nodes of a cluster run: a rehearsal, without the cluster. Host 0's output is shown,
and the exit status is the worst of theirs. Needs Linux, root and iproute2; the hosts are made by
``benchmarks/netlab.py``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import netlab

PORT = 29500


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--nproc-per-node", default="2", help="processes on each host")
    parser.add_argument("--rate", default=netlab.UNSHAPED, help="of the links, as tc writes it")
    parser.add_argument("--timeout", default="600", help="seconds after which all is stopped")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    args = parser.parse_args()
    if not args.command:
        parser.error("no script to run")
    # As on any cluster, but for the last line: these hosts share a name, from which torchrun would
    # tell the one where all meet, and its address.
    torchrun = (
        f"exec {shlex.quote(sys.executable)} -m torch.distributed.run"
        f" --nnodes {args.hosts} --nproc-per-node {args.nproc_per_node}"
        f" --rdzv-backend c10d --rdzv-endpoint {netlab.host_address(0)}:{PORT}"
        " --rdzv-conf is_host=$((RANK == 0)) --local-addr $(hostname -I) "
        + shlex.join(args.command)
    )
    options = ["--hosts", args.hosts, "--rate", args.rate, "--timeout", args.timeout]
    return netlab.main([*options, "--", "sh", "-c", torchrun])


if __name__ == "__main__":
    sys.exit(main())
