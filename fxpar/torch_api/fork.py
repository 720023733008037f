"""What a forked child must do before it compiles."""

from __future__ import annotations

import sys


def forget_compile_threads() -> None:
    """Drop the threads of inductor's compiler that the parent had: the pool is there in a forked child, they are not.

    Inductor itself forgets its pool of processes after a fork, but not its pool of threads: what the child gives to
    that one waits for ever (seen in torch 2.13, when the parent had compiled before it forked).
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()
