"""Text for training: corpora, tokenizers, tokens on disk, and a loader of mini-batches.

corpus = open_corpus("python-stdlib")
tokenizer = train_tokenizer(corpus, vocab_size=8192)
training, validation = prepare(corpus, tokenizer).hold_out(16)
for sequences in MiniBatchLoader(training, batch_tokens=65536, max_length=32768):
    ...                                    # list of int64 [T_i] tensors, the same on every rank
"""

from __future__ import annotations

from fxpar.data.cache import default_cache_dir
from fxpar.data.corpus import Corpus
from fxpar.data.cut import CutReport
from fxpar.data.lengths import LengthBin, LengthHistogram
from fxpar.data.loader import MiniBatchLoader
from fxpar.data.report import CorpusReport, SkippedKind
from fxpar.data.sources import KINDS, open_corpus
from fxpar.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from fxpar.data.tokens import Tokens, load, prepare

__all__ = [
    "KINDS",
    "Corpus",
    "CorpusReport",
    "CutReport",
    "LengthBin",
    "LengthHistogram",
    "MiniBatchLoader",
    "SkippedKind",
    "Tokenizer",
    "Tokens",
    "default_cache_dir",
    "load",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "train_tokenizer",
]
