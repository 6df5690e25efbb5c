"""Corpora: windows of token ids, local files and bad names."""

import random

import pytest
import torch

from vqkv import DataError, UnknownNameError, load_corpus
from vqkv.data.corpus import SPLITS, documents, fingerprint, packed


def test_windows_start_with_bos_and_depend_on_the_seed_only(tokenizer):
    a, again, other = (load_corpus("python-stdlib", tokenizer, "test", 32, 5, seed) for seed in (1, 1, 2))
    assert a.shape == (5, 32) and a.dtype == torch.long and (a[:, 0] == tokenizer.bos_token_id).all()
    assert fingerprint(a) == fingerprint(again) != fingerprint(other)


def test_packed_windows_hold_all_tokens_with_eos_between(tokenizer):
    texts = [f"text {i} " * i for i in range(1, 90)]
    rows = torch.tensor([*packed(iter(texts), tokenizer, 33, random.Random(0))])
    ids = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in (*row, tokenizer.eos_token_id)]
    assert len(rows) == len(ids) // 32 and (rows[:, 0] == tokenizer.bos_token_id).all()
    assert rows[:, 1:].flatten().tolist() == ids[: len(rows) * 32]


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


REFUSED = {
    "python-stdlb": (UnknownNameError, "Did you mean 'python-stdlib'", {}),
    "python": (DataError, "need at least 2 tokens", {"seq_len": 1}),
    "python-stdlib": (UnknownNameError, "unknown split 'valid'", {"split": "valid"}),
    "short.txt": (DataError, "holds only 0 windows", {}),
    "empty": (DataError, "no text file", {}),
    "missing.txt": (DataError, "there is no file 'missing.txt'", {}),
    "bytes.txt": (DataError, "is not UTF-8 text", {}),
    "rows.jsonl": (DataError, "holds rows, not text: give redpajama@FOLDER", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_names_sizes_and_files(tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "rows.jsonl").write_text('{"text": "few words"}')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "empty").mkdir()
    error, message, more = REFUSED[name]
    with pytest.raises(error, match=message):
        load_corpus(name, tokenizer, **{"seq_len": 64, "num_seqs": 1} | more)
