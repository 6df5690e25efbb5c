"""``with compressed(model, compressor):`` every cache that ``generate``, or code that calls it, makes is compressed."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache

from vqkv.cache.compressed import CompressedCache
from vqkv.cache.compressor import Compressor
from vqkv.models.layers import plain


@dataclass(eq=False)
class Compressed:
    """What ``compressed`` is at work with. ``cache``: the last one that was made, whose ``report()`` has its bytes."""

    compressor: Compressor
    in_place: bool
    thread: int
    cache: CompressedCache | None = None


_active: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> list[Compressed], the innermost last
_changing = threading.Lock()


@contextmanager
def compressed(model, compressor: Compressor, in_place: bool = False) -> Iterator[Compressed]:
    """Compress the caches that ``model`` makes for itself: of ``generate``, pipelines, chat programs, lm-eval.

    A forward pass with no cache, or with an empty ``DynamicCache``, gets one of ``compressor``; caches that the caller
    passes stay. Blocks nest. A thread that has entered no block takes the one that was entered last, so that
    ``generate`` may run in a thread that a block started (``TextIteratorStreamer``).

    Args: ``model``, a transformers decoder, also wrapped or with adapters; ``compressor``, fitted to it by
    ``calibrate``; ``in_place``, whether the tokens of a pass are read back by that pass too, as by tasks that only
    score a text. Raises ``FormatError`` if the compressor was fitted to another model.
    """
    model = plain(model)
    compressor.check(model)
    use = Compressed(compressor, in_place, threading.get_ident())
    with _changing:
        if _swap not in model._forward_pre_hooks.values():  # for good: one that goes races with other threads' passes
            model.register_forward_pre_hook(_swap, prepend=True, with_kwargs=True)
        _active[model] = [*_active.get(model, ()), use]
    try:
        yield use
    finally:
        with _changing:
            _active[model] = [other for other in _active[model] if other is not use]


@torch.compiler.disable
def _swap(model, args, kwargs):
    """Replace the empty cache of a forward pass, within a block of ``compressed``."""
    if not (uses := _active.get(model)):
        return None
    own = [use for use in uses if use.thread == threading.get_ident()]
    given, caches = kwargs.get("past_key_values"), kwargs.get("use_cache", getattr(model.config, "use_cache", True))
    empty = given is None or (type(given) is DynamicCache and not given.get_seq_length())
    if not (caches and empty) or any(isinstance(each, Cache) for each in args):
        return None
    use = (own or uses)[-1]
    use.cache = use.compressor.new_cache(model, use.in_place)
    return args, kwargs | {"past_key_values": use.cache}
