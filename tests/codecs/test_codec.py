"""Payloads, chains and their stages: bytes, invariants, bad input, saving."""

import pytest
import torch
from codec_zoo import chain, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.codecs.exact import Fp16
from vqkv.codecs.payload import Payload
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.transform import Grouping, Hadamard
from vqkv.errors import DataError


def test_an_all_zero_codebook_batch_does_not_hide_zero_vectors():
    """Zero and other vectors side by side: only the zero ones become exact zeros."""
    x = gaussian(1, 1, 200, 16)
    x[:, :, ::7] = 0
    codec = chain().fit(x)
    decoded = codec.decode(codec.encode(x))
    assert torch.equal((decoded == 0).all(dim=-1), (x == 0).all(dim=-1))


def test_scale_is_the_population_std_rounded_to_fp16():
    x = gaussian(1, 2, 3, 16) * 3 + 1
    y, side = VectorScale().encode(x)
    expected = x.double().var(dim=-1, correction=0).sqrt().half()
    assert torch.equal(side["scale"], expected)
    torch.testing.assert_close(y, x / expected.float()[..., None], rtol=0, atol=0)
    _, side = VectorScale().encode(torch.full((1, 1, 1, 16), 5.0))
    assert side["scale"].item() == 5.0  # constant, not zero: divided by its rms, or it would be far from any code


def test_groups_are_the_channels_the_paper_names():
    channels = torch.arange(12.0).view(1, 1, 1, 12)
    expected = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "strided": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
    }
    for kind, groups in expected.items():
        stage = Grouping(kind, 4)
        assert stage.build((12,)) == (3, 4)
        assert stage.encode(channels)[0][0, 0, 0].tolist() == groups
    orders = []
    for seed in (0, 0, 1):
        stage = Grouping("random", 4, seed)
        stage.build((12,))
        orders.append(stage.encode(channels)[0].flatten().tolist())
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(12))


@settings(deadline=None, max_examples=20)
@given(size=st.sampled_from([1, 2, 8, 64]), seed=st.integers(0, 1000))
def test_hadamard_is_orthonormal_and_its_own_inverse(size, seed):
    stage, x = Hadamard(), gaussian(1, 2, 3, size, seed=seed)
    stage.build((size,))
    y, _ = stage.encode(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(stage.decode(y, {}), x)
    if size > 1:  # one outlier is spread evenly
        spike = torch.zeros(1, 1, 1, size)
        spike[..., 1] = 1
        torch.testing.assert_close(stage.encode(spike)[0].abs(), torch.full((1, 1, 1, size), size**-0.5))


def bad_values(value, *position):
    x = gaussian(2, 3, 4, 16)
    x[position] = value
    return x


@pytest.mark.parametrize("codec", [chain().fit(gaussian(1, 3, 200, 16)), Fp16(16)], ids=["chain", "fp16"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (bad_values(float("nan"), 1, 2, 0, 3), r"1 of 384 values are NaN or infinite, the first .*= \(1, 2, 0, 3\)"),
        (bad_values(float("inf"), 0, 1), r"64 of 384 values.*\(0, 1, 0, 0\)"),
        (gaussian(1, 3, 0, 16), "at least one token"),
        (gaussian(1, 3, 4, 8), "head_dim is 8, but this codec was made for 16"),
        (gaussian(3, 4, 16), "batch, num_kv_heads, seq_len, head_dim"),
        (torch.zeros(1, 1, 1, 16, dtype=torch.long), "int64"),
        (gaussian(1, 1, 1, 16).double() * 1e300, "16 of 16 values"),
    ],
)
def test_bad_input_is_named(codec, x, message):
    with pytest.raises(DataError, match=message):
        codec.encode(x)
    if not isinstance(codec, Fp16):
        with pytest.raises(DataError, match=message):
            chain().fit(x)


def test_views_do_not_keep_their_base_alive():
    payload = Payload({"values": gaussian(1, 1, 100, 16)[:, :, :1]})
    assert payload.nbytes == 64 and payload.tokens(0, 0).nbytes == 0
