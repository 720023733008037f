"""What can be checked before any rank is started: the model, text and tokenizer, folders of
results, the cluster file."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from fxpar.checkpoint import latest_checkpoint
from fxpar.checkpoint.load import check_shapes, optimizer_class, read_extra, trained_names
from fxpar.checkpoint.lock import holder, release, take
from fxpar.checkpoint.state import model_state
from fxpar.data import KINDS, load_tokenizer
from fxpar.data.files import list_files
from fxpar.data.loader import OLDER_STATES
from fxpar.data.sources import check_source
from fxpar.errors import (
    CheckpointError,
    EmptyCorpusError,
    ResumeError,
    RunFolderError,
    RunInUseError,
    TooManyRanksError,
    muted_warnings,
)
from fxpar.ir.teams import formations, teams_apart
from fxpar.profiling.record import check_measured
from fxpar.runtime.planned import parameters_of
from fxpar.search.plan_file import Plan
from fxpar.store.folder import Given
from fxpar.switch.order import check_order
from fxpar.train.config import TrainConfig, described_cluster
from fxpar.train.model import VOCAB_MULTIPLE, shapes_for, shapes_of, weights_in
from fxpar.train.optimize import CLASSES
from fxpar.train.schema import shown
from fxpar.train.session import TRAINED, check_steps_left, latest
from fxpar.train.task_source import OF_ONE_LOSS, check_tasks, given_counts, task_model
from fxpar.train.tasks import texts_of as task_texts

_OF_TASKS = (
    "it was written by a run of tasks, and this configuration has [data] alone. Go on with the sections [task.NAME] of "
    "that run, or start another run from these weights: fxpar export, then model.weights"
)
RANKS_PER_CORE = 4  # more are a mistake, if nobody said how many


def check_ranks(config: TrainConfig) -> None:
    """See that this machine is to run the ranks. Raises TooManyRanksError."""
    cores = os.cpu_count() or 1
    if config.run.ranks is None and config.world > RANKS_PER_CORE * cores:
        texts = task_texts(config.tasks, config.strategies)
        raise TooManyRanksError(max(reversed(texts), key=lambda text: formations(text)[0].world), config.world, cores)


def preflight(config: TrainConfig) -> None:
    """Raises ClusterError, MeasuredElsewhereError, and what `check_folders` raises."""
    cluster = described_cluster(config.engine)
    if cluster is not None:
        cluster.require(config.world)
    if isinstance(config.engine.cluster, str):
        local = int(os.environ.get("LOCAL_WORLD_SIZE", config.world))
        on_gpus = config.run.device != "cpu" and torch.cuda.device_count() >= local
        check_measured(config.engine.cluster, torch.device("cuda" if on_gpus else "cpu"))
    check_folders(config)


def check_parts(config: TrainConfig) -> None:
    """See that there is what ranks read: the source of text, the tokenizer, and a model with these options and these
    parameters to train. Its sizes are looked at only, nothing of it is allocated. Of tasks their functions too.

    Of weights to start from names and forms are looked at.

    Raises TeamsGatherError, OrderError, CorpusPathError, EmptyCorpusError, TokenizerError, MissingDataPackageError, and
    what `shapes_of`, `check_tasks` and `Given.to` raise.
    """
    for text in task_texts(config.tasks, config.strategies):
        for one in formations(text):
            teams_apart(one)
    if config.tasks:
        check_tasks(config)
        _check_weights(config, None, lambda: task_model(config, "meta"))
        return
    if config.engine.order is not None and config.strategies:
        names = [str(one) for _, text in config.strategies for one in formations(text)]
        check_order(config.engine.order, list(dict.fromkeys(names)))
    if config.data.source not in [name for name, kind in KINDS.items() if not kind.at_path]:
        globs = () if config.data.glob is None else (config.data.glob,)
        files = list_files(check_source(config.data.source), globs)
        if not any(_has_bytes(files.path(i)) for i in range(len(files.names))):
            why = files.hint() or "all of its files are empty"
            raise EmptyCorpusError(config.data.source, config.data.kind, (), why)
    size = config.data.vocab  # of no tokenizer yet
    if config.data.tokenizer is not None:
        size = load_tokenizer(config.data.tokenizer, end_token=config.data.end_token).vocab_size
    loaded = shapes_of(config, size)
    _check_weights(config, loaded.weights, lambda: loaded.model)


def _check_weights(config: TrainConfig, folder: str | None, model: Callable[[], nn.Module]) -> None:
    """Weights to start from, if there are any, fit the model. Raises what `Given.to` raises."""
    weights = weights_in(config, folder)
    if weights is not None:
        with muted_warnings():  # ranks tell them
            Given.to(model(), weights)


def _has_bytes(file: Path) -> bool:
    """False for an empty file; who reads one that is none, or that cannot be read, says so."""
    try:
        found = file.stat()
    except OSError:
        return True
    return found.st_size > 0 or not stat.S_ISREG(found.st_mode)


def check_folders(config: TrainConfig) -> None:
    """Make the folder of the run and see that it can be written; that there is what to resume from, or nothing to lose.

    Raises RunFolderError, ResumeError, CorruptCheckpointError, as `check_resumed` does.
    """
    if config.checkpoint.resume:
        check_resumed(config, latest(config))
    for folder in _folders(config):
        make_writable(folder, config)
    if config.checkpoint.enabled and not config.checkpoint.resume and _has_checkpoint(config.checkpoints):
        raise RunFolderError(
            str(config.checkpoints),
            "has checkpoints of an earlier run. Add --resume to go on with it, set run.folder to another folder, "
            "or delete this one",
        )


def check_resumed(config: TrainConfig, checkpoint: Path) -> None:
    """See that a run with this configuration goes through the data as the one that wrote the checkpoint, as far as the
    configuration shows. Raises ResumeError, CorruptCheckpointError.
    """
    extra = read_extra(checkpoint)
    done, loader = extra.get("step"), extra.get("loader")
    if isinstance(done, int):
        check_steps_left(checkpoint, done, config)
    if isinstance(loader, dict) and (given_counts(loader) is None) == bool(config.tasks):
        raise ResumeError(str(checkpoint), OF_ONE_LOSS if config.tasks else _OF_TASKS)
    if config.tasks:  # each goes on at its next item: nothing was drawn from a corpus
        return
    before = loader.get("fingerprint") if isinstance(loader, dict) else None
    now: dict[str, tuple[str, object]] = {
        "max_length": ("data.max_length", config.max_length),
        "overlong": ("data.overlong", config.data.overlong),
        "length_multiple": ("engine.length_multiple", config.engine.length_multiple),
        "seed": ("run.seed", config.run.seed),
        "shuffle": ("data.shuffle", config.data.shuffle),
    }
    for name, (key, value) in now.items():
        was = {**OLDER_STATES, **before}.get(name, value) if isinstance(before, dict) else value
        if was != value:
            longest = ", the longest length of [strategies]" * (name == "max_length" and not config.data.max_length)
            raise ResumeError(
                str(checkpoint),
                f"its sequences were drawn with {key} = {shown(was)}, and this configuration has {shown(value)}"
                f"{longest}. Go on with --set {key}={shown(was)}, or start another run in another run.folder",
            )


def check_resumed_model(config: TrainConfig) -> None:
    """See that the checkpoint to go on from, if one is asked for, is of this model, by names and shapes, and of a run
    that trains the same parameters with the same optimizer. Sizes that follow from a tokenizer which is yet to be
    trained are left out: ranks see them.

    Raises CheckpointMismatchError, ResumeError, CorruptCheckpointError.
    """
    if not config.checkpoint.resume:
        return
    if config.tasks:
        _check_resumed_shapes(config, [task_model(config, "meta")])
        return
    _check_resumed_shapes(config, shapes_so_far(config))


def shapes_so_far(config: TrainConfig) -> list[nn.Module]:
    """The model of a run, on the meta device; two that differ in what follows from a tokenizer which is yet to be
    trained. Raises as `shapes_for` does.
    """
    sizes = [config.data.vocab, config.data.vocab + VOCAB_MULTIPLE]
    if config.data.tokenizer is not None:
        sizes = [load_tokenizer(config.data.tokenizer, end_token=config.data.end_token).vocab_size]
    return [shapes_for(config, size, {}).model for size in sizes]


def check_planned_model(config: TrainConfig, plan: Plan, path: str) -> None:
    """See that the plan at `path` is for a model with as many parameters, unless a tokenizer which is yet to be trained
    decides about them: then ranks see it. Raises PlanFileError.
    """
    counts = {parameters_of(model) for model in shapes_so_far(config)}
    if len(counts) == 1:
        plan.check_module(path, counts.pop(), config.world)


def _check_resumed_shapes(config: TrainConfig, models: Sequence[nn.Module]) -> None:
    path = latest(config)
    check_shapes(path, models[0], models[-1])
    _check_trained(config, path, models[0])
    _check_optimizer(config, path)


def _check_optimizer(config: TrainConfig, checkpoint: Path) -> None:
    """The state of one optimizer is none of another's. Raises ResumeError, CorruptCheckpointError."""
    was, here = optimizer_class(checkpoint), config.optimizer.name
    if was == CLASSES[here].__name__:
        return
    name = next((name for name, cls in CLASSES.items() if cls.__name__ == was), None)
    back = f"--set optimizer.name={name}" if name else "the optimizer of that run"
    raise ResumeError(
        str(checkpoint),
        f"it holds the state of {was}, and this configuration has optimizer.name = {shown(here)}. Go on with {back}, "
        "or start another run from these weights: fxpar export, then model.weights",
    )


