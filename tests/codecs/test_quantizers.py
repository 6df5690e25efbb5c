"""Quantizers and every preset: bytes against numbers derived by hand; scalars, grids, products, fallbacks. Components
in groups with different bits: the best groups there are, and streams that are intact or refused."""

import itertools
import json

import numpy as np
import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, SMALL, gaussian, same
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import FormatError, presets
from vqkv.codecs import groups
from vqkv.codecs.affine import AffineQuantizer, HalfQuadratic, MinMax
from vqkv.codecs.exact import Fp16
from vqkv.codecs.grid import Grid, NonUniform, WeightedChain, gaussian_grids, gaussian_tables
from vqkv.codecs.groups import ByteGroups, ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.vector import ProductVQ, ResidualVQ
from vqkv.kernels import using
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
    # no codecs of their own (test_calibrate.py, test_plans.py), or tested by themselves (test_streams.py)
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


WIDTH = 12


def every_grouping(components):
    """All ways to part units of 16 components into groups of 1 or 4 of them, or of the rest at the end."""
    if not components:
        yield ()
        return
    for size in {16, min(64, components)}:
        yield from ((size, *rest) for rest in every_grouping(components - size))


@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 1000), bits=st.floats(0.5, 6))
def test_no_grouping_within_the_budget_is_better(seed, bits):
    rows = gaussian(1, 1, 12, 64, seed=seed)[0, 0] * 2 ** torch.linspace(2, -4, 64)
    budget = int(bits * 64)
    cheapest = groups._cheapest(rows, budget).tolist()

    def cost(sizes, widths):
        return sum(size * width + groups.ENDS * (width > 0) for size, width in zip(sizes, widths, strict=True))

    def error(sizes, widths):
        return sum(groups._error(part, width) for part, width in zip(rows.split(sizes, dim=-1), widths, strict=True))

    assert sum(size for size, _ in cheapest) == 64 and cost(*zip(*cheapest, strict=True)) <= budget
    tried = [
        (s, w)
        for s in every_grouping(64)
        for w in itertools.product(groups.WIDTHS, repeat=len(s))
        if cost(s, w) <= budget
    ]
    assert error(*zip(*cheapest, strict=True)) == pytest.approx(min(error(*each) for each in tried), rel=1e-4)


@pytest.fixture(scope="module")
def deflated():
    """A codec of rows with weak components, and a payload."""
    x = gaussian(1, 2, 40, 32, seed=1) * 2 ** torch.linspace(2, -6, 32)
    codec = Chain([TokenBlock(8)], ComponentGroups(3.0)).fit(x)
    return codec, codec.encode(x)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_streams_that_were_cut_or_extended_are_refused(deflated, data):
    codec, payload = deflated
    stream, order = payload.ragged["stream"], payload.fields["lengths"].permute(2, 0, 1).contiguous()
    row, grows = data.draw(st.integers(0, order.numel() - 1)), data.draw(st.booleans())
    end = int(order.flatten()[: row + 1].sum())
    changed = torch.cat([stream[: end - (not grows)], stream.new_zeros(int(grows)), stream[end:]])
    order.view(-1)[row] += 1 if grows else -1
    tensors = payload.tensors | {"stream": changed, "lengths": order.permute(1, 2, 0)}
    with pytest.raises(FormatError, match="store the tokens again"):
        codec.decode(payload.holding(tensors))


def test_components_without_bits_are_not_stored_and_take_no_place_in_the_basis(deflated):
    """What is read back is the same as with the complete basis, which is orthonormal."""
    kept = deflated[0].quantizer.kept
    assert 0 < kept < 32 and (deflated[0].decode(deflated[1])[..., kept:] == 0).all()
    x = gaussian(1, 2, 400, 32, seed=1) * 2.0 ** -torch.arange(32.0)
    codec, complete = (Chain([MergeHeads(), PCA(), TokenBlock(8)], ComponentGroups(1.5)) for _ in range(2))
    complete.quantizer.finalize = lambda: None
    complete.fit(x)
    kept = codec.fit(x).quantizer.kept
    assert 0 < kept < 64 and codec.stages[1].matrix.shape == (1, 64, kept)
    assert complete.side_bytes - codec.side_bytes >= 2 * 64 * (64 - kept)
    read = [each.decode(each.encode(x)) for each in (codec, complete)]
    assert torch.allclose(*read, atol=1e-3 * x.std())
    again = codec_from_config(codec.config(), codec.state_dict())
    assert torch.equal(again.decode(codec.encode(x)), read[0])


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, WIDTH), seed=st.integers(0, 99))
def test_bytes_are_as_many_as_asked_and_compiled_search_finds_the_nearest_vectors(count, seed):
    spread = 2.0 ** -torch.arange(WIDTH).div(3) * torch.tensor([1.0, 5.0, 2.0])[:, None, None]
    y, quantizer = gaussian(2, HEADS, 300, WIDTH, seed=seed) * spread, ByteGroups(8 * count / WIDTH)
    quantizer.build((HEADS, WIDTH))
    quantizer.partial_fit(y)
    payload = quantizer.store(y)
    assert payload.fields["codes"].shape == (2, HEADS, 300, count) and (quantizer.sizes.sum(1) <= WIDTH).all()
    assert torch.equal(quantizer.load(payload), quantizer.quantize_dequantize(y))
    with using("naive"):
        expected = quantizer.encode(y)[0]
        back = quantizer.quantize_dequantize(y)
    codes = quantizer.encode(y)[0]
    assert (codes != expected).float().mean() < 1e-3  # ties, but for rounding
    assert torch.allclose(quantizer.decode(codes, {}), back, atol=0.1 * y.std())


def test_groups_of_a_byte_are_those_of_least_error():
    variance, errors = np.array([9.0, 2.0, 1.0, 0.5, 0.1, 0.1]), gaussian_tables()["byte_errors"]

    def error(sizes) -> float:
        ends = np.cumsum(sizes)
        parts = (variance[end - size : end].sum() * errors[str(size)] for size, end in zip(sizes, ends, strict=True))
        return sum(parts) + variance[ends[-1] :].sum()

    for count in (1, 2, 3):
        tried = [sizes for sizes in itertools.product(groups.SIZES[:5], repeat=count) if sum(sizes) <= len(variance)]
        best = pytest.approx(min(map(error, tried)))
        assert groups._least_errors(variance)[0][-1, count] == best and error(groups._sizes(variance, count)) == best


@pytest.mark.parametrize("kind", ["few tokens", "few vectors", "a dead head", "all zeros"])
def test_text_that_says_little_still_makes_codes(kind):
    x = gaussian(1, HEADS, {"few tokens": 20}.get(kind, 600), WIDTH)
    if kind == "few vectors":
        x = x[:, :, torch.arange(600) % 7]
    x[:, 0] *= kind != "a dead head"
    x *= kind != "all zeros"
    quantizer = ByteGroups(4.0)
    quantizer.build((HEADS, WIDTH))
    quantizer.partial_fit(x)
    error = quantizer.quantize_dequantize(x) - x
    assert error.square().mean() <= 0.05 * x.square().mean() + 1e-12
