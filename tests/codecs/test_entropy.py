"""Entropy-coded codes: lossless, as short as their tables allow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.entropy import Entropy, TableCoder
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.nonuniform import NonUniform
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.streams import LARGEST
from vqkv.codecs.transform import Grouping

pytest.importorskip("constriction")
KINDS = {
    "static": {},
    "stage": {"context": "stage"},
    "adaptive": {"tables": "adaptive"},
    "adaptive stage": {"tables": "adaptive", "context": "stage"},
}


def rvq(**settings):
    return ResidualVQ(**{"num_quantizers": 3, "codebook_size": 20, "group_size": 8, **settings})


def chain(quantizer, tokens=4, head_dim=16):
    return Chain([TokenBlock(tokens), VectorScale(), Grouping(group_size=8)], quantizer, head_dim)


@pytest.fixture(scope="module")
def codecs():
    """Packed, and entropy-coded in every way, with the same codebooks."""
    x = gaussian(2, 3, 200, 16)
    return {"packed": chain(rvq()).fit(x)} | {kind: chain(Entropy(rvq(), **s)).fit(x) for kind, s in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(batch=st.integers(1, 3), blocks=st.integers(1, 6), seed=st.integers(0, 1000))
def test_streams_are_lossless(codecs, kind, batch, blocks, seed):
    x = gaussian(batch, 3, 4 * blocks, 16, seed=seed)
    expected = codecs["packed"].decode(codecs["packed"].encode(x))
    assert torch.equal(codecs[kind].decode(codecs[kind].encode(x)), expected)


@settings(deadline=None, max_examples=100)
@given(
    tables=st.integers(1, 4),
    size=st.sampled_from([2, 3, 63, 256, 5000]),
    count=st.sampled_from([1, 2, 15, 16, 17, 100]),
    step=st.sampled_from([None, 1, 16, 1000]),
    skew=st.sampled_from([0.0, 1.0, 8.0]),
    seed=st.integers(0, 10**6),
)
def test_any_codes_round_trip_through_any_tables(tables, size, count, step, skew, seed):
    """Also codes that the tables hold for nearly impossible, runs of code 0, and tables of one certain code."""
    rng = np.random.default_rng(seed)
    start = np.clip(np.round(LARGEST * rng.random((tables, size)) ** (4 * skew)), 1, LARGEST)
    codes = (size * rng.random((tables, count)) ** (1 + skew)).astype(np.int32)
    stream = TableCoder(start, step, 7).write(codes)
    assert np.array_equal(TableCoder(start, step, 7).read(stream, count), codes)
    assert len(stream) <= 3 * codes.size + 8  # what the type of ``lengths`` relies on


class Given(ResidualVQ):
    """A quantizer whose values are its codes."""

    def encode(self, x):
        return x.long().flatten(3), {}

    def decode(self, codes, side):
        return codes.float().unflatten(-1, (*self._groups, self.num_quantizers))

    def partial_fit(self, x):
        self.codebooks = torch.zeros(1)

    def finalize(self):
        pass


def coded(codes, calibration, **settings):
    """The payload of codes (batch, heads, rows, vectors, stages), and the quantizer that made it."""
    stages, size = codes.shape[-1], settings.pop("size")
    strength = settings.pop("strength", Entropy.strength)
    codec = Entropy(Given(stages, size, stages), **settings)
    codec.strength = strength
    codec.build((1, *codes.shape[3:]))
    codec.partial_fit(calibration)
    codec.finalize()
    return codec.store(codes), codec


def drawn(probabilities, *shape, seed=0):
    """Codes (*shape, stages) with probabilities (stages, size)."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape))
    return torch.stack([torch.multinomial(p, count, True, generator=generator) for p in probabilities], -1).view(
        *shape, -1
    )


