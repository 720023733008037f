"""What the pages are generated with: pictures are up to date, references are complete."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxpar import errors
from fxpar.ir import pass_registry

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "tools"))
    yield
    for name in ("pictures", "generated", "hooks"):
        sys.modules.pop(name, None)


def test_pictures_are_what_the_script_makes():
    import pictures

    for name, draw in pictures.PICTURES.items():
        svg = draw()
        assert (ROOT / "docs" / "assets" / name).read_text() == svg, f"run python docs/tools/pictures.py: {name}"
        ElementTree.fromstring(svg)


def test_every_pass_has_a_section():
    import generated

    text = generated.passes_reference()
    for name in pass_registry.BUILTIN:
        assert f". `{name}`\n" in text
    assert text.index("`insert_reshards`") < text.index("`lower_collectives`") < text.index("`accumulate_gradients`")
    assert "Options: `storage: torch.dtype | None = None`" in text
    assert "Tier `numeric`: may round differently. `fxpar.passes.casts.Casts`" in text


def test_every_error_has_a_row():
    import generated

    text = generated.errors_reference()
    known = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.FxparError | Warning)]
    assert len(known) > 100
    missing = [name for name in known if f"| `{name}` |" not in text]
    assert missing == []
    row = next(line for line in text.splitlines() if line.startswith("| `WorldSizeError`"))
    assert "needs &lt;needed&gt; ranks" in row


def test_a_page_that_the_build_fills_says_so_in_the_repository():
    import generated

    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        for name in re.findall(r"<!-- generated: (\w+) -->", text):
            assert name in generated.GENERATORS
            assert "in the repository it is empty" in text
            assert f"`make docs` writes it to `site/{page.stem}.html`" in text
            assert f"`python docs/tools/generated.py {name}`" in text


def test_what_a_page_loads_from_elsewhere_is_found():
    import hooks

    html = '<script src="https://a.b/c.js"></script> <link rel="x" href=//d.e/f.css> <a href="https://fine.org">'
    assert hooks.loaded_from_elsewhere(html) == ["https://a.b/c.js", "//d.e/f.css"]
    assert hooks.loaded_from_elsewhere('<script src="assets/a.js"></script><img src="a.png">') == []


def test_links_out_of_the_folder_are_bent():
    import hooks

    class Page:
        class file:
            src_uri = "cli.md"

    bent = hooks.on_page_markdown("[a](../README.md) [b](../examples/my_model.py) [c](train.md)", Page)
    assert bent == "[a](readme.md) [b](examples/my_model.py) [c](train.md)"
    Page.file.src_uri = "readme.md"
    assert hooks.on_page_markdown("[a](docs/cli.md) [l](LICENSE)", Page) == "[a](cli.md) [l](LICENSE.txt)"
