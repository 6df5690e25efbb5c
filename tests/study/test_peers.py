"""transformers' quantized cache on our harness: that it is the real thing, faults included, and what it weighs."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian, run
from transformers import DynamicCache, LlamaConfig

import vqkv
from vqkv import capture, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.study.metrics import relative_mse
from vqkv.study.peers import TransformersQuantized

ALL = [("quanto", 2), ("quanto", 4), ("hqq", 1), ("hqq", 2), ("hqq", 3), ("hqq", 4), ("hqq", 8)]
ONE_LAYER = SimpleNamespace(config=LlamaConfig(num_hidden_layers=1))  # all of a model that a cache asks for


@pytest.fixture(scope="module")
def tokens(mini):
    return vqkv.load_corpus("python-stdlib", mini[1], "test", seq_len=160, num_seqs=2)


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
    """Every group has two numbers in the model's dtype with its codes, so 4 bits weigh 5 in fp32 and 4.5 in fp16."""
    cache = TransformersQuantized(*which, q_group_size=group_size).new_cache(ONE_LAYER)
    for length in [packed] + [1] * window:
        x = gaussian(batch, heads, length, 64).to(dtype)
        cache.update(x, x.clone(), 0)
    report, groups, itemsize = cache.report(), batch * heads * packed * 64 // group_size, dtype.itemsize
    codes = 2 * code_bits(*which, groups, group_size) // 8
    assert report.packed_values == 2 * batch * heads * packed * 64
    assert report.packed_bytes == codes + 2 * 2 * groups * itemsize
    assert report.kinds["window"] == 2 * batch * heads * window * 64 * itemsize
    assert report.cache_bytes == tensor_bytes(cache)  # nothing that is stored goes unreported
    assert report.values == 2 * batch * heads * (packed + window) * 64
    assert (report.seq_len, report.batch_size) == (packed + window, batch)


@pytest.mark.parametrize("backend, nbits", [("quanto", 2), ("hqq", 1)])
def test_fault_one_pass_scores_as_exact_whatever_the_bits(mini, tokens, backend, nbits):
    model, length, again = mini[0], tokens.shape[1], torch.cat([tokens, tokens[:, :1]], dim=1)
    cache = TransformersQuantized(backend, nbits).new_cache(model)
    exact = run(model, DynamicCache(), again, (length, 1))
    assert torch.equal(run(model, cache, tokens, (length,)), exact[:, :-1])
    assert cache.report().packed_values == cache.report().values  # although every token is stored in one or two bits
    assert not torch.allclose(run(model, cache, again[:, -1:], (1,)), exact[:, -1:], atol=0.1)


@pytest.mark.parametrize(("backend", "nbits", "apart"), [("quanto", 2, 1e-3), ("quanto", 4, 1e-3), ("hqq", 4, 0.01)])
def test_our_presets_are_their_arithmetic(mini, tokens, backend, nbits, apart):
    """Where groups are consecutive values; hqq stops its solver for all groups at once, one step late."""
    layers = list(zip(*capture(mini[0], tokens[:, :128], pre_rope=False), strict=True))
    peer = TransformersQuantized(backend, nbits, **({"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}))
    preset = presets.make(backend, bits=nbits)
    for index, layer in enumerate(layers):
        for x, theirs in zip(layer, peer.reconstruct(index, *layer), strict=True):
            codec = preset.key_codec(x.shape[-1]).fit(x)
            ours = relative_mse(x, codec.decode(codec.encode(x)))
            assert ours / relative_mse(x, theirs) == pytest.approx(1, abs=apart)
