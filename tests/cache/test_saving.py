"""Saved caches go on as if they had never been away, or are refused; compressors are shared as models are."""

import copy
import dataclasses
import random

import pytest
import small_models
import torch
from codec_zoo import EVERY, PREDICTED, PREDICTORS
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from strategies import run

from vqkv import CompressedCache, Compressor, DataError, FormatError, calibrate, evaluate, load_model, presets
from vqkv.cache import saving
from vqkv.cache.compressor import FILE, FORMAT, VERSION
from vqkv.cache.meter import tensor_bytes
from vqkv.models.load import describe, difference
from vqkv.runtime.files import save_checked

MANY = torch.randint(1, 4096, (12, 96), generator=torch.Generator().manual_seed(0))  # as many as an MLP asks for
TOKENS = MANY[:3]
PADDED = torch.ones(3, 96, dtype=torch.long)
PADDED[0, :7] = PADDED[1, 41:45] = PADDED[2, :3] = 0
POSITIONS = (PADDED.cumsum(dim=1) - 1).clamp(min=0)
PREDICTING = {f"aqua-{kind}": presets.aqua(presets.quanto(), kind, recent_window=8, **arguments)
              for kind, arguments in PREDICTORS.items()}  # fmt: skip
PRESETS = EVERY | PREDICTED | PREDICTING


def feed(model, cache, tokens, mask=None, positions=None):
    """Logits of ``tokens`` (batch, new_tokens) after those in ``cache``."""
    kwargs = {} if mask is None else {"attention_mask": mask, "position_ids": positions}
    with torch.inference_mode():
        return model(tokens, past_key_values=cache, **kwargs).logits


def half_way(model, cache, tokens=TOKENS):
    """Three sequences with padding, fed, cropped (which leaves holes in blocks) and fed again elsewhere."""
    feed(model, cache, tokens[:, :58], PADDED[:, :58], POSITIONS[:, :58])
    cache.crop(-27)
    feed(model, cache, tokens[:, 31:53], PADDED[:, :53], POSITIONS[:, 31:53] + 5)


def rest(model, cache):
    """Logits of the tokens after ``half_way``."""
    return feed(model, cache, TOKENS[:, 53:], PADDED, POSITIONS[:, 53:] + 5)


