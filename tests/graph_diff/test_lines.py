"""Nodes as lines: stable names, alignment by name, equal layers once."""

from __future__ import annotations

from fxpar.graph_diff.lines import Line, compare_sections
from fxpar.graph_diff.modules import ModulePlace
from tests.graph_diff.graphs import difference, lowered, side

HERE = ModulePlace("norm", "forward")


def section(*lines: str):
    return {HERE: tuple(Line(line.split()[0], line) for line in lines)}


def test_nothing():
    assert compare_sections(section("a", "b"), section("a", "b")) == []


def test_aligned_by_name():
    (diff,) = compare_sections(section("a", "b 1", "c 1", "d"), section("a", "b 2", "x", "c 2", "e"))
    assert [mark + text for mark, text in diff.lines] == [" a", "-b 1", "+b 2", "+x", "-c 1", "+c 2", "-d", "+e"]
    assert (diff.removed, diff.added, diff.changed) == (1, 2, 2)


def test_a_place_that_only_one_has():
    (diff,) = compare_sections({}, section("a", "b"))
    assert (diff.place, diff.lines, diff.added) == (HERE, (("+", "a"), ("+", "b")), 2)


def test_equal_layers_once():
    sections = difference("tp2", "tp2+sp").sections
    blocks = {section.place.part: section.blocks for section in sections if section.place.block.startswith("layers")}
    assert blocks["forward"] == ("layers.0", "layers.1", "layers.2")
    assert blocks["backward"] == ("layers.2", "layers.1", "layers.0")


def test_names_do_not_depend_on_what_stands_before():
    """A mask that is added shifts no name behind it: what tp2 and pp2.tp2 compute in the first layer is the same."""
    old, new = (side(strategy).sections[ModulePlace("layers.0", "forward")] for strategy in ("tp2", "pp2.tp2"))
    assert old == new
    names = [line.name for line in old]
    assert len(set(names)) == len(names)
    assert names[0] == "attention_norm.pow"
    assert "attention.q_proj.mm" in names


def test_no_flood():
    """Sequence parallelism changes lines and adds collectives; hardly a node counts as another one."""
    for section in difference("tp2", "tp2+sp").sections:
        assert section.removed <= 2


def test_names_of_other_places():
    texts = "\n".join(line.text for line in side("tp2").sections[ModulePlace("layers.1", "backward")])
    assert "%forward/attention.q_proj.reshape" in texts
    assert "%layers.2/" in texts
    assert "%forward/(root)/size" in texts
    assert "%attention.q_proj.weight" in texts
    assert "%layers.1" not in texts


def test_what_the_prologue_makes():
    """A gathered parameter has the name that it has where it is made."""
    from fxpar.graph_diff import digest
    from fxpar.lowering import lower
    from tests.graph_diff.graphs import logical

    sections = digest(lower(logical(), "dp2+zero1")).sections
    made = {line.name for place, lines in sections.items() if place.part == "prologue" for line in lines}
    used = "\n".join(line.text for line in sections[ModulePlace("layers.0", "forward")])
    assert made
    assert "%prologue/" in used
    assert lowered("dp2").prologue.is_empty
