"""Attention to packed tokens where they lie: Triton's kernels, in their interpreter without a GPU, against everything
decoded."""

import dataclasses

import pytest
from views import FORMATS, affine, as_decoded, coded, gaussian, made, rope

from vqkv.kernels import naive
from vqkv.kernels.attention import triton


def assert_same(query, keys, values, rotation=None, tolerance=2e-3):
    """To products of fp16 numbers: 2^-11 of each term."""
    assert triton.can_decode_attention(query, keys, values, 1.0, rotation)
    as_decoded(triton, query, keys, values, rotation, tolerance)


ROTATED = [
    *[("residual 11 bits", 100_003, 1), ("residual 7 bits", 0, 1), ("one group", 0, 1), ("grid 256", 100_003, 1)],
    *[("int4 128/64", 9, 1), ("int2 64/16", 9, 1), ("int4 96/48", 0, 1)],
    *[("live one size", 0, 16), ("live by head", 37, 16), ("live by head", 100_003, 16)],
]
PAIRS = {
    **{f"{name}, {tokens} tokens": (*made(name, tokens=tokens), None) for name in FORMATS for tokens in (1, 131)},
    **{f"{name} before RoPE from {start}": (*made(name), (start, block)) for name, start, block in ROTATED},
    "int8 and product": (affine(64, 8, 64), made("product")[0], None),
    "residual before RoPE and int2": (made("residual 11 bits")[0], affine(64, 2, 64), (0, 1)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_every_format_on_a_gpu(pair):
    keys, values, rotation = PAIRS[pair]
    assert_same(gaussian(2, 6, 1, keys.shape[3]), keys, values, rotation and rope(keys.shape[3], *rotation))


@pytest.mark.parametrize(("num_heads", "new_tokens"), [(3, 1), (24, 1), (6, 5), (12, 3)])
@pytest.mark.parametrize("name", ["int4 64/16", "live by head"])
def test_all_query_heads_and_new_tokens_of_a_kv_head_at_once(name, num_heads, new_tokens):
    assert_same(gaussian(2, num_heads, new_tokens, 64), *made(name))


@pytest.mark.parametrize(("name", "tile"), [("int4 128/64", 128), ("live one size", 16)])
def test_shares_of_the_tokens_are_joined(name, tile, monkeypatch):
    monkeypatch.setattr(triton, "MIN_TILES", 1)
    monkeypatch.setattr(triton, "PROGRAMS_EACH", 64)
    keys, values = made(name, tokens=5 * tile - 1, batch=1)
    assert triton._shares(keys.codes.device, 3, keys.shape[2], tile)[0] == 5
    assert_same(gaussian(1, 3, 1, keys.shape[3]), keys, values)


def test_values_of_any_size():
    """Steps that fp16 holds only as subnormal numbers, a token of zeros, and one that takes all attention."""
    for size in (1e-3, 1e3):
        x = gaussian(1, 3, 67, 64) * size
        x[:, :, 3] = 0
        assert_same(gaussian(1, 3, 1, 64), affine(64, 4, 64, batch=1), naive.affine_encode(x, 4, 64))
    keys = affine(64, 8, 64)
    assert_same(naive.decode(keys)[:, :, 7:8] * 300, keys, affine(64, 4, 64, seed=2), tolerance=6e-3)


def test_what_the_kernel_cannot_read_is_said_before():
    query, keys, live = gaussian(2, 6, 1, 64), affine(64, 4, 64), made("live by head")[0]
    odd, half = coded(3, 32, 2, 4), rope(32)  # three groups have no half; rotary of half the channels
    assert triton.can_decode_attention(query, keys, keys, 1.0)
    assert triton.can_decode_attention(query, live, live, 1.0, rope(64, 0, 16))
    for refused in (
        (query, keys, keys, half), (query, keys.tokens(0, 0), keys.tokens(0, 0)), (gaussian(2, 6, 64, 64), keys, keys),
        (gaussian(2, 6, 1, 96), odd, odd), (query, live, live, rope(64, 0, 8)), (query, live, live, half),
        (gaussian(2, 6, 64, 64), live, live), (query, live, dataclasses.replace(live, matrix=None)),
    ):  # fmt: skip
        assert not triton.can_decode_attention(*refused[:3], 1.0, *refused[3:])
