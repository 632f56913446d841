"""Sockets between the ranks of a group, by which they find out which rank is missing.

A collective that fails says neither which rank it waited for nor why, and its group cannot be used
afterwards. On these sockets a rank that gives up tells the others so, and what a rank sent before
its process ended can still be read.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from .groups import gather_facts

__all__ = ["Message", "Wires", "name_ranks"]

Message = dict[str, Any]
"""A message, sent as JSON."""

_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 16
_ADDRESS_BYTES = 256


class _Peer:
    """The wire to one rank."""

    def __init__(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire = wire
        self.closed = False
        self._incoming, self._outgoing = bytearray(), bytearray()

    def put(self, data: bytes) -> None:
        """Send now, or later if the socket does not take it yet."""
        self._outgoing += data
        self.send()

    def send(self) -> None:
        try:
            while self._outgoing and not self.closed:
                del self._outgoing[: self.wire.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            # The peer may have sent something before it closed: only receive() sets closed.
            self._outgoing.clear()

    def receive(self) -> None:
        try:
            while data := self.wire.recv(1 << 16):
                self._incoming += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    @property
    def waits_to_send(self) -> bool:
        return bool(self._outgoing) and not self.closed

    def take(self) -> Message | None:
        """The next message, if all of it has come."""
        if len(self._incoming) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message: Message = json.loads(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return message


class Wires:
    """A socket to each other rank of a group, made by all of its ranks together.

    One collective on the group exchanges the ranks' addresses: that of the interface that
    ``GLOO_SOCKET_IFNAME`` names, else that of the host's name, as gloo does. A rank that connects
    has to present a random token which that collective brought it.

    Args:
        device: the device of the tensors that the group takes.
        limit: seconds within which all ranks have to be connected.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, limit: float) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.index = group.rank()
        end = time.monotonic() + limit
        with _listener() as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            mine = json.dumps([*listener.getsockname(), token.hex()]).encode()
            sent = torch.tensor(list(mine.ljust(_ADDRESS_BYTES)), dtype=torch.uint8, device=device)
            addresses = gather_facts(sent, group).view(group.size(), -1).tolist()
            wires: dict[int, socket.socket] = {}
            for index, address in enumerate(addresses[: self.index]):
                host, port, theirs = json.loads(bytes(address))
                wire = socket.create_connection((host, port), max(end - time.monotonic(), 0.1))
                wire.sendall(bytes.fromhex(theirs) + _LENGTH.pack(self.index))
                wires[index] = wire
            while len(wires) < len(self.ranks) - 1:
                listener.settimeout(max(end - time.monotonic(), 0.1))
                wire, _ = listener.accept()
                wire.settimeout(max(end - time.monotonic(), 0.1))
                greeting = wire.recv(_TOKEN_BYTES + _LENGTH.size, socket.MSG_WAITALL)
                if secrets.compare_digest(greeting[:_TOKEN_BYTES], token):
                    wires[_LENGTH.unpack(greeting[_TOKEN_BYTES:])[0]] = wire
                else:
                    wire.close()
        self.peers = {self.ranks[index]: _Peer(wires[index]) for index in sorted(wires)}
        self._selector = selectors.DefaultSelector()
        for peer in self.peers.values():
            self._selector.register(peer.wire, selectors.EVENT_READ, peer)

    def __del__(self) -> None:
        for peer in getattr(self, "peers", {}).values():
            peer.wire.close()

    @property
    def rank(self) -> int:
        return self.ranks[self.index]

    def tell(self, message: Message) -> None:
        """Send to every other rank, without waiting."""
        data = json.dumps(message).encode()
        for peer in self.peers.values():
            peer.put(_LENGTH.pack(len(data)) + data)

    def exchange(self, mine: Message, limit: float) -> dict[int, Message]:
        """Send ``mine`` to every rank and return every rank's message, this one's included.

        Returns after ``limit`` seconds without the messages that have not come, and at once if a
        missing one cannot come any more (:attr:`closed`).
        """
        self.tell(mine)
        heard = {self.rank: mine}
        end = time.monotonic() + limit
        while True:
            for rank, peer in self.peers.items():
                if rank not in heard and (message := peer.take()) is not None:
                    heard[rank] = message
            missing = self.peers.keys() - heard.keys()
            waiting = any(peer.waits_to_send for peer in self.peers.values())
            if not (missing or waiting) or missing & self.closed or time.monotonic() > end:
                return heard
            self._attend(end)

    def listen(self, end: float) -> list[tuple[int, Message]]:
        """``(rank, message)`` for what has come; waits until ``end`` at most if nothing has."""
        self._attend(end)
        heard = []
        for rank, peer in self.peers.items():
            while (message := peer.take()) is not None:
                heard.append((rank, message))
        return heard

    @property
    def closed(self) -> set[int]:
        """The ranks whose end of the wire is closed: their processes have ended."""
        return {rank for rank, peer in self.peers.items() if peer.closed}

    def _attend(self, end: float) -> None:
        for peer in self.peers.values():
            events = selectors.EVENT_READ if not peer.closed else 0
            events |= selectors.EVENT_WRITE if peer.waits_to_send else 0
            self._watch(peer, events)
        for key, events in self._selector.select(max(end - time.monotonic(), 0.0)):
            if events & selectors.EVENT_READ:
                key.data.receive()
            if events & selectors.EVENT_WRITE:
                key.data.send()

    def _watch(self, peer: _Peer, events: int) -> None:
        known = self._selector.get_map().get(peer.wire)
        if known is not None and not events:
            self._selector.unregister(peer.wire)
        elif known is not None and known.events != events:
            self._selector.modify(peer.wire, events, peer)


def _listener() -> socket.socket:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return socket.create_server((_address_of(name), 0))
    try:
        return socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    import fcntl  # here, as there is none on Windows

    get_address = 0x8915  # SIOCGIFADDR, as in linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        answer = fcntl.ioctl(some, get_address, struct.pack("256s", interface[:15].encode()))
    return socket.inet_ntoa(answer[20:24])


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``, for messages."""
    ordered = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])
    ]
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(named)}"
