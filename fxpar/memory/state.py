"""What is there all the time, whatever runs: masters, the optimizer's moments, gradients at home."""

from __future__ import annotations

from fxpar.ir.exec_graph import Program
from fxpar.store.home import home_layout, param_specs

OPTIMIZER_BYTES = 8
"""AdamW: two fp32 moments per element of the masters."""


def home_bytes(program: Program) -> tuple[int, int, int]:
    """Bytes of masters, of the optimizer's moments and of gradients at home, on the fullest rank."""
    home = home_layout(param_specs(program), program.strategy.world)
    gradients = home.only({out.fqn for out in program.outputs if out.kind == "grad"})
    trained = sum(-(-home.only({f}).max_bytes() // p.dtype.itemsize) for f, p in gradients.params.items())
    return home.max_bytes(), OPTIMIZER_BYTES * trained, gradients.max_bytes()
