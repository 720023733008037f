"""What papers report, for comparison: HotSPa (SOSP 2024), its model, layouts and tables, and the machine it ran on.

Layouts are named as HotSPa names them, `dp.tp.pp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpar.cost.cluster import ClusterSpec

A800 = replace(ClusterSpec.from_file("a800"), nodes=4)
# What collectives of a layer sustain, GB/s per device: a ring over whole nodes uses all of their adapters at once, 100
# GB/s together. With these, and what a800.toml says of a device, prices are within 9 % (3.1 % in the mean square) of
# the times of a micro-batch of 1K to 32K tokens that Hydraulis (SIGMOD 2026) ships for six layouts of the same model.
# Nothing is fitted to HotSPa.
A800_COLLECTIVES = replace(A800, intra_gb_per_s=140.0, inter_gb_per_s=95.0)

# Four nodes of H20 that sustain the same shares of their data sheets as A800s do (290 and 180 of 312 TFLOP/s), with the
# same adapters: HSPMD (OSDI 2026) does not tell its network.
_H20 = ClusterSpec.from_file("h20")
_DEVICE = replace(_H20.sustained, tflops=148 * 290 / 312, attention_tflops=148 * 180 / 312)
H20 = replace(_H20, nodes=4, inter_gb_per_s=A800.inter_gb_per_s, device=_DEVICE)
H20_COLLECTIVES = replace(
    H20,
    intra_gb_per_s=H20.intra_gb_per_s * A800_COLLECTIVES.intra_gb_per_s / A800.intra_gb_per_s,
    inter_gb_per_s=A800_COLLECTIVES.inter_gb_per_s,
)
# Seconds of a step of the same model on them, 200,000 tokens of CommonCrawl of at most 32K each, as HSPMD reports them.
HSPMD_S = {"HSPMD": 12.56, "HotSPa": 19.56, "Megatron": 27.94}
HSPMD_TOKENS, HSPMD_LENGTHS = 200_000, "commoncrawl:32768"

MODEL_32B = {"dim": "6656", "heads": "64", "kv_heads": "64", "ffn": "17920", "vocab": "30592"}
LAYERS_32B = 60
STATIC = "1.16.2"
LAYOUTS = {
    "1.16.2": "pp2.tp16+sp",
    "2.8.2": "dp2.pp2.tp8+sp",
    "4.4.2": "dp4.pp2.tp4+sp",
    "4.2.4": "dp4.pp4.tp2+sp",
    "8.4.1": "dp8.tp4+sp",
}


# What HSPMD ran there, (tp, pp) of each pipeline: A is (16, 1) beside four of (4, 1), B is (8, 1) beside three of
# (4, 2); switched between steps by the longest sequence. Up to which it ran B is not published: here up to the length
# that HotSPa's artifact gives to eight devices.
HSPMD_SETS = {
    16 * 1024: ("B", "tp8+sp | pp2.tp4+sp | pp2.tp4+sp | pp2.tp4+sp"),
    32 * 1024: ("A", "tp16+sp | dp4.tp4+sp"),
}


@dataclass(frozen=True)
class Band:
    """Lengths above `low` up to `high` tokens, and the layout of the combination that has them as a group."""

    low: int
    high: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.low // 1024}-{self.high // 1024}K"


_K = 1024
EDGES = (1 * _K, 4 * _K, 8 * _K, 16 * _K, 32 * _K)  # of Table 3
SHORTEST_ROW = 4 * _K  # of the artifact's groups: its shortest bucket
_LONGEST = Band(16 * _K, 32 * _K, STATIC)
_SHORT, _MIDDLE = Band(0, 4 * _K, "4.2.4"), (Band(4 * _K, 8 * _K, "4.4.2"), Band(8 * _K, 16 * _K, "2.8.2"))
# Table 3: the groups of each combination, the longest last; they run as the artifact does, the longest layout's weights
# first, then from short to long.
COMBINATIONS = {
    "C1": (_SHORT, Band(4 * _K, 16 * _K, "2.8.2"), _LONGEST),
    "C2": (_SHORT, *_MIDDLE, _LONGEST),
    "C3": (Band(0, 1 * _K, "8.4.1"), Band(1 * _K, 4 * _K, "4.2.4"), *_MIDDLE, _LONGEST),
}
STATIC_S = {"CommonCrawl": (42.1, 12.5, 3.5, 2.9, 2.4), "GitHub": (34.9, 38.4, 25.0, 27.3, 53.0)}  # by band of EDGES
SPEEDUPS = {  # of groups, CommonCrawl and GitHub
    ("0-4K", "4.2.4"): (2.40, 2.78),
    ("0-1K", "8.4.1"): (3.28, 4.05),
    ("1-4K", "4.2.4"): (1.52, 2.24),
    ("4-8K", "4.4.2"): (1.29, 1.62),
    ("8-16K", "2.8.2"): (1.31, 1.35),
    ("4-16K", "2.8.2"): (1.18, 1.40),
    ("16-32K", "1.16.2"): (1.00, 1.00),
}
TOTALS = {"C1": (1.96, 1.50), "C2": (1.89, 1.50), "C3": (1.90, 1.49)}
OTHERS_S = {"C1": 1.8, "C2": 3.5, "C3": 4.9}  # switches and all else outside of the groups

# The 20 switches of Figure 8, in GB (1e9): what stays, inside nodes and between nodes under Algorithm 1, between nodes
# if a slice enters a node once. Worked out from the layouts by others; the figure itself has seconds, which are not
# published as text.
FIGURE_8_GB = {
    ("1.16.2", "2.8.2"): (8, 57, 65, 65),
    ("1.16.2", "4.4.2"): (16, 114, 130, 65),
    ("1.16.2", "4.2.4"): (16, 114, 130, 33),
    ("1.16.2", "8.4.1"): (16, 114, 390, 195),
    ("2.8.2", "1.16.2"): (8, 57, 0, 0),
    ("2.8.2", "4.4.2"): (33, 228, 0, 0),
    ("2.8.2", "4.2.4"): (33, 228, 0, 0),
    ("2.8.2", "8.4.1"): (33, 228, 260, 130),
    ("4.4.2", "1.16.2"): (16, 49, 0, 0),
    ("4.4.2", "2.8.2"): (33, 98, 0, 0),
    ("4.4.2", "4.2.4"): (65, 195, 0, 0),
    ("4.4.2", "8.4.1"): (260, 0, 260, 130),
    ("4.2.4", "1.16.2"): (16, 16, 33, 33),
    ("4.2.4", "2.8.2"): (33, 33, 65, 65),
    ("4.2.4", "4.4.2"): (65, 65, 130, 65),
    ("4.2.4", "8.4.1"): (65, 65, 390, 195),
    ("8.4.1", "1.16.2"): (16, 49, 0, 0),
    ("8.4.1", "2.8.2"): (33, 98, 0, 0),
    ("8.4.1", "4.4.2"): (260, 0, 0, 0),
    ("8.4.1", "4.2.4"): (65, 195, 0, 0),
}
