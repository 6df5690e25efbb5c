"""The scalar, grid, product and fallback codecs, and every preset: bytes against numbers derived by hand."""

import json

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, SMALL, gaussian, same
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codecs.affine import AffineQuantizer, HalfQuadratic, MinMax
from vqkv.codecs.exact import Fp16
from vqkv.codecs.grid import Grid, NonUniform, WeightedChain, gaussian_grids
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.vector import ProductVQ, ResidualVQ
from vqkv.study.metrics import explained_variance_ratio


def sparse(row: int, share: float, index_bits: int, width: int) -> float:
    """Bits a value of outliers: ``width`` bits of codes, fp16 values, and positions padded to a whole byte."""
    count = max(1, round(share * row))
    return width + (16 * count + 8 * -(-count * index_bits // 8)) / row


EXPECTED = [
    # codes + two fp16 ends for each group
    (presets.quanto(2).key_codec(), 64, 2 + 32 / 64),
    (presets.quanto(4).value_codec(), 64, 4 + 32 / 64),
    (presets.quanto(3, 32).value_codec(), 128, 3 + 32 / 32),
    (presets.quanto(4).key_codec(), 20, 4 + 32 / 20),  # all 20 channels share two ends
    (presets.hqq(4).key_codec(), 128, 4 + 32 / 64),
    # keys: two ends for each channel and 128 tokens; values: for each token and head
    (presets.kivi(2).key_codec(), 64, 2 + 32 / 128),
    (presets.kivi(2).value_codec(), 64, 2 + 32 / 64),
    # 1% of 32 tokens x 64 channels: 20 outliers of 16 + 11 bits, 27.5 bytes of positions stored in 28
    (presets.kvquant(4).key_codec(), 64, sparse(2048, 0.01, 11, 4)),
    # both heads in one row of 4,096 values, and two ends for each token
    (presets.kvquant(4).value_codec(), 64, sparse(4096, 0.01, 12, 4) + 32 / 128),
    # one fp16 norm for both heads of 64
    (presets.higgs(2).key_codec(), 64, 2 + 16 / 128),
    (presets.higgs(4).value_codec(), 128, 4 + 16 / 256),
    # one byte for 8 (or 2) values, an fp32 scale for 64 tokens
    (presets.vq(8).key_codec(), 64, 1 + 32 / 4096),
    (presets.vq(8, per_head_scale=False).key_codec(), 64, 1),
    (presets.rvq2().key_codec(), 64, 2 + 32 / 4096),
    # with no block or every block in fp16, and a mask bit for every 8 values
    (presets.vqq(100.0).key_codec(), 64, 1 + 1 / 8 + 32 / 4096),
    (presets.vqq(0.0).key_codec(), 64, 16 + 1 / 8 + 32 / 4096),
    (presets.vqq_product(100.0).value_codec(), 64, 2 + 1 / 8 + 32 / 4096),
    (presets.vqllm(8, 256).key_codec(), 64, 2 + 16 / 64),
    *((presets.turboquant(3).key_codec(), head_dim, 3 + 16 / head_dim) for head_dim in (64, 80, 96, 128)),
    (Fp16(), 64, 16),
]


@pytest.mark.parametrize(("codec", "head_dim", "expected"), EXPECTED)
def test_presets_store_exactly_the_bits_derived_by_hand(codec, head_dim, expected):
    codec.fit(gaussian(1, 2, 512, head_dim))
    x = gaussian(2, 2, 128, head_dim, seed=1)
    payload = codec.encode(x)
    assert sum(tensor.untyped_storage().nbytes() for tensor in payload.tensors.values()) == payload.nbytes
    assert 8 * payload.nbytes / x.numel() == expected


def test_every_preset_is_pinned():
    # no codecs of their own (test_aqua.py, test_crosses.py), or tested by themselves (test_streams.py)
    over_others = {"aqua": "aqua-higgs"} | {
        name: name for name in ("kvsharer", "crossed", "best", "lossless", "aatc", "kvtc", "live", "oscar", "nova")
    }
    assert set(SMALL) | {"fp16", "vqllm"} | set(over_others) == set(presets.PRESETS)
    for name in presets.PRESETS:
        assert presets.make(name).name == over_others.get(name, name)


@settings(deadline=None, max_examples=25)
@given(width=st.integers(1, 8), seed=st.integers(0, 1000), offset=st.floats(-50, 50))
def test_affine_error_is_at_most_half_a_step(width, seed, offset):
    x = gaussian(1, 2, 3, 16, seed=seed) + offset
    codec = Chain([], AffineQuantizer(width)).fit(x)
    step = (x.amax(-1) - x.amin(-1)) / (2**width - 1)
    error = (x - codec.decode(codec.encode(x))).abs().amax(-1)
    assert (error <= step / 2 * 1.001 + 0.002 * (abs(offset) + 5)).all()  # and the ends' rounding to fp16


def test_half_quadratic_lowers_the_norm_it_is_made_for():
    x = gaussian(1, 4, 200, 64).pow(3)  # heavy tails
    chains = [Chain([], AffineQuantizer(2, ends)).fit(x) for ends in (MinMax(), HalfQuadratic(bits=2))]
    plain, solved = ((x - codec.decode(codec.encode(x))).abs().mean() for codec in chains)
    assert solved < 0.97 * plain


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("batches", [1, 4])
def test_levels_learned_with_fisher_weights_lower_what_errors_cost_at_equal_bytes(role, batches):
    """One channel in 16, of values near -2 and 2, costs a thousand times the most."""
    x, metric, rows = gaussian(2, HEADS, 640, 64), torch.eye(64).repeat(HEADS, 1, 1), []
    x[..., ::16] = 2 * x[..., ::16].sign() + 0.1 * x[..., ::16]
    metric[:, range(0, 64, 16), range(0, 64, 16)] = 1000.0
    for fisher, given_metric in ((False, metric), (True, torch.eye(64).expand_as(metric)), (True, metric)):
        codec = getattr(presets.kvquant(2, fisher=fisher), f"{role}_codec")(64)
        codec.weigh(given_metric)
        for batch in x.chunk(batches, dim=2):
            codec.partial_fit(batch)
        error = (codec.finalize().decode(codec.encode(x)) - x).square()
        loaded = codec_from_config(json.loads(json.dumps(codec.config())), dict(codec.state_dict()))
        assert same(loaded.encode(x), codec.encode(x))
        rows.append(((error * metric.diagonal(dim1=1, dim2=2).unsqueeze(1)).sum(), codec.side_bytes))
    plain, alike, weighted = rows
    assert weighted[0] < 0.2 * min(plain[0], alike[0]) and plain[1] == weighted[1]


def test_equal_weights_and_none_at_all_teach_the_same_levels():
    x = gaussian(2, HEADS, 640, 64)
    plain = Chain([], NonUniform(3), 64).fit(x)
    for weight in (0.0, 1e-6):
        codec = WeightedChain([], NonUniform(3), 64)
        codec.weigh(weight * torch.eye(64).expand(HEADS, -1, -1))
        assert torch.equal(codec.fit(x).quantizer.levels, plain.quantizer.levels)


def test_stored_grids_are_what_lloyd_leaves_and_explain_what_they_claim():
    """Every point is the mean of its cell (up to the stored digits), and the 16 points explain 89% of a Gaussian."""
    x = gaussian(1, 1, 100_000, 2, seed=3)
    for size, (grid, mse) in gaussian_grids().items():
        codec = Chain([], Grid(size), 2).fit(x[:, :, :10])
        codes = codec.quantizer.encode(x)[0][0, 0, :, 0]
        explained = explained_variance_ratio(x[0], codec.decode(codec.encode(x))[0])
        assert abs(1 - explained - mse) < 0.03 * mse
        assert 2 ** (-2 * codec.quantizer.code_bits / 2) < mse  # Shannon
        if size == 16:
            cells = torch.stack([x[0, 0][codes == code].mean(0) for code in range(size)])
            assert (cells - grid).abs().max() < 0.06 and explained > 0.89


@pytest.mark.parametrize("stages", [1, 3])
def test_product_codes_are_those_of_each_piece_alone(stages):
    x = gaussian(1, 2, 300, 8)
    product = Chain([], ProductVQ(2, 32, 4, num_quantizers=stages), 8).fit(x)
    for i, piece in enumerate(x.split(4, dim=-1)):
        alone = Chain([], ResidualVQ(stages, 32, 4, seed=i), 4).fit(piece)
        assert torch.equal(product.decode(product.encode(x)).split(4, dim=-1)[i], alone.decode(alone.encode(piece)))
    assert product.encode(x).nbytes == 2 * 300 * -(-2 * stages * 5 // 8)  # complete bytes


@settings(deadline=None, max_examples=20)
@given(threshold=st.floats(0, 1), seed=st.integers(0, 100))
def test_fallback_bounds_the_error_and_pays_for_it(codecs, threshold, seed):
    codec = codecs["vqq key"]
    codec.quantizer.threshold, before = threshold, codec.quantizer.threshold
    try:
        x = gaussian(2, HEADS, 9, HEAD_DIM, seed=seed)
        payload = codec.encode(x)
        scale = x.unflatten(2, (-1, 3)).abs().amax(dim=(3, 4), keepdim=True)
        error = ((x - codec.decode(payload)).unflatten(2, (-1, 3)) / scale).abs().max()
    finally:
        codec.quantizer.threshold = before
    assert error <= threshold + 1e-3  # fp16
    good, blocks = int(payload.mask().sum()), x.numel() // 8
    scales, mask = 4 * 2 * HEADS * 3, 2 * HEADS * 3  # 6 bits of mask
    assert payload.nbytes == good + 16 * (blocks - good) + scales + mask
