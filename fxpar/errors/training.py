"""Errors of `fxpar train`, its data, and torchtitan."""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.errors.base import FxparError, nearest, one_line
from fxpar.errors.looking import MissingPackageError


# ----------------------------------------------------------------------------------------------------- fxpar train
class ConfigFileError(FxparError):
    """A configuration file that cannot be read or parsed."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"config {source!r}: {why}")


class ConfigError(FxparError):
    """Keys or values of a configuration that cannot be used; all of them in one message."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = self.problems[0] if len(self.problems) == 1 else "".join(f"\n  {line}" for line in self.problems)
        super().__init__(f"config {source!r}: {lines}")


class TaskDataError(FxparError):
    """A function of [task.NAME] that gives no item of a mini-batch."""

    def __init__(self, task: str, place: str, number: int, why: str) -> None:
        super().__init__(
            f"task.{task}.data: {place}({number}) {one_line(why, 200)}. Let it return the item of that number: a "
            "sequence (int64 [T]), or a dict of tensors, the batch that the loss of the task takes"
        )


class MaxLengthError(FxparError):
    """Sequences may be longer than any strategy takes."""

    def __init__(self, max_length: int, limit: int) -> None:
        super().__init__(
            f"data.max_length = {max_length}, but the strategies are for sequences of up to {limit} tokens. "
            f"Add a strategy for {max_length} tokens, or set data.max_length = {limit}: data.overlong then says what "
            "happens to longer documents (split, truncate, error)"
        )


class TooManyRanksError(FxparError):
    """The strategies need far more ranks than this machine has cores, and nobody said that so many are meant."""

    def __init__(self, strategy: str, ranks: int, cores: int) -> None:
        super().__init__(
            f"strategy {strategy!r} needs {ranks} ranks, and this machine has {cores} cores. Use smaller degrees, "
            f"start the ranks on more machines with torchrun, or add --ranks {ranks} if you mean it"
        )


class CheckedRanksError(FxparError):
    """`fxpar check` plays all ranks in one process, and a strategy has too many for that."""

    def __init__(self, strategy: str, ranks: int, most: int) -> None:
        super().__init__(
            f"strategy {strategy!r} has {ranks} ranks; one process can simulate at most {most}. Check the same axes "
            "with smaller degrees: an error in a collective does not depend on how many ranks take part"
        )


class CheckedLengthError(FxparError):
    """`fxpar check` runs documents one by one, and one is shorter or longer than the captured graph takes."""

    def __init__(self, length: int, limits: str) -> None:
        super().__init__(
            f"a document of the checked batches has {length} tokens, and the model takes {limits}. Give batches whose "
            "documents all have such lengths: MODEL as file.py:function that returns 'batches'"
        )


class DrawnRanksError(FxparError):
    """`fxpar viz` draws every rank, and a strategy has too many for a page."""

    def __init__(self, strategy: str, ranks: int, most: int) -> None:
        super().__init__(
            f"strategy {strategy!r} has {ranks:,} ranks; a page shows every rank, and at most {most:,}. Draw the same "
            "axes with a smaller dp: the graph of a rank is the same. fxpar dump, explain and memory take any number"
        )


class RunFolderError(FxparError):
    """A folder for results that cannot be used."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"folder {folder!r} {why}")


class RunInUseError(FxparError):
    """Another run works in the same folder; its checkpoints and metrics would be written over."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"{folder} is in use by {holder}. Wait until that run ends, stop it, or set run.folder (and "
            "checkpoint.folder) to another folder. The lock of a killed run is ignored"
        )


class ResumeError(FxparError):
    """There is nothing to resume from, or it does not fit."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"cannot resume from {folder!r}: {why}")


class TextModelError(FxparError):
    """A model that cannot be trained on sequences of tokens."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"model {name!r} {why}")


class DeviceCountError(FxparError):
    """More ranks than devices, or no device at all."""

    def __init__(self, ranks: int, found: int) -> None:
        super().__init__(
            f"{ranks} local ranks need {ranks} GPUs, but torch sees {found}. Use strategies of fewer ranks, start more "
            'nodes with torchrun, or use the CPU: run.device = "cpu" in `fxpar train`, --device cpu in `fxpar profile`'
        )


