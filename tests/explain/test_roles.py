"""Who uses which ranks for what, in as few lines as a strategy has differences."""

from __future__ import annotations

import pytest

from fxpar.explain.roles import module_roles
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from tests.captured import llama

TABLES = {
    "tp2+sp": ["all x1: tp+sp"],
    "tp2+sp[layers.{0-1}: cp2; layers.3: +remat]": [
        "embedding x1: tp+sp",
        "layers.{0-1} x2: cp",
        "layers.2 x1: tp+sp",
        "layers.3 x1: tp+sp, remat",
        "norm x1: tp+sp",
        "head x1: tp+sp",
    ],
    "tp2[layers.{0,2-3}.attention: rows2+zero1; embedding: cp2]": [
        "embedding x1: cp",
        "layers.{0,2-3}.attention_norm x3: tp",
        "layers.{0,2-3}.attention x3: rows, zero1",
        "layers.{0,2-3}.ffn_norm x3: tp",
        "layers.{0,2-3}.ffn x3: tp",
        "layers.1 x1: tp",
        "norm x1: tp",
        "head x1: tp",
    ],
    "pp2.tp4+sp[layers: tp2.cp2]": [
        "embedding x1: tp+sp tp+sp",
        "layers x1: tp cp",
        "norm x1: tp+sp tp+sp",
        "head x1: tp+sp tp+sp",
    ],
}


@pytest.mark.parametrize("strategy", TABLES)
def test_modules_that_do_the_same_are_one_line(strategy):
    program = lower(pack_documents(llama(layers=4, heads=8, kv_heads=4).graph), strategy)
    lines = [
        f"{one.modules or 'all'} x{one.count}: {' '.join(one.roles)}"
        + (f", zero{one.zero}" if one.zero else "")
        + (f", {one.saves}" if one.saves else "")
        for one in module_roles(program)
    ]
    assert lines == TABLES[strategy]