def same_state(a, b):
    """Bit for bit: sequences, padding, positions, sinks, payloads, holes and windows."""
    ours, theirs = (dict(saving.tensors_of(cache.batch)) for cache in (a, b))
    counts = [(x.batch.slots, x.batch.size, [group.counts for group in x.batch.groups]) for x in (a, b)]
    alike = counts[0] == counts[1] and ours.keys() == theirs.keys() and a.settings.in_place == b.settings.in_place
    return alike and all(x.dtype == theirs[name].dtype and torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.fixture(scope="module")
def kivi(llama):
    """Blocks of 16 tokens, 8 recent ones."""
    return calibrate(llama, TOKENS, EVERY["kivi"], progress=False)


@pytest.mark.parametrize("name", PRESETS)
def test_a_cache_is_saved_loaded_cropped_reordered_and_reset(llama, tmp_path, name):
    """And goes on as if it had never been away, with a compressor that was saved, too."""
    compressor = calibrate(llama, MANY if name in PREDICTING else TOKENS, PRESETS[name], progress=False)
    compressor.save_pretrained(tmp_path)
    loaded = Compressor.from_pretrained(tmp_path)
    assert loaded.fingerprint == compressor.fingerprint
    for in_place in (False, True):
        cache = compressor.new_cache(llama, in_place)
        half_way(llama, cache)
        cache.save(tmp_path / "cache")
        again = CompressedCache.load(tmp_path / "cache", loaded, llama)
        assert same_state(again, cache) and len(cache.batch.groups) == 3
        assert again.report() == cache.report()
        assert torch.equal(rest(llama, again), rest(llama, cache))
        assert same_state(again, cache)
    cache, tokens = compressor.new_cache(llama), TOKENS[:2, :60]
    first = run(llama, cache, tokens, (40, 1, 1, 18))
    swapped, one, more = copy.deepcopy(cache), copy.deepcopy(cache), TOKENS[:2, 60:65]
    swapped.reorder_cache(torch.tensor([1, 0]))
    one.batch_select_indices(torch.tensor([False, True]))
    expected = run(llama, copy.deepcopy(cache), more, (5,))
    torch.testing.assert_close(run(llama, swapped, more.flip(0), (5,)).flip(0), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run(llama, one, more[1:], (5,)), expected[1:], rtol=1e-3, atol=1e-3)
    for length in (37, 3, 0):
        cache.crop(length - cache.get_seq_length())
        held = {sum(store.parts) for group in cache.batch.groups for store in group.all_stores}
        assert held == ({length} if length else set()) and cache.get_seq_length() == length
    assert torch.equal(run(llama, cache, tokens, (40, 1, 1, 18)), first)
    cache.reset()
    assert cache.report().cache_bytes == 0 and cache.get_seq_length() == 0
    cache.save(tmp_path / "cache")
    assert same_state(CompressedCache.load(tmp_path / "cache", loaded, llama), cache)


@pytest.mark.parametrize(
    ("name", "dtype", "preset"),
    [("gpt2", "float16", "kivi"), ("qwen3", "bfloat16", "vqq"), ("llama-yarn", "float32", "aqua-vqllm")],
)
def test_of_other_models_and_types_the_file_is_the_bytes_of_the_report_and_a_header(tmp_path, name, dtype, preset):
    model = small_models.load(name, tmp_path, dtype)
    cache = calibrate(model, TOKENS, PRESETS[preset], progress=False).new_cache(model)
    half_way(model, cache)
    cache.save(tmp_path / "cache")
    stored = sum(x.numel() * x.element_size() for x in load_file(tmp_path / "cache").values())
    assert stored == cache.report().cache_bytes  # by safetensors' own hand
    assert stored < (tmp_path / "cache").stat().st_size < stored + 40_000
    again = CompressedCache.load(tmp_path / "cache", cache.compressor, model)
    assert same_state(again, cache) and torch.equal(rest(model, again), rest(model, cache))


def test_the_fingerprint_is_of_what_matters(llama, tmp_path):
    one = calibrate(llama, TOKENS, PREDICTED["aqua-vqllm"], progress=False)
    one.save_pretrained(tmp_path)
    again = Compressor.from_pretrained(tmp_path)
    again.name, again.notes = "other", {"another": "note"}
    assert again.fingerprint == one.fingerprint
    again.codecs[1][0].quantizer.codebooks[0, 0, 0] += 0.01
    others = [again, Compressor("other", one.codecs, dataclasses.replace(one.settings, recent_window=3), one.model)]
    others += [calibrate(llama, TOKENS, EVERY[name], progress=False) for name in ("vqllm", "beam", "kivi", "quanto")]
    assert len({compressor.fingerprint for compressor in (one, *others)}) == 7


def test_another_compressor_or_model_is_named(llama, kivi, tmp_path):
    kivi.new_cache(llama).save(tmp_path / "cache")
    other = calibrate(llama, TOKENS, EVERY["higgs"], progress=False)
    message = r"saved with compressor 'kivi' with fingerprint \w{64}, not 'higgs' with fingerprint \w{64}:"
    with pytest.raises(FormatError, match=message):
        CompressedCache.load(tmp_path / "cache", other, llama)
    changes = {
        "dtype float32, not .* with dtype bfloat16": llama.config._name_or_path,
        "rope_parameters .*default.*, not .*yarn": small_models.make("llama-yarn", tmp_path / "yarn"),
        "model_type llama, not .* with model_type gpt2": small_models.make("gpt2", tmp_path / "gpt2"),
    }
    for message, folder in changes.items():
        model = load_model(str(folder), "bfloat16" if "dtype" in message else None)[0]
        with pytest.raises(FormatError, match=f"saved with model .* with {message}"):
            CompressedCache.load(tmp_path / "cache", kivi, model)
    about = describe(llama)
    for value in (float("nan"), float("inf"), -3e38):  # weights that match no model's
        weights = [[value for _ in row] for row in about["weights"]]
        for wrong in (weights, weights[:1], [*about["weights"], [1.0]]):
            assert difference(about | {"weights": wrong}, llama) == "other attention weights"


def test_what_cannot_be_saved_or_loaded_is_named(llama, kivi, tmp_path, monkeypatch):
    cache = kivi.new_cache(llama)
    feed(llama, cache, TOKENS)
    monkeypatch.setattr(cache.layers[1].stores[0], "write", lambda *a: (_ for _ in ()).throw(DataError("no room")))
    with pytest.raises(DataError, match="no room"):
        feed(llama, cache, TOKENS[:, :5])
    with pytest.raises(DataError, match="failed half-way"):
        cache.save(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    kivi.new_cache(llama).save(tmp_path / "cache")
    kivi.save_pretrained(tmp_path / "c")
    (tmp_path / "text").write_text("not a cache")
    for path, message in (
        (tmp_path / "none", "missing, cut or altered, or no vqkv-cache: save a cache with"),
        (tmp_path, "missing"),
        (tmp_path / "text", "no vqkv-cache"),
        (tmp_path / "c" / FILE, "is vqkv-compressor 3; this vqkv reads vqkv-cache 6: save a cache"),
    ):
        with pytest.raises(FormatError, match=message):
            CompressedCache.load(path, kivi, llama)


def damaged(rng, data, other):
    """``data`` with one kind of damage; ``other``: a file of the same kind."""
    size = len(data) if rng.random() < 0.5 else min(len(data), 4096)  # near the beginning, where headers are
    a, b, c = sorted(rng.randrange(size) for _ in range(3))
    noise, length = rng.randbytes(rng.randint(1, 40)), rng.choice([0, 1, len(data), (1 << 63) - 1, rng.getrandbits(16)])
    kinds = [
        data[:a] + bytes([data[a] ^ 1 << rng.randrange(8)]) + data[a + 1 :],  # a bit
        data[:a] + noise + data[rng.choice([a, a + len(noise)]) :],  # inserted, or in place of others
        data[:a],
        data[:a] + data[b:],  # without a part
        data[:b] + data[a:],  # with a part twice
        data[:a] + other[a:c] + data[c:],
        length.to_bytes(8, "little") + data[8:],
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("name", ["kivi", "aqua-vqllm"])
def test_damaged_files_are_refused_or_load_as_they_were(tmp_path, name):
    """A cache, then its compressor: bytes that change nothing (a part grafted onto itself) are no damage."""
    model, rng, path = small_models.load("llama", tmp_path / "model"), random.Random(0), tmp_path / "c" / FILE
    compressors = [calibrate(model, tokens, PRESETS[name], progress=False) for tokens in (TOKENS, TOKENS + 1)]
    caches = [compressor.new_cache(model) for compressor in compressors[:1] * 2]
    half_way(model, caches[0])
    feed(model, caches[1], TOKENS)
    kinds = [
        (caches, lambda x, to: x.save(to), lambda: CompressedCache.load(path, compressors[0], model), same_state),
        (compressors, lambda x, to: x.save_pretrained(to.parent), lambda: Compressor.from_pretrained(path.parent),
         lambda a, b: a.fingerprint == b.fingerprint),
    ]  # fmt: skip
    path.parent.mkdir()
    for originals, save, load, alike in kinds:
        files = []
        for original in originals:
            save(original, path)
            files.append(path.read_bytes())
        refused = 0
        for data in [*(damaged(rng, *files) for _ in range(120)), files[0][:-1]]:
            path.write_bytes(data)
            try:
                loaded = load()
            except FormatError as error:
                refused += f"{path} is missing, cut or altered, or no vqkv-c" in str(error) and ": save a" in str(error)
            else:
                assert any(alike(loaded, original) for original in originals)
        assert refused > 100


def test_other_versions_and_unknown_parts_are_named(tmp_path):
    about = {"format": FORMAT, "version": 99}
    save_checked(tmp_path / FILE, about, {})
    with pytest.raises(FormatError, match="is vqkv-compressor 99; this vqkv reads vqkv-compressor"):
        Compressor.from_pretrained(tmp_path)
    about |= {"version": VERSION, "predictions": [], "codecs": [[{"part": "Newer"}, {"part": "Newer"}]]}
    save_checked(tmp_path / FILE, about, {})
    with pytest.raises(FormatError, match="unknown codec part 'Newer'"):
        Compressor.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def residual(llama):
    return calibrate(llama, TOKENS, presets.vqllm(2, 16, 8), progress=False)


def test_the_card_names_model_text_bits_and_losses(llama, residual, tmp_path):
    residual.save_pretrained(tmp_path)
    assert "were not measured" in (tmp_path / "README.md").read_text()
    residual.notes |= {"corpus": "random tokens", "measured": evaluate(llama, residual, TOKENS, chunk_size=16)}
    residual.save_pretrained(tmp_path)
    card, row = ModelCard.load(tmp_path / "README.md"), Compressor.from_pretrained(tmp_path).notes["measured"]
    bits = "| bits a value, without side information | 1.5 |"
    for part in ("random tokens", "288 tokens", "num_quantizers=2", bits, "nats", f"| {row['kl_mean']:.4g} |"):
        assert part in card.text, part
    assert card.data.library_name == "vqkv"


def test_a_compressor_from_the_hub(residual, tmp_path, monkeypatch):
    """The hub itself is out of reach: its client's call is made on a folder."""
    monkeypatch.setattr("vqkv.cache.compressor.hf_hub_download", lambda name, file: tmp_path / name / file)
    residual.save_pretrained(tmp_path / "me/mine")
    assert sorted(path.name for path in (tmp_path / "me/mine").iterdir()) == ["README.md", "compressor.safetensors"]
    assert Compressor.from_pretrained("me/mine").fingerprint == residual.fingerprint
    monkeypatch.undo()
    for nowhere in ("nobody/nothing", "a/b/c"):
        with pytest.raises(FormatError, match="is no folder, and not on the hub .*save_pretrained"):
            Compressor.from_pretrained(nowhere)


def test_copies_of_a_cache_go_their_own_ways_and_share_the_codebooks(llama, residual):
    cache = residual.new_cache(llama)
    with torch.inference_mode():
        llama(TOKENS[:, :30], past_key_values=cache)
        twin = copy.deepcopy(cache)
        both = [llama(TOKENS[:, 30:], past_key_values=c).logits for c in (cache, twin)]
    assert torch.equal(*both) and twin.compressor is residual
    assert tensor_bytes(cache, twin) == 2 * cache.report().cache_bytes + tensor_bytes(residual)
