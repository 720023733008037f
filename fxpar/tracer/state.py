"""What a model's code keeps from one call to the next outside of its buffers: a graph computes with what was there at
its capture, so what calls change is told, and put back.

What a forward makes once and keeps, such as a table of positions, looks like state after one call. A second call with
the same shapes tells them apart: it finds the table, changes nothing, and computes the same from data. What is made
once of data, or makes the second call compute something else, is state; a tensor that every call makes anew and none
reads from the call before, such as an auxiliary loss, is handed on within a call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import warn
from fxpar.losses import what_is_called
from fxpar.torch_api import tracing
from fxpar.tracer.computed import Computed
from fxpar.tracer.provenance import is_user_file

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = frozenset({dict, list, set, deque, OrderedDict, defaultdict, Counter})  # others may make what they hold
_ANSWERS = (bool, str, type(None))  # in a class or file what code has found out once, rather than state
_PLAIN = (int, float, complex, *_ANSWERS)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DEEPEST = 3  # containers inside of containers
_OTHER = object()
_LARGEST = 4096  # of larger ones the elements are not looked at


@dataclass(frozen=True)
class _Kept:
    """A value that calls may change, as it was: a tensor, number, text, or what a container has."""

    value: Any
    version: Any = None

    @classmethod
    def of(cls, value: Any) -> _Kept:
        if isinstance(value, Tensor):
            return cls(value, 0 if value.is_inference() else value._version)
        if isinstance(value, _SYMBOLIC):
            return cls(value, str(value.node.expr))
        if isinstance(value, nn.Module):
            return cls(value)
        return cls(value) if isinstance(value, _PLAIN) else cls(type(value), len(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kept) or self.version != other.version:
            return False
        if isinstance(self.value, _PLAIN) and isinstance(other.value, _PLAIN):
            return self.value is other.value or self.value == other.value
        return self.value is other.value or isinstance(self.value, _SYMBOLIC)

    __hash__ = None  # type: ignore[assignment]

    def is_number(self) -> bool:
        return type(self.value) in (int, float)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"a tensor [{', '.join(map(str, self.value.shape))}]"
        if isinstance(self.value, nn.Module):
            return f"a {type(self.value).__name__}"
        if isinstance(self.value, type):
            return f"a {self.value.__name__} of {self.version}"
        return str(self.version) if isinstance(self.value, _SYMBOLIC) else repr(self.value)


@dataclass(frozen=True)
class _Place:
    """Where code keeps values by name: a module, a class, or the globals of a file, of which `names` are looked at.

    `put` and `drop` undo single names where not all is put back.
    """

    words: str
    values: Mapping[str, Any]
    of_class: Mapping[str, Any]
    names: frozenset[str] | None = None
    put: Callable[[str, Any], None] | None = None
    drop: Callable[[str], Any] | None = None
    buffers: frozenset[str] = frozenset()  # of a module, those that it had

    @classmethod
    def of_object(cls, words: str, owner: Any) -> _Place:
        """Of a class, or of an object that is no module."""
        return cls(words, vars(owner), {}, None, functools.partial(setattr, owner), functools.partial(delattr, owner))

    @classmethod
    def of_module(cls, words: str, module: nn.Module, of_class: Mapping[str, Any]) -> _Place:
        """Its attributes, the modules in it, and buffers that it gets."""
        buffers = frozenset(name for name, value in module._buffers.items() if value is not None)
        return cls(words, vars(module), of_class, buffers=buffers)

    def now(self) -> dict[str, Any]:
        found = {**self.of_class, **self.values}
        if isinstance(self.values.get("_modules"), dict):
            made = {name: value for name, value in self.values["_buffers"].items() if name not in self.buffers}
            found = {**found, **self.values["_modules"], **made}
        return {name: value for name, value in found.items() if name not in _OF_TORCH and self._has(name)}

    def _has(self, name: str) -> bool:
        return not name.startswith("__") and (self.names is None or name in self.names)

    def kept(self) -> dict[str, _Kept]:
        """By how one writes them: `step`, `state['n']`, `counts[0]`."""
        found: dict[str, _Kept] = {}
        for name, value in self.now().items():
            if self.put is None or not isinstance(value, _ANSWERS):
                _look_into(name, value, found, _DEEPEST)
        return found


def _look_into(name: str, value: Any, found: dict[str, _Kept], deepest: int) -> None:
    if isinstance(value, (Tensor, nn.Module, *_PLAIN, *_SYMBOLIC)):
        found[name] = _Kept.of(value)
    elif type(value) in _CONTAINERS or isinstance(value, tuple):
        found[name] = _Kept.of(value)
        if deepest and len(value) <= _LARGEST and type(value) is not set:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                _look_into(f"{name}[{key!r}]", each, found, deepest - 1)


class State:
    """What the code of a model and of other functions keeps, as it was when this was made."""

    def __init__(self, model: nn.Module, functions: Sequence[Any] = ()) -> None:
        self.places = _places(model, functions)
        self.kept = [place.kept() for place in self.places]
        self.attributes = [(place, dict(place.values)) for place in self.places if place.put is None]
        self.shared = [(place, place.now()) for place in self.places if place.put is not None]
        self.containers = _contents(values for _, values in self.attributes)
        self.shared_containers = _contents(values for _, values in self.shared)

    def put_back(self) -> None:
        """Every attribute, parameter and buffer table of the modules as it was; in classes and globals, whose code may
        count captures, only what holds values of a trace.
        """
        for place, old in self.attributes:
            _fill(place.values, old)
        for container, content in self.containers:
            _fill(container, content)
        for place, old in self.shared:
            assert place.put is not None
            assert place.drop is not None
            for name, value in place.now().items():
                if _is_traced(value) and name not in old:
                    place.drop(name)
                elif _is_traced(value) and value is not old[name]:
                    place.put(name, old[name])
        for container, content in self.shared_containers:
            if any(map(_is_traced, _elements(container))):
                _fill(container, content)

    def tensors(self) -> Iterator[Tensor]:
        """Those that code keeps now."""
        for place in self.places:
            yield from (one.value for one in place.kept().values() if isinstance(one.value, Tensor))

    def changed(self) -> bool:
        """Whether a call has changed anything."""
        return any(_changed(was, place.kept()) for was, place in zip(self.kept, self.places, strict=True))

    def tell(
        self, first: Computed | None, call_again: Callable[[], Computed | None], in_names: Callable[[str], str]
    ) -> None:
        """Warn of what a call has changed: of numbers at once, of the rest by what `call_again` makes of it. `first` is
        what the call computed, None if nothing had changed. `in_names` puts the names of sizes into a message.
        """
        found = [place.kept() for place in self.places]
        changes = [_changed(was, now) for was, now in zip(self.kept, found, strict=True)]
        second = None
        laters: list[dict[str, _Kept]] = [{} for _ in self.places]
        if any(not both_numbers for names in changes for both_numbers in names.values()):
            with self._shared_kept():
                second = call_again()
                laters = [place.kept() if names else {} for place, names in zip(self.places, changes, strict=True)]
        told, rest = [], []
        for place, was, now, names, later in zip(self.places, self.kept, found, changes, laters, strict=True):
            again = _changed(now, later)
            for name, both_numbers in names.items():
                whole = name.partition("[")[0]
                if whole in place.of_class and whole not in place.values:
                    continue  # the class itself is a place
                of_data = first is not None and id(now[name].value) in first.of_data
                state = of_data if name not in again else not _handed_on(now[name], later.get(name), second)
                change = in_names(_in_words(was.get(name), now[name]))
                (told if both_numbers or state else rest).append((place.words, whole, both_numbers, f"{name} {change}"))
        if not told and first is not None and second is not None and first.ops != second.ops:
            told = rest
        said: set[tuple[str, str]] = set()
        for words, whole, both_numbers, change in told:
            place = words if whole != "training" else ""  # a model passes its mode on to all modules in it
            if both_numbers or (place, whole) not in said:
                said.add((place, whole))
                warn(
                    f"{words} sets {change}: captured, every step begins as before that, and none "
                    "sets it. Make it a buffer, or keep it outside of the model"
                )

    @contextlib.contextmanager
    def _shared_kept(self) -> Iterator[None]:
        """Undo what the block changes in classes, files and functions, whose code may count calls."""
        old = [(place, place.now()) for place, _ in self.shared]
        containers = [one for one in _contents(values for _, values in old) if type(one[0]) in _CONTAINERS]
        try:
            yield
        finally:
            for place, values in old:
                assert place.put is not None
                assert place.drop is not None
                for name, value in place.now().items():
                    if name not in values:
                        place.drop(name)
                    elif value is not values[name]:
                        place.put(name, values[name])
            for container, content in containers:
                _fill(container, content)


def _handed_on(now: _Kept, later: _Kept | None, second: Computed | None) -> bool:
    """Whether a tensor of the first call is another one after the second, which has not computed with it."""
    if later is None or second is None or not isinstance(now.value, Tensor):
        return False
    return isinstance(later.value, Tensor) and later.value is not now.value and id(now.value) not in second.read


def _in_words(was: _Kept | None, now: _Kept) -> str:
    if was is None:
        return f"to {now}"
    if isinstance(was.value, Tensor) and isinstance(now.value, Tensor):
        return f"to other values, [{', '.join(map(str, now.value.shape))}]"
    return f"from {was} to {now}"


def _changed(was: Mapping[str, _Kept], now: Mapping[str, _Kept]) -> dict[str, bool]:
    """What is another value or new, and whether it was a number and is one."""
    names = [name for name, value in now.items() if name not in was or was[name] != value]
    return {name: name in was and was[name].is_number() and now[name].is_number() for name in names}


@contextlib.contextmanager
def unchanged(model: nn.Module, functions: Sequence[Any] = ()) -> Iterator[State]:
    """Undo every change that the block makes to what the modules of `model` keep."""
    state = State(model, functions)
    try:
        yield state
    finally:
        state.put_back()


def class_attributes(kind: type[nn.Module]) -> dict[str, Any]:
    """What the classes of a user's module say, for those of its objects that say nothing."""
    found: dict[str, Any] = {}
    for each in reversed(_own_classes(kind)):
        found |= {name: value for name, value in vars(each).items() if not name.startswith("__")}
    return found


