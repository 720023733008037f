"""The pages as a whole: in the table of contents, in plain words, and no table stands in two of them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# Phrases that read as translated, with what to say instead.
PHRASES = {
    "after this page": "what the page is about",
    "lies as": "is sharded this way",
    "lie alike": "have the same placement",
    "lie otherwise": "have another placement",
    "want it otherwise": "need another placement",
    "wants it otherwise": "needs another placement",
    "cut over": "sharded over, split over",
    "inside of": "inside",
    "is no number": "is NaN",
    "are no numbers": "are NaN",
    "goes on from": "continues from",
    "goes on under": "continues under",
    "nobody": "no token, no package, nothing",
    "bit by bit": "bitwise equal",
    "usual figures": "typical figures",
    "what is refused": "not supported",
    "is to be": "should be",
    "told of": "reported",
    "is told at": "is reported at",
    "begin anew": "start again",
    "begins anew": "start again",
    "given anew": "given again",
    "in the mean ": "on average",
}
# Records keep the words of their day; the other page is made of messages.
AS_WRITTEN = {"decisions.md", "model_types.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in AS_WRITTEN])
def test_no_translated_phrases(page):
    prose = " ".join(re.sub(r"```.*?```|`[^`\n]*`", "", PAGES[page].read_text(), flags=re.DOTALL).lower().split())
    assert {phrase: better for phrase, better in PHRASES.items() if phrase in prose} == {}


def test_every_page_is_in_the_table_of_contents():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted({*PAGES, "changelog.md"} - {"README.md"})


def test_every_page_is_on_the_front_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["index.md"].read_text()))
    assert PAGES.keys() - {"README.md", "index.md"} <= linked


def rows(text: str) -> set[tuple[str, ...]]:
    """The rows of all tables of a page, below their headings, as cells without markup."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tables = re.findall(r"^\|[^\n]*\n\|[-| :]+\|\n((?:\|[^\n]*\n?)+)", prose, re.MULTILINE)
    lines = (line.strip().strip("|") for table in tables for line in table.splitlines())
    return {tuple(" ".join(re.sub(r"[`*]", "", cell).split()) for cell in line.split("|")) for line in lines}


def repeats(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether two rows say the same: the first cell, and half of the others that say anything."""
    equal = sum(one == other != "" for one, other in zip(a[1:], b[1:], strict=False))
    return a[0] == b[0] and 2 * equal >= max(len(a), len(b)) - 1


def test_no_row_stands_in_two_pages():
    found = {page: rows(path.read_text()) for page, path in PAGES.items()}
    twice = [
        (page, other, row)
        for page, other in itertools.combinations(found, 2)
        for row in found[page]
        if any(repeats(row, elsewhere) for elsewhere in found[other])
    ]
    assert twice == [], "keep one table, and link to it"


def test_rows_are_found():
    text = "| a | b |\n|---|---|\n| `x` | **1** |\n| y | 2 |\n\n```\n| z | 3 |\n|---|---|\n| w | 4 |\n```\n"
    assert rows(text) == {("x", "1"), ("y", "2")}
    assert repeats(("dp1", "128 MB", "130 MB", "1"), ("dp1", "128 MB", "130 MB", "1.00"))
    assert not repeats(("cleanup", "removes dead nodes"), ("cleanup", "what writes to memory stays"))
