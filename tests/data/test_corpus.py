"""Corpora: windows of token ids, local files, streamed data sets (folders in their layouts), bad names. The splits of
the bundled text: disjoint, no twin across them, what the rule gives."""

import itertools
import json
import random
import sys
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from vqkv import DataError, UnknownNameError, load_corpus
from vqkv.data import bundled, corpus
from vqkv.data.bundled import CORPORA
from vqkv.data.corpus import HUB_CORPORA, SPLITS, documents, fingerprint
from vqkv.reference import splitting
from vqkv.reference.rows import TOKENIZER_DIR

# Seconds after each reading of several files, so that a process does not end before Arrow's threads: tests go on.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
TEXT = "the of and a key value cache codebook vector layer attention error größe naïve 1999 @-@ ( ) , . ;"
WORDS = TEXT.split(" ")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(corpus, "BUFFER", 8)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) + ("\n" if rng.random() < 0.05 else "") for _ in range(words))


def parquet(file, texts, **columns):
    """Write a column ``text`` and others, in row groups of 7."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts} | columns), file, row_group_size=7)


def slimpajama(folder, test: bool = True):
    """Write shards with a struct ``meta`` next to the text."""
    rng = random.Random(7)
    for split, shard in [*(("train", shard) for shard in range(3)), *[("test", 0)] * test]:
        texts = [f"{split} {shard} {i} " + text(rng, rng.randrange(1, 60)) for i in range(40)]
        parquet(folder / f"{split}-{shard:05d}.parquet", texts, meta=[{"redpajama_set_name": "RedPajamaC4"}] * 40)
    return folder


def redpajama(folder):
    """Write a jsonl file per source, whose other fields differ; no test split."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(8)
    for source, about in (("arxiv", {"meta": {"timestamp": "x"}}), ("c4", {"meta": "{}"}), ("cc_2023-06", {"rank": 1})):
        rows = [{"text": f"{source} {i} " + text(rng, 50)} | about for i in range(40)]
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"{source}_sample.jsonl").write_text(lines + "\n", encoding="utf-8")
    return folder


def wikitext_rows(articles: int, seed: int) -> list[str]:
    """A line a row, blank rows, headings between ``=``."""
    rng, rows = random.Random(seed), []
    for i in range(articles):
        rows += ["", f" = Article {i} = \n", ""]
        for section in range(rng.randrange(3)):
            rows += [f" = = Section {section} = = \n", "", " " + text(rng, 80).replace("\n", "") + " \n"]
    return rows


def wikitext(folder, articles: int = 30):
    for seed, split in enumerate(("train", "validation", "test")):
        parquet(folder / f"{split}-00000-of-00001.parquet", wikitext_rows(articles, seed))
    return folder


def test_windows_start_with_bos_and_depend_on_the_seed_only(tokenizer):
    a, again, other = (load_corpus("python-stdlib", tokenizer, "test", 32, 5, seed) for seed in (1, 1, 2))
    assert a.shape == (5, 32) and a.dtype == torch.long and (a[:, 0] == tokenizer.bos_token_id).all()
    assert fingerprint(a) == fingerprint(again) != fingerprint(other)


def test_a_repeated_document_is_read_once_and_splits_are_disjoint(tmp_path):
    for i in range(42):
        (tmp_path / f"{i}.txt").write_text(f"document {max(1, i)} says so\n" * 20)  # 0 and 1 are alike
    texts = [set(documents(str(tmp_path), split)) for split in SPLITS]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 41
    other = tmp_path / "41.txt"
    assert set(documents(f"train={tmp_path},test={other}", "train")) == texts[0]
    assert [*documents(f"train={tmp_path},test={other}", "test")] == [*documents(str(other), "test")]


@pytest.mark.parametrize("end", ["\n", " "])
def test_one_file_is_cut_into_three_parts_by_position(tmp_path, end):
    path, text = tmp_path / "text.txt", end.join(f"word{i}" for i in range(4000))
    path.write_text(text)
    parts = {split: [text.index(piece) for piece in documents(str(path), split)] for split in SPLITS}
    assert max(parts["train"]) < min(parts["validation"]) <= max(parts["validation"]) < min(parts["test"])
    assert sum(len(piece) for split in SPLITS for piece in documents(str(path), split)) == len(text)
    assert 0.18 < sum(len(piece) for piece in documents(str(path), "test")) / len(text) < 0.22


