#!/usr/bin/env python3
"""Run one program on N small hosts joined by links of a chosen speed.

    python benchmarks/netlab.py -n 4 --rate 200mbit [--delay 1ms] -- python train.py ARG...

Each host is a network namespace with one interface, ``eth0``, and its own address. A bridge joins
them. ``tc`` shapes every link both ways: a host sends at most RATE and receives at most RATE, and
DELAY is added to each packet on its way. A program started here moves its collectives over real
sockets at a real, chosen bandwidth, so that communication costs a few CPU cores what it costs a
GPU on a cluster. Hosts use TCP as Linux does by default (CUBIC), whatever this machine is set to.

Every host runs the command with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK=0``, ``MASTER_ADDR``,
``MASTER_PORT``, ``GLOO_SOCKET_IFNAME`` and ``OMP_NUM_THREADS`` set, as torchrun would set them on
N nodes of one process each, and ``NETLAB_RATE``. Rank 0's output is shown, the others' goes to
log files. With the rate ``none`` the links are as fast as this machine makes them.

The exit status is the worst one among the ranks that ended by themselves (128 + the signal for
one that was killed), 124 after ``--timeout``, 2 when the links could not be made. When one rank
fails, the others are given ``--grace`` seconds before they are stopped.

Needs Linux, root and iproute2 (``apt-get install iproute2``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

INTERFACE = "eth0"
PREFIX = "netlab"
# The bridge lives in a namespace too, so nothing of a run is visible outside it, two runs at once
# can use the same addresses, and deleting the namespaces deletes everything.
SWITCH = "switch"
MAX_HOSTS = 254
UNSHAPED = "none"
CONGESTION_CONTROL = "cubic"
"""Linux's default. By BBR, which some hosts are set to, many connections at once leave a link idle
at times: 8 x 1 at 200 Mbit/s took 1.13 times as long."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NetlabError(Exception):
    """The hosts could not be made; the message says why and what to do."""


class Stopped(Exception):
    """A signal asked this program to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def host_address(rank: int) -> str:
    """The address of the host that runs ``rank``."""
    return f"10.77.0.{rank + 1}"


def run_tool(*command: str) -> None:
    """Run one ``ip`` or ``tc`` command, or raise a NetlabError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise NetlabError(f"`{' '.join(command)}` failed: {said}")


def check_machine() -> None:
    """Raise a NetlabError unless this machine lets us make namespaces."""
    if not sys.platform.startswith("linux"):
        raise NetlabError(f"network namespaces need Linux, this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetlabError(
            f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise NetlabError("network namespaces need root: run this program with sudo")


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def remove_leftovers() -> None:
    """Delete the namespaces of earlier runs that were killed before they could clean up."""
    for name in namespaces():
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdigit() and not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def shape(namespace: str, device: str, rate: str, delay: str) -> None:
    """Let ``device`` send no faster than ``rate``, each packet ``delay`` late."""
    if rate == UNSHAPED:
        return
    tc = ("tc", "-netns", namespace, "qdisc", "add", "dev", device)
    # The burst must hold a whole 64 KiB offloaded segment, or the bucket drops it.
    run_tool(*tc, *"root handle 1: tbf burst 256kb latency 400ms rate".split(), rate)
    if delay.rstrip("smun").strip("0."):
        try:
            run_tool(*tc, *"parent 1:1 handle 10: netem limit 100000 delay".split(), delay)
        except NetlabError as error:
            raise NetlabError(f"{error} (--delay needs a kernel with the netem qdisc)") from None


def set_congestion_control(namespace: str) -> None:
    """Let TCP in ``namespace`` go by :data:`CONGESTION_CONTROL`, or say that it cannot.

    Some hosts do not allow it to namespaces before they have gone by it themselves.
    """
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    write = f"echo {CONGESTION_CONTROL} > {setting}"
    try:
        run_tool("ip", "netns", "exec", namespace, "sh", "-c", write)
    except NetlabError:
        own = Path(setting).read_text().strip()
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().strip()
        print(
            f"netlab: TCP goes by {own}, with other times than by {CONGESTION_CONTROL}, which this "
            f"machine does not let namespaces take: sysctl -w "
            f"net.ipv4.tcp_allowed_congestion_control='{allowed} {CONGESTION_CONTROL}' allows it",
            file=sys.stderr,
        )


@contextmanager
def network(hosts: int, rate: str, delay: str) -> Iterator[list[str]]:
    """Make the hosts and their links; yields the namespaces in rank order and removes them."""
    run = f"{PREFIX}-{os.getpid()}"
    switch = f"{run}-{SWITCH}"
    names = [f"{run}-{rank}" for rank in range(hosts)]
    with ExitStack() as cleanup:
        for name in (switch, *names):
            cleanup.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True)
            run_tool("ip", "netns", "add", name)
        for name in names:
            set_congestion_control(name)
        run_tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run_tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            run_tool(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", INTERFACE, "netns", name),
            )
            run_tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run_tool(
                *("ip", "-n", name, "address", "add", f"{host_address(rank)}/24"),
                *("dev", INTERFACE),
            )
            run_tool("ip", "-n", name, "link", "set", INTERFACE, "up")
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            # A device only shapes what it sends, so the switch's end shapes what a host receives.
            # The delay is put on one end only: once per packet, not twice.
            shape(name, INTERFACE, rate, delay)
            shape(switch, port, rate, "0ms")
        yield names


