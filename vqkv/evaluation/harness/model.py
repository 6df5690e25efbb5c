"""A model that reads its own compressed cache, as a model of lm_eval: one text at a time, unpadded, so that a text's
bytes and logits do not depend on its company."""

import math
import os
from dataclasses import dataclass, field

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import Report, tensor_bytes, total
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.harness.quiet import without_logs
from vqkv.models.load import BUNDLED, load_model
from vqkv.models.plain import evaluating
from vqkv.runtime.checks import check_whole

PROTOCOLS = ("in_place", "chunked")
OF_HFLM = (
    "max_length", "truncation", "add_bos_token", "prefix_token_id", "softmax_dtype", "mixed_precision_dtype",
    "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
OWN = ("pretrained", "compressor", "protocol", "chunk_size", "dtype", "device", "trust_remote_code", "tokenizer")


@dataclass
class Tally:
    """Reports of every cache that a task filled, and how many tokens were ``read``, ``read_packed`` of them with packed
    ones behind them: where these are few, a task says little about a codec."""

    reports: list[Report] = field(default_factory=list)
    read: int = 0
    read_packed: int = 0

    def as_dict(self) -> dict:
        """The columns of a table; of an uncompressed cache ``bits_per_value`` is that of all values."""
        whole = total(self.reports)
        measured = {name: getattr(whole, name) for name in ("bits_per_value", "ratio", "side_bytes")}
        return measured | {"packed_share": self.read_packed / self.read if self.read else math.nan}


@register_model("vqkv")
class VqkvLM(HFLM):
    """lm_eval's ``HFLM``, reading a compressed cache instead of the exact keys and values.

    ``pretrained``: what ``load_model`` takes, or a loaded model (then with its ``tokenizer``). ``compressor``: a folder
    written by ``vqkv calibrate``; in Python also a ``Compressor`` or a peer (``vqkv.study.peers``); None leaves the
    cache as it is. ``protocol``: ``chunked`` (a text's tokens come ``chunk_size`` at a time and read packed history) or
    ``in_place`` (one pass that reads its own tokens packed). The rest are HFLM's arguments. ``tally`` adds up the bytes
    that the caches held. Raises ``UnknownNameError`` for a model, protocol or argument of another name, ``FormatError``
    for a compressor of another model.
    """

    def __init__(
        self,
        pretrained,
        compressor=None,
        protocol: str = "chunked",
        chunk_size: int = 32,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        tokenizer=None,
        **of_hflm,
    ):
        for name in of_hflm:
            if name not in OF_HFLM:
                raise UnknownNameError("model argument", name, (*OF_HFLM, *OWN))
        if protocol not in PROTOCOLS:
            raise UnknownNameError("protocol", protocol, PROTOCOLS)
        check_whole("chunk_size", chunk_size, 1, 1 << 30)
        model = pretrained
        if isinstance(pretrained, str):
            model, tokenizer = load_model(pretrained, dtype, device or "cpu", trust_remote_code)
        if tokenizer is None:
            raise DataError("a loaded model needs its tokenizer: tokenizer=...")
        if isinstance(compressor, (str, os.PathLike)):
            compressor = Compressor.from_pretrained(compressor)
        self.compressor, self.protocol, self.chunk_size, self.tally = compressor, protocol, chunk_size, Tally()
        self._model = evaluating(model)
        self._new_cache()  # refuses what does not fit
        with without_logs():  # warnings that a loaded model takes no dtype and no device
            super().__init__(self._model, backend="causal", tokenizer=tokenizer, batch_size=1, **of_hflm)
        if isinstance(pretrained, str):  # for lm_eval's records
            self.pretrained = str(BUNDLED.get(pretrained, pretrained))

    def get_model_info(self) -> dict:
        """HFLM's, with what was compressed and how far; lm_eval puts it into the results' ``config``."""
        about = {"protocol": self.protocol, "chunk_size": self.chunk_size, **self.tally.as_dict()}
        return super().get_model_info() | {"compressor": getattr(self.compressor, "name", None)} | about

    def _model_call(self, inps: Tensor, *_, **__) -> Tensor:
        """Logits (1, tokens, vocabulary) of a text (1, tokens)."""
        cache, logits = self._new_cache(), []
        with torch.no_grad():
            for piece in inps.split(self.chunk_size if self.protocol == "chunked" else inps.shape[1], dim=1):
                self._note(piece.shape[1], cache)
                logits.append(self.model(piece, past_key_values=cache, use_cache=True).logits)
        self.tally.reports.append(report(cache))
        return torch.cat(logits, dim=1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments):
        cache, chunk = self._new_cache(), self.chunk_size if self.protocol == "chunked" else None
        out = super()._model_generate(
            context, max_length, stop, past_key_values=cache, prefill_chunk_size=chunk, **arguments
        )
        self.tally.reports.append(report(cache))
        self._note(out.shape[1] - context.shape[1], cache)
        return out

    def _new_cache(self):
        if self.compressor is None:
            return DynamicCache(config=self.model.config)
        return self.compressor.new_cache(self.model, in_place=self.protocol == "in_place")

    def _note(self, tokens: int, cache) -> None:
        """Count tokens that are read with ``cache`` as it is."""
        self.tally.read += tokens
        if self.compressor is not None and (self.protocol == "in_place" or report(cache).packed_values):
            self.tally.read_packed += tokens


def report(cache) -> Report:
    """The byte meter's report of a cache; transformers' uncompressed one holds each value as it is."""
    if hasattr(cache, "report"):
        return cache.report()
    held = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    size, count = tensor_bytes(held), sum(x.numel() for x in held)
    return Report({"exact": size}, size, count, count, cache.get_seq_length(), 1, 0, count)
