"""Attention to packed tokens where they lie, in compiled loops on a CPU, against everything decoded."""

import pytest
import torch
from grouped_view import view
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.kernels import Rope, cpu, naive
from vqkv.kernels.attention import affine, grouped

SIZES = {
    "batch": st.integers(1, 2),
    "heads": st.integers(1, 3),
    "shared": st.integers(1, 5),
    "new_tokens": st.integers(1, 2),
    "seq_len": st.integers(1, 70),
}


@settings(max_examples=25, deadline=None)
@given(
    **SIZES,
    head_dim=st.sampled_from([4, 6, 16]),
    rope=st.sampled_from([None, (0, 16), (4, 16), (37, 8)]),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5),
    offset=st.booleans(),
)
def test_queries_turned_by_block_see_what_decoded_keys_show(
    batch, heads, shared, new_tokens, seq_len, head_dim, rope, sizes, offset
):
    torch.manual_seed(0)
    keys, values = (view(batch, seq_len, [sizes] * heads, head_dim, offset) for _ in range(2))
    query = torch.randn(batch, heads * shared, new_tokens, head_dim)
    rope = rope and Rope(1 / 7 ** torch.arange(head_dim // 2), *rope)
    assert grouped.serves(keys, values, rope)
    expected = naive.decode_attention(query, keys, values, 0.3, rope)
    found = cpu.decode_attention(query, keys, values, 0.3, rope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    **SIZES,
    bits=st.tuples(*[st.sampled_from([2, 4, 8])] * 2),
    groups=st.tuples(*[st.sampled_from([1, 2, 3])] * 2),
    size=st.sampled_from([4, 12]),
)
def test_products_with_affine_codes_are_those_with_what_they_decode_to(
    batch, heads, shared, new_tokens, seq_len, bits, groups, size
):
    torch.manual_seed(0)
    width = 6 * size
    keys, values = (
        naive.affine_encode(torch.randn(batch, heads, seq_len, width), each, width // count)
        for each, count in zip(bits, groups)
    )
    query = torch.randn(batch, heads * shared, new_tokens, width)
    assert affine.serves(keys, values, None)
    expected = naive.decode_attention(query, keys, values, 0.3)
    for one, other in zip(cpu.decode_attention(query, keys, values, 0.3), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("block", [1, 16])
def test_a_piece_at_a_time_rotates_as_all_at_once(block):
    rope = Rope(torch.tensor([1.0, 0.01]), 5, block)
    x = torch.randn(1, 2, 40, 4)
    parts = [rope.turned(x[:, :, i : i + 7], i) for i in range(0, 40, 7)]
    torch.testing.assert_close(torch.cat(parts, dim=2), rope.turned(x))
