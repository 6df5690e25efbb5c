"""Data sets that are streamed, in local folders with the layouts of the real ones: packing, splits, errors, and tokens
that stay on the disk: complete or not there, wanted twice at once."""

import builtins
import itertools
import os
import resource

import corpus_folders as folders
import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from vqkv import DataError, UnknownNameError, load_corpus
from vqkv.data import hub
from vqkv.data.corpus import HUB_CORPORA, SPLITS, documents, fingerprint
from vqkv.data.windows import tokenizer_hash
from vqkv.reference.data import TOKENIZER_DIR

SEQ_LEN = 24


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "BUFFER", 8)
    return tmp_path / "cache"


def own_tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)


# What is read


def test_packed_windows_are_the_shuffled_documents(tokenizer, tmp_path):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    texts = list(documents(name, "train", seed=3))
    ids = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in (*row, tokenizer.eos_token_id)]
    tokens = load_corpus(name, tokenizer, seq_len=33, num_seqs=len(ids) // 32, seed=3)
    assert tokens[:, 1:].flatten().tolist() == ids[: len(tokens) * 32]
    assert texts != list(documents(name, "train", seed=4))
    assert load_corpus(name, tokenizer, seq_len=33, num_seqs=5, seed=3).equal(tokens[:5])


def test_documents_of_several_files_come_in_turn(tmp_path):
    name = f"redpajama@{folders.redpajama(tmp_path)}"
    first = list(itertools.islice(documents(name, "train"), 10))
    assert {text.split()[0] for text in first} == {"arxiv", "c4", "cc_2023-06"}


def test_splits_that_are_lacking_are_held_out_of_train(tmp_path):
    red, slim = folders.redpajama(tmp_path / "red"), folders.slimpajama(tmp_path / "slim", test=False)
    for name in (f"redpajama@{red}", f"slimpajama@{slim}"):
        texts = [set(documents(name, split)) for split in SPLITS]
        assert sum(map(len, texts)) == len(set.union(*texts)) == 120 and all(0 < len(held) < 20 for held in texts[1:])
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'both')}"
    assert all(text.startswith("test") for text in documents(name, "test"))
    train, validation = (set(documents(name, split)) for split in ("train", "validation"))
    assert not train & validation and all(text.startswith("train") for text in train | validation) and validation


def test_joined_windows_are_those_of_the_complete_text(tokenizer, tmp_path):
    name = f"wikitext@{folders.wikitext(tmp_path)}"
    ids = tokenizer("\n\n".join(folders.wikitext_rows(30, seed=2)), verbose=False)["input_ids"]
    tokens = load_corpus(name, tokenizer, "test", seq_len=17, num_seqs=len(ids) // 17)
    assert tokens.flatten().tolist() == ids[: tokens.numel()] and tokenizer.bos_token_id not in tokens
    other = own_tokenizer()  # that begins a text with BOS
    bos = (other.bos_token, other.bos_token_id)
    other.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    begun = load_corpus(name, other, "test", seq_len=17, num_seqs=4).flatten()
    assert begun[0] == other.bos_token_id and begun[1:].equal(tokens.flatten()[: 4 * 17 - 1])
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)


