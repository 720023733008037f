"""HotSPa's Figure 8: messages of its switches, whose bytes tests/switch/test_volumes.py has."""

from __future__ import annotations

from fxpar.search.published import A800, LAYOUTS
from fxpar.search.simulate_switches import figure_8
from tests.switch.large import layouts_32b


def test_fusion_saves_the_latency_of_messages():
    layouts = dict(zip(LAYOUTS, layouts_32b().values(), strict=True))
    for one in figure_8(layouts, ("hotspa", "relay"), what=("weights",)):
        assert one.messages <= one.slices
        least_s = one.max_send_bytes / (A800.intra_gb_per_s * 1e9)
        assert least_s <= one.fused_s <= one.unfused_s
        assert (one.fused_s < one.unfused_s) == (one.messages < one.slices)
