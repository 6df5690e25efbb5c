"""Needs of every experiment: models and tokens whose fingerprints go into the provenance, rows as a DataFrame."""

import dataclasses
import math
from typing import NamedTuple

import pandas as pd
import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.spill import CapturedTokens
from vqkv.codecs.predictive import ROLES, Place, side_by_side
from vqkv.data.corpus import fingerprint as corpus_fingerprint
from vqkv.data.corpus import load_corpus
from vqkv.data.facts import FactsTask
from vqkv.data.recall import RecallBatch
from vqkv.errors import DataError
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.evaluation.exact import ExactPass
from vqkv.models.load import fingerprint as model_fingerprint
from vqkv.models.load import load_model, values_per_token
from vqkv.presets import Preset
from vqkv.study.answers import answered
from vqkv.study.metrics import explained_variance_ratio
from vqkv.study.sweep import per_process

EXACT_BYTES = 6 << 30  # that a process remembers of a model's own logits
FINDS = 16  # tokens of a passage after which a model can know which comes again


def load(name: str, dtype: str, device: str, sources: dict):
    """Model and tokenizer; ``sources`` takes the hash of the weights."""
    model, tokenizer = load_model(name, dtype or None, device)
    sources[f"model {name}"] = model_fingerprint(model)
    return model, tokenizer


def draw(corpus, tokenizer, split, seq_len, num_seqs, seed, sources):
    """Tokens (num_seqs, seq_len) drawn by ``seed``; ``sources`` takes their hash."""
    tokens = load_corpus(corpus, tokenizer, split, seq_len, num_seqs, seed)
    sources[f"corpus {corpus} {split} {num_seqs}x{seq_len} seed {seed}"] = corpus_fingerprint(tokens)
    return tokens


class Subject(NamedTuple):
    """Beginning of most cases of a sweep; ``sources`` has the hashes of model and tokens."""

    model: object
    tokenizer: object
    train: torch.Tensor
    test: torch.Tensor
    sources: dict
    exact: ExactPass  # what the model itself makes of these tokens


def subject(
    name: str, corpus: str, train: list[int], test: list[int], seed: int, dtype: str, device: str, test_seed=None,
    held_out: str = "test",
) -> Subject:  # fmt: skip
    """A model and its calibration and held-out tokens, ``train`` and ``test`` as (num_seqs, seq_len); all arguments are
    plain literals. Held-out tokens are drawn by ``seed`` too, unless ``test_seed`` is given; ``held_out``: their split,
    ``validation`` for what chooses among designs."""
    model, tokenizer, sources, exact = loaded(name=name, dtype=dtype, device=device)
    how = {"name": name, "dtype": dtype, "device": device, "corpus": corpus}
    seeds = {"train": seed, held_out: seed if test_seed is None else test_seed}
    texts = [_text(split=split, size=size, seed=seeds[split], **how) for split, size in zip(seeds, (train, test))]
    for _, drawn in texts:
        sources = sources | drawn
    return Subject(model, tokenizer, *(tokens for tokens, _ in texts), sources, exact)


@per_process(maxsize=1)
def loaded(name: str, dtype: str, device: str):
    """Model, tokenizer, sources and an exact pass, once for the cases of a sweep that need them."""
    sources = {}
    model, tokenizer = load(name, dtype, device, sources)
    return model, tokenizer, sources, ExactPass(model, EXACT_BYTES)


@per_process(maxsize=2)
def _text(name: str, dtype: str, device: str, corpus: str, split: str, size: list[int], seed: int):
    sources = {}
    _, tokenizer, *_ = loaded(name=name, dtype=dtype, device=device)
    return draw(corpus, tokenizer, split, size[1], size[0], seed, sources), sources


def calibrated(preset: Preset, who: dict, batch_size: int = 8) -> Compressor:
    """``preset`` fitted on the calibration text of ``subject(**who)``, of which keys and values are captured once for
    all presets."""
    found = subject(**who)
    preset = preset.fitting(found.model)
    held = _captured(who=who, batch_size=batch_size, pre_rope=preset.pre_rope)
    return calibrate(found.model, found.train, preset, batch_size, progress=False, captured=held)


@per_process(maxsize=2)
def _captured(who: dict, batch_size: int, pre_rope: int) -> CapturedTokens:
    """Once for each side of RoPE; the files go when it is forgotten."""
    found = subject(**who)
    return CapturedTokens(found.model, found.train, batch_size, pre_rope, progress=False)


def bare(preset: Preset) -> Preset:
    """The preset without sinks, recent window and a flush block beyond its codec's."""
    return dataclasses.replace(preset, sink_tokens=0, recent_window=0, flush_block=1)


def paired(key: Compressor, value: Compressor, like: Compressor) -> Compressor:
    """The key codecs of one calibrated compressor with the value codecs of another, named and set as ``like``."""
    pairs = [(ours, theirs) for (ours, _), (_, theirs) in zip(key.codecs, value.codecs, strict=True)]
    return Compressor(like.name, pairs, like.settings, like.model)


def exact_compressor(found: Subject, model=None) -> Compressor:
    """A compressor that stores everything in 16 bits, for a case's model or another one."""
    return calibrate(model or found.model, found.train[:1], presets.fp16(), progress=False)