class StartedRanksError(FxparError):
    """A launcher started another number of ranks than a run is for. `why` it is for so many, as a user wrote it."""

    def __init__(self, world: int, started: int, why: str) -> None:
        super().__init__(
            f"this configuration is for {world} ranks ({why}), but {started} were started. Start {world} (torchrun "
            f"--nproc-per-node N), or give strategies and ranks that are for {started}"
        )


class LaunchError(FxparError):
    """A local rank ended in another way than by an error of its own.

    `log` is the file of what it wrote, empty if it wrote nothing; `advice` says how to go on.
    """

    def __init__(self, rank: int, how: str, log: str, advice: str = "") -> None:
        self.rank, self.how, self.log = rank, how, log
        wrote = f"what it wrote is in {log!r}" if log else "it wrote nothing"
        super().__init__(f"rank {rank} {how}; {wrote}" + (f". {advice}" if advice else ""))


class CompareError(FxparError):
    """A comparison that cannot be made, or whose losses differ."""

    def __init__(self, why: str) -> None:
        super().__init__(f"--compare: {why}")


# ------------------------------------------------------------------------------------------------------------ data
class MissingDataPackageError(MissingPackageError):
    """A source of text or a tokenizer needs a package that is not installed."""

    def __init__(self, what: str, package: str, how: str) -> None:
        FxparError.__init__(self, f"{what} need {package}: {how}")


class CorpusPathError(FxparError):
    """There is nothing at the path of a corpus."""

    def __init__(self, path: str, built_in: Iterable[str]) -> None:
        names = list(built_in)
        super().__init__(
            f"corpus {path!r}: there is no such file or folder{nearest(path, names) or '.'} "
            f"Built-in corpora are {', '.join(names)}"
        )


