"""Where each traced node comes from: module FQN, the user's source line, forward or backward.

Nothing of the model is touched: global module hooks keep a stack of FQNs while the model runs. A node of the backward
gets what the forward op had whose autograd node the engine is running, matched by sequence number.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from fxpar.errors import UnsupportedOpError
from fxpar.torch_api import tracing
from fxpar.torch_api.backward import tensors_in


def _folder(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_TORCH = _folder(torch.__file__)
_FXPAR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SYMPY = f"{os.sep}sympy{os.sep}"
_TRANSFORMERS = f"{os.sep}transformers{os.sep}"
F = TypeVar("F", bound=Callable[..., Any])
_GENERATED = ("<frozen", "<string>", "<eval_with_key>")

# Functions of capture that call user code: frames outside of them are the caller's, not the model's.
_BOUNDARIES: set[CodeType] = set()
_STEP = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "step.py"
)  # everything of the user's is called from here


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether users know this file: not torch, fxpar, the standard library or a host's plumbing."""
    if filename.startswith(_GENERATED):
        return False
    path = os.path.abspath(filename)
    if path.startswith((_TORCH, _FXPAR)) or _SYMPY in path:
        return False
    if "-packages" + os.sep in path:
        return _TRANSFORMERS not in path or f"{_TRANSFORMERS}models{os.sep}" in path
    return not path.startswith(_STDLIB)


def calls_user_code(function: F) -> F:
    """Mark a function of capture that calls user code."""
    _BOUNDARIES.add(function.__code__)
    return function


def user_line() -> str | None:
    """`file:line` of the innermost frame of user code inside capture; None for what capture itself does.

    A region that is recomputed in the backward runs outside of the call of the loss function, but inside the step.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _BOUNDARIES and frame.f_code.co_filename != _STEP:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def line_of_error(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of user code in an exception's traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in _BOUNDARIES:
            line = None
        elif is_user_file(code.co_filename):
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def failed_on_size(error: BaseException) -> bool:
    """Whether an exception comes from an operation on a symbolic size, below the innermost frame of user code."""
    if re.search(r"\bSym(Int|Float|Bool)\b", str(error)):
        return True
    below, trace = False, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if is_user_file(frame.f_code.co_filename):
            below = False
        else:
            below = below or _SYMPY in frame.f_code.co_filename or _is_operator(frame)
        trace = trace.tb_next
    return below


def _is_operator(frame: FrameType) -> bool:
    """Whether a frame is of an operator of a symbolic size, such as `SymFloat.__pow__`; a truth value is a guard."""
    of_size = isinstance(frame.f_locals.get("self"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return of_size and frame.f_code.co_name not in ("__bool__", "__index__", "__int__", "__float__")


@dataclass
class ModuleFrame:
    """One module call on the stack: the number of the call among those of this module inside the call around it.

    `calls` counts what wants a number (dropouts), `inner` the calls of modules by id, both within this call.
    """

    fqn: str
    module: int
    repeat: int = 0
    calls: int = 0
    inner: dict[int, int] = field(default_factory=dict)


@dataclass
class Provenance:
    """Follows one run of a model; `on_node` stamps `fqn`, `source`, `backward` into node metas."""

    model: nn.Module
    stack: list[ModuleFrame] = field(default_factory=lambda: [ModuleFrame("", 0)])
    recomputing: int = 0
    recomputes: bool = False  # some of the model, or its hooks on saved tensors, runs in the backward
    ends: list[Tensor] = field(default_factory=list)
    """The results of modules that stand in a list of modules, as layers do, where each is one tensor with a gradient
    (beside others without one).
    """
    newest: dict[fx.Node, int] = field(default_factory=dict)
    """Of each call of the forward: the number of autograd's newest node when it ran."""

    def __post_init__(self) -> None:
        modules = list(self.model.named_modules())
        self._names = {id(module): name for name, module in reversed(modules)}
        lists = (module for _, module in modules if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential))
        self._listed = {id(module) for found in lists for module in found.children()}
        self._forward: dict[int, tuple[str, str | None]] = {}

    @property
    def fqn(self) -> str:
        """FQN of the module that is running."""
        return self.stack[-1].fqn

    def next_call(self) -> str:
        """A name for something in the running module that no other place or call of this step has.

        `fqn:call`, plus how often each module around it has been called before if any has.
        """
        frame = self.stack[-1]
        repeats = [entry.repeat for entry in self.stack]
        name = f"{frame.fqn}:{frame.calls}" + f":{repeats}" * any(repeats)
        frame.calls += 1
        return name

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Follow module calls, checkpointed ones too, and stamp the nodes traced inside the block."""
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            with tracing.checkpoint_hook(self._resume, self._reentrant), tracing.observe_nodes(self.on_node):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def on_node(self, node: fx.Node) -> None:
        if node.op != "call_function":
            return
        sequence = tracing.backward_sequence_number()
        meta = node.meta
        if sequence is None or self.recomputing:
            meta["fqn"], meta["source"] = self.fqn, user_line()
            if sequence is None:
                self.newest[node] = tracing.sequence_number()
                # Ops that need no gradient get no number of their own, so the first one keeps it.
                self._forward.setdefault(self.newest[node], (meta["fqn"], meta["source"]))
                self.recomputes = self.recomputes or tracing.has_hooks_on_saved()
        else:
            meta["fqn"], meta["source"] = self._forward.get(sequence, (None, None))
        meta["backward"] = sequence is not None

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            inner = self.stack[-1].inner
            repeat = inner.get(id(module), 0)
            inner[id(module)] = repeat + 1
            self.stack.append(ModuleFrame(name, id(module), repeat))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names:
            return
        # A model that catches an exception of a submodule leaves that submodule's frame behind.
        while len(self.stack) > 1 and self.stack.pop().module != id(module):
            pass
        if id(module) in self._listed and not self.recomputing:
            ends = [value for value in tensors_in(output) if value.requires_grad]
            self.ends += ends if len(ends) == 1 else []

    def _reentrant(self, *args: Any) -> Any:
        advice = "Pass use_reentrant=False to torch.utils.checkpoint."
        raise UnsupportedOpError("a checkpoint with use_reentrant=True", advice, self.fqn, user_line())

    def _resume(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        """Give a checkpointed region the same stack when it runs again, so that its dropouts get the same numbers."""
        start = copy.deepcopy(self.stack)
        self.recomputes = True

        def run(*args: Any, **kwargs: Any) -> Any:
            stack, self.stack = self.stack, copy.deepcopy(start)
            self.recomputing += 1
            try:
                return recompute(*args, **kwargs)
            finally:
                self.recomputing -= 1
                self.stack = stack

        return run
