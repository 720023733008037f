"""Constants that FlexSP's authors published for their models, as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxpar.errors import UnknownRoundCostError
from fxpar.rounds.cost import RoundCost, read_cost

# 8 nodes of 8 A100-40GB with NVLink inside and 400 Gb/s of InfiniBand between; GPT models of 64 heads. From the open
# branch `flexsp` of PKU-DAIR/Hetu-Galvatron (commit b466689): times in ms, memory for 32 and 64 devices, parameters at
# contexts of 4K, 192K and 384K, bandwidths as profiled with rows of 4K tokens over two InfiniBand adapters.
# Per token and layer, 4 all-to-alls (q, k, v, output) of `hidden` bf16 numbers, forward and backward.
_BANDWIDTH = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
_4K, _192K, _384K = 4096, 192 * 1024, 384 * 1024


def _sent_mib(layers: int, hidden: int) -> float:
    return 8 * layers * hidden * 2 / 2**20


_7B = RoundCost(
    square_ms=5.128e-6,
    token_ms=0.18396,
    fixed_ms=629.36,
    token_mib=4.4804,
    sent_mib=_sent_mib(32, 4096),
    gi_parameters={_4K: 6.51, _192K: 7.117, _384K: 7.850},
    mib_per_ms=_BANDWIDTH,
    heads=64,
)
PUBLISHED = {
    "flexsp-7b": _7B,
    "flexsp-13b": replace(
        _7B,
        square_ms=9.285e-6,
        token_ms=0.30602,
        fixed_ms=1132.56,
        token_mib=4.2204,
        sent_mib=_sent_mib(40, 5120),
        gi_parameters={_4K: 12.357, _192K: 13.116, _384K: 14.032},
    ),
    "flexsp-30b": replace(
        _7B,
        square_ms=15.426e-6,
        token_ms=0.80357,
        fixed_ms=2789.36,
        token_mib=3.4174,
        sent_mib=_sent_mib(60, 6656),
        gi_parameters={_4K: 30.538, _192K: 31.525, _384K: 32.715},
    ),
}


def cost_of(text: str) -> RoundCost:
    """The published one of this name, or that of a JSON file. Raises UnknownRoundCostError, RoundCostError."""
    if text in PUBLISHED:
        return PUBLISHED[text]
    if text.endswith(".json") or Path(text[:4000]).is_file():
        return read_cost(text)
    raise UnknownRoundCostError(text, PUBLISHED)
