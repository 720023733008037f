"""Backward ops are not differentiated themselves: torch would take their derivative for zero and only warn of it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fxpar.errors import UnsupportedOpError


def refuse_second_derivative(lib: torch.library.Library, op: str, of: str, instead: str) -> None:
    """Make a derivative of the backward op "fxpar::..." an UnsupportedOpError; `of`: what it is a backward of, such as
    "F.embedding", `instead`: what to write, a sentence.
    """

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise UnsupportedOpError(f"the second derivative of {of}", instead)

    torch.library.register_autograd(op, refuse, lib=lib)
