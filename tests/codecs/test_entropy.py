"""Entropy-coded codes: lossless, as short as their tables allow."""

import numpy as np
import pytest
import torch
from strategies import gaussian

from vqkv.codecs.entropy import Entropy, frequencies
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.nonuniform import NonUniform
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.transform import Grouping

KINDS = {"position": {}, "stage": {"context": "stage"}}


def rvq(**settings):
    return ResidualVQ(**{"num_quantizers": 3, "codebook_size": 20, "group_size": 8, **settings})


def chain(quantizer, tokens=4, head_dim=16):
    return Chain([TokenBlock(tokens), VectorScale(), Grouping(group_size=8)], quantizer, head_dim)


@pytest.fixture(scope="module")
def codecs():
    """Packed, and entropy-coded in every way, with the same codebooks."""
    x = gaussian(2, 3, 200, 16)
    return {"packed": chain(rvq()).fit(x)} | {kind: chain(Entropy(rvq(), **s)).fit(x) for kind, s in KINDS.items()}


@pytest.mark.parametrize("counts", [[0, 0, 1], [5] * 1000, [10**9, 0, 0, 3], [0] * 700 + [10**6], [0.5]])
def test_frequencies_sum_and_none_is_impossible(counts):
    found = frequencies(torch.tensor([counts, counts]).double() + 0.5)
    assert found.dtype == torch.uint16 and found.int().amin() >= 1 and found.int().sum(-1).tolist() == [4096, 4096]


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
    codec = Entropy(Given(stages, size, stages), **settings)
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


def cross_entropy(codes, frequencies):
    """Bits of codes under whole frequencies of 4,096, computed anew."""
    bits = (frequencies.double() / 4096).log2().neg().view(codes.shape[-1], -1)
    return sum(float(bits[k][codes[..., k].flatten()].sum()) for k in range(codes.shape[-1]))


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("size", [2, 20, 256])
def test_bytes_are_those_of_the_cross_entropy(power, size):
    """Stages that differ: only with a table for each does this hold. 2% and 112 bits a row: ``lengths`` and what four
    states hold. Rounding frequencies to 4,096ths costs at most a tenth of a bit a code."""
    ranks = 1 / torch.arange(1, size + 1).double() ** power
    probabilities = torch.stack([ranks, ranks.flip(0), ranks.roll(size // 2)])
    calibration, codes = drawn(probabilities, 1, 1, 20, 500), drawn(probabilities, 2, 1, 3, 250, seed=1)
    payload, codec = coded(codes, calibration, size=size)
    assert torch.equal(codec.load(payload), codes.float())
    bits = cross_entropy(codes, codec.frequencies)
    counts = torch.stack([torch.bincount(calibration[..., k].flatten(), minlength=size) for k in range(3)]) + 0.5
    assert payload.nbytes * 8 <= 1.02 * bits + 112 * 6
    assert bits <= cross_entropy(codes, 4096 * counts / counts.sum(-1, keepdim=True)) + 0.1 * codes.numel()
    packed = codes.numel() * max(1, (size - 1).bit_length())
    if power == 2.0 and size > 2:
        assert payload.nbytes * 8 < 0.5 * packed  # skewed codes shrink
    assert payload.nbytes * 8 <= 1.02 * packed + 112 * 6  # and uniform ones hardly grow


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
    assert codecs["position"].side_bytes == packed + 3 * 2 * 3 * 20 * 2  # heads, groups


def test_tables_count_all_batches_and_no_code_is_impossible():
    codec = chain(Entropy(rvq(), context="stage"))
    for seed in range(3):
        codec.partial_fit(gaussian(1, 2, 100, 16, seed=seed))
        assert codec.quantizer._counts.sum(dim=-1).tolist() == [[(seed + 1) * 400] * 3]
    found = codec.finalize().quantizer.state_dict()["frequencies"].int()
    assert found.amin() >= 1 and (found.sum(dim=-1) == 4096).all()


@pytest.mark.parametrize(
    "quantizer", [NonUniform(3), rvq(codebook_size=1), rvq(codebook_size=1100), rvq(num_quantizers=1, beam=2)]
)
def test_other_quantizers_and_codebooks_of_one_code_and_of_many(quantizer):
    x = gaussian(1, 2, 1200, 16)
    codec = chain(Entropy(quantizer)).fit(x)
    packed = chain(quantizer)
    packed.ready = True
    assert torch.equal(codec.decode(codec.encode(x)), packed.decode(packed.encode(x)))
