"""A folder of weights as Hugging Face writes it: `*.safetensors`, with an index if there are several. Read by slice.

    folder = WeightsFolder.open("llama-8b")
    folder.read("model.norm.weight", ((0, 512),))     # these elements alone are read from disk

The format holds names, dtypes, shapes and bytes, and nothing that could run. Pickles (`*.bin`, `*.pt`) are never read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import MissingPackageError, WeightsFolderError, WeightsMismatchError, nearest, warn

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
Box = Sequence[tuple[int, int]]
"""(start, stop) per dim."""
Read = Callable[[Box], Tensor]
_FLOATS = ("F64", "F32", "F16", "BF16")  # others are compressed, and mean nothing without their scales


@dataclass(frozen=True)
class Weights:
    """Where the values of a model come from: a local folder.

    `missing` are globs of parameters and buffers that the folder need not have (they are initialised), `unused` globs
    of names in the folder that the model need not have.
    """

    folder: str | os.PathLike[str]
    missing: Sequence[str] = ()
    unused: Sequence[str] = ()

    @classmethod
    def of(cls, given: Weights | str | os.PathLike[str]) -> Weights:
        return given if isinstance(given, Weights) else cls(given)


@dataclass
class WeightsFolder:
    """The tensors of a folder; `files` names the file of each. Files stay open from the first read on."""

    path: Path
    files: Mapping[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> WeightsFolder:
        """Raises WeightsFolderError (no such folder, no weights in it, a file that is missing or broken),
        MissingPackageError.
        """
        where = Path(path).expanduser()
        if not where.is_dir():
            what = "is a file" if where.exists() else "does not exist"
            raise WeightsFolderError(where, f"the folder {what}. Nothing is downloaded: name a local folder")
        found = cls(where, {})
        index = where / INDEX
        found.files = found._of_index(index) if index.is_file() else found._of_files(_weight_files(where))
        return found

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape of the whole tensor and dtype ("BF16")."""
        part = self._file(name).get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of a tensor in a box, in the dtype of the file, on the CPU. Raises WeightsFolderError."""
        file = self._file(name)
        try:
            if not box:  # a 0-dim tensor has no slices
                return file.get_tensor(name)
            return file.get_slice(name)[tuple(slice(start, stop) for start, stop in box)]
        except Exception as error:
            raise self._broken(self.files[name], error) from error

    def _of_index(self, index: Path) -> dict[str, Path]:
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): self.path / str(file) for name, file in named.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(index, error) from error
        for file in dict.fromkeys(files.values()):
            if file.parent != self.path or file.suffix != ".safetensors":
                why = f"{INDEX} names {os.path.relpath(file, self.path)!r}, which is none of its files"
                raise WeightsFolderError(self.path, why)
        found = self._of_files(list(dict.fromkeys(files.values())))
        lost = sorted(name for name, file in files.items() if found.get(name) != file)
        if lost:
            raise WeightsFolderError(self.path, f"{files[lost[0]].name} has no {lost[0]!r}, which {INDEX} puts there")
        return files

    def _of_files(self, files: Sequence[Path]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for file in files:
            for name in self._opened(file).keys():  # noqa: SIM118 (no mapping)
                if name in found:
                    raise WeightsFolderError(self.path, f"{found[name].name} and {file.name} both have {name!r}")
                found[name] = file
        return found

    def _file(self, name: str) -> Any:
        return self._opened(self.files[name])

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                from safetensors import safe_open
            except ImportError as error:
                raise MissingPackageError("weights from a folder", "safetensors", 'pip install "fxpar[hf]"') from error
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except Exception as error:
                raise self._broken(file, error) from error
        return self._open[file]

    def _broken(self, file: Path, error: Exception) -> WeightsFolderError:
        reason = " ".join(str(error).split()) or type(error).__name__
        why = f"cannot be read: {reason}" if file.exists() else "is missing"
        return WeightsFolderError(self.path, f"the file {file.name} {why}. Copy the folder again")


def _weight_files(folder: Path) -> list[Path]:
    """Without an index: `model.safetensors`, else all files of the format."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    why = "the folder has no *.safetensors"
    if pickled:
        why += f", and {pickled[0]} is a pickle, which could run code: load it with transformers, save_pretrained it"
    raise WeightsFolderError(folder, why)


