"""Data sets that are streamed, in local folders with the layouts of the real ones: packing, splits, errors."""

import builtins
import itertools

import corpus_folders as folders
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from vqkv import DataError, UnknownNameError, load_corpus
from vqkv.data.corpus import HUB_CORPORA, SPLITS, documents
from vqkv.data.windows import tokenizer_hash
from vqkv.reference.data import TOKENIZER_DIR


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))


def test_packed_windows_are_the_shuffled_documents_with_eos_between(tokenizer, tmp_path):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    texts = list(documents(name, "train", seed=3))
    rest = set(documents(name, "validation"))  # a split that the data set lacks
    assert len(set(texts) | rest) == len(texts) + len(rest) == 120 and texts != list(documents(name, "train", seed=4))
    ids = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in (*row, tokenizer.eos_token_id)]
    tokens = load_corpus(name, tokenizer, seq_len=33, num_seqs=None, seed=3)
    assert len(tokens) == len(ids) // 32 and (tokens[:, 0] == tokenizer.bos_token_id).all()
    assert tokens[:, 1:].flatten().tolist() == ids[: len(tokens) * 32]
    few = load_corpus(name, tokenizer, seq_len=33, num_seqs=None, seed=3, num_docs=10)
    assert few[:, 1:].flatten().tolist() == ids[: len(few) * 32] and len(few) < len(tokens)
    assert load_corpus(name, tokenizer, seq_len=33, num_seqs=5, seed=3).equal(tokens[:5])


def test_documents_of_several_files_come_in_turn(tmp_path):
    name = f"redpajama@{folders.redpajama(tmp_path)}"
    first = list(itertools.islice(documents(name, "train"), 10))
    assert {text.split()[0] for text in first} == {"arxiv", "c4", "cc_2023-06"}


def test_without_a_test_split_documents_are_held_out(tokenizer, tmp_path):
    for name in (
        f"redpajama@{folders.redpajama(tmp_path / 'red')}",
        f"slimpajama@{folders.slimpajama(tmp_path / 'slim', test=False)}",
    ):
        found = [set(documents(name, split)) for split in SPLITS]
        assert sum(map(len, found)) == len(set.union(*found)) == 120 and all(0 < len(held) < 20 for held in found[1:])
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'both')}"
    assert all(text.startswith("test") for text in documents(name, "test"))
    train, validation = (set(documents(name, split)) for split in ("train", "validation"))
    assert not train & validation and all(text.startswith("train") for text in train | validation) and validation


def test_joined_windows_are_those_of_the_whole_text(tokenizer, tmp_path):
    tokens = load_corpus(f"wikitext@{folders.wikitext(tmp_path)}", tokenizer, "test", seq_len=17, num_seqs=None)
    whole = tokenizer("\n\n".join(folders.wikitext_rows(30, seed=2)), verbose=False)["input_ids"]
    assert tokens.flatten().tolist() == whole[: tokens.numel()] and len(whole) - tokens.numel() < 17


def test_bos_begins_joined_text_where_the_tokenizer_puts_it(tokenizer, tmp_path):
    name = f"wikitext@{folders.wikitext(tmp_path)}"
    plain = load_corpus(name, tokenizer, "test", seq_len=16, num_seqs=4)
    assert tokenizer.bos_token_id not in plain
    other = AutoTokenizer.from_pretrained(TOKENIZER_DIR)
    inner = other.backend_tokenizer
    from tokenizers.processors import TemplateProcessing

    bos = (other.bos_token, other.bos_token_id)
    inner.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    begun = load_corpus(name, other, "test", seq_len=16, num_seqs=4).flatten()
    assert begun[0] == other.bos_token_id and begun[1:].equal(plain.flatten()[:-1])
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)


def test_a_caller_may_choose_the_packing(tokenizer, tmp_path):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    one_each = load_corpus(name, tokenizer, seq_len=16, num_seqs=20, packing="windows")
    assert (one_each[:, 0] == tokenizer.bos_token_id).all()
    assert not one_each.equal(load_corpus(name, tokenizer, seq_len=16, num_seqs=20))
    local = tmp_path / "a.txt"
    local.write_text("".join(f"line {i} goes on and on\n" for i in range(3000)))
    packed = load_corpus(str(local), tokenizer, seq_len=64, num_seqs=6, packing="packed")
    assert packed.shape == (6, 64) and not packed.equal(load_corpus(str(local), tokenizer, seq_len=64, num_seqs=6))
    with pytest.raises(DataError, match="wikitext@FOLDER"):
        load_corpus(str(local), tokenizer, packing="joined")
    with pytest.raises(UnknownNameError, match="Did you mean 'packed'"):
        load_corpus(name, tokenizer, packing="pack")


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


def test_every_known_corpus_says_what_is_wrong_offline(tokenizer):
    for name in HUB_CORPORA:
        with pytest.raises(DataError, match=rf"corpus '{name}'.*offline.*NAME@FOLDER"):
            load_corpus(name, tokenizer)


def test_folders_that_are_not_what_they_should_be(tokenizer, tmp_path, monkeypatch):
    def fails(name, message, error=DataError, **more):
        with pytest.raises(error, match=message):
            load_corpus(name, tokenizer, **{"seq_len": 16, "num_seqs": 2} | more)

    fails(f"slimpajma@{tmp_path}", "Did you mean 'slimpajama'", UnknownNameError)
    fails(f"slimpajama@{tmp_path}/none", "there is no folder")
    (tmp_path / "empty").mkdir()
    fails(f"slimpajama@{tmp_path}/empty", "there is no folder")
    (tmp_path / "column").mkdir()
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "column/train.parquet")
    fails(f"slimpajama@{tmp_path}/column", "no column 'text' of strings; it has content")
    (tmp_path / "numbers").mkdir()
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers/train.parquet")
    fails(f"slimpajama@{tmp_path}/numbers", r"it has text [(]int[)]")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/train.parquet").write_bytes(b"PAR1 but not really")
    fails(f"slimpajama@{tmp_path}/broken", "cannot load it.*parquet or jsonl")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text('{"text": "a"}\n[1\n')
    with pytest.raises(DataError, match="broke off [(]JSONDecodeError"):
        load_corpus(f"redpajama@{tmp_path}/lines", tokenizer, num_seqs=1)
    folders.wikitext(tmp_path / "wiki")
    (tmp_path / "wiki/test-00000-of-00001.parquet").unlink()
    fails(f"wikitext@{tmp_path}/wiki", "has no test split", split="test")
    with pytest.raises(DataError, match="holds only"):
        load_corpus(f"wikitext@{tmp_path}/wiki", tokenizer, seq_len=512, num_seqs=10_000)
    real = builtins.__import__

    def no_datasets(name, *rest, **more):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    fails("wikitext", r"pip install 'vqkv\[study\]'")
