"""The configuration of a run: a TOML file, and `--set section.key=value` on top of it, as frozen dataclasses.

`docs/train.md` lists every key. Paths are relative to the current folder. Torch is imported where it is needed only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fxpar.batching import length_groups
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ConfigError, ConfigFileError, FxparError, MaxLengthError, nearest
from fxpar.ir.strategy import MOST_RANKS
from fxpar.ir.teams import formations
from fxpar.ir.written import LONGEST, read
from fxpar.train.assign import assign
from fxpar.train.schema import from_table, shown
from fxpar.train.strategies import DRIFT, PlanConfig, auto_problems, group_problems, plan_problems, read_strategies
from fxpar.train.tasks import TaskConfig, chooses, read_tables, task_problems, world_of

_POSITIVE: dict[str, Any] = {"least": 1}


@dataclass(frozen=True)
class ModelConfig:
    """Which model; `options` are those of `--set` of the other commands. It starts from the safetensors in the folder
    `weights` (by default those of `hf:./FOLDER`), which may lack the parameters of the globs `missing` and have
    those of the globs `unused`. Only parameters of the globs `train` are trained.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    missing: list[str] | None = None
    unused: list[str] | None = None
    train: list[str] | None = None


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, and how much of it makes a mini-batch.

    `text` is the field (JSONL) or column (parquet, dataset) that holds the text; `unit` is what of `python-stdlib` is a
    document: a "file", or a "definition" (function or class). A corpus without `tokenizer` (a file)
    gets a byte-pair tokenizer of `vocab` tokens. `validation` documents are held out; their
    loss is measured each `validate_every` steps (0: never) and after the last one. The last mini-batch of an epoch has
    what is left; `drop_last` leaves it out.
    """

    source: str
    kind: Literal["auto", "text", "jsonl", "parquet", "dataset", "python-stdlib"] = "auto"
    glob: str | None = None
    text: str | None = None
    unit: Literal["file", "definition"] | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    vocab: int = field(default=4096, metadata={"least": 257})
    max_length: int | None = field(default=None, metadata={"least": 2, "most": LONGEST})
    overlong: Literal["split", "truncate", "error"] = "split"
    batch_tokens: int | None = field(default=None, metadata=_POSITIVE)
    batch_sequences: int | None = field(default=None, metadata=_POSITIVE)
    validation: int = field(default=0, metadata={"least": 0})
    validate_every: int = field(default=0, metadata={"least": 0})
    shuffle: bool = True
    drop_last: bool = False
    cache: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How strategies are run; see `fxpar.parallelize`. `token_budgets` has numbers for some lengths of [strategies],
    `cluster` is a cluster file or what stands in one. Sequences of [data] are cut to multiples of `length_multiple`.
    """

    token_budget: int | None = field(default=None, metadata=_POSITIVE)
    token_budgets: dict[str, Any] = field(default_factory=dict)
    memory_budget_bytes: int | None = field(default=None, metadata=_POSITIVE)
    gradients: Literal["home", "chain"] = "home"
    order: list[str] | None = None
    merge: bool = True
    compile: Literal["eager", "inductor"] = "eager"
    checked: bool = False
    length_multiple: int = field(default=1, metadata=_POSITIVE)
    cluster: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """torch.optim; `clip` is the largest norm of all gradients (0: none)."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = field(default=3e-4, metadata={"above": 0})
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = field(default=1e-8, metadata={"above": 0})
    weight_decay: float = field(default=0.1, metadata={"least": 0})
    momentum: float = field(default=0.0, metadata={"least": 0})
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    clip: float = field(default=1.0, metadata={"least": 0})


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by step: `warmup` steps up from 0, then down to `final` times the rate at the last step."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = field(default=0, metadata={"least": 0})
    final: float = field(default=0.1, metadata={"least": 0})


@dataclass(frozen=True)
class PrecisionConfig:
    """`parameters`: dtype in which the model is built. `compute`: what it computes, adds up and sends in
    (`fxpar.precision.Precision`); by default as it is built.
    """

    parameters: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    compute: str | None = None
    loss_scale: float | None = field(default=None, metadata={"above": 0})
    deterministic: bool = False

    @property
    def narrowest(self) -> str:
        """The name of the dtype that rounds most."""
        from fxpar.precision import Precision

        low = Precision.parse(self.compute).param_dtype if self.compute else None
        return self.parameters if low is None else str(low).removeprefix("torch.")


@dataclass(frozen=True)
class CheckpointConfig:
    """`every` 0 saves at the end (and on Ctrl-C) only; `enabled = false` never."""

    enabled: bool = True
    folder: str | None = None
    every: int = field(default=0, metadata={"least": 0})
    keep: int = field(default=2, metadata=_POSITIVE)
    resume: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Steps, ranks, and where results go."""

    steps: int = field(default=100, metadata=_POSITIVE)
    ranks: int | None = field(default=None, metadata={"least": 1, "most": MOST_RANKS})
    seed: int = field(default=0, metadata={"least": 0})
    folder: str | None = None
    timeout_s: float = field(default=300.0, metadata={"above": 0, "most": 10**9})
    threads: int = field(default=1, metadata=_POSITIVE)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nan: Literal["error", "skip"] = "error"
    tensorboard: bool = True
    report: bool = True


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "engine": EngineConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "checkpoint": CheckpointConfig,
    "plan": PlanConfig,
    "run": RunConfig,
}
_REQUIRED = ("model", "data", "strategies")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. `strategies` maps the longest sequence of a group, in tokens, to a strategy; ascending. There are
    none where they are yet to be chosen ("auto"), or where all `tasks` have their own. Nothing of `data` holds for
    tasks.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    strategies: tuple[tuple[int, str], ...]
    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plan: PlanConfig = field(default_factory=PlanConfig)
    run: RunConfig = RunConfig()
    tasks: Mapping[str, TaskConfig] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks that the strategies need, or shall be chosen for."""
        if self.tasks:
            return world_of(self.tasks, self.strategies, self.run.ranks)
        return formations(self.strategies[-1][1])[0].world if self.strategies else self.run.ranks or 1

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens, that the loader hands out."""
        return self.data.max_length or self.strategies[-1][0]

    @property
    def folder(self) -> Path:
        """Where metrics, logs and (by default) checkpoints go."""
        return Path(self.run.folder or f"runs/{self.name}")

    @property
    def checkpoints(self) -> Path:
        return Path(self.checkpoint.folder) if self.checkpoint.folder else self.folder / "checkpoints"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def planned(self) -> TrainConfig:
        """The same with strategies of a plan, which may drift, unless it says how far."""
        return self if self.plan.drift is not None else replace(self, plan=replace(self.plan, drift=DRIFT))


