"""Hooks that a user has registered, on gradients of parameters and on modules (attributes of torch 2.13)."""

from __future__ import annotations

from torch import Tensor, nn


def has_gradient_hook(parameter: Tensor) -> bool:
    """Whether autograd would call somebody with the gradient of a parameter."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def hooked_modules(module: nn.Module) -> dict[str, int]:
    """FQN of each module that has hooks on its forward or backward -> how many."""
    found = {}
    for fqn, one in module.named_modules():
        hooks = (one._forward_pre_hooks, one._forward_hooks, one._backward_pre_hooks, one._backward_hooks)
        if any(hooks):
            found[fqn] = sum(map(len, hooks))
    return found
