"""Who is missing: a heartbeat per rank, and the search for the rank that a failed collective waited for."""

from fxpar.monitor.monitor import Monitor, unwatched
from fxpar.monitor.signs import looks_like_peer_loss

__all__ = ["Monitor", "looks_like_peer_loss", "unwatched"]
