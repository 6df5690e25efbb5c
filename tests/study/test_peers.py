"""transformers' quantized cache on our harness: that it is the real thing, faults included, and what it weighs."""

from types import SimpleNamespace

import pytest
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from transformers import DynamicCache, LlamaConfig, cache_utils

import vqkv
from vqkv import capture, evaluate, presets
from vqkv.cache import meter
from vqkv.cache.meter import tensor_bytes
from vqkv.errors import DataError
from vqkv.study.metrics import relative_mse
from vqkv.study.peers import LAYERS, TransformersQuantized

ALL = [("quanto", 2), ("quanto", 4), ("hqq", 1), ("hqq", 2), ("hqq", 3), ("hqq", 4), ("hqq", 8)]
ONE_LAYER = SimpleNamespace(config=LlamaConfig(num_hidden_layers=1))  # all of a model that a cache asks for


@pytest.fixture(scope="module")
def models():
    return {name: vqkv.load_model(f"vqkv/{name}") for name in ("llama-mini", "gpt2-mini")}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama-mini"][0]


@pytest.fixture(scope="module")
def tokens(models):
    return vqkv.load_corpus("python-stdlib", models["llama-mini"][1], "test", seq_len=160, num_seqs=2)


@pytest.fixture(scope="module")
def captured(models, tokens):
    """Per model: what transformers' caches are given, keys after RoPE and values, of every layer."""
    return {name: capture(model, tokens[:, :128], pre_rope=False) for name, (model, _) in models.items()}


def states(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(model, cache, pieces):
    with torch.inference_mode():
        return torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], dim=1)


def fed(backend, nbits, lengths, seed=0, **arguments):
    """A layer fed pieces of these lengths, what it was fed, and how many tokens it quantised and decoded at each."""
    layer = LAYERS[backend](nbits, **arguments)
    quantize, dequantize, quantised, decoded = layer._quantize, layer._dequantize, [], []
    layer._quantize = lambda x, axis: quantised.append(x.shape[-2]) or quantize(x, axis)
    layer._dequantize = lambda q: decoded.append((x := dequantize(q)).shape[-2]) or x
    pieces = states(1, 2, sum(lengths), 64, seed=seed).split(lengths, dim=2)
    for piece in pieces:
        layer.update(piece, piece)
    return layer, torch.cat(pieces, dim=2), quantised[::2], decoded[::2]


def read(layer):
    """What the layer gives back for its tokens, as attention would read them."""
    nothing = torch.empty(1, 2, 0, 64)
    return layer.update(nothing, nothing)[0]


def test_the_meter_counts_what_wrappers_wrap():
    a, b = torch.zeros(3, 5), torch.ones(3, 5)
    wrapper = TwoTensor(a, b)
    assert {t.data_ptr() for t in meter.tensors({"k": [wrapper]})} == {a.data_ptr(), b.data_ptr()}
    assert tensor_bytes(wrapper) == 2 * 15 * 4 == tensor_bytes(wrapper, a, TwoTensor(wrapper, wrapper))


