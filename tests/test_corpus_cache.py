"""Tokenised corpora on the disk: killed, damaged, wanted twice at once, larger than memory should grow."""

import json
import os
import random
import resource
import signal
import threading
from pathlib import Path

import corpus_folders as folders
import forked
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vqkv import DataError, load_corpus
from vqkv.corpus import cache, fingerprint, stream
from vqkv.reference.data import TOKENIZER_DIR

SEQ_LEN = 24


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stream, "ROWS", 8)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def processes():
    """Processes that fork from one that has imported everything."""
    return forked.context()


def load(where: str, name: str, packing: str, num_seqs: int | None = None):
    """What a child process does: small pieces into the cache ``where``."""
    os.environ |= {"VQKV_CACHE": where, "HF_HUB_OFFLINE": "1"}
    stream.ROWS = 8
    chosen = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    return load_corpus(name, chosen, "train", SEQ_LEN, num_seqs, seed=5, packing=packing)


def load_and_die(seed: str, *arguments) -> None:
    """``load``, killed at a random moment after a random number of writes that have reached the disk."""
    rng, whole = random.Random(seed), os.fsync
    left = [rng.randrange(3, 30)]

    def counting(file):
        whole(file)
        left[0] -= 1
        if left[0] == 0:
            die = threading.Timer(rng.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL))
            die.start()

    os.fsync = counting
    load(*arguments)


def leave_fingerprint(*arguments) -> None:
    """``load`` in a child process, reported in a file."""
    Path(arguments[0], f"done-{os.getpid()}").write_text(fingerprint(load(*arguments)))


def leave_peaks(where: str, name: str) -> None:
    """After a part of the documents and after all: the most memory in MB, and how many MB of token ids there are."""
    found = []
    for num_docs in (500, 1000, 2000, 10_000):  # the first two fill the allocator's arenas
        os.environ |= {"VQKV_CACHE": where, "HF_HUB_OFFLINE": "1"}
        stream.ROWS = 50
        chosen = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
        tokens = load_corpus(name, chosen, seq_len=256, num_seqs=None, num_docs=num_docs)
        found += [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tokens.nbytes / 2**20]
    Path(where, "peaks").write_text(" ".join(map(str, found[-4:])))


def the_file(where: Path, name: str = "tokens.bin") -> Path:
    (found,) = where.rglob(name)
    return found


def counted(where: Path) -> int:
    states = list(where.rglob("state.json"))
    return json.loads(states[0].read_text())["body"]["windows"] if states else 0


@pytest.mark.parametrize("packing", ["packed", "joined"])
def test_killed_at_random_moments_it_goes_on_with_the_same_result(packing, processes, tmp_path):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=6, docs=120, words=200)}"
    expected = load(str(tmp_path / "whole"), name, packing)
    where, known, ends = tmp_path / "cache", 0, []
    for kill in range(7):
        child = processes.Process(target=load_and_die, args=(f"{packing}/{kill}", str(where), name, packing))
        child.start()
        child.join(60)
        ends.append(child.exitcode)
        assert counted(where) >= known, "finished pieces were lost"
        known = counted(where)
    assert ends.count(-signal.SIGKILL) >= 4 and known > 0
    assert load(str(where), name, packing).equal(expected)
    assert the_file(where).read_bytes() == the_file(tmp_path / "whole").read_bytes()


def test_two_processes_that_want_the_same_corpus_both_get_it(processes, tmp_path, own_cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=4, docs=100)}"
    own_cache.mkdir()
    pair = [processes.Process(target=leave_fingerprint, args=(str(own_cache), name, "packed")) for _ in range(2)]
    for child in pair:
        child.start()
    for child in pair:
        child.join(60)
    found = [path.read_text() for path in own_cache.glob("done-*")]
    assert found == [fingerprint(load(str(tmp_path / "alone"), name, "packed"))] * 2
    assert len(list(own_cache.rglob("tokens.bin"))) == 1


def test_a_second_reading_does_not_touch_the_data_set(tokenizer, tmp_path, own_cache, monkeypatch):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    first = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    monkeypatch.setattr(stream, "open_split", lambda *a: pytest.fail("streamed again"))
    again = load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9)
    assert again.equal(first) and again.dtype == torch.int64
    again.zero_()  # the file stays what it is
    assert load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=9).equal(first)
    with pytest.raises(pytest.fail.Exception):
        load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=10)


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
    assert len(list(own_cache.rglob("tokens.bin"))) == 7
    renamed.add_tokens(["cache codebook"])
    load_corpus(name, renamed, seq_len=SEQ_LEN, num_seqs=5)
    os.utime(sorted(folder.iterdir())[0], (1, 1))
    load_corpus(name, tokenizer, seq_len=SEQ_LEN, num_seqs=5)
    assert len(list(own_cache.rglob("tokens.bin"))) == 9


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("damage", ["flip", "truncate", "longer", "state", "no state", "no tokens", "other state"])
def test_a_damaged_cache_is_noticed_and_made_anew(
    damage, finished, tokenizer, tmp_path, own_cache, capsys, monkeypatch
):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}"
    asked = {"seq_len": SEQ_LEN, "num_seqs": 60, "seed": 2}
    if not finished:  # broken off after some pieces
        whole = cache._TokenFile._append

        def broken(self, file, rows):
            whole(self, file, rows)
            if file.tell() > 5000:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache._TokenFile, "_append", broken)
            load_corpus(name, tokenizer, **asked)
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "whole"))
    expected = load_corpus(name, tokenizer, **asked).clone()
    monkeypatch.setenv("VQKV_CACHE", str(own_cache))
    kept = load_corpus(name, tokenizer, **asked) if finished else None
    tokens, state = the_file(own_cache), the_file(own_cache, "state.json")
    data, text = tokens.read_bytes(), state.read_text()
    tokens.unlink()  # a mapped file is replaced, not written to
    {
        "flip": lambda: tokens.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:]),
        "truncate": lambda: tokens.write_bytes(data[:-9] if finished else data[:80]),
        "longer": lambda: tokens.write_bytes(data + b"12345678"),
        "state": lambda: (tokens.write_bytes(data), state.write_text(text.replace('"windows": ', '"windows": 1'))),
        "no state": lambda: (tokens.write_bytes(data), state.unlink()),
        "no tokens": lambda: None,
        "other state": lambda: (tokens.write_bytes(data), state.write_text(text[: len(text) // 2])),
    }[damage]()
    capsys.readouterr()
    assert load_corpus(name, tokenizer, **asked).equal(expected)
    said = "damaged and made anew" in capsys.readouterr().err
    assert said == (damage != "no state" and (damage != "longer" or finished))  # bytes not counted yet are cut off
    assert kept is None or kept.equal(expected)


def test_a_folder_that_cannot_be_written_names_the_remedy(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="VQKV_CACHE="):
        load_corpus(f"slimpajama@{folders.slimpajama(tmp_path / 'slim')}", tokenizer, seq_len=8, num_seqs=1)


def test_memory_does_not_grow_with_the_corpus(processes, tmp_path, own_cache):
    name = f"slimpajama@{folders.slimpajama(tmp_path / 'slim', shards=6, docs=1000, words=500)}"
    own_cache.mkdir()
    child = processes.Process(target=leave_peaks, args=(str(own_cache), name))
    child.start()
    child.join(120)
    part, ids, all_, all_ids = map(float, (own_cache / "peaks").read_text().split())
    assert all_ids - ids > 13 and all_ - part < (all_ids - ids) / 2, (part, ids, all_, all_ids)
