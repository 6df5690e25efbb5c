"""Tokenised corpora on the disk: whole or not there, wanted twice at once, larger than memory should grow."""

import os
import resource

import corpus_folders as folders
import forked
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vqkv import DataError, load_corpus
from vqkv.data import hub
from vqkv.data.corpus import fingerprint
from vqkv.reference.data import TOKENIZER_DIR

SEQ_LEN = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "BUFFER", 8)
    return tmp_path / "cache"


def peaks(where: str, name: str) -> list[float]:
    """After a part of the documents and after all: the most memory in MB, and how many MB of token ids there are."""
    found = []
    os.environ |= {"VQKV_CACHE": where, "HF_HUB_OFFLINE": "1"}
    chosen = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    for num_docs in (500, 1000, 2000, 10_000):  # the first two fill the allocator's arenas
        tokens = load_corpus(name, chosen, seq_len=256, num_seqs=None, num_docs=num_docs)
        found += [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tokens.nbytes / 2**20]
    return found[-4:]


def test_a_second_reading_does_not_touch_the_data_set(tokenizer, tmp_path, own_cache, monkeypatch):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    first = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    monkeypatch.setattr(hub, "_loaded", lambda *a: pytest.fail("streamed again"))
    again = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    assert again.equal(first) and again.dtype == torch.int64
    again.zero_()  # the file stays what it is
    assert load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9).equal(first)
    with pytest.raises(pytest.fail.Exception):
        load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=10)


def test_what_breaks_off_leaves_nothing_half_made(tokenizer, tmp_path, own_cache, monkeypatch):
    name, whole = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}", hub._text

    def broken(corpus, row):
        if "train 1 3 " in row["text"]:
            raise KeyboardInterrupt
        return whole(corpus, row)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub, "_text", broken)
        load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60)
    assert not list(own_cache.rglob("*.bin")) and not list(own_cache.rglob("*.part"))
    found = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60)
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "other"))
    assert load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60).equal(found)


def test_each_thing_that_matters_has_a_cache_of_its_own(tokenizer, tmp_path, own_cache):
    folder = folders.slimpajama(tmp_path / "slim")
    name = f"slimpajama@{folder}"
    asked = [{}, {"seed": 1}, {"seq_len": 12}, {"num_seqs": 4}, {"split": "test"}, {"num_docs": 20}]
    for more in [*asked, {"packing": "windows"}]:
        load_corpus(name, tokenizer, **{"seq_len": SEQ_LEN, "num_seqs": 5} | more)
    renamed = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    renamed.name_or_path = "elsewhere"
    renamed("padded", padding="max_length", max_length=8, truncation=True)
    load_corpus(name, renamed, seq_len=SEQ_LEN, num_seqs=5)
    assert len(list(own_cache.rglob("*.bin"))) == 7
    renamed.add_tokens(["cache codebook"])
    load_corpus(name, renamed, seq_len=SEQ_LEN, num_seqs=5)
    os.utime(sorted(folder.iterdir())[0], (1, 1))
    load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=5)
    assert len(list(own_cache.rglob("*.bin"))) == 9


def shared(where: str, name: str) -> str:
    """Run by each of several processes."""
    os.environ |= {"VQKV_CACHE": where, "HF_HUB_OFFLINE": "1"}
    chosen = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    return fingerprint(load_corpus(name, chosen, "train", SEQ_LEN, None, packing="packed"))


def test_two_processes_that_want_the_same_corpus_both_get_it(tmp_path, own_cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=4, docs=100)}"
    first, second = forked.share(2, shared, str(own_cache), name)
    assert first == second and len(list(own_cache.rglob("*.bin"))) == 1


def test_a_folder_that_cannot_be_written_names_the_remedy(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="VQKV_CACHE="):
        load_corpus(f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}", tokenizer, seq_len=8, num_seqs=1)


def test_memory_does_not_grow_with_the_corpus(tmp_path, own_cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=6, docs=1100, words=500)}"
    part, ids, all_, all_ids = forked.call(peaks, str(own_cache), name)
    assert all_ids - ids > 13 and all_ - part < (all_ids - ids) / 2, (part, ids, all_, all_ids)
