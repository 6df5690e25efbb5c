"""Notebook 13: caches of prompts that come back."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch

from vqkv.cache.compressed import CompressedCache
from vqkv.cache.prompts import PromptCache
from vqkv.evaluation.evaluate import bootstrap_interval
from vqkv.models.metrics import token_kl
from vqkv.study.bench.caches import Uncompressed, chosen
from vqkv.study.bench.generation import Generation
from vqkv.study.bench.restoring import EVERYTHING, FP16, timed_prompts
from vqkv.study.bench.timing import num_threads
from vqkv.study.experiments.common import FINDS, Subject, frame, subject
from vqkv.study.experiments.generation import fitted_contender
from vqkv.study.provenance import device_name
from vqkv.study.sweep import per_process, sweep

GOES_ON = 64  # tokens read from a restored cache


def restoring_times(
    model: str, corpus: str, systems: list[str], lengths: list[int], rounds: int, train_seqs: int, seq_len: int,
    seed: int, threads: int, dtype: str, device: str,
):  # fmt: skip
    """Times of ``bench.restoring.timed_prompts``, which no two runs have alike, of held-out prompts of ``lengths``
    tokens."""
    who = {"name": model, "corpus": corpus, "dtype": dtype, "device": device, "seed": seed,
           "train": [train_seqs, seq_len], "test": [1, max(lengths) + 1]}  # fmt: skip
    with num_threads(threads):
        found = subject(**who)
        timed = timed_prompts(found.model, _fitted(systems, who), found.test.to(device), lengths, rounds)
    machine = {"threads": threads, "device": device_name(torch.device(device))}
    return frame([{"model": model} | row | machine for row in timed], found.sources)


def _fitted(systems: list[str], who: dict) -> dict:
    who = who | {"test": [1, 2]}  # which no fit depends on
    return {label: _one_fitted(label=label, who=who) for label in chosen(systems, [])}


@per_process(maxsize=16)
def _one_fitted(label: str, who: dict):
    """Once for all tables of the page that are computed in one process."""
    return fitted_contender(subject(**who), label, who, {"codebook_sizes": [], "seed": who["seed"]})[label]


def break_even(times: pd.DataFrame) -> pd.DataFrame:
    """What each way to store is worth, a row per model, prompt and system: ``smaller``, times fewer bytes than the fp16
    file; ``faster``, times faster ready than the prompt computed again (a machine that computes it this many times
    faster need not store it); ``bandwidth``, MB/s of what the files come from above which the fp16 file is ready first
    (infinite if it never is)."""
    plain = times[times["system"] == FP16].set_index(["model", "tokens"])[["file_bytes", "ready_ms"]]
    found = times.join(plain.add_prefix("plain_"), on=["model", "tokens"])
    saved = found["plain_file_bytes"] - found["file_bytes"]
    slower = (found["ready_ms"] - found["plain_ready_ms"]).clip(lower=0)
    return found[["model", "tokens", "system"]].assign(
        smaller=found["plain_file_bytes"] / found["file_bytes"],
        faster=found["again_ms"] / found["ready_ms"],
        bandwidth=(saved / 1e6) / (slower / 1e3),
    )


def restored_quality(
    model: str, corpus: str, systems: list[str], prompt_len: int, num_seqs: int, train_seqs: int, seq_len: int,
    seed: int, dtype: str, device: str,
):  # fmt: skip
    """What is generated after ``prompt_len`` tokens whose cache was saved and restored; a row per system.

    ``kl_mean``: nats a token from the exact model over the next 63 tokens of held-out text, with its 95% bootstrap
    interval over ``num_seqs`` prompts. ``copied``: tokens told right of a passage of the prompt that comes a second
    time. ``same``: every logit has the bits that a cache never saved gives.
    """
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, prompt_len + GOES_ON], "seed": seed}
    settings = {
        "who": texts | {"name": model, "corpus": corpus, "dtype": dtype, "device": device},
        "prompt_len": prompt_len,
    }
    return frame(*sweep(_quality_rows, [{"system": label} for label in chosen(systems, [])], settings, "restored"))


def _quality_rows(system: str, who: dict, prompt_len: int):
    found = subject(**who)
    compressor, text = _fitted([system], who)[system], found.test.to(found.model.device)
    middle = (prompt_len - GOES_ON) // 2
    passage = torch.cat([text[:, :prompt_len], text[:, middle : middle + GOES_ON]], 1)
    exact, logits, same = _gone_on(found, compressor, text, prompt_len)
    kl = token_kl(exact, logits)[:, :-1].double().mean(1)
    low, high = bootstrap_interval(kl)
    floor = found.exact.floor(text, [prompt_len, GOES_ON])[:, prompt_len:-1].double().mean().item()
    row = {"model": who["name"], "system": system, "kl_mean": kl.mean().item(), "kl_low": low, "kl_high": high}
    exact, logits, again = _gone_on(found, compressor, passage, prompt_len)
    row |= {"copied": _told(logits, passage), "copied_exact": _told(exact, passage)}
    return [row | {"kl_floor": floor, "same": same and again}], found.sources


def _told(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Share of the next tokens, once the passage is known, that the most likely one is."""
    right = logits.argmax(-1)[:, :-1] == tokens[:, 1 - logits.shape[1] :]
    return right[:, FINDS:].double().mean().item()