@dataclass(frozen=True)
class Wanted:
    """A parameter or buffer: its whole shape, all its names (tied weights have several), whether it holds floats, and
    whether it is a parameter that is not trained.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_float: bool = True
    is_frozen: bool = False


def wanted_of(module: nn.Module) -> list[Wanted]:
    """What a state dict of the module has values for."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [
        Wanted(tuple(names[i]), tuple(t.shape), t.dtype.is_floating_point, _is_frozen(t)) for i, t in tensors.items()
    ]


def _is_frozen(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def fit(folder: WeightsFolder, wanted: Sequence[Wanted], about: Weights) -> dict[str, str]:
    """The first name of what is wanted, by the name of each tensor in the folder; before anything changes.

    Raises WeightsMismatchError that names the first tensors which are missing, are too many, have another form.
    """
    known = {name for one in wanted for name in one.names}
    pairs, missing, differ = {}, [], []
    for one in wanted:
        stored = [name for name in one.names if name in folder.names]
        if not stored and not any(_matches(name, about.missing) for name in one.names):
            missing.append(one.names[0])
        for name in stored:
            pairs[name] = one.names[0]
            shape, dtype = folder.form(name)
            if shape != one.shape:
                differ.append(f"{name} ({list(shape)} in the folder, {list(one.shape)} in the model)")
            elif (dtype in _FLOATS) != one.is_float:
                differ.append(f"{name} ({dtype} in the folder)")
    extra = sorted(name for name in folder.names if name not in known and not _matches(name, about.unused))
    found = (
        ("not in the folder", missing, "missing", folder.names),
        ("not in the model", extra, "unused", known),
        ("of another form", differ, "", ()),
    )
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}{_nearest(names[0], others)}"
        for what, names, _, others in found
        if names
    ]
    if problems:
        raise WeightsMismatchError(folder.path, "; ".join(problems), [o for _, names, o, _ in found if names and o])
    return pairs


def _nearest(name: str, others: Iterable[str]) -> str:
    """The hint in brackets: more of the sentence follows."""
    hint = nearest(name, others).removeprefix("; ")
    return f" ({hint})" if hint else ""


@dataclass(frozen=True)
class Given:
    """The values that a module gets: what fits of a folder, as `fit` found it."""

    folder: WeightsFolder
    pairs: Mapping[str, str]

    @classmethod
    def to(cls, module: nn.Module, weights: Weights | str | os.PathLike[str]) -> Given:
        """Nothing is changed, and no values are read. Warns of parameters that are neither in the folder nor trained.
        Raises WeightsFolderError, WeightsMismatchError, MissingPackageError.
        """
        about, wanted = Weights.of(weights), wanted_of(module)
        folder = WeightsFolder.open(about.folder)
        found = cls(folder, fit(folder, wanted, about))
        frozen = [one.names[0] for one in wanted if one.is_frozen and one.names[0] not in found.names]
        if frozen:
            warn(
                f"{len(frozen)} frozen parameters are not in {folder.path}, so they keep the values that they are "
                f"initialised with: {', '.join(frozen[:3])}{', ...' * (len(frozen) > 3)}. Train them, or start from "
                "weights that have them"
            )
        return found

    @property
    def names(self) -> Collection[str]:
        """First names of the parameters and buffers."""
        return set(self.pairs.values())

    def fill(self, put: Callable[[str, Read], object]) -> None:
        """`put(first name, read)` for each value; `read(box)` gives it. Of a tied weight that the folder has under
        several names all must be equal. Raises WeightsFolderError, for a NaN too.
        """
        firsts: dict[str, str] = {}
        for name, wanted in self.pairs.items():
            put(wanted, partial(self._read, name, firsts.setdefault(wanted, name)))

    def fill_module(self, module: nn.Module) -> None:
        """Of a module that is whole on one device."""
        targets = module.state_dict()
        self.fill(lambda name, read: targets[name].copy_(read([(0, size) for size in targets[name].shape])))

    def _read(self, name: str, first: str, box: Box) -> Tensor:
        value = self.folder.read(name, box)
        if name != first and not torch.equal(value, self.folder.read(first, box)):
            why = f"the folder has {first!r} and {name!r} with different values, and the model has one weight for both"
            raise WeightsFolderError(self.folder.path, why)
        if value.is_floating_point() and value.isnan().any():  # else the first step blames the learning rate
            why = f"{name!r} holds NaN, so every loss would be NaN. Save the weights again, or copy the folder again"
            raise WeightsFolderError(self.folder.path, why)
        return value


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