def read_config(path: str | Path, assignments: Sequence[str] = (), launched: int | None = None) -> TrainConfig:
    """Read and check a file. Raises ConfigFileError and what `parse_config` raises."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        why = "it is a folder; name the TOML file, such as run.toml" if isinstance(error, IsADirectoryError) else why
        raise ConfigFileError(str(path), f"{why}{_if_a_model(str(path))}") from error
    return parse_config(text, str(path), Path(path).stem, assignments, launched)


def _if_a_model(path: str) -> str:
    """What to say of a path that looks like a MODEL of the other commands."""
    if not path.startswith("hf:") and Path(path.partition(":")[0]).suffix != ".py":
        return ""
    return ". A model is named in the configuration, a TOML file: name = ... under [model]"


def parse_config(
    text: str, source: str, name: str, assignments: Sequence[str] = (), launched: int | None = None
) -> TrainConfig:
    """Check the TOML `text`; `source` names it in errors, `name` is the default name of the run. Strategies that are
    yet to be chosen are for the ranks that a launcher has `launched`, unless run.ranks says how many.

    Raises ConfigFileError, ConfigError (all problems at once), MaxLengthError, StrategyWorldsError, TokenBudgetError.
    """
    try:
        tables = read(text, "TOML")
    except ValueError as error:
        raise ConfigFileError(source, f"{error}{_if_a_model(source)}") from error
    if "fxpar_plan" in tables:
        why = "is a plan of `fxpar plan`, which says the strategies of a run and nothing else of it"
        raise ConfigFileError(source, f"{why}. Give it beside a configuration: fxpar train CONFIG --plan {source}")
    problems: list[str] = []
    for assignment in assignments:
        assign(tables, assignment, problems)
    if "task" in tables:
        return _of_tasks(tables, source, name, problems, launched)
    sections = _sections(tables, problems)
    strategies = read_strategies(tables.get("strategies"), tables.get("data"), problems)
    if problems:
        run = tables.get("run")  # the section is None if another of its keys is wrong
        ranks = run.get("ranks") if isinstance(run, dict) else None
        raise ConfigError(source, [*problems, *group_problems(strategies, ranks)])
    config = _for_launched(TrainConfig(name=name, strategies=strategies, **sections), launched)
    config = replace(config, data=replace(config.data, tokenizer=_tokenizer(config, problems)))
    if problems:
        raise ConfigError(source, problems)
    check_together(config, source)
    return config


def _for_launched(config: TrainConfig, launched: int | None) -> TrainConfig:
    """With as many ranks as a launcher has started, where strategies are yet to be chosen and run.ranks is missing."""
    chosen = not chooses(config.tasks, config.strategies) if config.tasks else bool(config.strategies)
    if chosen or launched is None or config.run.ranks is not None:
        return config
    return replace(config, run=replace(config.run, ranks=launched))


def _of_tasks(tables: dict[str, Any], source: str, name: str, problems: list[str], launched: int | None) -> TrainConfig:
    """The run of [task.NAME] sections. Raises ConfigError."""
    tasks, strategies = read_tables(tables, problems)
    # A tokenizer is nothing that weights for tasks must have.
    sections = _sections({**tables, "data": {"source": "", "tokenizer": ""}, "strategies": {}}, problems)
    if not problems:
        config = _for_launched(TrainConfig(name=name, strategies=strategies, tasks=tasks, **sections), launched)
        problems += task_problems(tasks, config.model.name, strategies, config.run.ranks) + _value_problems(config)
        _tokenizer(config, problems)
        if not problems:
            return config
    raise ConfigError(source, problems)


def _tokenizer(config: TrainConfig, problems: list[str]) -> str | None:
    """The file of the tokenizer: trained weights know the tokens of one. Looks at the folders of a model too."""
    from fxpar.models.loaded import folder_of

    model, data, folder = config.model, config.data, folder_of(config.model.name)
    for key in ("missing", "unused"):
        if getattr(model, key) is not None and model.weights is None and folder is None:
            problems.append(f"model.{key} is for weights from a folder: set model.weights")
    for key, place in (("name", folder), ("weights", model.weights and Path(model.weights).expanduser())):
        if place and not place.is_dir():
            problems.append(f"model.{key}: {shown(str(place))} is not a folder here. Nothing is downloaded")
            return data.tokenizer
    start = folder or (model.weights and Path(model.weights).expanduser())
    if data.tokenizer is not None or not start:
        return data.tokenizer
    file = start / "tokenizer.json"
    if not file.is_file():
        problems.append(
            f"data.tokenizer is missing: {shown(str(start))} has weights but no tokenizer.json, and a new tokenizer "
            "would give its tokens other meanings. Put that of the weights into the folder, or set data.tokenizer"
        )
    return str(file)


def check_together(config: TrainConfig, source: str) -> None:
    """What only several keys show. Raises ConfigError, MaxLengthError and what `length_groups` raises."""
    problems: list[str] = []
    budgets = token_budget(config.engine, problems)
    if not config.strategies:
        problems += auto_problems(config.run.ranks, asdict(config.engine))
    problems += [*_value_problems(config), *plan_problems(config.plan, config.strategies, config.engine.compile)]
    longest, multiple = config.data.max_length or max(dict(config.strategies), default=0), config.engine.length_multiple
    if multiple > longest:
        problems.append(f"engine.length_multiple = {multiple} must be at most {longest}, the longest length")
    if (config.data.batch_tokens is None) == (config.data.batch_sequences is None):
        problems.append("[data] needs one of batch_tokens and batch_sequences")
    if problems:
        raise ConfigError(source, [*problems, *group_problems(config.strategies, config.run.ranks)])
    if config.strategies:
        length_groups(dict(config.strategies), world=config.run.ranks or config.world, token_budget=budgets)
        if config.max_length > config.strategies[-1][0]:
            raise MaxLengthError(config.max_length, config.strategies[-1][0])


def _value_problems(config: TrainConfig) -> list[str]:
    from fxpar.precision import Precision

    optimizer, compute = config.optimizer, config.precision.compute
    why = 'optimizer.implementation = "fused" is not for sgd: it takes no shards. Write "foreach"'
    problems = [why] if (optimizer.name, optimizer.implementation) == ("sgd", "fused") else []
    try:
        Precision.parse(compute or "fp32")
    except FxparError as error:
        problems.append(f"precision.compute: {error}")
    return problems


def described_cluster(engine: EngineConfig) -> ClusterSpec | None:
    """What the run is predicted for, if the configuration says so. Raises ClusterError."""
    if engine.cluster is None or isinstance(engine.cluster, str):
        return ClusterSpec.from_file(engine.cluster) if engine.cluster else None
    return ClusterSpec.from_dict(engine.cluster, "[engine.cluster]")


def token_budget(engine: EngineConfig, problems: list[str]) -> int | dict[int, int] | None:
    """Tokens of a micro-batch in the form of `fxpar.parallelize`."""
    if not engine.token_budgets:
        return engine.token_budget
    if engine.token_budget is not None:
        problems.append("engine.token_budget and engine.token_budgets exclude each other")
    for key, value in engine.token_budgets.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int):
            problems.append(f"engine.token_budgets.{key} = {shown(value)} must be a length and a number of tokens")
    return None if problems else {int(key): value for key, value in engine.token_budgets.items()}


def config_from_json(data: Mapping[str, Any]) -> TrainConfig:
    """The inverse of `TrainConfig.to_json`."""
    sections: dict[str, Any] = {name: from_table(cls, data[name], name, []) for name, cls in SECTIONS.items()}
    strategies = tuple((int(limit), text) for limit, text in data["strategies"])
    tasks: dict[str, Any] = {name: from_table(TaskConfig, one, name, []) for name, one in data["tasks"].items()}
    return TrainConfig(name=data["name"], strategies=strategies, tasks=tasks, **sections)


def _sections(tables: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The dataclass of each section that the file has."""
    known = [*SECTIONS, "strategies", "task"]
    for name in tables:
        if name not in known:
            problems.append(f"[{name}] is not a section" + (nearest(name, known) or f"; there are {', '.join(known)}"))
    found = {}
    for name, cls in SECTIONS.items():
        table = tables.get(name)
        if table is None:
            if name in _REQUIRED:
                problems.append(f"section [{name}] is missing" + " (or [task.NAME])" * (name == "data"))
        elif not isinstance(table, dict):
            problems.append(f"{name} = {shown(table)} must be a section: [{name}]")
        else:
            found[name] = from_table(cls, table, name, problems)
    return found
