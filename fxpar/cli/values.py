"""Values of options and arguments: words, numbers and choices.

Typer reads them with pydantic, whose import takes longer than all else of a command that needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperOption

from fxpar.cli.usage import MISSING_VALUE
from fxpar.errors import nearest


class _ReadHere:
    """An option or argument of typer's whose words are read by `read_word`."""

    kind: Any
    least: float | None
    most: float | None

    def process_value(self: Any, ctx: Any, value: Any) -> Any:
        """The value of the words, checked. Raises BadParameter."""
        many = self.multiple or self.nargs != 1
        try:
            if many and value is not None:
                value = tuple(read_word(one, self.kind, self.least, self.most) for one in value)
            elif isinstance(value, str):
                value = read_word(value, self.kind, self.least, self.most)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=self) from None
        if value is None and (self.multiple or self.nargs == -1):
            value = ()
        if self.required and value in (None, ()):
            raise typer.BadParameter(MISSING_VALUE, ctx=ctx, param=self)
        return value if self.callback is None else self.callback(ctx, self, value)


class _Option(_ReadHere, TyperOption):
    multiple: bool


class _Argument(_ReadHere, TyperArgument):
    multiple = False


class ReadsWords:
    """A command of typer's, or a group of them, whose parameters are read here."""

    kinds: Mapping[str, tuple[Any, Any]] = {}  # by name of a parameter: its type, and the option that has its limits

    def get_params(self: Any, ctx: Any) -> list[Any]:
        """Those of typer, `--help` included, each made once."""
        made = vars(self).setdefault("made", {})
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.name not in made:
                made[param.name] = _read_here(param, *self.kinds.get(param.name, (str, None)))
        return [made[param.name] for param in params]


def _read_here(param: Any, kind: Any, option: Any) -> Any:
    """The same parameter, whose values are of `kind`, within the limits of `option`."""
    cls: Any = _Argument if isinstance(param, TyperArgument) else _Option
    made = cls.__new__(cls)
    vars(made).update(vars(param))
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    made.kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    made.least, made.most = (None, None) if option is None else (option.min, option.max)
    return made


def read_word(text: str, kind: Any, least: float | None = None, most: float | None = None) -> Any:
    """A word of the command line as text, number or one of several words (`kind`: a Literal). Raises ValueError with
    what it must be.
    """
    if get_origin(kind) is Literal:
        known = get_args(kind)
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, known))}{nearest(text, known)}")
        return text
    if kind not in (int, float):
        return text
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"{text!r} must be a {'whole ' if kind is int else ''}number") from None
    if least is not None and not number >= least:
        raise ValueError(f"{text!r} must be {least} or more")
    if most is not None and not number <= most:
        raise ValueError(f"{text!r} must be {most} or less")
    return number
