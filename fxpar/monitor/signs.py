"""Which errors of torch say that a peer is missing rather than that this rank did something wrong."""

from __future__ import annotations

import torch.distributed as dist

from fxpar.errors import TransferError

# gloo raises plain RuntimeErrors, so the text must tell (torch 2.13; the first entry is in each of gloo's messages).
SIGNS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def looks_like_peer_loss(error: BaseException) -> bool:
    """True for what a collective, a send, a receive or the store raises when the other side is gone or late, and for an
    error that it caused.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, dist.DistError | TransferError):
            return True
        if isinstance(found, RuntimeError) and any(sign in str(found) for sign in SIGNS):
            return True
        found = found.__cause__ or found.__context__
    return False


def is_timeout(error: BaseException) -> bool:
    """True if an operation failed because its time was up, False if because the other side closed the connection."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def one_line(error: BaseException) -> str:
    """`Type: first line of its text`, without gloo's source line and advice and the C++ stack that torch appends."""
    line = (str(error).splitlines() or [""])[0]
    if line.startswith("[/"):
        line = line.partition("] ")[2] or line
    return f"{type(error).__name__}: {line.partition('. This is typically')[0][:300]}".rstrip(".")
