"""torch.compile with inductor, and the order that its scheduler must keep to be right (seen in torch 2.13)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled as one graph. Sizes of its inputs that change once are dynamic."""
    options = {"_pre_fusion_custom_pass": _read_after_write()}
    return torch.compile(function, backend="inductor", dynamic=True, fullgraph=True, options=options)


@functools.cache
def _read_after_write() -> Any:
    """A pass that says again, in a way that fusion keeps, that a kernel reads a buffer after an op has written to it in
    place.

    Collectives and their waits write to a buffer in place, and a kernel that reads the result depends on the wait
    through the name under which the scheduler knows the written buffer. When kernels of compatible ranges are fused
    on a CPU, what each reads is found again, without that name: the fused kernel may then run before the wait. A
    dependency that was added by hand is kept.
    """
    # Inductor takes a second to import, and only who compiles needs it.
    from torch._inductor import custom_graph_pass
    from torch._inductor.dependencies import StarDep

    # torch 2.11 has no class of its own for these passes.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class ReadAfterWrite(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            for node in nodes:
                for written in node.mutation_renames.values():
                    node.add_fake_dep(StarDep(written))
            return nodes

        def uuid(self) -> str:
            return "fxpar: read after write, 1"

    return ReadAfterWrite()
