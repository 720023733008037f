"""What mkdocs calls while it builds the site.

- Pages link to files of the repository (`../README.md`, `../examples/my_model.py`), which works on any host of the
  repository; such files become part of the site, and the links are bent to where they are.
- `<!-- generated: NAME -->` in a page is replaced by the text of a generator, so no table goes stale.
- A built page that would load a script, a style or a font from elsewhere ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from generated import GENERATORS
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
# Pages of the site that lie at the top of the repository, under the name that they have in the site.
TOP = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
_UP = re.compile(r"(?<=\]\()\.\./([\w./-]+)")
_DOWN = re.compile(r"(?<=\]\()docs/")
_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what pages link to outside of docs/."""
    wanted = dict.fromkeys(TOP)
    for page in [*Path(config.docs_dir).glob("*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        wanted.update(dict.fromkeys(m[1] for m in _UP.finditer(text)))
        if page.name == "README.md":
            wanted.update(dict.fromkeys(re.findall(r"\]\(((?:examples/[\w.]+|LICENSE))\)", text)))
    for path in wanted:
        if not (ROOT / path).is_file():
            continue  # mkdocs reports the link
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return TOP.get(path, path if path.endswith((".md", ".py", ".toml")) else f"{path}.txt")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Bend links, fill in what is generated."""
    if page.file.src_uri in TOP.values():
        markdown = _DOWN.sub("", markdown)
        markdown = markdown.replace("](LICENSE)", f"]({site_path('LICENSE')})").replace(
            "](CHANGELOG.md)", "](changelog.md)"
        )
    markdown = _UP.sub(lambda m: site_path(m[1]), markdown)
    return _GENERATED.sub(lambda m: GENERATORS[m[1]](), markdown)


def loaded_from_elsewhere(html: str) -> list[str]:
    """Addresses of scripts, styles and pictures on other hosts."""
    return _LOADED.findall(html)


def on_post_build(config: MkDocsConfig) -> None:
    """The site opens without a network. Raises PluginError, which names the page and the address."""
    for page in Path(config.site_dir).rglob("*.html"):
        for address in loaded_from_elsewhere(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.name} loads {address}; the site must not need a network")
