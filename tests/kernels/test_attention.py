"""Attention to packed tokens where they lie on a CPU, against everything decoded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views import FORMATS, affine, as_decoded, gaussian, made, mapped, rope

from vqkv.kernels import Rope, cpu
from vqkv.kernels.attention import affine as products
from vqkv.kernels.attention import grouped


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("live")])
@pytest.mark.parametrize("piece", [1, 1 << 12])
def test_the_cpu_reads_piece_by_piece(name, piece, monkeypatch):
    monkeypatch.setattr("vqkv.kernels.attention.cpu.PIECE", piece)
    keys, values = made(name, tokens=130)
    rotation = Rope(rope(keys.shape[3]).inv_freq[: 4 if piece == 1 else None], 3)  # partial rotary, or all of it
    as_decoded(cpu, gaussian(2, 6, 2, keys.shape[3]), keys, values, rotation, 1e-5)


SIZES = {"batch": st.integers(1, 2), "heads": st.integers(1, 3), "shared": st.integers(1, 5),
         "new_tokens": st.integers(1, 2), "tokens": st.integers(1, 70)}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(**SIZES, head_dim=st.sampled_from([4, 6, 16]), rotation=st.sampled_from([None, (0, 16), (4, 16), (37, 8)]),
       sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), offset=st.booleans())  # fmt: skip
def test_queries_rotated_by_block_on_a_cpu(batch, heads, shared, new_tokens, tokens, head_dim, rotation, sizes, offset):
    keys, values = (mapped([sizes] * heads, head_dim, offset, tokens, batch, seed) for seed in (1, 5))
    rotation = rotation and rope(head_dim, *rotation)
    assert grouped.serves(keys, values, rotation)
    as_decoded(cpu, gaussian(batch, heads * shared, new_tokens, head_dim), keys, values, rotation, 2e-5)


@settings(max_examples=25, deadline=None)
@given(**SIZES, bits=st.tuples(*[st.sampled_from([2, 4, 8])] * 2), groups=st.tuples(*[st.sampled_from([1, 2, 3])] * 2),
       size=st.sampled_from([4, 12]))  # fmt: skip
def test_products_with_affine_codes_on_a_cpu(batch, heads, shared, new_tokens, tokens, bits, groups, size):
    keys, values = (affine(6 * size, b, 6 * size // g, tokens, heads, batch, b) for b, g in zip(bits, groups))
    assert products.serves(keys, values, None)
    as_decoded(cpu, gaussian(batch, heads * shared, new_tokens, 6 * size), keys, values, None, 2e-5)
