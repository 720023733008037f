"""Pickles of torch.distributed.checkpoint (DCP), and of plain values, read by hand.

A pickle is a program. Python's own unpickler runs all of it, and what is looked at before and after cannot stop that:
a hundred bytes make tuples that share their parts sixty levels deep, whose hash takes 2^60 steps, or a memo of 64 GB.
Here stand only the opcodes that Python writes for these (protocols 4 and 5), and each takes a time bounded by its
bytes: keys of tables and parts of sets are plain, a memo has as many entries as were made, and what is called is in a
table.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_DEEPEST = 100  # levels of tables and lists that wait for their end; DCP's have fewer than ten


@dataclass(frozen=True)
class Kind:
    """A class that a pickle may name: its objects become records of that kind."""

    name: str


@dataclass(eq=False)
class Record:
    """What a pickle says of an object of a class; equal to itself alone, so its hash asks for no part of it."""

    kind: str
    state: Any = None


@dataclass(frozen=True)
class Function:
    """What a pickle may call, with a tuple of arguments."""

    call: Callable[[tuple[Any, ...]], Any]


def read_pickle(data: bytes, find: Callable[[str, str], Any]) -> Any:
    """The value of a pickle. `find(module, name)` gives a Kind, a Function or a plain value for what it names.

    Raises pickle.UnpicklingError, or what `find` and its functions raise; nothing else is called.
    """
    machine = _Machine(data, find)
    try:
        while (step := machine.next()) is not None:
            step(machine)
        (found,) = machine.stack
    except (IndexError, ValueError, TypeError) as error:
        raise pickle.UnpicklingError(f"byte {machine.at:,}: {error}") from error
    return found


class _Machine:
    def __init__(self, data: bytes, find: Callable[[str, str], Any]) -> None:
        self.data, self.at, self.find = data, 0, find
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below a mark
        self.memo: list[Any] = []

    def next(self) -> Callable[[_Machine], None] | None:
        """What the next opcode does; None at the end."""
        code = self.data[self.at]
        self.at += 1
        if code == _STOP:
            return None
        if code not in _STEPS:
            what = f"an opcode that neither metadata nor plain values need ({code:#04x})"
            raise pickle.UnpicklingError(f"byte {self.at - 1:,} is {what}")
        return _STEPS[code]

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise pickle.UnpicklingError("it is cut off")
        self.at += count
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def marked(self) -> list[Any]:
        """The values since the last mark."""
        found, self.stack = self.stack, self.outer.pop()
        return found


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _number(size: int, *, signed: bool = False) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(int.from_bytes(m.take(size), "little", signed=signed))


def _text(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(str(m.take(m.number(size)), "utf-8"))


def _remembered(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.memo[m.number(size)])


def _tuple(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        if len(m.stack) < size:
            raise IndexError("a tuple has more parts than there are values")
        m.stack[len(m.stack) - size :] = [tuple(m.stack[len(m.stack) - size :])]

    return step


def _tuple_of_marked(m: _Machine) -> None:
    found = tuple(m.marked())
    m.stack.append(found)


def _mark(m: _Machine) -> None:
    if len(m.outer) >= _DEEPEST:
        raise pickle.UnpicklingError(f"it has more than {_DEEPEST} levels")
    m.outer.append(m.stack)
    m.stack = []


def _set(m: _Machine, values: list[Any]) -> None:
    table = m.stack[-1]
    if type(table) is not dict or len(values) % 2:
        raise TypeError("a key and a value belong into a table")
    for key, value in zip(values[::2], values[1::2], strict=True):
        if type(key) not in (str, int, Record):
            raise TypeError(f"a key of a table is of class {type(key).__name__}")
        table[key] = value


def _add(m: _Machine, values: list[Any]) -> None:
    if type(m.stack[-1]) is not set or not all(type(value) in (str, int, float, bytes) for value in values):
        raise TypeError("plain values alone belong into a set")
    m.stack[-1].update(values)


def _append(m: _Machine, values: list[Any]) -> None:
    if type(m.stack[-1]) is not list:
        raise TypeError("a value is appended to what is not a list")
    m.stack[-1].extend(values)


def _object(m: _Machine) -> None:
    args, kind = m.stack.pop(), m.stack.pop()
    if not isinstance(kind, Kind) or args != ():
        raise TypeError("an object is made of what is not a class of the metadata, or with arguments")
    m.stack.append(Record(kind.name))


def _call(m: _Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Function) or type(args) is not tuple:
        raise TypeError("it calls what cannot be called here")
    m.stack.append(function.call(args))


def _build(m: _Machine) -> None:
    state, made = m.stack.pop(), m.stack[-1]
    if not isinstance(made, Record) or made.state is not None:
        raise TypeError("a state is given to what takes none")
    made.state = state


def _name(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a name is not text")
    m.stack.append(m.find(module, name))


_STOP = pickle.STOP[0]
_STEPS: Mapping[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: lambda m: m.take(1),
        pickle.FRAME: lambda m: m.take(8),
        pickle.NONE: _push(None),
        pickle.NEWTRUE: _push(True),
        pickle.NEWFALSE: _push(False),
        pickle.BININT: _number(4, signed=True),
        pickle.BININT1: _number(1),
        pickle.BININT2: _number(2),
        pickle.LONG1: lambda m: m.stack.append(int.from_bytes(m.take(m.number(1)), "little", signed=True)),
        pickle.BINFLOAT: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
        pickle.SHORT_BINBYTES: lambda m: m.stack.append(m.take(m.number(1))),
        pickle.BINBYTES: lambda m: m.stack.append(m.take(m.number(4))),
        pickle.SHORT_BINUNICODE: _text(1),
        pickle.BINUNICODE: _text(4),
        pickle.EMPTY_TUPLE: _push(()),
        pickle.TUPLE1: _tuple(1),
        pickle.TUPLE2: _tuple(2),
        pickle.TUPLE3: _tuple(3),
        pickle.TUPLE: _tuple_of_marked,
        pickle.EMPTY_LIST: lambda m: m.stack.append([]),
        pickle.APPEND: lambda m: _append(m, [m.stack.pop()]),
        pickle.APPENDS: lambda m: _append(m, m.marked()),
        pickle.EMPTY_DICT: lambda m: m.stack.append({}),
        pickle.SETITEM: lambda m: _set(m, [m.stack.pop(-2), m.stack.pop()]),
        pickle.SETITEMS: lambda m: _set(m, m.marked()),
        pickle.EMPTY_SET: lambda m: m.stack.append(set()),
        pickle.ADDITEMS: lambda m: _add(m, m.marked()),
        pickle.MARK: _mark,
        pickle.MEMOIZE: lambda m: m.memo.append(m.stack[-1]),
        pickle.BINGET: _remembered(1),
        pickle.LONG_BINGET: _remembered(4),
        pickle.STACK_GLOBAL: _name,
        pickle.NEWOBJ: _object,
        pickle.REDUCE: _call,
        pickle.BUILD: _build,
    }.items()
}
