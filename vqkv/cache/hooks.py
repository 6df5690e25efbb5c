"""Hooks of modules that tell a cache of a forward pass, and die with it."""

import weakref
from collections.abc import Callable

import torch


class WeakHook:
    """Calls one method of an object that it does not keep alive; copied or saved with its module, it calls nothing."""

    def __init__(self, owner=None, method: str = ""):
        self.owner, self.method = owner and weakref.ref(owner), method

    @torch.compiler.disable
    def __call__(self, *arguments) -> None:
        owner = self.owner and self.owner()
        if owner is not None:
            getattr(owner, self.method)(*arguments)

    def __reduce__(self):
        return WeakHook, ()


def watch(owner, method: str, register: Callable, **options) -> None:
    """``register`` a hook that calls ``owner.method``; it is removed when ``owner`` is gone."""
    weakref.finalize(owner, register(WeakHook(owner, method), **options).remove)