def rank_environment(rank: int, hosts: int, port: int, rate: str) -> dict[str, str]:
    """The environment of one rank: ours, plus what torchrun would set, and the links' rate."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(hosts),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=host_address(0),
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME=INTERFACE,
        NETLAB_RATE=rate,
    )
    return env


@contextmanager
def processes(
    command: Sequence[str], names: Sequence[str], port: int, rate: str, log_dir: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the command on every host; whatever still runs at the end is killed."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        started = []
        for rank, name in enumerate(names):
            out = None
            if rank:
                out = cleanup.enter_context((log_dir / f"rank{rank}.log").open("wb"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=rank_environment(rank, len(names), port, rate),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                # A process group of its own, so that a rank's own children can be ended with it. No
                # session: Linux may share out the processors by session (autogroup), and a rank's
                # transfers would wait for the rank's own turn, which its computing has used up.
                preexec_fn=os.setpgrp,
            )
            cleanup.callback(end, process, signal.SIGKILL)
            started.append(process)
        yield started


def end(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Signal a rank and all its children; after SIGKILL also wait for it."""
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        pass
    if signum == signal.SIGKILL:
        process.wait()


def wait_for(
    ranks: Sequence[subprocess.Popen[bytes]], timeout: float | None, grace: float
) -> dict[int, int]:
    """Wait for the ranks; returns the exit status of those that ended by themselves.

    A rank that fails leaves the others waiting in a collective for minutes, so they are stopped
    ``grace`` seconds after the first failure.
    """
    statuses: dict[int, int] = {}
    deadline = None if timeout is None else time.monotonic() + timeout
    failed_at = None
    while len(statuses) < len(ranks):
        for rank, process in enumerate(ranks):
            code = process.poll()
            if code is not None and rank not in statuses:
                statuses[rank] = code if code >= 0 else 128 - code
        now = time.monotonic()
        if failed_at is None and any(statuses.values()):
            failed_at = now
        if failed_at is not None and now > failed_at + grace:
            break
        if deadline is not None and now > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return statuses


def report_failures(statuses: Mapping[int, int], log_dir: Path) -> None:
    """Say on stderr which ranks failed, and show how the log of the first of them ends.

    ``statuses`` is in the order in which the ranks ended. What fails after the first rank mostly
    fails because of it.
    """
    failed = [rank for rank, status in statuses.items() if status]
    for rank in failed:
        print(f"netlab: rank {rank} ended with status {statuses[rank]}", file=sys.stderr)
    if failed and failed[0]:
        log = log_dir / f"rank{failed[0]}.log"
        lines = log.read_text(errors="replace").splitlines()[-15:]
        print(f"netlab: the end of {log}:", *lines, sep="\n  ", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Run one program on N network namespaces joined by links of a chosen speed.",
        epilog="Example: netlab.py -n 4 --rate 200mbit -- python benchmarks/block.py",
    )
    parser.add_argument("-n", "--hosts", type=int, default=4, help="hosts, one rank each (4)")
    parser.add_argument(
        "-r", "--rate", default="1gbit", help="of each link, as tc writes it, or none (1gbit)"
    )
    parser.add_argument("-d", "--delay", default="0ms", help="of each packet, one way (0ms)")
    parser.add_argument("--port", type=int, default=29555, help="MASTER_PORT (29555)")
    parser.add_argument("--timeout", type=float, help="seconds after which all ranks are stopped")
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds left to the others after a failure (5)"
    )
    parser.add_argument("--log-dir", type=Path, help="for the output of ranks above 0 (temporary)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs, after --")
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    if not args.command:
        parser.error("no command: put it after --")
    if args.rate == UNSHAPED and args.delay != parser.get_default("delay"):
        parser.error("--delay needs a --rate")
    if not 1 <= args.hosts <= MAX_HOSTS:
        parser.error(f"--hosts must be 1 to {MAX_HOSTS}")
    return args


def stop_on_signal(signum: int, frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that the namespaces are removed on the way out."""
    for other in STOP_SIGNALS:  # A second one must not cut the cleaning up short.
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parse(argv)
    for signum in STOP_SIGNALS:
        signal.signal(signum, stop_on_signal)
    log_dir = args.log_dir or Path(tempfile.gettempdir(), f"{PREFIX}-{os.getpid()}")
    try:
        check_machine()
        remove_leftovers()
        with (
            network(args.hosts, args.rate, args.delay) as names,
            processes(args.command, names, args.port, args.rate, log_dir) as ranks,
        ):
            statuses = wait_for(ranks, args.timeout, args.grace)
    except NetlabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except TimeoutError:
        print(f"netlab: not done after {args.timeout:g} s; logs: {log_dir}", file=sys.stderr)
        return 124
    except Stopped as stopped:
        print(f"netlab: stopped by {stopped}", file=sys.stderr)
        return 128 + stopped.signum
    report_failures(statuses, log_dir)
    worst = max(statuses.values())
    if not worst and args.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
