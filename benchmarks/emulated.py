"""Two nodes on one machine: network namespaces joined by a pair of virtual links, as slow as asked, two ranks in each.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NODES = ("fxpar-node0", "fxpar-node1")
LINKS = ("fxpar-veth0", "fxpar-veth1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
RANKS_PER_NODE = 2
WORLD = RANKS_PER_NODE * len(NODES)
PORT = 29611


def shell(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=check, capture_output=True, text=True)


def why_not() -> str | None:
    """Why this machine cannot emulate nodes."""
    if os.geteuid() != 0:
        return "it needs root to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"it needs {' and '.join(missing)} (package iproute2)"
    return None


@contextmanager
def emulated_nodes(mbit: float | None) -> Iterator[None]:
    """Namespaces joined by a link of `mbit` Mbit/s per direction (None: as fast as it is); removed afterwards."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that they are removed then, too
    remove_nodes()
    try:
        for node in NODES:
            shell("ip", "netns", "add", node)
        shell("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for node, link, address in zip(NODES, LINKS, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", node)
            shell("ip", "link", "set", link, "netns", node)
            shell(*inside, "ip", "addr", "add", f"{address}/24", "dev", link)
            shell(*inside, "ip", "link", "set", "lo", "up")
            shell(*inside, "ip", "link", "set", link, "up")
            if mbit is not None:
                limit = ("rate", f"{mbit:.0f}mbit", "burst", "256kb", "latency", "50ms")
                shell(*inside, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield
    finally:
        remove_nodes()


def remove_nodes() -> None:
    """Deleting a namespace deletes the link in it, and with it the other end."""
    for node in NODES:
        shell("ip", "netns", "del", node, check=False)
    shell("ip", "link", "del", LINKS[0], check=False)


def run_ranks(script: str, words: Sequence[str], timeout_s: float = 600) -> str:
    """What rank 0 printed of `script words --rank R` on all ranks. Raises SystemExit if it failed."""
    ranks = [_start(rank, script, words) for rank in range(WORLD)]
    try:
        output, _ = ranks[0].communicate(timeout=timeout_s)
        for process in ranks[1:]:
            process.wait(60)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    if ranks[0].returncode:
        raise SystemExit("rank 0 failed; see its error above")
    return output


def _start(rank: int, script: str, words: Sequence[str]) -> subprocess.Popen[str]:
    node = rank // RANKS_PER_NODE
    env = {
        **os.environ,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "GLOO_SOCKET_IFNAME": LINKS[node],
        "OMP_NUM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", NODES[node], sys.executable, script, *words, "--rank", str(rank)]
    out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdout=out, text=True)


def sent_bytes() -> int:
    """What the node of this process has sent over the link so far."""
    for link in LINKS:
        counter = Path(f"/sys/class/net/{link}/statistics/tx_bytes")
        if counter.exists():
            return int(counter.read_text())
    return 0
