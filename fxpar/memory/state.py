"""What is there all the time, whatever runs: masters, the optimizer's moments, gradients at home."""

from __future__ import annotations

from fxpar.ir.exec_graph import Program
from fxpar.store.home import home_layout, param_specs
from fxpar.switch.layout import ParamLayout

OPTIMIZER_BYTES = 8
"""AdamW: two fp32 moments per element of the masters."""


def home_bytes(program: Program) -> tuple[int, int, int]:
    """Bytes of masters, of the optimizer's moments and of gradients at home, on the fullest rank."""
    home = home_layout(param_specs(program), program.strategy.world)
    gradients = _only(home, {out.fqn for out in program.outputs if out.kind == "grad"})
    trained = sum(-(-_only(home, {f}).max_bytes() // p.dtype.itemsize) for f, p in gradients.params.items())
    return home.max_bytes(), OPTIMIZER_BYTES * trained, gradients.max_bytes()


def _only(layout: ParamLayout, names: set[str]) -> ParamLayout:
    return ParamLayout(layout.name, layout.world, {f: p for f, p in layout.params.items() if f in names})
