"""Errors of models by name and of the commands that show something."""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from fxpar.errors.base import FxparError, nearest


# ------------------------------------------------------------------------------------- models and the command line
class UnknownModelError(FxparError):
    """MODEL names no built-in example, and is not written as another kind of model."""

    @classmethod
    def of(cls, spec: str, examples: Sequence[str], others: Sequence[str] = ()) -> UnknownModelError:
        """With a hint: a folder of this name, or the nearest name, which may be one of `others`."""
        if spec and os.path.isdir(os.path.expanduser(spec)):  # False for a name that is too long for one
            written = spec if "/" in spec or spec.startswith((".", "~")) else f"./{spec}"
            return cls(spec, examples, f"; to use the folder of this name, write hf:{written}.")
        if spec.endswith(".toml"):
            return cls(spec, examples, _of_run(spec))
        return cls(spec, examples, nearest(spec, [*examples, *others, *(f"hf:{name}" for name in examples)]))

    def __init__(self, spec: str, examples: Iterable[str], hint: str) -> None:
        super().__init__(
            f"there is no built-in model {spec!r}{hint or '.'} Built-in models are {', '.join(examples)}; others are "
            "written hf:TYPE, pkg.module:function or file.py:function, or with the prefix of an installed package"
        )


def _of_run(path: str) -> str:
    """How to look at the model of a run or a plan, whose file was given in its place."""
    say = "; a TOML file is the configuration of a run, for fxpar train (one with [task.NAME] for fxpar tasks plan too)"
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if "fxpar_plan" in tables:
            say = "; it is a plan, for fxpar train --plan and fxpar viz"
            model, options = tables["model"], tables.get("options", [])
        else:
            model, table = tables["model"]["name"], tables["model"].get("options", {})
            options = [f"{key}={value}" for key, value in table.items()]
        words = shlex.join([model, *(word for option in options for word in ("--set", option))])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{say}. Write the name of the model."
    if "task" in tables:
        return (
            f"{say}. Write FILE.py:FUNCTION of a function that returns the model, and the loss and batch of one task."
        )
    return f"{say}. Write its model: {words}."


class ExampleRunError(FxparError):
    """A model or its loss fails on its own example batch."""

    def __init__(self, error: BaseException, line: str | None) -> None:
        said, where = " ".join(str(error).split()).rstrip("."), f" at {line}" if line else ""
        super().__init__(
            f"the model or its loss does not run on the example batch: {type(error).__name__}{where}: {said}. It was "
            "captured from shapes alone; look at the values of the batch, such as labels beyond the number of classes"
        )


class OneTeamError(FxparError):
    """A command that looks at one strategy is given several side by side."""

    def __init__(self, command: str, strategy: str, teams: Sequence[str]) -> None:
        super().__init__(
            f"{command} looks at one strategy at a time, and {strategy!r} is {len(teams)} side by side. Name one of "
            f"them, such as {teams[0]!r}: the graph of a team is that of its strategy"
        )


class OneFormationError(FxparError):
    """A command that takes strategies one by one is given all formations of rounds."""

    def __init__(self, text: str, formations: Sequence[str]) -> None:
        some = ", ".join(formations[:4]) + (", ..." if len(formations) > 4 else "")
        super().__init__(
            f"{text!r} stands for {len(formations)} strategies: {some}. `fxpar check` and `fxpar memory` take all of "
            f"them; name one here, such as {formations[0]!r}"
        )


class ModelTypeError(FxparError):
    """A transformers type that is unknown or not a dense decoder."""

    def __init__(self, model_type: str, why: str) -> None:
        super().__init__(f"model type {model_type!r} {why}")


class ModelConfigError(FxparError):
    """transformers refuses a configuration."""

    def __init__(self, model_type: str, cause: Exception) -> None:
        reason = " ".join(str(cause).split()) or type(cause).__name__
        super().__init__(
            f"transformers cannot build 'hf:{model_type}' with these options: {type(cause).__name__}: {reason}. "
            "Change them with --set key=value"
        )


class ModelFolderError(FxparError):
    """A folder that is no model of transformers."""

    def __init__(self, folder: str, why: str) -> None:
        written = folder if "/" in folder or folder.startswith((".", "~")) else f"./{folder}"
        super().__init__(f"model 'hf:{written}': the folder {why}")


class PresetError(FxparError):
    """A published configuration that fxpar does not know."""

    def __init__(self, model_type: str, size: str, known: Iterable[str]) -> None:
        sizes = ", ".join(f"hf:{model_type}@{name}" for name in [*known, "default"])
        super().__init__(f"there is no configuration 'hf:{model_type}@{size}'. Known ones are {sizes}")


class ModelOptionError(FxparError):
    """A `--set` option that a model does not take, or with a value that does not fit."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"option {option!r} {why}")

    @classmethod
    def unknown(cls, key: str, owner: str, known: Iterable[str]) -> ModelOptionError:
        names = sorted(set(known))
        hint = nearest(key, names)
        if hint in ("", ".") and 0 < len(names) <= 12:
            hint = f"; known options are {', '.join(names)}"
        return cls(key, f"is unknown to {owner}{hint}")


class ModelFunctionError(FxparError):
    """A user's model function cannot be found, or returns something else than a model, a loss and a batch."""

    def __init__(self, spec: str, why: str) -> None:
        super().__init__(f"model {spec!r}: {why}")


class MissingPackageError(FxparError):
    """A model needs a package that is not installed."""

    def __init__(self, model: str, package: str, how: str) -> None:
        super().__init__(f"models {model!r} need {package}: {how}")