def _check_trained(config: TrainConfig, checkpoint: Path, model: nn.Module) -> None:
    """An optimizer has no state for parameters that it did not train. Raises ResumeError, CorruptCheckpointError."""
    state = model_state(model)
    here = {state.name_of[id(parameter)] for parameter in model.parameters() if parameter.requires_grad}
    saved = {state.alias.get(name, name) for name in trained_names(checkpoint)}
    if here == saved:
        return
    extra = read_extra(checkpoint)
    was, back = f"{len(saved)} parameters trained", "with the model.train of that run"
    if TRAINED in extra:
        was = _globs(extra[TRAINED])
        back = "without model.train" if extra[TRAINED] is None else f'with --set "model.train={extra[TRAINED]}"'
    other = sorted(here ^ saved)
    raise ResumeError(
        str(checkpoint),
        f"it was written with {was}, and this configuration has {_globs(config.model.train)}: they differ in "
        f"{', '.join(other[:3])}{', ...' * (len(other) > 3)}. Go on {back}, or start another run from these weights: "
        "fxpar export, then model.weights",
    )


def _globs(trained: Sequence[str] | None) -> str:
    return "all parameters trained (no model.train)" if trained is None else f"model.train = {shown(trained)}"


def check_free(config: TrainConfig) -> None:
    """See that no other run works in the folders, before ranks are started. Raises RunInUseError."""
    for folder in _folders(config):
        other = holder(folder)
        if other is not None:
            raise RunInUseError(str(folder), str(other))


