"""Who is missing: a heartbeat per rank, and the search for the rank that a failed collective waited for."""

from fxpar.monitor.monitor import Monitor, unwatched
from fxpar.monitor.signs import looks_like_peer_loss
from fxpar.monitor.standing import print_and_exit

__all__ = ["Monitor", "looks_like_peer_loss", "print_and_exit", "unwatched"]
