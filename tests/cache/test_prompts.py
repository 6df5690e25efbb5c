"""Prompts that come back: found by prefix, written turn by turn, damaged files a miss."""

import contextlib
import copy
import errno
import os
import random
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import forked
import prompt_job
import pytest
import torch
from preset_zoo import EVERY

from vqkv import DataError, calibrate
from vqkv.cache.prompts import FORMAT, VERSION, PromptCache
from vqkv.runtime.files import _checksum, load_checked, save_checked

TOKENS = torch.randint(1, 400, (6, 96), generator=torch.Generator().manual_seed(0))
KINDS = ("vqllm", "kivi", "split", "lossless")


@pytest.fixture(scope="module", params=KINDS)
def compressor(request, llama):
    return calibrate(llama, TOKENS, EVERY[request.param], progress=False)


@pytest.fixture(scope="module")
def quanto(llama):
    """8 recent tokens."""
    return calibrate(llama, TOKENS, replace(EVERY["quanto"], recent_window=8, flush_block=8), progress=False)


@torch.inference_mode()
def feed(model, cache, tokens):
    return model(tokens.view(1, -1), past_key_values=cache, use_cache=True).logits


def read(model, compressor, tokens, pieces=(40,)):
    """A cache that was given tokens in pieces of these sizes."""
    cache = compressor.new_cache(model)
    for piece in tokens.split([*pieces, len(tokens) - sum(pieces)]):
        if len(piece):
            feed(model, cache, piece)
    return cache


def test_a_chat_goes_on_as_if_never_saved_and_stores_each_block_once(llama, compressor, tmp_path):
    known, text = PromptCache(tmp_path, compressor, llama), TOKENS[0]
    expected = read(llama, compressor, text[:40])
    known.save(text[:40], expected)
    sizes = [sum(x.stat().st_size for x in known.folder.iterdir())]
    for turn in (56, 72, 88):
        cache, count = known.find(text[:turn])
        assert count == turn - 16
        assert torch.equal(feed(llama, cache, text[count:turn]), feed(llama, expected, text[count:turn]))
        known.save(text[:turn], cache)
        sizes.append(sum(x.stat().st_size for x in known.folder.iterdir()))
    assert len(list(known.folder.iterdir())) == 4
    again, count = PromptCache(tmp_path, compressor, llama).find(text)
    assert count == 88 and torch.equal(feed(llama, again, text[88:]), feed(llama, expected, text[88:]))


def test_what_is_new_is_all_that_is_written(llama, quanto, tmp_path):
    known, text = PromptCache(tmp_path, quanto, llama), TOKENS[0].repeat(5)
    cache = read(llama, quanto, text[:400])
    known.save(text[:400], cache)
    feed(llama, cache, text[400:408])
    known.save(text[:408], cache)
    large, small = sorted((x.stat().st_size for x in known.folder.iterdir()), reverse=True)
    assert small < large / 4


def test_the_longest_common_prefix_is_found_and_something_is_left_to_read(llama, quanto, tmp_path):
    known, text = PromptCache(tmp_path, quanto, llama), TOKENS[0]
    assert known.find(text) == (None, 0)
    for stop in (20, 40):
        known.save(text[:stop], read(llama, quanto, text[:stop], (stop,)))
    other = torch.cat([text[:30], TOKENS[1][30:]])
    for tokens, wanted in ((text, 40), (text[:41], 40), (text[:40], 39), (other, 30), (text[:1], 0), (TOKENS[1], 0)):
        cache, count = known.find(tokens)
        assert count == wanted and (cache is None or cache.get_seq_length() == wanted)
        if cache is not None:  # as if it had been cropped without a file
            expected = read(llama, quanto, text[:40], (40,))
            expected.crop(count - 40)
            assert torch.equal(feed(llama, cache, tokens[count:]), feed(llama, expected, tokens[count:]))


def test_other_models_types_and_compressors_find_nothing(llama, quanto, tmp_path):
    PromptCache(tmp_path, quanto, llama).save(TOKENS[0], read(llama, quanto, TOKENS[0]))
    assert PromptCache(tmp_path, calibrate(llama, TOKENS, EVERY["kivi"], progress=False), llama).find(TOKENS[0])[1] == 0
    half = copy.deepcopy(llama).half()
    assert PromptCache(tmp_path, quanto, half).find(TOKENS[0])[1] == 0
    assert PromptCache(tmp_path, quanto, llama).find(TOKENS[0])[1] == 95


def test_damaged_files_are_a_miss_or_as_they_were(llama, compressor, tmp_path):
    """Flipped, cut and extended; half of them with a checksum that fits, which may make other values, and such as no
    cache can hold."""
    known, text, rng = PromptCache(tmp_path, compressor, llama), TOKENS[0], random.Random(0)
    mutations = int(os.environ.get("VQKV_MUTATIONS", 60))
    known.save(text[:40], read(llama, compressor, text[:40]))
    (path,) = known.folder.iterdir()
    whole, found = path.read_bytes(), 0
    for number in range(mutations):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if number % 3 == 1:
            data = data[: rng.randrange(len(data))]
        elif number % 3 == 2:
            data += bytes(rng.randrange(1, 9))
        forged = number % 2 and len(data) > 200
        if forged:
            data[_checksum(data)] = b"0" * 8
            data[_checksum(data)] = f"{zlib.crc32(data):08x}".encode()
        path.write_bytes(data)
        cache, count = known.find(text)
        found += count > 0
        if count:
            with contextlib.suppress(DataError) if forged else contextlib.nullcontext():  # NaN, infinity
                feed(llama, cache, text[count:])
    assert found < mutations / 2
    path.write_bytes(whole)
    assert known.find(text)[1] == 40