def _own_classes(kind: type[nn.Module]) -> list[type]:
    return [c for c in kind.__mro__ if issubclass(c, nn.Module) and not c.__module__.startswith("torch.")]


def _places(model: nn.Module, functions: Sequence[Any]) -> list[_Place]:
    modules: list[_Place] = []
    classes: dict[type, None] = {}
    of_class: dict[type, dict[str, Any]] = {}
    for fqn, module in model.named_modules():
        kind = type(module)
        if kind not in of_class:
            of_class[kind] = class_attributes(kind)
            classes |= dict.fromkeys(_own_classes(kind))
        words = f"the forward of module {fqn!r}" if fqn else "the forward of the model"
        modules.append(_Place.of_module(words, module, of_class[kind]))
    shared = [_Place.of_object(f"the code of class {each.__name__}", each) for each in classes]
    written = [value for each in classes for value in vars(each).values()]
    for function in functions:
        called = what_is_called(function)
        owner = getattr(called, "__self__", called)
        plain = isinstance(owner, (FunctionType, ModuleType, type)) or not hasattr(owner, "__dict__")
        if not plain and all(owner is not module for module in model.modules()):
            shared.append(_Place.of_object(f"the loss function, a {type(owner).__name__},", owner))
            written.append(type(owner).__call__)
    return [*modules, *_objects(modules), *shared, *_globals([*written, *functions])]