def lock_folders(config: TrainConfig) -> None:
    """Keep the folders of the run for this process. Raises RunInUseError and RunFolderError."""
    for folder in _folders(config):
        make_writable(folder, config)
        other = take(folder, f"fxpar train of {config.name!r}")
        if other is not None:
            unlock_folders(config)
            raise RunInUseError(str(folder), str(other))


def unlock_folders(config: TrainConfig) -> None:
    """Give back what this process has locked."""
    for folder in _folders(config):
        release(folder)


def _folders(config: TrainConfig) -> list[Path]:
    """Where the run writes."""
    return [config.folder, *([config.checkpoints] if config.checkpoint.enabled else [])]


def make_writable(folder: Path, config: TrainConfig) -> None:
    """Make a folder of the run. Raises RunFolderError, which names the key that says where it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        key = "checkpoint.folder" if config.checkpoint.folder and folder == config.checkpoints else "run.folder"
        file = next((one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()), None)
        why = f"{str(file)!r} is a file" if file is not None else error.strerror or str(error)
        do = f"Set {key} to another folder" + (f", or move {str(file)!r} away" if file is not None else "")
        raise RunFolderError(str(folder), f"cannot be written: {why}. {do}") from error


def _has_checkpoint(folder: Path) -> bool:
    try:
        return latest_checkpoint(folder) is not None
    except CheckpointError:
        return True  # a corrupt one is one too