def test_books_and_the_hub_s_own_folder_layout(tokenizer, tmp_path):
    tokens = load_corpus(f"pg19@{folders.pg19(tmp_path / 'books')}", tokenizer, "test", seq_len=512, num_seqs=8)
    assert tokens.shape == (8, 512)
    clone = tmp_path / "clone"
    folders.wikitext(clone / "wikitext-2-raw-v1")
    folders.wikitext(clone / "other", articles=2)
    entries = "".join(f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {c}/test-*\n"
                      f"  - split: train\n    path: {c}/train-*\n" for c in ("other", "wikitext-2-raw-v1"))  # fmt: skip
    (clone / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    assert load_corpus(f"wikitext@{clone}", tokenizer, "test", 16, 20).shape == (20, 16)


# What is refused


@pytest.mark.parametrize("name", HUB_CORPORA)
def test_every_known_corpus_says_what_is_wrong_offline(tokenizer, name):
    with pytest.raises(DataError, match=rf"corpus '{name}'.*offline.*NAME@FOLDER"):
        load_corpus(name, tokenizer)


BROKEN = {
    "slimpajma@empty": (UnknownNameError, "Did you mean 'slimpajama'"),
    "slimpajama@empty": (DataError, "there is no folder"),
    "slimpajama@column": (DataError, "no column 'text' of strings; it has content"),
    "slimpajama@numbers": (DataError, r"it has text [(]int[)]"),
    "slimpajama@broken": (DataError, "cannot load it.*parquet or jsonl"),
    "redpajama@lines": (DataError, "broke off [(]JSONDecodeError"),
    "wikitext@wiki": (DataError, "has no test split"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_folders_that_are_not_what_they_should_be(tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "column", "numbers", "broken", "lines"):
        (tmp_path / folder).mkdir()
    pq.write_table(pa.table({"content": ["x"]}), "column/train.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), "numbers/train.parquet")
    (tmp_path / "broken/train.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "lines/a.jsonl").write_text('{"text": "a"}\n[1\n')
    (folders.wikitext(tmp_path / "wiki") / "test-00000-of-00001.parquet").unlink()
    error, message = BROKEN[name]
    with pytest.raises(error, match=message):
        load_corpus(name, tokenizer, "test" if name.startswith("wiki") else "train", seq_len=16, num_seqs=2)


def test_without_the_library_or_a_folder_for_tokens_the_remedy_is_named(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="VQKV_CACHE="):
        load_corpus(f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}", tokenizer, seq_len=8, num_seqs=1)
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    real = builtins.__import__

    def no_datasets(name, *rest, **more):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(DataError, match=r"pip install 'vqkv\[study\]'"):
        load_corpus("wikitext", tokenizer, seq_len=16, num_seqs=2)


# What stays on the disk


def test_a_second_reading_does_not_touch_the_data_set(tokenizer, tmp_path, monkeypatch):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    first = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    monkeypatch.setattr(hub, "_load", lambda *a: pytest.fail("streamed again"))
    again = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    assert again.equal(first) and again.dtype == torch.int64
    again.zero_()  # the file stays what it is
    assert load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9).equal(first)
    with pytest.raises(pytest.fail.Exception):
        load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=10)


def test_what_breaks_off_leaves_nothing_half_made(tokenizer, tmp_path, cache, monkeypatch):
    name, own = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}", hub._text

    def broken(row):
        if "train 1 3 " in row["text"]:
            raise KeyboardInterrupt
        return own(row)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub, "_text", broken)
        load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60)
    assert not list(cache.rglob("*.bin")) and not list(cache.rglob("*.part"))
    tokens = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60)
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "other"))
    assert load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=60).equal(tokens)


def test_each_thing_that_matters_has_a_file_of_its_own(tmp_path, cache):
    folder, tokenizer = folders.slimpajama(tmp_path / "slim"), own_tokenizer()
    name = f"slimpajama@{folder}"
    for more in ({}, {"seed": 1}, {"seq_len": 12}, {"num_seqs": 4}, {"split": "test"}):
        load_corpus(name, tokenizer, **{"seq_len": SEQ_LEN, "num_seqs": 5} | more)
    tokenizer.name_or_path = "elsewhere"
    tokenizer("padded", padding="max_length", max_length=8, truncation=True)
    load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=5)
    assert len(list(cache.rglob("*.bin"))) == 5
    os.utime(sorted(folder.iterdir())[0], (1, 1))
    load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=5)
    tokenizer.add_tokens(["cache codebook"])
    load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=5)
    assert len(list(cache.rglob("*.bin"))) == 7


def in_a_process(cache: str, name: str, *counts: int) -> list:
    """By count of windows: the most memory in MB, MB of token ids, what they are."""
    os.environ |= {"VQKV_CACHE": cache, "HF_HUB_OFFLINE": "1"}
    rows = []
    for count in counts:
        tokens = load_corpus(name, own_tokenizer(), seq_len=256, num_seqs=count)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append((peak, tokens.nbytes / 2**20, fingerprint(tokens)))
    return rows


def test_two_processes_that_want_the_same_corpus_both_get_it(tmp_path, cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=4, docs=100)}"
    (first,), (second,) = forked.share(2, in_a_process, str(cache), name, 50)
    assert first[2] == second[2] and len(list(cache.rglob("*.bin"))) == 1


def test_memory_does_not_grow_with_the_corpus(tmp_path, cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=6, docs=1100, words=500)}"
    counts = (500, 1000, 2000, 9000)  # the first two fill the allocator's arenas
    *_, (part, ids, _), (all_, all_ids, _) = forked.call(in_a_process, str(cache), name, *counts)
    assert all_ids - ids > 13 and all_ - part < (all_ids - ids) / 2, (part, ids, all_, all_ids)
