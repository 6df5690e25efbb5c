"""Groups of components: the best that dynamic programming can find, and streams that are whole or refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv import FormatError
from vqkv.codecs.component_groups import ENDS, WIDTHS, ComponentGroups, _cheapest, _error
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import codec_from_config


def every_grouping(components):
    """All ways to part units of 16 components into groups of 1 or 4 of them, or of what is left at the end."""
    if not components:
        yield ()
        return
    for size in {16, min(64, components)}:
        yield from ((size, *rest) for rest in every_grouping(components - size))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), bits=st.floats(0.5, 6))
def test_no_grouping_within_the_budget_is_better(seed, bits):
    rows = gaussian(1, 1, 12, 64, seed=seed)[0, 0] * 2 ** torch.linspace(2, -4, 64)
    budget = int(bits * 64)
    found = _cheapest(rows, budget).tolist()
    assert sum(size for size, _ in found) == 64
    assert sum(size * width + ENDS * (width > 0) for size, width in found) <= budget

    def error(sizes, widths):
        return sum(_error(part, width) for part, width in zip(rows.split(sizes, dim=-1), widths, strict=True))

    least = min(
        error(sizes, widths)
        for sizes in every_grouping(64)
        for widths in itertools.product(WIDTHS, repeat=len(sizes))
        if sum(size * width + ENDS * (width > 0) for size, width in zip(sizes, widths, strict=True)) <= budget
    )  # fmt: skip
    assert error(*zip(*found, strict=True)) == pytest.approx(least, rel=1e-4)


def codec_and_payload():
    x = gaussian(1, 2, 40, 32, seed=1) * 2 ** torch.linspace(2, -6, 32)
    codec = Chain([TokenBlock(8)], ComponentGroups(3.0)).fit(x)
    return codec, codec.encode(x)


def test_weak_components_are_not_stored():
    codec, payload = codec_and_payload()
    assert 0 < codec.quantizer.kept < 32
    assert (codec.decode(payload)[..., codec.quantizer.kept :] == 0).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_streams_that_were_cut_or_extended_are_refused(data):
    codec, payload = codec_and_payload()
    stream, lengths = payload.ragged["stream"], payload.fields["lengths"]
    row = data.draw(st.integers(0, lengths.numel() - 1))
    place = int(lengths.permute(2, 0, 1).flatten()[: row + 1].sum())
    if data.draw(st.booleans()):
        changed, by = torch.cat([stream[: place - 1], stream[place:]]), -1
    else:
        changed, by = torch.cat([stream[:place], stream.new_zeros(1), stream[place:]]), 1
    order = lengths.permute(2, 0, 1).contiguous()
    order.view(-1)[row] += by
    tensors = payload.tensors | {"stream": changed, "lengths": order.permute(1, 2, 0)}
    with pytest.raises(FormatError, match="store the tokens again"):
        codec.decode(payload.holding(tensors))


def test_components_without_bits_take_no_place_in_the_basis():
    """What is read back is the same as with the whole basis, which is orthonormal."""
    x = gaussian(1, 2, 400, 32, seed=1) * 2.0 ** -torch.arange(32.0)
    codec = Chain([MergeHeads(), PCA(), TokenBlock(8)], ComponentGroups(1.5)).fit(x)
    kept = codec.quantizer.kept
    assert 0 < kept < 64 and codec.stages[1].matrix.shape == (1, 64, kept)
    whole = Chain([MergeHeads(), PCA(), TokenBlock(8)], ComponentGroups(1.5))
    whole.quantizer.finalize = lambda: None
    whole.fit(x)
    assert whole.side_bytes - codec.side_bytes >= 2 * 64 * (64 - kept)
    read = [each.decode(each.encode(x)) for each in (codec, whole)]
    assert torch.allclose(*read, atol=1e-3 * x.std())
    again = codec_from_config(codec.config(), codec.state_dict())
    assert torch.equal(again.decode(codec.encode(x)), read[0])
