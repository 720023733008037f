"""The classes of sympy nodes that sizes are made of. Apart from `symbolic`, which loads Dynamo.

What this wraps (torch 2.13): torch's sympy functions.
"""

from __future__ import annotations

import sympy
from torch.utils._sympy import functions

_PLAIN = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min)
_OWN = (
    functions.PowByNatural,
    functions.FloatPow,
    functions.FloorDiv,
    functions.CleanDiv,
    functions.Mod,
    functions.PythonMod,
    functions.Max,
    functions.Min,
    functions.IntTrueDiv,
    functions.FloatTrueDiv,
    functions.ToFloat,
    functions.TruncToInt,
    functions.CeilToInt,
    functions.FloorToInt,
)


def expression_classes() -> dict[str, type[sympy.Basic]]:
    """By name; torch's own as `torch.Max`."""
    return {**{cls.__name__: cls for cls in _PLAIN}, **{f"torch.{cls.__name__}": cls for cls in _OWN}}
