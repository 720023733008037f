"""What a forked child must do first: the parent's threads are gone, but not what waits for them."""

from __future__ import annotations

import gc
import sys


def forget_parent_threads() -> None:
    """Let nothing in this process wait for a thread that only its parent has. Call it first in a forked child.

    What the parent left to the garbage collector is not collected here: the destructor of a process group, say, joins
    threads, and would do so for ever.
    """
    gc.freeze()
    _forget_compile_threads()


def _forget_compile_threads() -> None:
    """Drop the threads of inductor's compiler that the parent had: the pool is there in a forked child, they are not.

    Inductor itself forgets its pool of processes after a fork, but not its pool of threads: what the child gives to
    that one waits for ever (seen in torch 2.13, when the parent had compiled before it forked).
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()
