"""Corpora: splits, windows, local files and bad names."""

import json

import pytest
import torch

from vqkv import DataError, UnknownNameError, load_corpus
from vqkv.data.corpus import SPLITS, documents, fingerprint


def test_windows_start_with_bos_and_depend_on_the_seed_only(tokenizer):
    a = load_corpus("python-stdlib", tokenizer, "test", seq_len=32, num_seqs=5, seed=1)
    assert a.shape == (5, 32) and a.dtype == torch.long
    assert (a[:, 0] == tokenizer.bos_token_id).all()
    assert fingerprint(a) == fingerprint(load_corpus("python-stdlib", tokenizer, "test", 32, 5, seed=1))
    assert fingerprint(a) != fingerprint(load_corpus("python-stdlib", tokenizer, "test", 32, 5, seed=2))


def test_a_repeated_document_is_read_once(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same words\n" * 20)
    for i in range(40):
        (tmp_path / f"c{i}.txt").write_text(f"other words {i}\n" * 20)
    found = [set(documents(str(tmp_path), split)) for split in SPLITS]
    assert sum(map(len, found)) == len(set.union(*found)) == 41


def test_local_files_and_folders(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"line {i} " * 30}) for i in range(9)))
    assert load_corpus(str(tmp_path / "a.jsonl"), tokenizer, seq_len=16, num_seqs=4).shape == (4, 16)
    (tmp_path / "b.jsonl").write_text('{"words": "no text field"}\n')
    with pytest.raises(DataError, match="'text' field"):
        load_corpus(str(tmp_path / "b.jsonl"), tokenizer, seq_len=16, num_seqs=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text file"):
        load_corpus(str(tmp_path / "empty"), tokenizer)


def test_what_is_learned_from_is_not_reported_on(tokenizer, tmp_path):
    for folder, numbers in (("ours", range(60)), ("theirs", range(60, 120)), ("both", range(60))):
        (tmp_path / folder).mkdir()
        for i in numbers:
            (tmp_path / folder / f"{folder}{i}.txt").write_text(f"document {i} says so\n" * 20)
    ours, theirs, both = (tmp_path / folder for folder in ("ours", "theirs", "both"))
    assert load_corpus(f"train={ours},test={theirs}", tokenizer, "train", seq_len=16, num_seqs=4).shape == (4, 16)
    with pytest.raises(DataError, match="are also in .*take them out of one"):
        load_corpus(f"train={ours},test={both}", tokenizer, "test", seq_len=16, num_seqs=1)


def test_bad_names_and_sizes(tokenizer, tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'python-stdlib'"):
        load_corpus("python-stdlb", tokenizer)
    with pytest.raises(UnknownNameError, match="unknown split 'valid'"):
        load_corpus("python-stdlib", tokenizer, split="valid")
    with pytest.raises(DataError, match="need at least 2 tokens"):
        load_corpus("python-stdlib", tokenizer, seq_len=1)
    (tmp_path / "short.txt").write_text("few words")
    with pytest.raises(DataError, match="holds only 0 windows"):
        load_corpus(str(tmp_path / "short.txt"), tokenizer, seq_len=64, num_seqs=1)


@pytest.mark.parametrize("form", ["lines", "one line", "one row"])
def test_one_file_is_cut_into_three_parts_by_position(tmp_path, form):
    words = [f"word{i}" for i in range(4000)]
    text = {"lines": "\n", "one line": " ", "one row": " "}[form].join(words)
    path = tmp_path / ("text.jsonl" if form == "one row" else "text.txt")
    path.write_text(json.dumps({"text": text}) if form == "one row" else text)
    parts = {split: [text.index(piece) for piece in documents(str(path), split)] for split in SPLITS}
    assert max(parts["train"]) < min(parts["validation"]) <= max(parts["validation"]) < min(parts["test"])
    assert sum(len(piece) for split in SPLITS for piece in documents(str(path), split)) == len(text)
    assert 0.06 < sum(len(piece) for piece in documents(str(path), "test")) / len(text) < 0.1