@torch.inference_mode()
def _gone_on(found: Subject, compressor, tokens: torch.Tensor, start: int):
    """Exact logits from token ``start`` on, those of a restored cache, and whether one never saved gives the same."""
    kept = compressor.new_cache(found.model)
    found.model(tokens[:, :start], past_key_values=kept, use_cache=True, logits_to_keep=1)
    with TemporaryDirectory() as folder:
        kept.save(path := Path(folder) / "cache")
        restored = CompressedCache.load(path, compressor, found.model)
    one, two = (found.model(tokens[:, start:], past_key_values=x, use_cache=True).logits for x in (restored, kept))
    return found.exact(tokens)[0][:, start:], one, torch.equal(one, two)


def chat(
    model: str, corpus: str, systems: list[str], turns: int, said: int, answered: int, train_seqs: int, seq_len: int,
    seed: int, threads: int, dtype: str, device: str,
):  # fmt: skip
    """A conversation of ``turns``, each of ``said`` tokens of held-out text and an answer of ``answered``; in between,
    nothing stays in memory and a ``PromptCache`` has the rest. A row per system and turn.

    ``find_ms``: until the cache is back; ``ready_ms``: until the answer's first token is there; ``save_ms``;
    ``again_ms``: everything computed again with transformers' cache. ``restored``: tokens that need not be read again.
    ``folder_bytes``: all that is stored so far. ``same``: the answer is the one of a cache that stayed in memory.
    """
    who = {"name": model, "corpus": corpus, "dtype": dtype, "device": device, "seed": seed,
           "train": [train_seqs, seq_len], "test": [1, turns * said]}  # fmt: skip
    with num_threads(threads):
        found, rows = subject(**who), []
        for label, compressor in _fitted(systems, who).items():
            rows += [{"model": model, "system": label} | row for row in _talk(found, compressor, said, answered)]
    machine = {"threads": threads, "device": device_name(torch.device(device))}
    return frame([row | machine for row in rows], found.sources)


def _talk(found: Subject, compressor, said: int, answered: int) -> list[dict]:
    model, rows = found.model, []
    stays, again, back = (Generation(model, system) for system in (compressor, Uncompressed(), compressor))
    stays.cache, held = compressor.new_cache(model, decoded_cache_bytes=EVERYTHING), found.test[:, :0].to(model.device)
    with TemporaryDirectory() as folder:
        for turn, piece in enumerate(found.test.to(model.device).split(said, 1), 1):
            prompts = PromptCache(folder, compressor, model, decoded_cache_bytes=EVERYTHING)
            prompt = torch.cat([held, piece], 1)
            start = back.now()
            back.cache, restored = prompts.find(prompt)
            if back.cache is None:
                back.cache = compressor.new_cache(model, decoded_cache_bytes=EVERYTHING)
            found_at = back.now()
            back.feed(prompt[:, restored:])
            ready = back.now()
            answer, stayed = _answer(back, answered), _answer(stays, answered, piece)
            held = torch.cat([prompt, answer], 1)
            saving = back.now()
            prompts.save(held, back.cache)
            rows.append({
                "turn": turn, "tokens": prompt.shape[1], "restored": restored, "find_ms": 1e3 * (found_at - start),
                "ready_ms": 1e3 * (ready - start), "save_ms": 1e3 * (back.now() - saving),
                "again_ms": again.prefill(prompt), "folder_bytes": _size(folder), "same": answer.equal(stayed),
            })  # fmt: skip
    return rows


def _answer(going: Generation, count: int, piece: torch.Tensor | None = None) -> torch.Tensor:
    """The next ``count`` tokens (1, count), chosen greedily, after ``piece`` if there is one; the cache holds them."""
    if piece is not None:
        going.feed(piece)
    tokens = []
    for _ in range(count):
        tokens.append(going.last)
        going.step()
    return torch.cat(tokens, 1)


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