def by_window(found: Subject, compressor, tokens: torch.Tensor, **read) -> dict[str, float | str]:
    """``evaluate``'s row of ``tokens`` (windows, seq_len), with ``ppl_increase`` in percent and ``kl_each``, the KL of
    each window in one cell. ``read``: arguments of ``evaluate``."""
    row = evaluate(found.model, compressor, tokens, per_sequence=True, exact=found.exact, **read)
    each = {"kl_each": written(row["kl_each"]), "ppl_increase": 100 * (row["ppl"] / row["ppl_exact"] - 1)}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | each


def written(numbers: list[float]) -> str:
    """As one cell of a table: a number for each window."""
    return " ".join(f"{number:.5g}" for number in numbers)


def facts_told(
    found: Subject, compressor, corpus: str, num_facts: int, text_len: int, num_seqs: int, seed: int
) -> dict[str, float]:
    """``facts`` and ``facts_exact``: share of questions about facts in ``num_seqs`` texts of ``text_len`` tokens that
    are answered (``data.facts``); ``facts_lost`` in points, its 95% interval over texts ``_low`` and ``_high``."""
    text = draw(corpus, found.tokenizer, "test", text_len, num_seqs, seed, found.sources)
    batch = FactsTask(found.tokenizer).episodes(num_facts, text, text_len, seed)
    exact = found.exact.remembered("facts", batch.tokens, lambda: (answered(found.model, None, batch),))[0]
    right = answered(found.model, compressor, batch)
    low, high = bootstrap_interval(100 * (exact.double() - right.double()).mean(1))
    told, told_exact = right.double().mean().item(), exact.double().mean().item()
    lost = {"facts_lost": 100 * (told_exact - told), "facts_lost_low": low, "facts_lost_high": high}
    return {"facts": told, "facts_exact": told_exact} | lost


def check_enough(task: str, items: int, points: float) -> None:
    """Raise ``DataError`` if a task asks too few questions for a loss of so many accuracy points, none gained, to be
    1.96 of its standard errors (of paired, independent answers): 73 questions for 5 points. The least that is needed;
    the intervals that a table shows say what was reached."""
    if not 0 < points <= 100:
        raise DataError(f"tell_apart {points!r} must be accuracy points, more than 0 and at most 100")
    share = points / 100
    least = max(1, math.ceil(1.96**2 * (1 - share) / share))
    if items < least:
        raise DataError(
            f"task {task!r} asks {items} questions, too few to tell {points:g} points apart: ask at least {least} "
            "(limit, recall_seqs), or raise tell_apart"
        )


def frame(rows: list[dict], sources: dict) -> pd.DataFrame:
    """A table whose ``attrs`` carry the sources."""
    table = pd.DataFrame(rows)
    table.attrs["sources"] = sources
    return table


def all_told(row: dict, about: dict, tokens: int, batch: int = 1, exact_tokens: float = 0) -> float:
    """Bits per value of an ``evaluate`` row in a cache of so many tokens, ``exact_tokens`` of them in 16 bits, with
    side information, which ``batch`` such caches share."""
    bits, values = row["bits_per_value"], values_per_token(about)
    return bits + (16 - bits) * exact_tokens / tokens + 8 * row["side_bytes"] / (tokens * batch * values)


def kept_exact(compressor) -> float:
    """Tokens of a sequence that a compressor's caches keep in 16 bits: sinks, recent window, and half a block less one
    that waits behind whole blocks, on average over all lengths."""
    settings = compressor.settings
    block = math.lcm(settings.flush_block, compressor.tokens_per_row)
    return settings.sink_tokens + settings.recent_window + (block - 1) / 2


def copied(found: Subject, compressor, chunk_size: int) -> dict:
    """``copied`` and ``copied_exact``: the share of tokens told right of a passage of ``chunk_size`` tokens of the
    held-out text that comes again at its end, in place of its last ones, from the ``FINDS``-th on."""
    batch, settings = passages(found.test, chunk_size), {"chunk_size": chunk_size, "reconstruction": False}
    row = evaluate(found.model, compressor, batch.tokens, answers=batch.answers, exact=found.exact, **settings)
    return {"copied": row["recall"], "copied_exact": row["recall_exact"]}


def explained_by_layer(found: Subject, compressor, tokens: torch.Tensor) -> dict[Place, float]:
    """EVR of the keys and the values that are read back of ``tokens`` (num_seqs, seq_len), by role and layer."""
    known, ratios, pre_rope = compressor.new_pass(), {}, compressor.settings.pre_rope
    for layer, pair in enumerate(zip(*found.exact.keys_and_values(tokens, pre_rope), strict=True)):
        for role, x, x_hat in zip(ROLES, pair, compressor.reconstruct(layer, *pair, known), strict=True):
            x = x[:, :, : x_hat.shape[2]]
            ratios[role, layer] = explained_variance_ratio(side_by_side(x.float()), side_by_side(x_hat))
    return ratios


def passages(text: torch.Tensor, chunk_size: int) -> RecallBatch:
    """``text`` (num_seqs, seq_len) with its second ``chunk_size`` tokens again as its last; see ``copied``."""
    tokens = torch.cat([text[:, :-chunk_size], text[:, chunk_size : 2 * chunk_size]], dim=1)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, FINDS - chunk_size :] = True
    return RecallBatch(tokens, answers, torch.full_like(tokens, text.shape[1] - 2 * chunk_size) * answers)
