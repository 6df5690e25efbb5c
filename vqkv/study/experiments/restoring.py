"""Notebook 13: caches of prompts that come back."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from torch.utils.benchmark.utils.common import set_torch_threads as num_threads
from tqdm import tqdm

from vqkv.cache.compressed import CompressedCache
from vqkv.cache.prompts import PromptCache
from vqkv.evaluation.evaluate import bootstrap_interval
from vqkv.models.metrics import token_kl
from vqkv.study.bench.caches import EVERYTHING, KeepingDecoded, Uncompressed, chosen
from vqkv.study.bench.generation import Generation
from vqkv.study.experiments.common import COPY_FROM, frame
from vqkv.study.experiments.speed import fitted_contender
from vqkv.study.provenance import device_name
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

GOES_ON = 64  # tokens read from a restored cache
FP16 = "fp16 file"


def restoring_times(
    subject: Subject, systems: list[str], lengths: list[int], rounds: int, threads: int
) -> pd.DataFrame:
    """Save, restore and go on after prompts of ``lengths`` tokens, in 16 bits too: a row per length and way.

    Medians of ``rounds``, files in memory: ``ready_ms``, until cache and next token are there; ``again_ms``, computed.
    """
    with num_threads(threads), TemporaryDirectory() as folder:
        tokens = subject.changed(test_size=[1, max(lengths) + 1]).test.to(subject.device)
        kept = {label: KeepingDecoded(each) for label, each in _fitted(subject, systems).items()}
        timed = partial(_timed_prompt, subject.model, {FP16: Uncompressed()} | kept, rounds=rounds, folder=Path(folder))
        bar = tqdm(lengths, desc="prompts", leave=False, disable=None)
        rows = [row for length in bar for row in timed(tokens[:, : length + 1])]
    return _on_machine(subject, threads, rows)


def _timed_prompt(model, ways: dict, tokens: torch.Tensor, rounds: int, folder: Path) -> list[dict]:
    for label, way in ways.items():
        stored = Generation(model, way)
        stored.prefill(tokens[:, :-1])
        way.save(stored.cache, folder / label)
    rows = []
    for repetition in range(rounds + 1):  # the first warms up
        times = {label: _ready(model, way, folder / label, tokens[:, -1:]) for label, way in ways.items()}
        again = Generation(model, Uncompressed()).prefill(tokens)
        rows += [{"system": label, "ready_ms": ms, "again_ms": again} for label, ms in times.items() if repetition]
    medians = pd.DataFrame(rows).groupby("system").median().to_dict("index")
    about = [{"tokens": tokens.shape[1] - 1, "system": label} for label in ways]
    return [row | {"file_bytes": (folder / row["system"]).stat().st_size} | medians[row["system"]] for row in about]


def _ready(model, way, path: Path, last: torch.Tensor) -> float:
    """Time in milliseconds until the cache is back, and for the token ``last`` after it."""
    going = Generation(model, way)
    start = going.now()
    going.cache = way.load(path, model)
    return 1e3 * (going.now() - start) + going.feed(last)


def _on_machine(subject: Subject, threads: int, rows: list[dict]) -> pd.DataFrame:
    machine = {"threads": threads, "device": device_name(torch.device(subject.device))}
    return frame([{"model": subject.name} | row | machine for row in rows], subject.sources)


def _fitted(subject: Subject, systems: list[str]) -> dict:
    subject = subject.changed(test_size=[1, 2])  # which no fit depends on
    return {label: _one_fitted(subject=subject, label=label) for label in chosen(systems)}


@per_process(maxsize=16)
def _one_fitted(subject: Subject, label: str):
    """Once for all tables of the page that are computed in one process."""
    return fitted_contender(subject, label)[label]


def break_even(times: pd.DataFrame) -> pd.DataFrame:
    """Return what each way to store is worth: ``smaller`` and ``faster``, times, than the fp16 file and than computing.

    ``bandwidth``: MB/s above which the fp16 file is ready first (infinite if it never is).
    """
    plain = times[times["system"] == FP16].set_index(["model", "tokens"])[["file_bytes", "ready_ms"]]
    joined = times.join(plain.add_prefix("plain_"), on=["model", "tokens"])
    saved = joined["plain_file_bytes"] - joined["file_bytes"]
    slower = (joined["ready_ms"] - joined["plain_ready_ms"]).clip(lower=0)
    return joined[["model", "tokens", "system"]].assign(
        smaller=joined["plain_file_bytes"] / joined["file_bytes"],
        faster=joined["again_ms"] / joined["ready_ms"],
        bandwidth=(saved / 1e6) / (slower / 1e3),
    )


@experiment(lambda systems: product(system=chosen(systems)))
def restored_quality(subject: Subject, system: str, prompt_len: int, num_seqs: int) -> dict:
    """Go on after ``prompt_len`` tokens whose cache was saved and restored: KL, passages copied; a row a system.

    ``same``: every logit has the bits that a cache never saved gives.
    """
    compressor = _fitted(subject, [system])[system]
    subject = subject.changed(test_size=[num_seqs, prompt_len + GOES_ON])
    text, middle = subject.test.to(subject.model.device), (prompt_len - GOES_ON) // 2
    passage = torch.cat([text[:, :prompt_len], text[:, middle : middle + GOES_ON]], 1)
    exact, logits, same = _gone_on(subject, compressor, text, prompt_len)
    kl = token_kl(exact, logits)[:, :-1].double().mean(1)
    low, high = bootstrap_interval(kl)
    floor = subject.exact.floor(text, [prompt_len, GOES_ON])[:, prompt_len:-1].double().mean().item()
    row = {"model": subject.name, "system": system, "kl_mean": kl.mean().item(), "kl_low": low, "kl_high": high}
    exact, logits, again = _gone_on(subject, compressor, passage, prompt_len)
    row |= {"copied": _predicted(logits, passage), "copied_exact": _predicted(exact, passage)}
    return row | {"kl_floor": floor, "same": same and again}


def _predicted(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Share of the next tokens, once the passage is known, that the most likely one is."""
    right = logits.argmax(-1)[:, :-1] == tokens[:, 1 - logits.shape[1] :]
    return right[:, COPY_FROM:].double().mean().item()


