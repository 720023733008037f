"""Write the weights of a model, or of a checkpoint, as a folder that transformers and others read: safetensors."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fxpar.checkpoint.agree import agreed, group_of, rank_in, watched
from fxpar.checkpoint.load import read_extra
from fxpar.checkpoint.manifest import check_files, read_manifest, write_json
from fxpar.checkpoint.metadata import SafePlanner, SafeReader, read_metadata
from fxpar.checkpoint.save import without_group_warning
from fxpar.checkpoint.state import model_state
from fxpar.errors import CheckpointError, CorruptCheckpointError, MissingPackageError, WeightsWriteError
from fxpar.store.folder import INDEX, WHOLE

SHARD_BYTES = 5_000_000_000  # as transformers cuts
HF_CONFIG = "hf_config"
"""Where a checkpoint's `extra` may hold the configuration of a model of transformers, as JSON text."""
HF_GENERATION = "hf_generation_config"
"""The same for how it generates text."""
TOKENIZER = "tokenizer"
"""The folder beside checkpoints that may hold the files of the tokenizer."""


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder` with whole weights in `*.safetensors` of at most `shard_bytes`; call it on all ranks.

    Parameters and persistent buffers keep their names; a tied weight is written once. Floats are written in `dtype` (as
    they are by default). A model of transformers adds its `config.json`, so `from_pretrained(folder)` reads it. Rank 0
    writes, and holds one file's weights at a time. The folder must not exist or be empty; it appears when all of it is
    written.

    Raises WeightsWriteError, the same on all ranks, MissingPackageError; PeerLostError if a rank is gone.
    """
    group, final = group_of(process_group), Path(folder).expanduser()
    rank = rank_in(group)[0]
    state = model_state(model)
    tensors = {name: value.detach() for name, value in state.tensors.items()}

    def whole(name: str) -> Tensor | None:
        tensor = tensors[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # all ranks
        return full if rank == 0 else None

    def describe(aside: Path) -> None:
        _save_configs(model, aside, dtype)

    with watched(model, rank, f"saving weights to {final.name}"):
        _write(final, tensors, whole, dtype, shard_bytes, describe, group)
    return final


def export_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """As `save_weights`, from a checkpoint of `save_checkpoint`, in one process and without the model. The files of a
    folder `tokenizer` beside the checkpoint, as `fxpar train` leaves one, are copied.

    Raises CorruptCheckpointError, WeightsWriteError, MissingPackageError.
    """
    source, final = Path(path), Path(folder).expanduser()
    check_files(source, read_manifest(source), 0, 1)
    prefix = "model."
    entries = {
        key.removeprefix(prefix): torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="meta")
        for key, entry in read_metadata(source).state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    extra = read_extra(source)

    def whole(name: str) -> Tensor:
        target = torch.empty_like(entries[name], device="cpu")
        words = {"storage_reader": SafeReader(source), "planner": SafePlanner()}
        try:
            with without_group_warning(None):
                dcp.load({f"{prefix}{name}": target}, no_dist=True, **words)
        except dcp.CheckpointException as failure:
            raise CorruptCheckpointError(source, f"{name} cannot be read: {failure}") from failure
        return target

    def describe(aside: Path) -> None:
        if isinstance(extra.get(HF_CONFIG), str):
            config = json.loads(extra[HF_CONFIG])
            write_json(aside / "config.json", config if dtype is None else {**config, "dtype": _name(dtype)})
        if isinstance(extra.get(HF_GENERATION), str):
            write_json(aside / "generation_config.json", json.loads(extra[HF_GENERATION]))
        for file in (source.parent / TOKENIZER).glob("*"):
            if file.is_symlink() or not file.is_file():  # it may be anybody's, and lead to a key
                raise CorruptCheckpointError(source, f"{TOKENIZER}/{file.name} beside it is not a file of its own")
            shutil.copyfile(file, aside / file.name)

    _write(final, entries, whole, dtype, shard_bytes, describe, None)
    return final


@dataclass(frozen=True)
class _Wrap:
    folder: Path

    def __call__(self, error: BaseException) -> CheckpointError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        return WeightsWriteError(self.folder, f"weights cannot be written: {type(error).__name__}: {reason}")


def _write(
    final: Path,
    tensors: Mapping[str, Tensor],
    whole: Callable[[str], Tensor | None],
    dtype: torch.dtype | None,
    shard_bytes: int,
    describe: Callable[[Path], None],
    group: dist.ProcessGroup | None,
) -> None:
    """All ranks ask for each whole tensor in turn, in the same order; rank 0 writes."""
    rank, wrap = rank_in(group)[0], _Wrap(final)
    if rank == 0:
        _require_safetensors()
    shards = _shards(tensors, dtype, shard_bytes)
    with _aside(final, rank, group) as aside:
        for number, names in enumerate(shards):
            held: dict[str, Tensor] = {}
            for name in names:
                value = whole(name)
                if value is not None:
                    held[name] = _cast(value, dtype).cpu().contiguous()

            def write(held: dict[str, Tensor] = held, number: int = number) -> None:
                from safetensors.torch import save_file

                file = aside / _file_name(number, len(shards))
                file.touch()  # in the mode of the umask: safetensors makes its files for their owner alone
                mode = file.stat().st_mode
                save_file(held, file, metadata={"format": "pt"})
                file.chmod(mode)

            agreed(group, write if rank == 0 else _nothing, wrap)

        def finish() -> None:
            if len(shards) > 1:
                index = {name: _file_name(n, len(shards)) for n, names in enumerate(shards) for name in names}
                total = sum(_bytes(tensor, dtype) for tensor in tensors.values())
                write_json(aside / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
            describe(aside)
            if final.is_dir():
                final.rmdir()  # empty
            aside.rename(final)

        agreed(group, finish if rank == 0 else _nothing, wrap)


@contextmanager
def _aside(final: Path, rank: int, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Where rank 0 writes until all is there; it is removed if anything fails."""
    aside = final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex[:8]}")

    def make() -> None:
        if final.is_file() or (final.is_dir() and any(final.iterdir())):
            raise WeightsWriteError(final, "already exists. Name a folder that is empty or does not exist")
        aside.mkdir(parents=True)

    try:
        agreed(group, make if rank == 0 else _nothing, _Wrap(final))
        yield aside
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _nothing() -> None:
    pass


def _require_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("a folder of weights", "safetensors", 'pip install "fxpar[hf]"') from error


def _shards(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, most: int) -> list[Sequence[str]]:
    """Names by file, in their order; a tensor larger than a file has one of its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor, dtype)
        if shards[-1] and used + size > most:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return list(shards)


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    stored = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    return tensor.numel() * stored.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.dtype.is_floating_point else tensor


def _file_name(number: int, count: int) -> str:
    return WHOLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """`config.json` and `generation_config.json` of a model of transformers."""
    text = hf_config(model)
    if text is not None:
        config = json.loads(text)
        write_json(folder / "config.json", config if dtype is None else {**config, "dtype": _name(dtype)})
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def hf_generation(model: nn.Module) -> str | None:
    """What its `generation_config.json` holds, as JSON text; None of a model without one."""
    config: Any = getattr(model, "generation_config", None)
    return config.to_json_string() if hasattr(config, "to_json_string") else None


def hf_config(model: nn.Module) -> str | None:
    """The configuration of a model of transformers as JSON text; None of any other model."""
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and hasattr(config, "model_type")):
        return None
    known = json.loads(config.to_json_string(use_diff=False))
    # The class that transformers knows: a parallel module is of a subclass.
    kinds = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return json.dumps({**known, "architectures": kinds[:1] or known.get("architectures")})