def test_a_file_that_went_is_a_miss_for_those_that_go_on_from_it(llama, quanto, tmp_path):
    known, text = PromptCache(tmp_path, quanto, llama), TOKENS[0]
    cache = read(llama, quanto, text[:40])
    known.save(text[:40], cache)
    (first,) = known.folder.iterdir()
    feed(llama, cache, text[40:80])
    known.save(text[:80], cache)
    first.unlink()
    assert known.find(text) == (None, 0)
    known.save(text[:80], cache)
    assert PromptCache(tmp_path, quanto, llama).find(text)[1] == 80


def out_of_files(path):
    raise OSError(errno.EMFILE, "Too many open files", str(path))


def out_of_memory(path):
    raise MemoryError


def out_of_torch_memory(path):
    torch.empty(1 << 60, dtype=torch.uint8)


def just_removed(path):
    os.rename(path, f"{path}.away")


@pytest.mark.parametrize("trouble", [out_of_files, out_of_memory, out_of_torch_memory, just_removed])
def test_what_cannot_be_read_now_is_a_miss_and_stays(llama, quanto, tmp_path, monkeypatch, trouble):
    known, text, read_bytes = PromptCache(tmp_path, quanto, llama), TOKENS[0], Path.read_bytes
    known.save(text, read(llama, quanto, text))
    (path,) = known.folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: trouble(path) or read_bytes(path))
        assert known.find(text) == (None, 0)
    if trouble is just_removed:
        os.rename(f"{path}.away", path)
    assert known.find(text)[1] == 95


def test_only_the_damaged_file_of_a_chat_goes(llama, quanto, tmp_path):
    known, text = PromptCache(tmp_path, quanto, llama), TOKENS[0]
    cache = read(llama, quanto, text[:40])
    known.save(text[:40], cache)
    (first,) = known.folder.iterdir()
    feed(llama, cache, text[40:80])
    known.save(text[:80], cache)
    (second,) = set(known.folder.iterdir()) - {first}
    whole = first.read_bytes()
    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert known.find(text) == (None, 0) and [*known.folder.iterdir()] == [second]
    first.write_bytes(whole)
    assert known.find(text)[1] == 80
    about, tensors = load_checked(second, FORMAT, VERSION, "")
    save_checked(second, about | {"version": VERSION + 1}, tensors)
    assert known.find(text)[1] == 40 and second.exists()


def test_files_are_listed_again_but_not_read_again(llama, quanto, tmp_path, monkeypatch):
    known = PromptCache(tmp_path, quanto, llama)
    for row in TOKENS:
        known.save(row[:40], read(llama, quanto, row[:40]))
    known.find(TOKENS[0])
    opened = []
    monkeypatch.setattr("vqkv.cache.prompts._opened", opened.append)
    assert known.find(TOKENS[3])[1] == 40 and known.find(TOKENS[4][:20])[1] == 19 and not opened


def test_a_full_disk_loses_nothing(llama, quanto, tmp_path, monkeypatch):
    known = PromptCache(tmp_path, quanto, llama)
    known.save(TOKENS[0], read(llama, quanto, TOKENS[0]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        known.save(TOKENS[1], read(llama, quanto, TOKENS[1]))
    assert len(list(known.folder.iterdir())) == 1 and known.find(TOKENS[0])[1] == 95


def test_two_writers(llama, quanto, tmp_path):
    """Each saves and finds the same prompts while the other does, in a folder that holds few of them."""
    llama.save_pretrained(tmp_path / "model")
    quanto.save_pretrained(tmp_path / "compressor")
    folders = [str(tmp_path / name) for name in ("model", "compressor", "prompts")]
    with ProcessPoolExecutor(2, forked.context()) as pool:
        hits = [job.result(forked.SECONDS) for job in [pool.submit(prompt_job.work, *folders) for _ in range(2)]]
    assert all(hits)


def test_copies_share_what_is_stored_and_go_on_by_themselves(llama, compressor):
    text = TOKENS[0]
    cache = read(llama, compressor, text[:40])
    twin, expected = copy.deepcopy(cache), read(llama, compressor, text[:40])
    for mine, its in zip(cache.batch.groups[0].all_stores, twin.batch.groups[0].all_stores, strict=True):
        if mine.payload is not None:
            assert all(
                x.data_ptr() == y.data_ptr()
                for x, y in zip(mine.payload.tensors.values(), its.payload.tensors.values())
            )
    first = feed(llama, twin, TOKENS[1])
    assert torch.equal(feed(llama, cache, text[40:]), feed(llama, expected, text[40:]))
    assert torch.equal(first, feed(llama, read(llama, compressor, text[:40]), TOKENS[1]))


@pytest.mark.parametrize(
    "tokens", [TOKENS[0][:39], TOKENS[:2, :40], torch.zeros(40), torch.zeros(0, dtype=torch.int64)]
)
def test_tokens_that_are_not_the_caches_are_refused(llama, quanto, tmp_path, tokens):
    with pytest.raises(DataError, match="tokens"):
        PromptCache(tmp_path, quanto, llama).save(tokens, read(llama, quanto, TOKENS[0][:40]))