def code_bits(backend, nbits, rows, group_size):
    """Bits of all codes, by hand. quanto packs 8 / nbits rows (groups) to one; hqq packs within a group, and its 3 bits
    ten to an int32."""
    if backend == "quanto":
        return 8 * -(-rows * nbits // 8) * group_size
    return rows * (32 * -(-group_size // 10) if nbits == 3 else nbits * group_size)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(ALL),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([32, 64]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 9),
    st.integers(0, 4),
)
def test_the_report_is_the_sum_worked_out_by_hand(which, dtype, group_size, batch, heads, packed, window):
    """Every group has two numbers in the model's dtype beside its codes, so 4 bits weigh 5 in fp32 and 4.5 in fp16."""
    cache = TransformersQuantized(*which, q_group_size=group_size).new_cache(ONE_LAYER)
    for length in [packed] + [1] * window:
        cache.update(states(batch, heads, length, 64, dtype=dtype), states(batch, heads, length, 64, dtype=dtype), 0)
    report, groups, itemsize = cache.report(), batch * heads * packed * 64 // group_size, dtype.itemsize
    codes = 2 * code_bits(*which, groups, group_size) // 8
    assert report.packed_values == 2 * batch * heads * packed * 64
    assert report.packed_bytes == codes + 2 * 2 * groups * itemsize
    assert report.kinds["window"] == 2 * batch * heads * window * 64 * itemsize
    assert report.cache_bytes == tensor_bytes(cache)  # nothing that is stored goes unreported
    assert report.values == 2 * batch * heads * (packed + window) * 64
    assert (report.seq_len, report.batch_size) == (packed + window, batch)


@pytest.mark.parametrize("protocol", ["chunked", "snapshot"])
def test_a_row_has_the_columns_of_our_presets(llama, tokens, protocol):
    ours = vqkv.calibrate(llama, tokens, presets.quanto(), progress=False)
    options = {"chunk_size": 32, "prompt_len": 150}
    theirs = evaluate(llama, TransformersQuantized("quanto", 2), tokens, protocol, **options)
    assert theirs.keys() == evaluate(llama, ours, tokens, protocol, **options).keys()
    assert theirs["kl_mean"] > 1e-3 and theirs["bits_per_value"] == 3  # what is packed is read
    packed = {"chunked": 160, "snapshot": 150}[protocol]  # in fp32, 3 bits packed and 32 in the window
    assert theirs["ratio"] == pytest.approx(16 * 160 / (3 * packed + 32 * (160 - packed)))
    assert theirs["side_bytes"] == 0
    keys = capture(llama, tokens, pre_rope=False)[0]  # what the cache is given
    errors = [relative_mse(x, TransformersQuantized("quanto", 2).reconstruct(0, x, x)[0]) for x in keys]
    assert theirs["key_mse"] == pytest.approx(sum(errors) / len(errors))


@pytest.mark.parametrize("backend, nbits", [("quanto", 2), ("hqq", 1)])
def test_fault_one_pass_scores_as_exact_whatever_the_bits(llama, tokens, backend, nbits):
    cache = TransformersQuantized(backend, nbits).new_cache(llama)
    exact = run(llama, DynamicCache(), [tokens])
    assert torch.equal(run(llama, cache, [tokens]), exact)
    assert cache.report().packed_values == cache.report().values  # although every token is stored in one or two bits
    again = run(llama, cache, [tokens[:, :1]])
    assert not torch.allclose(again, run(llama, DynamicCache(), [tokens, tokens[:, :1]])[:, -1:], atol=0.1)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_fault_the_whole_history_is_quantised_again_and_decoded_each_step(backend):
    layer, _, quantised, decoded = fed(backend, 4, [10] + [1] * 256)
    assert quantised == [10, 10 + 128, 10 + 256]  # not 10, 128, 128
    assert decoded == [10] * 128 + [138] * 128 and layer.get_seq_length() == 266
    assert fed(backend, 4, [10, 200], residual_length=128)[2] == [10, 210]


@pytest.mark.parametrize("backend, least, most", [("quanto", 0.999, 1.001), ("hqq", 10, 40)])
def test_quantising_again_forty_times_costs_hqq_twenty_times_the_error_and_quanto_nothing(backend, least, most):
    """quanto's groups stay what they were, and their ends are levels already; hqq's are other values each time."""
    errors = []
    for lengths in ([16 * 40], [16] * 40):
        layer, x, _, _ = fed(backend, 4, lengths, residual_length=16)
        errors.append(relative_mse(x, read(layer)))
    assert least < errors[1] / errors[0] < most


def test_fault_hqq_mixes_the_sequences_of_a_batch():
    """At axis 0 a group holds values of all sequences, so that what is stored for one depends on its neighbours."""
    x, neighbour = states(1, 2, 32, 64), 10 * states(1, 2, 32, 64, seed=1)
    for settings_, alone in (({}, False), ({"axis_key": 1, "axis_value": 1}, True)):
        peer = TransformersQuantized("hqq", 4, **settings_)
        by_itself, together = (peer.reconstruct(0, y, y)[0][:1] for y in (x, torch.cat([x, neighbour])))
        assert (relative_mse(x, together) < 1.5 * relative_mse(x, by_itself)) is alone
    quanto = TransformersQuantized("quanto", 4)
    assert torch.equal(quanto.reconstruct(0, x, x)[0], quanto.reconstruct(0, *[torch.cat([x, neighbour])] * 2)[0][:1])


def agreement(captured, peer, preset):
    """Relative MSE of our preset over the peer's on the same keys and values, one number per layer and role."""
    ratios = []
    for index, layer in enumerate(zip(*captured, strict=True)):
        for x, theirs in zip(layer, peer.reconstruct(index, *layer), strict=True):
            codec = preset.key_codec(x.shape[-1]).fit(x)
            ratios.append(relative_mse(x, codec.decode(codec.encode(x))) / relative_mse(x, theirs))
    return ratios


@pytest.mark.parametrize("name", ["llama-mini", "gpt2-mini"])
@pytest.mark.parametrize("nbits", [2, 4])
def test_our_quanto_preset_is_their_arithmetic(captured, name, nbits):
    ratios = agreement(captured[name], TransformersQuantized("quanto", nbits), presets.quanto(bits=nbits))
    assert len(ratios) == 12 and all(ratio == pytest.approx(1, abs=1e-3) for ratio in ratios)


@pytest.mark.parametrize("name", ["llama-mini", "gpt2-mini"])
@pytest.mark.parametrize("nbits, apart", [(1, 0.05), (4, 0.01)])
def test_our_hqq_preset_is_their_arithmetic_on_consecutive_values(captured, name, nbits, apart):
    """They stop the solver for all groups at once, one step late; we keep each group's best by mean absolute error."""
    peer = TransformersQuantized("hqq", nbits, axis_key=1, axis_value=1)
    ratios = agreement(captured[name], peer, presets.hqq(bits=nbits))
    assert all(ratio == pytest.approx(1, abs=apart) for ratio in ratios)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_generate_makes_the_same_cache_by_itself(llama, tokens, backend):
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    config = {"backend": backend, "nbits": 2, "residual_length": 16}
    prompt = tokens[:1, :50]
    by_name = llama.generate(prompt, cache_implementation="quantized", cache_config=config, **options)
    cache = TransformersQuantized(backend, 2, residual_length=16).new_cache(llama)
    assert torch.equal(llama.generate(prompt, past_key_values=cache, **options), by_name)
    assert not torch.equal(llama.generate(prompt, **options), by_name)
    assert cache.report().seq_len == 73


@pytest.mark.parametrize("backend, asked", [("quanto", "is_optimum_quanto_available"), ("hqq", "is_hqq_available")])
def test_a_missing_package_names_the_remedy(monkeypatch, backend, asked):
    monkeypatch.setattr(cache_utils, asked, lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'vqkv\[peers\]'"):
        TransformersQuantized(backend)


def test_a_missing_compiler_names_the_remedy(monkeypatch):
    def fail(*args):
        raise RuntimeError("Ninja is required")

    monkeypatch.setattr(torch.ops.quanto, "unpack", fail)
    with pytest.raises(ImportError, match="C\\+\\+ compiler, which failed: Ninja"):
        TransformersQuantized("quanto")


def test_a_model_with_sliding_windows_is_refused(tmp_path):
    model = small_models.sliding("gemma3", tmp_path)
    with pytest.raises(DataError, match="does not fit Gemma3ForCausalLM.*sliding_attention"):
        TransformersQuantized("quanto", 4).new_cache(model)
