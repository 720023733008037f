"""Mixed precision: parameters and activations in a low dtype, islands in the captured one.

`Precision` says which; `with_precision` rewrites a captured graph so that it computes that way, casts and all.
"""

from __future__ import annotations

from fxpar.precision.precision import Precision
from fxpar.precision.rewrite import with_precision

__all__ = ["Precision", "with_precision"]