def cross_entropy(codes, calibration, size):
    """Bits of codes under tables counted on calibration, computed anew."""
    bits = 0.0
    for k in range(codes.shape[-1]):
        counts = torch.bincount(calibration[..., k].flatten(), minlength=size).double() + 0.5
        bits -= float((counts / counts.sum()).log2()[codes[..., k].flatten()].sum())
    return bits


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("size", [2, 20, 256])
def test_bytes_are_those_of_the_cross_entropy(power, size):
    """Stages that differ: only with a table for each does this hold. 2% and 64 bits a row, ``lengths`` included."""
    ranks = 1 / torch.arange(1, size + 1).double() ** power
    probabilities = torch.stack([ranks, ranks.flip(0), ranks.roll(size // 2)])
    calibration, codes = drawn(probabilities, 1, 1, 20, 500), drawn(probabilities, 2, 1, 3, 250, seed=1)
    payload, codec = coded(codes, calibration, size=size)
    assert torch.equal(codec.load(payload), codes.float())
    assert payload.nbytes * 8 <= 1.02 * cross_entropy(codes, calibration, size) + 64 * 6
    packed = codes.numel() * max(1, (size - 1).bit_length())
    if power == 2.0 and size > 2:
        assert payload.nbytes * 8 < 0.5 * packed  # skewed codes shrink
    assert payload.nbytes * 8 <= 1.02 * packed + 64 * 6  # and uniform ones hardly grow


def test_adaptive_tables_learn_what_calibration_did_not_see():
    skewed = 1 / torch.arange(1, 65).double()[None] ** 1.5
    calibration, codes = drawn(skewed, 1, 1, 20, 500), drawn(skewed.flip(1), 1, 1, 4, 2000, seed=1)
    static, _ = coded(codes, calibration, size=64)
    adaptive, codec = coded(codes, calibration, size=64, tables="adaptive", strength=64)
    own = cross_entropy(codes, codes, 64) / 8
    assert adaptive.nbytes < 1.1 * own < 2 * own < static.nbytes
    assert torch.equal(codec.load(adaptive), codes.float())


def test_what_differs_between_heads_and_groups_is_where_bytes_are_saved():
    """Codes of a codebook are all about equally frequent; those of one head and group are not."""
    x = gaussian(2, 3, 2000, 16) + 2 * gaussian(1, 3, 1, 16, seed=1)
    stage, position = (chain(Entropy(rvq(), context=c), tokens=100).fit(x) for c in ("stage", "position"))
    fresh = gaussian(1, 3, 1000, 16, seed=2) + 2 * gaussian(1, 3, 1, 16, seed=1)
    sizes = [len(codec.encode(fresh).ragged["stream"]) for codec in (position, stage)]
    assert sizes[0] < 0.85 * sizes[1]


def test_tables_are_counted_as_side_information(codecs):
    packed = codecs["packed"].side_bytes
    assert packed == 3 * 20 * 8 * 2
    assert codecs["stage"].side_bytes == packed + 3 * 20 * 2
    assert codecs["static"].side_bytes == codecs["adaptive"].side_bytes == packed + 3 * 2 * 3 * 20 * 2  # heads, groups


def test_tables_count_all_batches_and_no_code_is_impossible():
    codec = chain(Entropy(rvq(), context="stage"))
    for seed in range(3):
        codec.partial_fit(gaussian(1, 2, 100, 16, seed=seed))
        assert codec.quantizer._counts.sum(dim=-1).tolist() == [[(seed + 1) * 400] * 3]
    frequencies = codec.finalize().quantizer.state_dict()["frequencies"].int() + 1
    assert frequencies.amin() >= 1 and (frequencies.amax(dim=-1) == LARGEST).all()


@pytest.mark.parametrize("quantizer", [NonUniform(3), rvq(codebook_size=1), rvq(num_quantizers=1, beam=2)])
def test_other_quantizers_and_a_codebook_of_one_code(quantizer):
    x = gaussian(1, 2, 16, 16)
    codec = chain(Entropy(quantizer)).fit(x)
    packed = chain(quantizer)
    packed.ready = True
    assert torch.equal(codec.decode(codec.encode(x)), packed.decode(packed.encode(x)))
