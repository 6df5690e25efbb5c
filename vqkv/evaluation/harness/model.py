"""A model that reads its own compressed cache, as a model of lm_eval."""

import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.harness.quiet import without_logs
from vqkv.evaluation.harness.reader import AskedText, Family, Reader
from vqkv.evaluation.harness.tally import Tally
from vqkv.models.load import BUNDLED, load_model

OF_HFLM = (
    "max_length", "max_batch_size", "truncation", "logits_cache", "add_bos_token", "prefix_token_id", "softmax_dtype",
    "mixed_precision_dtype", "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
OWN = (
    "pretrained", "compressor", "protocol", "chunk_size", "batch_size", "dtype", "device", "parallelize",
    "trust_remote_code", "tokenizer",
)  # fmt: skip


@register_model("vqkv")
class VqkvLM(HFLM):
    """lm_eval's ``HFLM``, reading a compressed cache instead of the exact keys and values.

    ``pretrained``: what ``load_model`` takes, or a loaded model (then with its ``tokenizer``). ``compressor``: a folder
    written by ``vqkv calibrate``; in Python also a ``Compressor`` or a peer (``peers``); None leaves the cache as
    it is. ``protocol``: ``chunked`` (a text's tokens come ``chunk_size`` at a time and read packed history; a prompt to
    be continued is cut from its end) or ``in_place`` (one pass that reads its own tokens packed). ``parallelize``: the
    model's layers over several cards. The rest are HFLM's arguments. ``tally`` adds up the bytes that the caches held.

    Answers do not depend on what shares a batch, but for floating-point rounding. Raises ``UnknownNameError`` for a
    model, protocol or argument of another name, ``FormatError`` for a compressor of another model.
    """

    def __init__(
        self,
        pretrained,
        compressor=None,
        protocol: str = "chunked",
        chunk_size: int = 32,
        batch_size: int | str = 1,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
        parallelize: bool = False,
        trust_remote_code: bool = False,
        tokenizer=None,
        **of_hflm,
    ):
        for name in of_hflm:
            if name not in OF_HFLM:
                raise UnknownNameError("model argument", name, (*OF_HFLM, *OWN))
        if batch_size != "auto" and (not str(batch_size).isdecimal() or int(batch_size) < 1):
            raise DataError(f"batch_size {batch_size!r} must be a whole number from 1 on, or 'auto'")
        accelerator = _accelerator()
        model = pretrained
        if isinstance(pretrained, str):
            place = "auto" if parallelize else _device(device, accelerator)
            model, tokenizer = load_model(pretrained, dtype, place, trust_remote_code)
        if tokenizer is None:
            raise DataError("a loaded model needs its tokenizer: tokenizer=...")
        with without_logs():  # warnings that a loaded model takes no dtype and no device
            super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size, **of_hflm)
        if isinstance(pretrained, str):  # for lm_eval's records
            self.pretrained = str(BUNDLED.get(pretrained, pretrained))
        if accelerator:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if isinstance(compressor, (str, os.PathLike)):
            compressor = Compressor.from_pretrained(compressor)
        self.reader = Reader(self.model, compressor, protocol, chunk_size)

    @property
    def tally(self) -> Tally:
        """Bytes that this process's caches held since the model was made or ``reset_tally`` called."""
        return self.reader.tally

    def reset_tally(self) -> None:
        """Count from zero."""
        self.reader.tally = Tally()

    def get_model_info(self) -> dict:
        """HFLM's, with what was compressed and how far; lm_eval puts it into the results' ``config``."""
        about = {"protocol": self.reader.protocol, "chunk_size": self.reader.chunk_size, **self.tally.as_dict()}
        return super().get_model_info() | {"compressor": getattr(self.reader.compressor, "name", None)} | about

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding gives it) of requests (key, context tokens,
        continuation tokens). HFLM's own pads without telling the cache."""
        answers = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Loglikelihood requests") as bar:
            for batch in self._batches(self._families(requests), override_bs):
                for number, part, greedy in self._parts(batch):
                    total, so_far = answers[number]
                    answers[number] = total + part, so_far and greedy
                bar.update(sum(len(text.asked) for family in batch for text in family.texts))
        for (key, *_), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _families(self, requests: list) -> list[Family]:
        """The texts of all requests, each once, longest first; those of one context together."""
        texts, contexts = {}, defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(f"a continuation of {len(continuation)} tokens; the model reads {self.max_length}")
            whole = context + continuation
            self.tally.truncated += len(whole) > self.max_length + 1
            tokens = whole[-(self.max_length + 1) :][:-1]
            key = tuple(tokens) if self.logits_cache else number
            if key not in texts:
                texts[key] = AskedText(tokens, [])
                contexts[tuple(context)].append(texts[key])
            texts[key].asked.append((number, continuation))
        found = [self.reader.family(members) for members in contexts.values()]
        return sorted(found, key=lambda family: -max(len(text.tokens) for text in family.texts))

    def _batches(self, families: list[Family], override_bs: int | None) -> Iterator[list[Family]]:
        """At most ``batch_size`` texts at a time; a family that is larger is parted."""
        size = self.batch_size
        if size == "auto":
            size = override_bs or self._detect_batch_size()
        size = size if self.reader.knows_padding else 1
        batch, count = [], 0
        for family in (part for whole in families for part in _parted(whole, size)):
            if batch and count + len(family.texts) > size:
                yield batch
                batch, count = [], 0
            batch.append(family)
            count += len(family.texts)
        if batch:
            yield batch

    def _parts(self, batch: list[Family]) -> Iterator[tuple[int, float, bool]]:
        """(number of the request, log-probability, whether greedy) of what each piece holds of its continuation."""
        with self._autocast():
            for piece in self.reader.read(batch):
                text, stop = piece.text, piece.start + len(piece.logits)
                first = max(piece.start, text.start)
                if first >= stop:
                    continue
                scores = F.log_softmax(piece.logits[first - piece.start :], dim=-1, dtype=self.softmax_dtype)
                for number, continuation in text.asked:
                    begin = len(text.tokens) - len(continuation)
                    wanted = torch.tensor(continuation[max(0, first - begin) : stop - begin], device=scores.device)
                    if len(wanted):
                        self.tally.scored += len(wanted)
                        self.tally.scored_packed += len(wanted) * piece.packed
                        found = scores[-len(wanted) :]
                        total = found.gather(1, wanted[:, None]).sum().item()
                        yield number, total, bool((found.argmax(-1) == wanted).all())

    def _autocast(self):
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        """HFLM's, counting the prompts that are cut."""
        tokens, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len:
            self.tally.truncated += int((mask.sum(1) > left_truncate_len).sum())
            tokens, mask = tokens[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return tokens, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], attention_mask=None, **arguments):
        """``context`` (rows, slots), padded on the left, with what follows it."""
        if self.reader.knows_padding or len(context) == 1:
            return self._continue(context, attention_mask, max_length, stop, arguments)
        out = []
        for row, mask in zip(context, attention_mask, strict=True):
            padding = int((mask == 0).sum())
            alone = row[None, padding:], mask[None, padding:]
            found = self._continue(*alone, max_length - padding, stop, dict(arguments))[0]
            out.append(F.pad(found, (padding, max_length - padding - len(found)), value=self.tokenizer.pad_token_id))
        return torch.stack(out)

    def _continue(self, context: Tensor, mask: Tensor, max_length: int, stop: list[str], arguments: dict) -> Tensor:
        """Prompts are cut from their common end, so that the pieces do not depend on the padding: slots before the
        first piece fill it up."""
        chunk, extra = None, 0
        if self.reader.protocol == "chunked":
            chunk = self.reader.chunk_size
            extra = -context.shape[1] % chunk if context.shape[1] > chunk else 0
        context = F.pad(context, (extra, 0), value=self.tokenizer.pad_token_id)
        cache = self.reader.new_cache()
        out = super()._model_generate(
            context, max_length + extra, stop, attention_mask=F.pad(mask, (extra, 0)), past_key_values=cache,
            prefill_chunk_size=chunk, **arguments,
        )  # fmt: skip
        self.tally.add(cache)
        count = len(context) * (out.shape[1] - context.shape[1])
        self.tally.scored += count
        self.tally.scored_packed += count * self.reader.holds_packed(cache)
        return out[:, extra:]


def _parted(family: Family, size: int) -> list[Family]:
    return [Family(family.texts[i : i + size], family.shared) for i in range(0, len(family.texts), size)]


def _accelerator() -> Accelerator | None:
    """This process's place among those of ``accelerate launch`` or ``torchrun``; None when it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    patience = InitProcessGroupKwargs(timeout=timedelta(weeks=52))  # HFLM's: one process may wait long for another
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])


def _device(wanted: str | None, accelerator: Accelerator | None) -> str:
    """lm_eval's command line asks for ``cuda:0`` also where there is no card; several processes have one each."""
    if not torch.cuda.is_available() and (wanted or "cuda").startswith("cuda"):
        return "cpu"
    if accelerator:
        return "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
    return wanted or "cuda"
