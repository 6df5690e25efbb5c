"""Attention to packed tokens: the Triton kernel in its interpreter, and a CPU's way, against the naive one."""

import dataclasses

import pytest
import torch
from gpu_guard import DEVICE, amid
from gpu_guard import gaussian as random

from vqkv.kernels import Affine, Coded, Rope, cpu, naive
from vqkv.kernels.attention import triton as gpu
from vqkv.kernels.attention import triton_shares

SCALING = 0.09
HEADS = 3


def codes(batch: int, seq_len: int, count: int, size: int, bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return naive.pack_codes(torch.randint(size, (batch, HEADS, seq_len, count), generator=generator).to(DEVICE), bits)


def affine(seq_len: int, head_dim: int, bits: int, group_size: int, seed: int = 1, batch: int = 2) -> Affine:
    return naive.affine_encode(random(batch, HEADS, seq_len, head_dim, seed=seed), bits, group_size)


def coded(
    seq_len, head_dim, dim, num_quantizers, size, bits, tables=1, each=1, strided=False, seed=1, batch=2
) -> Coded:
    """``each``: tokens that share a scale; 0 for none."""
    groups = head_dim // dim
    scale = random(batch, HEADS, -(-seq_len // max(1, each)), 1, seed=seed + 1).abs().half() + 0.1 if each else None
    codebooks = random(tables, num_quantizers, size, dim, seed=seed + 2).half()
    packed = codes(batch, seq_len, groups * num_quantizers, size, bits, seed)
    return Coded(packed, codebooks, bits, groups, scale, max(1, each), strided)


def rope(head_dim: int, start: int = 0) -> Rope:
    return Rope(1e4 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2)), start)


def amid_poison(packed):
    tensors = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
    return dataclasses.replace(packed, **{n: amid(x) for n, x in tensors.items() if isinstance(x, torch.Tensor)})


def assert_same(query, keys, values, rope=None, twin=gpu.decode_attention, tolerance=2e-3):
    """Products of fp16 numbers: 2^-11 of each term."""
    assert twin is not gpu.decode_attention or gpu.serves(query, keys, values, rope)
    out, total = twin(amid(query), amid_poison(keys), amid_poison(values), SCALING, rope)
    expected, expected_total = naive.decode_attention(query, keys, values, SCALING, rope)
    assert out.shape == expected.shape and out.dtype == torch.float32 and total.shape == expected_total.shape
    assert (out - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=2 * tolerance)


AFFINE = [(bits, head_dim, group) for bits in (2, 4, 8) for head_dim, group in ((128, 64), (64, 16), (96, 48))]
CODED = {
    "residual 11 bits": (64, 32, 3, 2048, 11, 1, 1, True),
    "residual 7 bits": (128, 32, 2, 100, 7, 1, 1, False),
    "one group": (32, 32, 2, 16, 4, 1, 1, False),
    "residual of 8": (64, 8, 2, 256, 8, 1, 64, False),
    "product": (64, 4, 1, 256, 8, 2, 64, False),
    "grid 256": (64, 2, 1, 256, 8, 1, 1, False),
    "grid 64": (32, 2, 1, 64, 6, 1, 0, False),
    "grid 16": (96, 2, 1, 16, 4, 1, 1, True),
}


def example(name: str, seq_len: int, seed: int = 1, batch: int = 2) -> Coded:
    head_dim, dim, num_quantizers, size, bits, tables, each, strided = CODED[name]
    return coded(seq_len, head_dim, dim, num_quantizers, size, bits, tables, each, strided, seed, batch)


@pytest.mark.parametrize(("bits", "head_dim", "group_size"), AFFINE)
@pytest.mark.parametrize("seq_len", [1, 131])
def test_affine_codes(bits, head_dim, group_size, seq_len):
    keys, values = (affine(seq_len, head_dim, bits, group_size, seed) for seed in (1, 2))
    assert_same(random(2, 6, 1, head_dim), keys, values)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("seq_len", [1, 67])
def test_sums_of_codes(name, seq_len):
    keys, values = example(name, seq_len), example(name, seq_len, seed=5)
    assert_same(random(2, 6, 1, keys.shape[3]), keys, values)


@pytest.mark.parametrize(
    ("name", "start"), [("residual 11 bits", 100_003), ("residual 7 bits", 0), ("one group", 0), ("grid 256", 100_003)]
)
def test_keys_before_rope(name, start):
    keys, values = example(name, 67), example(name, 67, seed=5)
    assert_same(random(2, 6, 1, keys.shape[3]), keys, values, rope(keys.shape[3], start))


@pytest.mark.parametrize("group_size", [64, 32, 8])
def test_affine_keys_before_rope(group_size):
    keys, values = affine(70, 64, 4, group_size), affine(70, 64, 2, 32, seed=2)
    assert_same(random(2, 3, 1, 64), keys, values, rope(64, 9))


@pytest.mark.parametrize(("num_heads", "new_tokens"), [(3, 1), (24, 1), (6, 5), (12, 3)])
def test_all_query_heads_and_new_tokens_of_a_kv_head_at_once(num_heads, new_tokens):
    assert_same(random(2, num_heads, new_tokens, 64), affine(70, 64, 4, 64), affine(70, 64, 4, 64, seed=2))


def test_keys_and_values_may_differ():
    assert_same(random(2, 6, 1, 64), affine(70, 64, 8, 64), example("product", 70))
    assert_same(random(2, 6, 1, 64), example("residual 11 bits", 70), affine(70, 64, 2, 64), rope(64))


@pytest.mark.parametrize("seq_len", [128, 255, 700])
def test_shares_of_the_tokens_are_joined(seq_len, monkeypatch):
    monkeypatch.setattr(triton_shares, "LEAST_TILES", 1)
    monkeypatch.setattr(triton_shares, "PROGRAMS_EACH", 16)
    keys, values = (affine(seq_len, 32, 4, 32, seed, batch=1) for seed in (1, 2))
    assert triton_shares.shares(keys.codes.device, HEADS, seq_len, 128)[0] == -(-seq_len // 128)
    assert_same(random(1, 3, 1, 32), keys, values)


def test_values_of_any_size():
    """Steps that fp16 holds only as subnormal numbers, and a token of zeros."""
    for size in (1e-3, 1e3):
        x = random(1, HEADS, 70, 64) * size
        x[:, :, 3] = 0
        assert_same(random(1, 3, 1, 64), affine(70, 64, 4, 64, batch=1), naive.affine_encode(x, 4, 64))


def test_one_token_that_takes_all_attention():
    keys, values = affine(130, 64, 8, 64), affine(130, 64, 4, 64, seed=2)
    query = naive.decode(keys)[:, :, 77:78] * 300
    assert_same(query, keys, values, tolerance=6e-3)


def test_what_the_kernel_cannot_read_is_said_before():
    query, keys = random(2, 6, 1, 64), affine(20, 64, 4, 64)
    assert gpu.serves(query, keys, keys)
    assert not gpu.serves(query, keys, keys, Rope(torch.ones(8)))  # partial rotary
    assert not gpu.serves(query, keys.tokens(0, 0), keys.tokens(0, 0))
    assert not gpu.serves(random(2, 6, 64, 64), keys, keys)
    odd = coded(20, 96, 32, 2, 16, 4)  # three groups have no half
    assert not gpu.serves(random(2, 6, 1, 96), odd, odd)


@pytest.mark.parametrize("name", [*CODED, "int4", "int2"])
@pytest.mark.parametrize("piece", [1, 1 << 12])
def test_the_cpu_reads_piece_by_piece(name, piece, monkeypatch):
    monkeypatch.setattr("vqkv.kernels.attention.cpu.PIECE", piece)
    keys = affine(130, 64, int(name[3]), 32) if name.startswith("int") else example(name, 130)
    turn = rope(keys.shape[3], 3) if keys.shape[3] % 4 == 0 else None
    assert_same(random(2, 6, 2, keys.shape[3]), keys, keys, turn, cpu.decode_attention, 1e-5)


def test_partial_rotary_on_the_cpu():
    keys = affine(20, 64, 4, 64)
    partial = Rope(torch.tensor([1.0, 0.1], device=DEVICE), 4)
    assert_same(random(2, 6, 1, 64), keys, keys, partial, cpu.decode_attention, 1e-5)
