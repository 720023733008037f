"""HotSPa's Figure 8: bytes against the published ones, which are whole GB."""

from __future__ import annotations

import pytest

from fxpar.search.published import A800, FIGURE_8_GB
from fxpar.search.simulate_switches import figure_8
from tests.switch.large import STRATEGIES, layouts_32b


def _name(text: str) -> str:
    degrees = {part.rstrip("0123456789"): part.lstrip("abcdefghijklmnopqrstuvwxyz") for part in text.split(".")}
    return f"{degrees['dp']}.{degrees['tp']}.{degrees['pp']}"


@pytest.fixture(scope="module")
def found():
    layouts = {_name(text): layouts_32b()[short] for short, text in STRATEGIES.items()}
    return figure_8(layouts, ("hotspa", "relay"), what=("weights",))


def test_bytes_are_the_published_ones(found):
    assert len(found) == 2 * len(FIGURE_8_GB) == 40
    for one in found:
        data = one.to_json()
        assert data["published_gb"]
        for kind, printed in data["published_gb"].items():
            assert abs(data[f"{kind}_bytes"] / 1e9 - printed) <= max(0.01 * printed, 0.5), (one, kind)


def test_fusion_saves_the_latency_of_messages(found):
    for one in found:
        assert one.messages <= one.slices
        least_s = one.max_send_bytes / (A800.intra_gb_per_s * 1e9)
        assert least_s <= one.fused_s <= one.unfused_s
        assert (one.fused_s < one.unfused_s) == (one.messages < one.slices)
