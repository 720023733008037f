"""From text to token ids: a tokenizer file, or a byte-level byte-pair encoding trained once on a corpus."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fxpar.data.cache import cache_key, default_cache_dir, publish
from fxpar.data.corpus import Corpus
from fxpar.errors import MissingDataPackageError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

END_TOKEN = "<|endoftext|>"
SMALLEST_VOCAB = 257  # the bytes and the end token
_FORMAT = 1
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Tokenizer:
    """A `tokenizers.Tokenizer` that encodes whole documents: never cut or padded, `end_id` last if there is one.

    `fingerprint` is a hash of all that decides the ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str, end_id: int | None) -> None:
        backend.no_truncation()  # a file may ask for both, made for other uses
        backend.no_padding()
        self.name = name
        self.end_id = end_id
        self._backend = backend

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: what an embedding needs at least. Ids may have gaps."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of vocabulary, rules and end token."""
        special = self._backend.encode_special_tokens
        return hashlib.sha256(f"{self._backend.to_str()}|{self.end_id}|{special}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text: int32 [T]."""
        encoded = self._backend.encode_batch_fast(list(texts))
        return [self._with_end(np.array(one.ids, dtype=np.int32)) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, which transformers reads too. Raises TokenizerError."""
        try:
            self._backend.save(str(path))
        except Exception as error:  # the library has no class of its own
            raise TokenizerError(str(path), f"cannot be written: {error}") from error

    def _with_end(self, ids: np.ndarray) -> np.ndarray:
        # Some files append their end token themselves.
        if self.end_id is None or (len(ids) and ids[-1] == self.end_id):
            return ids
        return np.append(ids, np.int32(self.end_id))


def load_tokenizer(path: str | Path, *, end_token: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`; `end_token` is put at the end of each document if given.

    What the file itself adds around a text (such as a token for its beginning) is added to each document.
    Raises TokenizerError (no such file, not a tokenizer, no such token), MissingDataPackageError.
    """
    backend = _read(Path(path).expanduser())
    end_id = None if end_token is None else backend.token_to_id(end_token)
    if end_token is not None and end_id is None:
        raise TokenizerError(str(path), f"has no token {end_token!r} to end a document with")
    return Tokenizer(backend, str(path), end_id)


def copy_tokenizer(path: str | Path, folder: Path, end_token: str | None = None) -> None:
    """Put a tokenizer file into `folder`, with what transformers writes beside one, so that transformers reads it.
    Where no configuration is beside it, one with `end_token` is written. Raises OSError.
    """
    file = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / "tokenizer.json")
    for name in _BESIDE:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
    if not (folder / _BESIDE[0]).is_file():
        known = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": end_token} if end_token else {})
        (folder / _BESIDE[0]).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def train_tokenizer(
    corpus: Corpus, vocab_size: int, *, cache_dir: str | Path | None = None, sample_bytes: int = 64 * 2**20
) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids for a corpus; trained once, then read from the cache.

    Every text can be encoded: all 256 bytes are tokens. Each document ends with `<|endoftext|>`, id 0; the same
    characters in a text are plain text. A corpus of more than `sample_bytes` is sampled, whole documents by a hash of
    their names. Deterministic. Raises TokenizerError, DataCacheError, CorpusChangedError, MissingDataPackageError.
    """
    if vocab_size < SMALLEST_VOCAB:
        why = f"{vocab_size} ids are too few: the 256 bytes and the end token need {SMALLEST_VOCAB}"
        raise TokenizerError("to train", why)
    settings = {"format": _FORMAT, "corpus": corpus.fingerprint, "vocab_size": vocab_size, "sample_bytes": sample_bytes}
    folder = Path(cache_dir or default_cache_dir()).expanduser() / "tokenizers" / cache_key(settings)
    file = folder / "tokenizer.json"
    if not file.is_file():
        with publish(folder) as building:
            backend = _train(corpus, vocab_size, sample_bytes)
            (building / file.name).write_text(backend.to_str(), encoding="utf-8")
    backend = _read(file)
    backend.encode_special_tokens = True
    return Tokenizer(backend, str(file), backend.token_to_id(END_TOKEN))


def _read(file: Path) -> tokenizers.Tokenizer:
    library = _library()
    try:
        # Read here, not by the library: its error for a missing file names no file.
        backend = library.Tokenizer.from_str(file.read_bytes().decode())
    except OSError as error:
        raise TokenizerError(str(file), f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(str(file), f"is not a tokenizer file of the `tokenizers` library: {error}") from error
    if not backend.get_vocab_size():
        raise TokenizerError(str(file), "has an empty vocabulary")
    return backend


def _train(corpus: Corpus, vocab_size: int, sample_bytes: int) -> tokenizers.Tokenizer:
    from tokenizers import decoders, pre_tokenizers, trainers

    library = _library()
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(corpus, sample_bytes), trainer)
    return backend


def _sample(corpus: Corpus, sample_bytes: int) -> Iterator[str]:
    """All texts, or as many as fit in the order of the hashes of their names (at least one)."""
    order: Sequence[int] = range(len(corpus))
    if corpus.report.text_bytes > sample_bytes:
        order = sorted(order, key=lambda index: hashlib.sha256(_name_bytes(corpus, index)).digest())
    taken = 0
    for index in order:
        text = corpus.text(index)
        taken += len(text.encode())
        if taken > sample_bytes and taken > len(text.encode()):
            return
        yield text


def _name_bytes(corpus: Corpus, index: int) -> bytes:
    return corpus.name(index).encode("utf-8", "surrogatepass")


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDataPackageError("tokenizers", "tokenizers", 'pip install "fxpar[train]"') from error
    return tokenizers