class DtypeError(FxparError):
    """A dtype that a model cannot be loaded in."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(f"dtype {name!r} is not known{nearest(name, names) or '.'} Write one of {', '.join(names)}")


class TokensError(FxparError):
    """`--tokens` is no list of lengths."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"--tokens {text!r}: write the lengths of the micro-batches, such as 64,37,96; each is at least 2, "
            "and no more than 2^30"
        )


class MicroBatchTokensError(FxparError):
    """A micro-batch of so many tokens that the model cannot have."""

    def __init__(self, tokens: int, rows: int, dim: str, least: int, most: int | None) -> None:
        takes = f"{dim} from {least:,}" + ("" if most is None else f" to {most:,}")
        each = f" in {rows:,} rows of {dim} each, as many as in the example" if rows > 1 else f" of {dim} each"
        super().__init__(
            f"--tokens {tokens}: a micro-batch of this model has tokens{each}, and it takes {takes}. Write a multiple "
            f"of {rows:,}" + ("" if most is None else f", at most {rows * most:,}")
        )


class OutputError(FxparError):
    """A result cannot be written where the user wants it."""

    def __init__(self, path: str, cause: OSError) -> None:
        super().__init__(f"cannot write {path!r}: {cause.strerror or cause}")


# -------------------------------------------------------------------------------------------------------- pictures
class VizDependencyError(FxparError):
    """A package that draws is not installed."""

    def __init__(self, package: str, what: str) -> None:
        super().__init__(f'{what} need the package {package}, which is not installed: pip install "fxpar[viz]"')


class OpenStdoutError(FxparError):
    """`--open` for something that is written to stdout."""

    def __init__(self) -> None:
        super().__init__("--open needs a file to open, and --output is stdout. Name a file with -o")


class SameOutputError(FxparError):
    """Two results are to be written to the same place."""

    def __init__(self, path: str) -> None:
        place = "stdout" if path == "-" else repr(path)
        super().__init__(f"--output and --trace are both {place}. Name another file for one of them")


# ------------------------------------------------------------------------------------------------------ comparison
class DifferentModelsError(FxparError):
    """Two graphs that are to be compared are of different models."""

    def __init__(self, old: str, new: str, fqn: str, left: tuple | None, right: tuple | None) -> None:
        def says(shape: tuple | None) -> str:
            return "no such parameter" if shape is None else f"shape {list(shape)}"

        super().__init__(
            f"{old} and {new} are different models: {fqn!r} has {says(left)} in the first, {says(right)} in the "
            "second. Compare graphs of one model, with the same options"
        )


class SidesError(FxparError):
    """What `fxpar diff` is to compare is not said, or said twice."""

    def __init__(self, why: str, do: str) -> None:
        super().__init__(f"nothing to compare: {why}. {do}.")


class PassStepError(FxparError):
    """A pass that is no step of the lowering, so there is no graph before or after it."""

    def __init__(self, name: str, see: str) -> None:
        super().__init__(f"pass {name!r} is not a step of the lowering, so no graph comes out of it. See: {see}")


class PassNeedsError(FxparError):
    """A pass was asked to run on a graph that is not what it needs."""

    def __init__(self, name: str, what: str, lack: str, do: str) -> None:
        super().__init__(f"pass {name!r} needs {what}; in this graph {lack}. {do}. See: fxpar passes {name}")


class PassOptionError(FxparError):
    """An option of a pass that it does not have, or a value that does not fit."""

    def __init__(self, name: str, option: str, why: str) -> None:
        super().__init__(f"option {option!r} of pass {name!r}: {why}")


class GivenPassesError(FxparError):
    """Options of `lower` that are options of its passes, beside passes that have theirs already."""

    def __init__(self, options: list[str]) -> None:
        given = ", ".join(f"{option}=" for option in options)
        super().__init__(
            f"lower(passes=...) cannot be combined with {given} which configure the passes that lower makes itself. "
            f"Give {given} to fxpar.lowering.ladder.default_passes, and change the list that it returns"
        )


class PassRunError(FxparError):
    """A pass failed on a graph for which it may not be meant."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"pass {name!r} cannot run on this graph ({type(error).__name__}: {error}). See what it needs with: "
            f"fxpar passes {name}"
        )


# ---------------------------------------------------------------------------------------------------- explanations
class UnknownSubjectError(FxparError):
    """`fxpar explain` is asked about something that the graph does not have."""

    def __init__(self, name: str, model: str, known: Iterable[str]) -> None:
        close = difflib.get_close_matches(name.removeprefix("%"), list(dict.fromkeys(known)), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        super().__init__(
            f"{model} has nothing called {name!r}{hint} Name a parameter or a module (globs too), a node as "
            "`fxpar dump --stage annotated` prints it, or a collective as `fxpar dump` does"
        )


class SubjectStageError(FxparError):
    """A name that means something else on each pipeline stage."""

    def __init__(self, name: str, stages: Iterable[int]) -> None:
        super().__init__(f"{name!r} is on stages {', '.join(map(str, stages))}. Add --stage N to choose one")


class WeightsNotFiniteError(FxparError):
    """A model to check has weights that are NaN or infinite."""

    def __init__(self, spec: str, fqns: Sequence[str]) -> None:
        others = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
        super().__init__(
            f"model {spec!r}: {fqns[0]}{others} holds NaN or infinite values, and nothing can be compared with them. "
            "Give it other weights"
        )
