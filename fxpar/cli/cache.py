"""Captured and lowered graphs, and answers about them, kept between commands and found again by the content of all
that they depend on.

An entry belongs to the words that name a model, the versions of torch, transformers and Python, and the content of
fxpar's own source. Which files a model comes from is only known after it was loaded, so it is written down then, with
their hashes, in a manifest; an entry counts while none of them has changed. What a model's code reads besides (data,
environment variables) is not seen: `--no-cache`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fxpar
from fxpar.data.cache import cache_key, default_cache_dir
from fxpar.errors import FxparWarning, GraphFileError, GraphFormatError, OutputError, warn
from fxpar.graph_files.file import load_value, read_header, save_value

if TYPE_CHECKING:
    from fxpar.models import LoadedModel

MOST_ENTRIES = 300
_ANSWER = ".answer"
_PACKAGES = ("torch", "transformers", "sympy", "scipy")


@dataclass(frozen=True)
class CaptureCache:
    """The entries of one model as the command line names it (`words`: JSON values)."""

    folder: Path
    words: Mapping[str, Any]

    @classmethod
    def of_user(cls, words: Mapping[str, Any]) -> CaptureCache:
        """In the folder for caches of this user."""
        return cls(default_cache_dir() / "graphs", {**words, "settings": _settings()})

    def find(self) -> str | None:
        """The id under which the entries of this model are, if it was captured before and its files are the same."""
        try:
            files = json.loads(self._manifest.read_text(encoding="utf-8"))["files"]
            if all(_digest(Path(path)) == digest for path, digest in files.items()):
                return self._id(files)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            pass
        return None

    def note(self, files: Iterable[Path]) -> str:
        """Write down which files the model comes from; the id of its entries."""
        digests = {str(path): _digest(path) for path in sorted(set(files))}
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manifest.write_text(json.dumps({"files": digests}), encoding="utf-8")
        return self._id(digests)

    def read(self, capture: str, what: Mapping[str, Any]) -> Any | None:
        """The entry, or None. Warnings of its making are issued again."""
        path = self._entry(capture, what)
        try:
            value = load_value(path)
            texts = read_header(path).get("warnings", ())
            path.touch()
        except (GraphFileError, OSError):
            return None
        for text in texts:
            warn(text)
        return value

    def write(self, capture: str, what: Mapping[str, Any], value: Any, texts: Iterable[str] = ()) -> None:
        """Keep an entry; where that cannot be, the next command builds it again."""
        with suppress(OSError, OutputError, GraphFormatError):
            save_value(self._entry(capture, what), value, {"kind": "cache", "warnings": list(texts)})
            self._prune()

    def read_answer(self, capture: str, what: Mapping[str, Any]) -> Any | None:
        """As `read`, of what `write_answer` has kept."""
        path = self._entry(capture, what).with_suffix(_ANSWER)
        try:
            texts, value = json.loads(zlib.decompress(path.read_bytes()))
            path.touch()
        except (OSError, ValueError, TypeError, zlib.error):
            return None
        for text in texts:
            warn(text)
        return value

    def write_answer(self, capture: str, what: Mapping[str, Any], value: Any, texts: Iterable[str] = ()) -> None:
        """As `write`, of JSON values, which no graph is made of: they are read in a tenth of the time."""
        path = self._entry(capture, what).with_suffix(_ANSWER)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            aside.write_bytes(zlib.compress(json.dumps([list(texts), value]).encode(), 1))
            aside.replace(path)
            self._prune()

    @property
    def _manifest(self) -> Path:
        return self.folder / f"{cache_key(self.words)}.json"

    def _id(self, files: Mapping[str, str]) -> str:
        return cache_key({**self.words, "files": dict(files)})

    def _entry(self, capture: str, what: Mapping[str, Any]) -> Path:
        return self.folder / f"{cache_key({'capture': capture, **what})}.fxpar"

    def _prune(self) -> None:
        found = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in found[:-MOST_ENTRIES]:
            path.unlink(missing_ok=True)


def recorded(build: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `build` returns, and the texts of fxpar's warnings meanwhile, which are issued all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = build()
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return value, [str(each.message) for each in caught if issubclass(each.category, FxparWarning)]


def model_files(model: LoadedModel, spec: str) -> Iterator[Path]:
    """Files that the model comes from: what its loader names; Python files that define its modules and its loss; of a
    user's function the file itself and all imported ones beside it or below the current folder, of a loader of another
    package all imported ones of that package.
    """
    yield from (path.resolve() for path in model.files)
    modules = {type(part).__module__ for part in model.model.modules()} | {getattr(model.loss_fn, "__module__", "")}
    own = Path(fxpar.__file__).parent
    skipped = (own, own.parent / "passes", Path(sysconfig.get_path("stdlib")), _folder_of("torch"))
    roots: list[Path] = []
    from fxpar.models.loaders import LOADERS, loader_of, prefix_of  # with all that makes models

    prefix = prefix_of(spec)
    if prefix is not None and prefix not in LOADERS.builtin:
        package = loader_of(prefix).__module__.partition(".")[0]  # type: ignore[attr-defined]
        modules |= {name for name in sys.modules if name.partition(".")[0] == package}
    elif ":" in spec and prefix is None:
        roots.append(Path.cwd())
        place = Path(spec.rpartition(":")[0])
        if place.suffix == ".py":
            roots.append(place.resolve().parent)
            yield place.resolve()
    for name, module in list(sys.modules.items()):
        if not roots and name not in modules:
            continue  # without a look at the disk: thousands are imported
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or not Path(file).is_file():
            continue
        path = Path(file).resolve()
        installed = "site-packages" in path.parts
        near = not installed and any(path.is_relative_to(root) for root in roots)
        wanted = near or name in modules
        if wanted and (installed or not any(path.is_relative_to(folder) for folder in skipped)):
            yield path


def _folder_of(package: str) -> Path:
    return Path(sys.modules[package].__file__ or "").parent


def _settings() -> dict[str, str]:
    """What decides a capture besides the words and the model's files."""
    found = {"python": platform.python_version(), "fxpar": _own_digest()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def _own_digest() -> str:
    """Hash of fxpar's source: a change of a rule or a pass makes other graphs."""
    total = hashlib.sha256()
    root = Path(fxpar.__file__).parent
    for path in sorted([*root.rglob("*.py"), *(root / "passes").glob("*.py")]):
        total.update(f"{path.relative_to(root)}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _digest(path: Path) -> str:
    """Hash of a file; of one that is not there, no hash."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
