"""The metadata of torch.distributed.checkpoint (DCP), read without running what is in it.

The metadata is a pickle, which calls whatever it names when it is loaded, and its checksum can be computed by anybody.
Here it may only name the classes that DCP writes (`fxpar.checkpoint.pickles` reads it); records stand for their
objects, are checked and become DCP's own classes.
`SafeReader` and `SafePlanner` take the place of DCP's: the latter would unpickle values that are no tensors, too.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import reprlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fxpar.checkpoint.pickles import Function, Kind, Record, read_pickle
from fxpar.errors import CorruptCheckpointError
from fxpar.torch_api.dcp import StorageInfo

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    *((f"{_DCP}metadata", cls.__name__) for cls in (Metadata, MetadataIndex, StorageMeta, TensorProperties)),
    *((f"{_DCP}metadata", cls.__name__) for cls in (BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata)),
    (f"{_DCP}filesystem", StorageInfo.__name__),
}
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_LONGEST = 64  # of a size, and of the path to a value
_FILE = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


class SafeReader(dcp.FileSystemReader):
    """DCP's reader of folders, with metadata under the allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CorruptCheckpointError. DCP asks for the metadata of a rank where that of all is not there."""
        rank = kwargs.get("rank")
        metadata = read_metadata(Path(self.path), METADATA if rank is None else f"__{int(rank)}{METADATA}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class SafePlanner(dcp.DefaultLoadPlanner):
    """DCP's plan of what to load; a value that is no tensor is loaded under torch's allow-list."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises pickle.UnpicklingError for what torch does not allow."""
        found = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), found)
        found.seek(0)
        super().load_bytes(read_item, found)  # what was loaded and written again holds nothing else


def read_metadata(path: Path, name: str = METADATA) -> Metadata:
    """What a checkpoint folder says is in its files. Raises CorruptCheckpointError."""
    try:
        return _metadata(path, read_pickle((path / name).read_bytes(), _find))
    except CorruptCheckpointError:
        raise
    except Exception as error:  # pickles fail in every way there is
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise CorruptCheckpointError(
            path, f"{METADATA} is none that DCP writes ({reason}). Nothing was loaded"
        ) from error


def check_plain_pickle(data: bytes, what: str) -> None:
    """Whether a pickle holds plain values only: no class, no function. Raises pickle.UnpicklingError."""

    def refused(module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"{what} names {module[:99]}.{name[:99]}, and may hold plain values only")

    read_pickle(data, refused)


def _find(module: str, name: str) -> Any:
    """What stands for a class or function that metadata names. Raises pickle.UnpicklingError."""
    if (module, name) in _RECORDS:
        return Kind(name)
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    if module in ("pathlib", "pathlib._local") and name in _PATHS:
        return Function(lambda parts: None)  # where the checkpoint was written: it may lie elsewhere now
    if (module, name) in _FUNCTIONS:
        return _FUNCTIONS[module, name]
    raise pickle.UnpicklingError(f"it names {module[:99]}.{name[:99]}, which no metadata needs")


def _only(kind: type) -> Function:
    """Gives back its one argument, which is of a kind."""

    def call(args: tuple[Any, ...]) -> Any:
        (value,) = args
        if type(value) is not kind:
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
        return value

    return Function(call)


_FUNCTIONS = {
    ("torch", "Size"): _only(tuple),
    ("torch.serialization", "_get_layout"): _only(str),
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"): _only(int),
}


def _metadata(path: Path, record: Any) -> Metadata:
    found = _state(record, "Metadata")
    tensors = _dict(found.get("state_dict_metadata"), "state_dict_metadata")
    stored: dict[MetadataIndex, Any] = {}
    for key, info in _dict(found.get("storage_data"), "storage_data").items():
        index = _index(key)
        if index in stored:
            raise ValueError(f"{index.fqn!r} is stored twice")
        stored[index] = _storage(path, info)
    version = found.get("version")
    return Metadata(
        state_dict_metadata={_text(key): _entry(_text(key), value, stored) for key, value in tensors.items()},
        planner_data={
            _text(key): _tuple_of(value, (str, int))
            for key, value in _dict(found.get("planner_data") or {}, "planner_data").items()
        },
        storage_data=stored,
        version=None if version is None else _text(version),
    )


def _entry(key: str, record: Any, stored: dict[MetadataIndex, Any]) -> TensorStorageMetadata | BytesStorageMetadata:
    """What is stored under a key: its chunks lie in the files and make up the tensor."""
    if isinstance(record, Record) and record.kind == "BytesStorageMetadata":
        _state(record, "BytesStorageMetadata")
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    size, dtype = _size(state.get("size")), _dtype(state.get("properties"))
    chunks, numel, nbytes = [], 0, 0
    for chunk in state.get("chunks") or ():
        part = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(part.get("offsets")), _size(part.get("sizes"))
        if not len(offsets) == len(sizes) == len(size) or any(
            o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a chunk of {key!r} lies outside of the tensor")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        numel += math.prod(sizes)
        nbytes += stored[MetadataIndex(key, offsets)].length
    starts = [chunk.offsets for chunk in chunks if math.prod(chunk.sizes)]
    if numel != math.prod(size) or len(set(starts)) != len(starts):
        raise ValueError(f"the chunks of {key!r} do not make up the tensor")
    if numel * dtype.itemsize > nbytes:
        raise ValueError(f"{key!r} has more elements than its files have bytes")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _dtype(record: Any) -> torch.dtype:
    state = record.state if isinstance(record, Record) and record.kind == "TensorProperties" else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise ValueError("a tensor has no dtype")
    if state[1] != "torch.strided":
        raise ValueError(f"a tensor has the layout {_shown(state[1])}")
    return state[0]


def _index(record: Any) -> MetadataIndex:
    state = _state(record, "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    if index is not None and type(index) is not int:
        raise ValueError("the number of a chunk is none")
    return MetadataIndex(_text(state.get("fqn")), None if offset is None else _size(offset), index)


def _storage(path: Path, record: Any) -> Any:
    """Where bytes lie: in a file of the checkpoint's own folder, and within it."""
    state = _state(record, StorageInfo.__name__)
    name, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is not a file of a checkpoint")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"a place in {name} is none")
    if state.get("transform_descriptors"):
        raise ValueError(f"{name} is transformed by {_shown(state['transform_descriptors'])}")
    if offset + length > (path / name).stat().st_size:
        raise ValueError(f"{name} is shorter than it says")
    return StorageInfo(name, offset, length)


def _state(record: Any, kind: str) -> dict[str, Any]:
    """The fields of a record. Raises ValueError for one of another class."""
    if not isinstance(record, Record) or record.kind != kind:
        raise ValueError(f"there is no {kind} where one belongs")
    return _dict({} if record.state is None else record.state, kind)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is not a table")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value


def _size(value: Any) -> torch.Size:
    found = _tuple_of(value, (int,))
    if any(not 0 <= size < 2**62 for size in found):
        raise ValueError(f"{_shown(found)} is not a size")
    return torch.Size(found)


def _tuple_of(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) > _LONGEST or any(type(each) not in kinds for each in value):
        raise ValueError(f"{type(value).__name__} where numbers or names belong")
    return value


def _shown(value: Any) -> str:
    """In a message: the beginning alone, as the parts of a value may be shared and stand for billions."""
    return reprlib.repr(value)[:60]


__all__ = ["METADATA", "SafePlanner", "SafeReader", "check_plain_pickle", "read_metadata"]
