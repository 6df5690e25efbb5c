"""A model that reads its own compressed cache, as a model of lm_eval."""

import os
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
from vqkv.evaluation.harness.reader import Reader, Tally, report
from vqkv.models.load import BUNDLED, load_model

OF_HFLM = (
    "max_length", "max_batch_size", "truncation", "add_bos_token", "prefix_token_id", "softmax_dtype",
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
        if isinstance(compressor, (str, os.PathLike)):
            compressor = Compressor.from_pretrained(compressor)
        self.reader = Reader(model, compressor, protocol, chunk_size)
        batch_size = batch_size if self.reader.knows_padding else 1
        with without_logs():  # warnings that a loaded model takes no dtype and no device
            super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size, **of_hflm)
        if isinstance(pretrained, str):  # for lm_eval's records
            self.pretrained = str(BUNDLED.get(pretrained, pretrained))
        if accelerator:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    @property
    def tally(self) -> Tally:
        """Bytes that this process's caches held since the model was made or the reader got a new tally."""
        return self.reader.tally

    def get_model_info(self) -> dict:
        """HFLM's, with what was compressed and how far; lm_eval puts it into the results' ``config``."""
        about = {"protocol": self.reader.protocol, "chunk_size": self.reader.chunk_size, **self.tally.as_dict()}
        return super().get_model_info() | {"compressor": getattr(self.reader.compressor, "name", None)} | about

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy) of requests (key, context, continuation); HFLM's own hides the padding."""
        texts: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}  # what is read, each once -> what is asked of it
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(f"a continuation of {len(continuation)} tokens; the model reads {self.max_length}")
            whole = context + continuation
            self.tally.truncated += len(whole) > self.max_length + 1
            texts.setdefault(tuple(whole[-(self.max_length + 1) : -1]), []).append((number, continuation))
        size = self.batch_size
        if size == "auto":
            size = override_bs or self._detect_batch_size()
        longest, answers = sorted(texts, key=len, reverse=True), dict[int, tuple[float, bool]]()
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Loglikelihood requests") as bar:
            for start in range(0, len(longest), size):
                batch = longest[start : start + size]
                answers |= self._answers(batch, [texts[text] for text in batch])
                bar.update(len(answers) - bar.n)
        found = [answers[number] for number in range(len(requests))]
        for (key, *_), answer in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def _answers(self, texts: list[tuple[int, ...]], asked: list[list[tuple[int, list[int]]]]) -> dict:
        """Number of a request -> (log-probability of its continuation, whether greedy decoding gives it)."""
        answers = {}
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            firsts = [len(text) - max(len(wanted) for _, wanted in own) for text, own in zip(texts, asked, strict=True)]
            logits, packed_from = self.reader.read(texts, firsts)
            for text, found, own in zip(texts, logits, asked, strict=True):
                scores = F.log_softmax(found, dim=-1, dtype=self.softmax_dtype)
                for number, continuation in own:
                    wanted = torch.tensor(continuation, device=scores.device)
                    last = scores[-len(wanted) :]
                    total = last.gather(1, wanted[:, None]).sum().item()
                    answers[number] = total, bool((last.argmax(-1) == wanted).all())
                    self.tally.scored += len(wanted)
                    self.tally.scored_packed += int(min(len(wanted), max(0, len(text) - packed_from)))
        return answers

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        """HFLM's, counting the prompts that are cut."""
        tokens, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len:
            self.tally.truncated += int((mask.sum(1) > left_truncate_len).sum())
            tokens, mask = tokens[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return tokens, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], attention_mask=None, **arguments):
        """``context`` (rows, slots), padded on the left, with what follows it. Prompts are cut from their common end,
        so that the pieces do not depend on the padding: slots before the first piece fill it up."""
        chunk, extra = None, 0
        if self.reader.protocol == "chunked":
            chunk = self.reader.chunk_size
            extra = -context.shape[1] % chunk if context.shape[1] > chunk else 0
        context = F.pad(context, (extra, 0), value=self.tokenizer.pad_token_id)
        cache, mask = self.reader.new_cache(), F.pad(attention_mask, (extra, 0))
        out = super()._model_generate(
            context, max_length + extra, stop, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk,
            **arguments,
        )  # fmt: skip
        self.tally.reports.append(report(cache))
        count = len(context) * (out.shape[1] - context.shape[1])
        self.tally.scored += count
        self.tally.scored_packed += count * self.reader.holds_packed(cache)
        return out[:, extra:]


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
