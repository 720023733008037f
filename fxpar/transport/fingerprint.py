"""Do all ranks carry out the same plan? Asked before the first byte moves."""

from __future__ import annotations

from collections import Counter

import torch

from fxpar.errors import FingerprintError
from fxpar.torch_api.since_2_13 import all_gather_single
from fxpar.transport.wire import PhaseOptions


def compare_fingerprints(name: str, fingerprint: bytes, wire: PhaseOptions, device: torch.device) -> None:
    """Gather 8 bytes of each rank. Raises FingerprintError that names the ranks that differ from most others."""
    mine = torch.tensor(list(fingerprint), dtype=torch.uint8, device=device)
    everyone = torch.empty(wire.world * 8, dtype=torch.uint8, device=device)
    try:
        all_gather_single(everyone, mine, group=wire.group)
    except (RuntimeError, ValueError) as error:
        raise wire.failed([rank for rank in range(wire.world)], error) from error
    prints = [bytes(row) for row in everyone.view(wire.world, 8).tolist()]
    common, count = Counter(prints).most_common(1)[0]
    if count == wire.world:
        return
    kinds: dict[bytes, list[int]] = {}
    for rank, value in enumerate(prints):
        kinds.setdefault(value, []).append(rank)
    if 2 * count > wire.world:
        odd = [rank for rank, value in enumerate(prints) if value != common]
        raise FingerprintError(name, f"the plan of rank(s) {_text(odd)} differs from that of all others")
    groups = "; ".join(_text(ranks) for ranks in kinds.values())
    raise FingerprintError(name, f"ranks have different plans (those with equal plans together): {groups}")


def _text(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
