"""Components in groups of their own bits: the best groups there are, and streams that are intact or refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv import FormatError
from vqkv.codecs import groups
from vqkv.codecs.grid import gaussian_tables
from vqkv.codecs.groups import ByteGroups, ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import codec_from_config
from vqkv.kernels import using

WIDTH, HEADS = 12, 2


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


def fitted(bits: float, seed: int = 0) -> tuple[ByteGroups, torch.Tensor]:
    spread = 2.0 ** -torch.arange(WIDTH).div(3) * torch.tensor([1.0, 5.0])[:, None, None]
    y = gaussian(2, HEADS, 300, WIDTH, seed=seed) * spread
    quantizer = ByteGroups(bits)
    quantizer.build((HEADS, WIDTH))
    quantizer.partial_fit(y)
    return quantizer, y


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, WIDTH), seed=st.integers(0, 99))
def test_bytes_are_as_many_as_asked_and_compiled_search_finds_the_nearest_vectors(count, seed):
    quantizer, y = fitted(8 * count / WIDTH, seed)
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