@torch.inference_mode()
def _gone_on(subject: Subject, compressor, tokens: torch.Tensor, start: int):
    """Give exact logits from token ``start``, those of a restored cache, and whether one never saved gives the same."""
    model, kept = subject.model, compressor.new_cache(subject.model)
    model(tokens[:, :start], past_key_values=kept, use_cache=True, logits_to_keep=1)
    with TemporaryDirectory() as folder:
        kept.save(path := Path(folder) / "cache")
        restored = CompressedCache.load(path, compressor, model)
    one, two = (model(tokens[:, start:], past_key_values=x, use_cache=True).logits for x in (restored, kept))
    return subject.exact(tokens)[0][:, start:], one, torch.equal(one, two)


def chat(subject: Subject, systems: list[str], turns: int, said: int, answered: int, threads: int) -> pd.DataFrame:
    """Hold a conversation of ``turns``, each ``said`` and ``answered`` tokens; between them a ``PromptCache`` keeps it.

    A row per system and turn. ``ready_ms``: to the answer's first token; ``again_ms``: all computed again.
    ``restored``: tokens not read again. ``same``: the answer of a cache that stayed in memory.
    """
    with num_threads(threads):
        text, rows = subject.changed(test_size=[1, turns * said]).test.to(subject.model.device), []
        for label, compressor in _fitted(subject, systems).items():
            talk = _talk(subject.model, compressor, text.split(said, 1), answered)
            rows += [{"system": label} | row for row in talk]
    return _on_machine(subject, threads, rows)


def _talk(model, compressor, pieces: Sequence[torch.Tensor], answered: int) -> list[dict]:
    stays, again, back = (Generation(model, system) for system in (compressor, Uncompressed(), compressor))
    new_cache = partial(compressor.new_cache, model, decoded_cache_bytes=EVERYTHING)
    stays.cache, before, rows = new_cache(), pieces[0][:, :0], []
    with TemporaryDirectory() as folder:
        for turn, piece in enumerate(pieces, 1):
            prompts = PromptCache(folder, compressor, model, decoded_cache_bytes=EVERYTHING)
            prompt = torch.cat([before, piece], 1)
            start = back.now()
            cache, restored = prompts.find(prompt)
            back.cache = new_cache() if cache is None else cache
            back.feed(prompt[:, restored:])
            ready = back.now()
            stays.feed(piece)
            answer, stayed = back.answer(answered), stays.answer(answered)
            before = torch.cat([prompt, answer], 1)
            prompts.save(before, back.cache)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            rows.append({
                "turn": turn, "tokens": prompt.shape[1], "restored": restored, "ready_ms": 1e3 * (ready - start),
                "again_ms": again.prefill(prompt), "folder_bytes": size, "same": answer.equal(stayed),
            })  # fmt: skip
    return rows
