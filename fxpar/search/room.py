"""How many tokens of a micro-batch fit into what a device has left, by predictions for just these."""

from __future__ import annotations

from fxpar.search.price import Priced, around

STEP = 0.01  # by so much fewer tokens are tried where memory was guessed too low
SHARE = 0.98  # of the way that a chord allows, as kernels take memory in blocks; half as much after a miss
WORTH = 0.004  # by so much more tokens are worth another prediction
CHORDS = 3  # predictions for more tokens, at most


def settled_tokens(one: Priced, room_bytes: int, least: int, guess: int, most: int) -> int | None:
    """The most tokens, `least` to `most`, of a micro-batch of a strategy that takes `room_bytes` beside masters and
    weights; `guess` is what `most_tokens` found on the line between two anchors. None if `least` need more.
    """
    tokens, above, share = guess, None, SHARE
    while one.at(tokens).beside_bytes > room_bytes:
        if tokens == least:
            return None
        tokens, above = max(least, int(tokens * (1 - STEP))), tokens
    # A peak is the largest of sums that grow evenly, so a chord from here to what holds more lies above it.
    for _ in range(CHORDS):
        far = above or around(one.anchors, tokens)[1]
        here, there = one.at(tokens).beside_bytes, one.at(far).beside_bytes
        way = (room_bytes - here) / (there - here) * (far - tokens) if there > room_bytes else most
        more = min(most, int(tokens + share * way))
        if more <= tokens * (1 + WORTH):
            break
        if one.at(more).beside_bytes <= room_bytes:
            tokens = more
        else:
            above, share = more, share / 2
    return tokens
