"""What is there all the time, whatever runs: masters, the optimizer's moments, gradients at home."""

from __future__ import annotations

from collections.abc import Collection

from fxpar.ir.exec_graph import Program
from fxpar.store.home import home_layout, param_specs
from fxpar.switch.layout import ParamLayout

OPTIMIZER_BYTES = 8
"""AdamW: two fp32 moments per element of the masters."""


def home_bytes(program: Program) -> tuple[int, int, int]:
    """Bytes of masters, of the optimizer's moments and of gradients at home, on the fullest rank."""
    home = home_layout(param_specs(program), program.strategy.world)
    return bytes_at_home(home, {out.fqn for out in program.outputs if out.kind == "grad"})


def bytes_at_home(home: ParamLayout, trained: Collection[str]) -> tuple[int, int, int]:
    """The same of a home layout, in which `trained` parameters have gradients."""
    gradients = home.only(trained)
    elements = sum(-(-home.only({f}).max_bytes() // p.dtype.itemsize) for f, p in gradients.params.items())
    return home.max_bytes(), OPTIMIZER_BYTES * elements, gradients.max_bytes()
