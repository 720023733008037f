"""Which errors of torch say that a peer is missing rather than that this rank did something wrong."""

from __future__ import annotations

import torch.distributed as dist

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
    """True for what a collective, a send, a receive or the store raises when the other side is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def is_timeout(error: BaseException) -> bool:
    """True if an operation failed because its time was up, False if because the other side closed the connection."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