def test_packed_windows_are_the_shuffled_documents(tokenizer, tmp_path):
    name = f"slimpajama@{slimpajama(tmp_path)}"
    texts = list(documents(name, "train", seed=3))
    ids = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in (*row, tokenizer.eos_token_id)]
    tokens = load_corpus(name, tokenizer, seq_len=33, num_seqs=len(ids) // 32, seed=3)
    assert tokens[:, 1:].flatten().tolist() == ids[: len(tokens) * 32]
    assert texts != list(documents(name, "train", seed=4))
    assert load_corpus(name, tokenizer, seq_len=33, num_seqs=5, seed=3).equal(tokens[:5])


def test_documents_of_several_files_come_by_turns(tmp_path):
    first = list(itertools.islice(documents(f"redpajama@{redpajama(tmp_path)}", "train"), 10))
    assert {text.split()[0] for text in first} == {"arxiv", "c4", "cc_2023-06"}


def test_splits_that_are_lacking_are_held_out_of_train(tmp_path):
    red, slim = redpajama(tmp_path / "red"), slimpajama(tmp_path / "slim", test=False)
    for name in (f"redpajama@{red}", f"slimpajama@{slim}"):
        texts = [set(documents(name, split)) for split in SPLITS]
        assert sum(map(len, texts)) == len(set.union(*texts)) == 120 and all(0 < len(held) < 20 for held in texts[1:])
    name = f"slimpajama@{slimpajama(tmp_path / 'both')}"
    assert all(text.startswith("test") for text in documents(name, "test"))
    train, validation = (set(documents(name, split)) for split in ("train", "validation"))
    assert not train & validation and all(text.startswith("train") for text in train | validation) and validation


def test_joined_windows_are_those_of_the_complete_text(tokenizer, tmp_path):
    name = f"wikitext@{wikitext(tmp_path)}"
    ids = tokenizer("\n\n".join(wikitext_rows(30, seed=2)), verbose=False)["input_ids"]
    tokens = load_corpus(name, tokenizer, "test", seq_len=17, num_seqs=len(ids) // 17)
    assert tokens.flatten().tolist() == ids[: tokens.numel()] and tokenizer.bos_token_id not in tokens
    other = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)  # that begins a text with BOS
    bos = (other.bos_token, other.bos_token_id)
    other.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    begun = load_corpus(name, other, "test", seq_len=17, num_seqs=4).flatten()
    assert begun[0] == other.bos_token_id and begun[1:].equal(tokens.flatten()[: 4 * 17 - 1])


def test_the_hub_s_own_folder_layout(tokenizer, tmp_path):
    wikitext(tmp_path / "wikitext-2-raw-v1")
    wikitext(tmp_path / "other", articles=2)
    entries = "".join(f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {c}/test-*\n"
                      f"  - split: train\n    path: {c}/train-*\n" for c in ("other", "wikitext-2-raw-v1"))  # fmt: skip
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    assert load_corpus(f"wikitext@{tmp_path}", tokenizer, "test", 16, 20).shape == (20, 16)


REFUSED = {
    "python-stdlb": (UnknownNameError, "Did you mean 'python-stdlib'", {}),
    "python": (DataError, "need at least 2 tokens", {"seq_len": 1}),
    "python-stdlib": (UnknownNameError, "unknown split 'valid'", {"split": "valid"}),
    "short.txt": (DataError, "holds only 0 windows", {}),
    "empty": (DataError, "no text file", {}),
    "missing.txt": (DataError, "there is no file 'missing.txt'", {}),
    "bytes.txt": (DataError, "is not UTF-8 text", {}),
    "rows.jsonl": (DataError, "holds rows, not text: give redpajama@FOLDER", {}),
    "slimpajma@empty": (UnknownNameError, "Did you mean 'slimpajama'", {}),
    "slimpajama@empty": (DataError, "cannot read it.*NAME@FOLDER", {}),
    "slimpajama@column": (DataError, "no column 'text' of strings; it has content", {}),
    "slimpajama@numbers": (DataError, r"it has text [(]int[)]", {}),
    "slimpajama@broken": (DataError, "cannot read it.*parquet or jsonl", {}),
    "redpajama@lines": (DataError, "cannot read it [(]JSONDecodeError", {}),
    "wikitext@wiki": (DataError, "has no test split", {"split": "test"}),
    **{name: (DataError, rf"corpus '{name}'.*offline.*NAME@FOLDER", {}) for name in HUB_CORPORA},
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_names_sizes_files_and_data_sets(tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "rows.jsonl").write_text('{"text": "few words"}')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    for folder in ("empty", "column", "numbers", "broken", "lines"):
        (tmp_path / folder).mkdir()
    pq.write_table(pa.table({"content": ["x"]}), "column/train.parquet")
    parquet(tmp_path / "numbers/train.parquet", [1, 2])
    (tmp_path / "broken/train.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "lines/a.jsonl").write_text('{"text": "a"}\n[1\n')
    (wikitext(tmp_path / "wiki") / "test-00000-of-00001.parquet").unlink()
    error, message, more = REFUSED[name]
    with pytest.raises(error, match=message):
        load_corpus(name, tokenizer, **{"seq_len": 64, "num_seqs": 1} | more)


def test_without_the_library_the_remedy_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'vqkv\[study\]'"):
        load_corpus("wikitext", tokenizer, seq_len=16, num_seqs=2)


PART = "00"  # first hex digits of the training documents that are compared


@pytest.fixture(scope="module")
def listed():
    """(split, module, text) of each document of source that is listed."""
    split_of = {name: split for split in bundled.SPLITS for name in bundled.listed(split)}
    read = ((document.module, document.text()) for document in CORPORA["python"]())
    named = {bundled.content_hash(text): (module, text) for module, text in read if text}
    return {name: (split_of[name], *about) for name, about in named.items() if name in split_of}


def test_documents_are_where_the_rule_deals_them(listed):
    assert all(bundled.dealt(module) == split for split, module, _ in listed.values())


def test_no_held_out_document_has_a_twin(listed):
    """Over all that is held out, and over the training documents that begin like ``PART``."""
    test = {name: text for name, (split, _, text) in listed.items() if split == "test"}
    twins = splitting.Twins(test.items())
    for name, (split, _, text) in listed.items():
        if split == "validation" or (split == "train" and name.startswith(PART)):
            assert not twins.of(text), f"{name} of {split} has a twin in the test split"


def test_twins_are_found_and_others_are_not(listed):
    texts = [text for _, _, text in listed.values() if 3_000 < len(text) < 9_000][:40]
    twins = splitting.Twins((str(i), text) for i, text in enumerate(texts))
    for i, text in enumerate(texts):
        lines = text.splitlines(keepends=True)
        assert str(i) in twins.of("".join(line for n, line in enumerate(lines) if n % 25))  # a vendored, edited copy
        assert str(i) not in twins.of("".join(lines[: len(lines) // 4]))


def test_a_patch_release_moves_nothing(monkeypatch, tmp_path):
    """A changed file is in no split, and the others keep their place and order."""
    before = [text for text, _ in zip(bundled.documents("python-stdlib", "train"), range(40))]
    changed = {before[3], before[17]}
    read = bundled.Document.text

    def patched(self):
        text = read(self)
        return text + "# 3.11.99\n" if text in changed else text

    monkeypatch.setattr(bundled.Document, "text", patched)
    after = [text for text, _ in zip(bundled.documents("python-stdlib", "train"), range(38))]
    assert after == [text for text in before if text not in changed]


def test_prose_is_prose_and_comes_once():
    counts = Counter(text for text, _ in zip(bundled.documents("prose", "validation"), range(4)))
    assert max(counts.values()) == 1 and all(len(text) >= bundled.MIN_PROSE for text in counts)
