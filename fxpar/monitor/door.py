"""Can this machine reach that one? A socket that listens on every rank, and an attempt to connect to it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

_MOST_AT_ONCE = 32


class Door:
    """A listening socket. Nobody says anything there: the kernel alone lets a connection through."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.bind((address, 0))
        self._socket.listen(128)
        self._socket.setblocking(False)
        self.name = f"{address}|{self._socket.getsockname()[1]}"

    def clear(self) -> None:
        """Drop the connections that were made."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def address_towards(store: dist.Store) -> str:
    """This machine's address on its way to the host of the store; the loopback if the store has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "127.0.0.1"
    for family, kind, protocol, _, address in socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it only looks for the way
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def try_doors(doors: Mapping[int, str], limit_s: float) -> tuple[int, ...]:
    """The ranks whose doors cannot be reached within `limit_s`."""

    def reach(door: str) -> bool:
        address, _, port = door.partition("|")
        try:
            socket.create_connection((address, int(port)), limit_s).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        reached = list(pool.map(reach, doors.values()))
    return tuple(rank for rank, good in zip(doors, reached, strict=True) if not good)
