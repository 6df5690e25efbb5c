"""Attention to components in groups of a byte: the Triton kernel in its interpreter against everything decoded."""

import pytest
import torch
from gpu_guard import DEVICE, amid
from gpu_guard import gaussian as random
from grouped_view import view

from vqkv.kernels import Rope, naive
from vqkv.kernels.attention import triton as gpu
from vqkv.kernels.attention import triton_shares

SIZES = {"one size": [[2, 2, 2]], "by head": [[1, 1, 2, 6], [1, 3, 3, 8], [2, 2, 2, 2]]}
TURNS = {"no rotation": None, "from the first": (0, 16), "amid a block": (37, 16), "far on": (100_003, 16)}


def rope(head_dim: int, start: int, block: int) -> Rope:
    return Rope(1e4 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2)), start, block)


def both(sizes, seq_len, head_dim, offset=True):
    torch.manual_seed(0)
    return [view(2, seq_len, sizes, head_dim, offset, DEVICE) for _ in range(2)]


def assert_same(query, keys, values, turn=None):
    """Products of fp16 numbers: 2^-11 of each term."""
    assert gpu.serves(query, keys, values, turn)
    out, total = gpu.decode_attention(amid(query), keys, values, 0.2, turn)
    expected, expected_total = naive.decode_attention(query, keys, values, 0.2, turn)
    assert out.shape == expected.shape and out.dtype == torch.float32
    assert (out - expected).norm() <= 2e-3 * expected.norm()
    torch.testing.assert_close(total, expected_total, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seq_len", [1, 75])
def test_queries_turned_by_block(turn, sizes, seq_len):
    where = TURNS[turn] and rope(32, *TURNS[turn])
    keys, values = both(SIZES[sizes], seq_len, 32, offset=sizes == "by head")
    assert_same(random(2, 2 * len(SIZES[sizes]), 1, 32), keys, values, where)


@pytest.mark.parametrize(("num_heads", "new_tokens", "head_dim"), [(3, 1, 64), (24, 1, 32), (6, 3, 128)])
def test_all_query_heads_and_new_tokens_of_a_kv_head_at_once(num_heads, new_tokens, head_dim):
    assert_same(
        random(2, num_heads, new_tokens, head_dim), *both(SIZES["by head"], 40, head_dim), rope(head_dim, 3, 16)
    )


def test_shares_of_the_tokens_are_joined(monkeypatch):
    monkeypatch.setattr(triton_shares, "LEAST_TILES", 1)
    monkeypatch.setattr(triton_shares, "PROGRAMS_EACH", 64)
    assert triton_shares.shares(torch.device("cpu"), 6, 300, 16)[0] == 19
    assert_same(random(2, 3, 1, 32), *both(SIZES["by head"], 300, 32), rope(32, 20, 16))


def test_what_the_kernel_cannot_read_is_said_before():
    query, (keys, values) = random(2, 3, 1, 32), both(SIZES["by head"], 20, 32)
    assert gpu.serves(query, keys, values, rope(32, 0, 16))
    assert not gpu.serves(query, keys, values, rope(32, 0, 8))
    assert not gpu.serves(query, keys, values, rope(16, 0, 16))
    assert not gpu.serves(random(2, 3, 64, 32), keys, values, None)
    assert not gpu.serves(query, keys, values.inner, None)