class CorpusKindError(FxparError):
    """A kind of corpus that does not exist."""

    def __init__(self, kind: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(
            f"there is no kind of corpus {kind!r}{nearest(kind, names) or '.'} Kinds are {', '.join(names)}"
        )


class CorpusOptionError(FxparError):
    """An option that a kind of corpus does not have, or a value that it cannot take."""

    def __init__(self, kind: str, option: str, known: Iterable[str], why: str = "") -> None:
        names = list(known)
        wrong = f"there is no such option{nearest(option, names) or '.'} Options are {', '.join(names)}"
        super().__init__(f"corpus of kind {kind!r}, option {option!r}: {why or wrong}")


class CorpusFormatError(FxparError):
    """A corpus that is not of the kind it should be, or lacks the part that is asked for."""

    def __init__(self, path: str, kind: str, why: str) -> None:
        super().__init__(f"corpus {path!r} (kind {kind!r}): {why}")


class EmptyCorpusError(FxparError):
    """A corpus without a single usable document."""

    def __init__(self, source: str, kind: str, skipped: Iterable[str], hint: str) -> None:
        reasons = "; ".join([*(f"skipped {one}" for one in skipped), *([hint] if hint else [])])
        super().__init__(f"corpus {source!r} (kind {kind!r}) has no usable document: {reasons or 'nothing was found'}")


class CorpusChangedError(FxparError):
    """A document changed while the corpus was in use."""

    def __init__(self, source: str, name: str) -> None:
        super().__init__(f"corpus {source!r}: {name!r} changed or went away since the corpus was opened; start again")


class TokenizerError(FxparError):
    """A tokenizer that cannot be read or trained."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"tokenizer {name!r}: {why}")


class VocabularyError(FxparError):
    """A tokenizer has more ids than the model has embeddings."""

    def __init__(self, tokenizer: str, vocab: int, model_vocab: int) -> None:
        super().__init__(
            f"tokenizer {tokenizer!r} has {vocab:,} ids, but the model's vocabulary has {model_vocab:,}: "
            f"give the model a vocabulary of at least {vocab:,}, or use a tokenizer with no more than {model_vocab:,}"
        )


class DataCacheError(FxparError):
    """The cache of tokens or tokenizers cannot be written, or something in it is damaged."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"data cache {path!r} {why}. Set `cache_dir` to use another folder")


class HeldOutError(FxparError):
    """More documents held out for validation than leaves any to train on."""

    def __init__(self, held_out: int, documents: int) -> None:
        super().__init__(
            f"cannot hold out {held_out} of {documents} documents: hold out 0 to {max(documents - 1, 0)}, "
            "so that one is left for training"
        )


class OverlongError(FxparError):
    """A document is longer than the longest sequence allowed, and the policy is "error"."""

    def __init__(self, name: str, length: int, limit: int, count: int) -> None:
        more = f" (the first of {count} such documents)" if count > 1 else ""
        super().__init__(
            f"document {name!r} has {length:,} tokens, the longest sequence allowed has {limit:,}{more}: "
            'raise max_length, or choose overlong="split" or "truncate"'
        )


class NoSequencesError(FxparError):
    """No document is long enough to learn from."""

    def __init__(self, documents: int, short: int, least: int = 2) -> None:
        why = "a shorter one has no token to predict" if least == 2 else f"lengths are multiples of {least:,}"
        super().__init__(
            f"none of {documents} documents gives a sequence of {least:,} tokens or more ({short} are shorter): {why}. "
            "Give more text"
        )


class LoaderOptionError(FxparError):
    """A setting of the mini-batch loader that makes no sense."""

    def __init__(self, why: str) -> None:
        super().__init__(f"mini-batch loader: {why}")


class LoaderStateError(FxparError):
    """A saved state of the mini-batch loader that does not fit to this loader."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot resume the mini-batch loader from this state: {why}")


# ------------------------------------------------------------------------------------------------------ torchtitan
class HostVersionError(FxparError):
    """A pair of versions of torchtitan and torch that the recipes were not made for."""

    def __init__(self, torchtitan: str, torch: str, torchtitan_range: str, torch_range: str) -> None:
        super().__init__(
            f"fxpar.recipes need torchtitan{torchtitan_range} and torch{torch_range}; found torchtitan {torchtitan} "
            f"and torch {torch}. Install a supported pair: pip install 'fxpar[torchtitan]'"
        )


class RecipeImportError(FxparError):
    """A module that a recipe imports is not there, or fails. Not an ImportError: torchtitan would hide it."""

    def __init__(self, module: str, error: Exception) -> None:
        super().__init__(f"{module} cannot be imported: {type(error).__name__}: {error}")


class UnsupportedRecipeError(FxparError):
    """An option of a torchtitan recipe that fxpar does not support."""

    def __init__(self, option: str, why: str, instead: str) -> None:
        super().__init__(f"recipe option {option}: {why}. {instead}")


class DataRanksError(FxparError):
    """A checkpoint's place in the data that this loader cannot go on from."""

    def __init__(self, saved_ranks: int, data_ranks: int) -> None:
        super().__init__(
            f"the checkpoint says where {saved_ranks} data-parallel rank(s) of torchtitan's loader were, this run "
            f"draws as {data_ranks}. Set --fxpar.data-ranks {saved_ranks} to go on from there, or "
            "--checkpoint.exclude-from-loading dataloader to start the data over"
        )


class DataDrawError(FxparError):
    """The rank of this node that draws the data for all has failed."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(
            f"rank {rank}, which draws the data of this node, has failed: {problem}. Its own log says where"
        )


class CheckpointModelError(FxparError):
    """A checkpoint of another model, or of another loader."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"checkpoint {path} does not fit this run: {what}")


class TrainedParametersError(FxparError):
    """A glob of `model.train` that names no parameter."""

    def __init__(self, glob: str, names: Iterable[str]) -> None:
        known = list(names)
        super().__init__(
            f"model.train: {glob!r} names no parameter of the model{nearest(glob, known) or '.'} Parameters are called "
            f"{', '.join(known[:3])}{', ...' * (len(known) > 3)}"
        )


class ForeignGraphPassError(FxparError):
    """A pass of fxpar that cannot run on a graph of torchtitan's graph_trainer, or has done it harm."""

    def __init__(self, name: str, why: str, instead: str) -> None:
        super().__init__(f"pass {name!r} on a graph of graph_trainer: {why}. {instead}")


class PipelineNameError(FxparError):
    """A pass pipeline of graph_trainer under a name that another one has."""

    def __init__(self, name: str, other: str) -> None:
        super().__init__(
            f"graph_trainer has a pass pipeline {name!r} already ({other}). Register this one under another name"
        )


class ForeignPassError(FxparError):
    """A pass of torchtitan's graph_trainer that cannot run on a graph of fxpar, or made something else of it."""

    def __init__(self, name: str, why: str, instead: str) -> None:
        super().__init__(f"graph_trainer pass {name!r} on a graph of fxpar: {why}. {instead}")
