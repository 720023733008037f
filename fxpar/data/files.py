"""The files of a corpus folder: recursive, filtered by glob, in the order of their names."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"__pycache__"})


@dataclass(frozen=True)
class FileList:
    """Files of a corpus: `names` are relative to `root`, with `/`, sorted by code point.

    `seen` counts the files before the glob filter.
    """

    root: Path
    names: tuple[str, ...]
    seen: int
    globs: tuple[str, ...] = ()

    def path(self, index: int) -> Path:
        """The path of file `index`."""
        return self.root / self.names[index]

    def hint(self) -> str:
        """Why there may be no document."""
        if self.names:
            return ""
        if self.globs and self.seen:
            ends = Counter(Path(name).suffix or "no suffix" for name in list_files(self.root).names).most_common(4)
            there = ", ".join(f"{count:,} {suffix}" for suffix, count in ends)
            return f"none of its {self.seen:,} files ({there}) matches {', '.join(self.globs)}; change the glob"
        return "it holds no file; put text, JSONL or parquet files there, or name another source"


def list_files(root: Path, globs: Sequence[str] = (), *, without: Collection[str] = ()) -> FileList:
    """The files at or below `root`; hidden files and folders (`.git`) are left out, and folders named in `without`.

    A glob without a slash fits the file name in any folder (`*.py`), one with a slash the whole relative path, where
    `**/` stands for any number of folders. Links to folders are not followed: they can form a circle.
    """
    if not root.is_dir():
        return FileList(root.parent, (root.name,), 1)
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in SKIPPED_FOLDERS and name not in without and not name.startswith(".")
        ]
        below = Path(folder).relative_to(root)
        names += [(below / name).as_posix() for name in files if not name.startswith(".")]
    patterns = [_regex(glob) for glob in globs]
    kept = sorted(name for name in names if not patterns or any(pattern.fullmatch(name) for pattern in patterns))
    return FileList(root, tuple(kept), len(names), tuple(globs))


def require_regular(path: Path) -> Path:
    """The path itself. Raises OSError if it is a pipe or a device: reading one may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError."""
    return require_regular(path).read_bytes()


def decode(data: bytes) -> str:
    """UTF-8 to text, without a byte order mark. Raises UnicodeDecodeError, for a NUL byte (binary, UTF-16) too."""
    text = data.decode("utf-8-sig")
    zero = data.find(b"\0")
    if zero >= 0:
        raise UnicodeDecodeError("utf-8", data, zero, zero + 1, "a NUL byte")
    return text


_GLOB_PART = re.compile(r"\*\*/|\*\*|\*|\?|\[(!?)((?:\]|[^\]])[^\]]*)\]")
_GLOB_REGEX = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _regex(glob: str) -> re.Pattern[str]:
    pattern = glob.removeprefix("./")
    if "/" not in pattern:
        pattern = "**/" + pattern
    parts, end = [], 0
    for match in _GLOB_PART.finditer(pattern):
        parts.append(re.escape(pattern[end : match.start()]))
        members = (match[2] or "").replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
        parts.append(_GLOB_REGEX.get(match[0]) or f"[{'^' if match[1] else ''}{members}]")
        end = match.end()
    parts.append(re.escape(pattern[end:]))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:  # a range such as [z-a]: nothing fits it
        return re.compile(r"(?!)")