def _objects(modules: Sequence[_Place]) -> list[_Place]:
    """Objects of the user's classes that modules hold in attributes, each once."""
    found: dict[int, _Place] = {}
    for module in modules:
        for name, value in module.values.items():
            if _is_users(type(value)) and hasattr(value, "__dict__"):
                found.setdefault(id(value), _Place(f"{module.words} (in self.{name})", vars(value), {}))
    return list(found.values())


@functools.cache
def _is_users(kind: type) -> bool:
    """Whether objects of a class are the user's, by its file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    plain = kind is SimpleNamespace or (file is not None and is_user_file(file))
    return plain and not issubclass(kind, (type, Tensor, nn.Module))


def _of_function(function: FunctionType) -> _Place:
    """Its attributes, and containers that are defaults of its parameters or come from a function around it."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    found: dict[str, Any] = dict(zip(reversed(arguments), reversed(defaults), strict=False))
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            found[name] = cell.cell_contents
    containers = {name: value for name, value in found.items() if type(value) in _CONTAINERS}
    put, drop = functools.partial(setattr, function), functools.partial(delattr, function)
    words = f"the code of {function.__qualname__}"
    return _Place(words, ChainMap(vars(function), containers), {}, put=put, drop=drop)


def _globals(functions: Sequence[Any]) -> list[_Place]:
    """The globals that functions of the user's name, and what functions of the same file that these call do; and what
    these functions themselves keep.
    """
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    todo, seen, places = list(functions), set(), list[_Place]()
    while todo:
        called = what_is_called(todo.pop())
        function = inspect.unwrap(getattr(called, "__func__", called))
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        if is_user_file(function.__code__.co_filename):
            space = function.__globals__
            places.append(_of_function(function))
            _, names = found.setdefault(id(space), (space, set()))
            new = _names(function.__code__) - names
            names |= new
            todo += [space[name] for name in new if isinstance(space.get(name), FunctionType)]
    return places + [
        _Place(f"the code in {space.get('__file__')}", space, {}, frozenset(names), space.__setitem__, space.pop)
        for space, names in found.values()
    ]


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _elements(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _contents(spaces: Iterable[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """The containers that are values of `spaces`, and those inside of them, with what they have now."""
    found: dict[int, tuple[Any, Any]] = {}
    todo = [(value, _DEEPEST) for values in spaces for value in values.values()]
    while todo:
        value, deepest = todo.pop()
        outermost = deepest == _DEEPEST and isinstance(value, (dict, list, set))
        if (type(value) in _CONTAINERS or outermost) and id(value) not in found:
            found[id(value)] = value, copy.copy(value)
        if deepest and (type(value) in _CONTAINERS or isinstance(value, tuple)) and len(value) <= _LARGEST:
            todo += [(each, deepest - 1) for each in _elements(value)]
    return list(found.values())


def _fill(container: Any, content: Any) -> None:
    """Not what is as it was: another thread may be reading a configuration that models share."""
    if isinstance(container, dict):
        same = len(container) == len(content) and all(container.get(k, _OTHER) is v for k, v in content.items())
    else:
        same = not isinstance(container, set) and list(map(id, container)) == list(map(id, content))
    if same:
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _is_traced(value: Any, deepest: int = _DEEPEST) -> bool:
    """Whether a value is one of a trace, or holds one."""
    if isinstance(value, tuple) or type(value) in _CONTAINERS:
        return deepest > 0 and any(_is_traced(each, deepest - 1) for each in _elements(value))
    return isinstance(value, _SYMBOLIC) or (isinstance(value, Tensor) and tracing.is_fake(value))
