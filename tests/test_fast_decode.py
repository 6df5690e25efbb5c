"""Fast packing, unpacking and decoding give the bits of the plain way: bit strings code by code, stages one by one."""

import copy

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, fitted_codecs, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codec import (
    Chain,
    ChannelScale,
    Grid,
    Grouping,
    HeadScale,
    MeanRemoval,
    MinMax,
    Payload,
    Uniform,
    VectorScale,
)
from vqkv.codec.packing import pack, unpack
from vqkv.errors import DataError, FormatError
from vqkv.kernels import by_byte, cpu, lookup, pack_codes, reference, unpack_codes

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def codecs():
    return fitted_codecs()


def bits_of(x):
    """The memory of a tensor, so that 0 and -0 differ."""
    return x.contiguous().view(torch.uint8)


@st.composite
def codes_and_bits(draw, widths=tuple(range(1, 17))):
    """Codes (..., count) below 2^bits: contiguous, a transposed view or a slice that begins at an odd byte."""
    bits = draw(st.sampled_from(widths))
    shape = [*draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.integers(0, 41))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, [*shape, 2], generator=generator)
    codes = codes.to(draw(st.sampled_from([torch.int64, torch.int32, *[torch.uint8] * (bits <= 8)])))
    layout = draw(st.sampled_from(["contiguous", "strided", "transposed", "slice"]))
    if layout == "slice":
        return codes.flatten(-2)[..., 1:], bits
    codes = codes[..., 0]
    if layout == "transposed":
        return codes.transpose(0, -1), bits
    return codes.contiguous() if layout == "contiguous" else codes, bits


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=100)
@given(codes_and_bits())
def test_packing_is_the_bit_string_code_by_code(device, case):
    codes, bits = case
    packed = pack_codes(codes.to(device), bits)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.shape == (expected := reference.pack_codes(codes, bits)).shape and torch.equal(packed.cpu(), expected)
    count = codes.shape[-1]
    assert torch.equal(unpack_codes(packed, bits, count).cpu().long(), codes.long())
    assert torch.equal(reference.unpack_codes(expected, bits, count), codes.long())
    scattered = packed.unsqueeze(-1).repeat_interleave(3, dim=-1)[..., 1]
    assert torch.equal(unpack(scattered, bits, count).cpu(), codes.long())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_come_in_the_type_asked_for(bits, dtype):
    codes = torch.arange(2**bits).repeat(3, 1)
    found = unpack(pack(codes, bits), bits, 2**bits, dtype)
    assert found.dtype == dtype and torch.equal(found.long(), codes)


def test_bytes_that_hold_any_code_are_not_searched_for_bad_ones():
    assert pack(torch.tensor([255, 0], dtype=torch.uint8), 8).tolist() == [255, 0]
    with pytest.raises(DataError, match="do not fit 7 bits"):
        pack(torch.tensor([128], dtype=torch.uint8), 7)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(case=codes_and_bits(widths=(1, 2, 4, 8)), values=st.integers(1, 9))
def test_looking_bytes_up_is_looking_every_code_up(device, case, values):
    codes, bits = case
    table = gaussian(2**bits, values)
    packed = pack_codes(codes, bits)
    rows = by_byte(table, bits)
    found = lookup(packed.to(device), rows.to(device)).cpu()
    assert torch.equal(found, reference.lookup(packed, rows))
    expected = table[codes.long()].flatten(-2)
    assert torch.equal(found[..., : expected.shape[-1]], expected)


def plain_values(quantizer, codes):
    """What ``Quantizer.decode`` gives, code by code."""
    if isinstance(quantizer, Uniform):
        return ((codes - quantizer._zero).float() / quantizer._steps).unflatten(
            -1, quantizer.row_shape or quantizer._row_shape
        )
    return (
        quantizer.state()["grid"].float()[codes].flatten(-2).unflatten(-1, quantizer.row_shape or quantizer._row_shape)
    )


def plain_stage(stage, y, side):
    """What ``Stage.decode`` gives, each operation in memory of its own and channels picked one by one."""
    if isinstance(stage, MinMax):
        low, high = side["low"].float().unsqueeze(-1), side["high"].float().unsqueeze(-1)
        return low + y * (high - low)
    if isinstance(stage, VectorScale):
        return y * side["scale"].float().unsqueeze(-1)
    if isinstance(stage, HeadScale):
        return y * side["scale"].reshape(*side["scale"].shape, *[1] * (y.ndim - 3))
    if isinstance(stage, ChannelScale):
        return y * stage.state()["scale"].float().unsqueeze(1) + stage.state()["mean"].float().unsqueeze(1)
    if isinstance(stage, MeanRemoval):
        return y + stage.state()["mean"].float().unsqueeze(1)
    if isinstance(stage, Grouping):
        return y.flatten(-2).index_select(-1, order(stage, y.shape[-2] * y.shape[-1]).argsort())
    return stage.decode(y.clone(), side)


def order(stage, channels):
    """Which channel goes where."""
    if stage.kind == "random":
        return stage.state()["order"].long()
    place = torch.arange(channels)
    return place.view(stage._size, -1).T.reshape(-1) if stage.kind == "strided" else place


def plain_decode(codec, payload):
    """``codec.decode`` for a chain whose quantizer is a ``Uniform`` or a ``Grid``."""
    codes = reference.unpack_codes(payload.fields["codes"], codec.quantizer.code_bits, codec.quantizer.codes_per_row)
    y = plain_values(codec.quantizer, codes)
    for stage, names in zip(reversed(codec.stages), reversed(codec._names), strict=True):
        y = plain_stage(stage, y, {name: payload.fields[names[name]] for name in names})
    return y


@st.composite
def scalar_chains(draw):
    """Codecs of every width, with and without groups, whose rows may end inside a byte; and the head_dim they take."""
    bits, size, groups = draw(st.integers(1, 8)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    stages = [Grouping(draw(st.sampled_from(["contiguous", "strided", "random"])), size)]
    stages += [draw(st.sampled_from([MinMax(), VectorScale("absmax"), HeadScale()])), ChannelScale(), MeanRemoval()]
    stages = draw(st.permutations(stages)) if draw(st.booleans()) else stages[:2]
    signed = bits > 1 and draw(st.booleans())
    return Chain([copy.deepcopy(stage) for stage in stages], Uniform(bits, signed)), size * groups


@settings(deadline=None, max_examples=80)
@given(scalar_chains(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1000))
def test_affine_codecs_decode_to_the_bits_of_the_plain_way(case, batch, tokens, seed):
    codec, head_dim = case
    codec.fit(gaussian(2, 2, 9, head_dim, seed=seed))
    payload = codec.encode(gaussian(batch, 2, tokens, head_dim, seed=seed + 1))
    assert torch.equal(bits_of(codec.decode(payload)), bits_of(plain_decode(codec, payload)))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_grids_decode_to_the_bits_of_the_plain_way(bits):
    for head_dim in (2, 6, 16):
        codec = Chain([VectorScale("rms")], Grid(4**bits), head_dim).fit(gaussian(1, 2, 5, head_dim))
        payload = codec.encode(gaussian(2, 2, 7, head_dim))
        assert torch.equal(bits_of(codec.decode(payload)), bits_of(plain_decode(codec, payload)))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["contiguous", "strided", "random"]), size=st.integers(1, 9), groups=st.integers(1, 5),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_grouping_moves_channels_and_keeps_what_it_was_given(kind, size, groups, seed):
    stage = Grouping(kind, size, seed)
    stage.build((size * groups,))
    x = gaussian(2, 3, 4, 2 * size * groups, seed=seed)[..., 1::2]  # no view of it is contiguous
    y, _ = stage.encode(x)
    expected = x.index_select(-1, order(stage, x.shape[-1])).unflatten(-1, (groups, size))
    assert torch.equal(y, expected) and y.stride() == expected.stride()  # sums over rows are rounded by their layout
    assert torch.equal(stage.decode(y, {}), x)


@settings(deadline=None, max_examples=40)
@given(quantizers=st.integers(1, 5), rows=st.integers(0, 200), seed=st.integers(0, 100))
def test_residual_codes_decode_the_same_whatever_their_number_and_type(quantizers, rows, seed):
    codebooks = gaussian(quantizers, 6, 3, seed=seed)
    codes = torch.randint(0, 6, (rows, quantizers), generator=torch.Generator().manual_seed(seed))
    expected = sum((codebooks[k, codes[:, k]] for k in range(quantizers)), torch.zeros(rows, 3))
    for dtype in (torch.int32, torch.int64):
        found = cpu.rvq_decode(codes.to(dtype), codebooks)
        assert torch.equal(found, expected)
        assert torch.equal(cpu.rvq_decode(codes.T.contiguous().T.to(dtype), codebooks), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_leaves_the_payload_alone_and_shares_no_memory_with_it(codecs, kind):
    codec = codecs[kind]
    payload = codec.encode(gaussian(2, HEADS, 2 * codec.tokens_per_row, HEAD_DIM))
    before = {name: tensor.clone() for name, tensor in payload.tensors.items()}
    first = codec.decode(payload)
    expected = first.clone()
    first.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in payload.tensors.items())
    assert torch.equal(codec.decode(payload), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_leaves_the_values_alone(codecs, kind):
    codec = codecs[kind]
    x = gaussian(2, HEADS, 2 * codec.tokens_per_row, HEAD_DIM)
    before = x.clone()
    codec.encode(x)
    assert torch.equal(x, before)


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 2 * 2 * 5 * 33 - 1), value=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_one_bad_value_anywhere_is_found(place, value):
    x = gaussian(2, 2, 5, 33)
    x.view(-1)[place] = value
    with pytest.raises(DataError, match="1 of 660 values are NaN or infinite"):
        presets.quanto(4).key_codec(33).fit(gaussian(1, 1, 1, 33)).encode(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sign_of_a_zero_end_is_that_of_the_first_zero(sign):
    zeros = torch.where(gaussian(1, 1, 200, 64) < 0, -0.0, 0.0)
    x = torch.where(gaussian(1, 1, 200, 64, seed=1) > 0, 2.0 * sign, zeros)
    _, side = MinMax().encode(x)
    low, high = torch.aminmax(x, dim=-1)
    first = zeros.gather(-1, (x == 0).int().argmax(dim=-1, keepdim=True)).squeeze(-1)
    assert torch.equal(bits_of(low if sign == 1 else high), bits_of(first))
    assert torch.equal(bits_of(side["low"]), bits_of(low.half()))
    assert torch.equal(bits_of(side["high"]), bits_of(high.half()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_other_types_are_rounded_from_float32(codecs, kind, dtype):
    codec = codecs[kind]
    payload = codec.encode(gaussian(1, HEADS, codec.tokens_per_row, HEAD_DIM))
    if "scale" in payload.fields:
        payload.fields["scale"].fill_(60000.0)  # times a code beyond 1.1: more than fp16 holds
    exact = codec.decode(payload)
    expected = exact.clamp(-65504, 65504) if dtype == torch.float16 else exact
    assert kind != "contiguous" or exact.abs().max() > 65504
    assert torch.equal(codec.decode(payload, dtype), expected.to(dtype))


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_arithmetic_of_decoding_can_be_traced_as_one_graph(bits):
    codec = presets.quanto(bits, 8).key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    traced = torch.compile(
        codec._decode, backend="eager", fullgraph=True
    )  # what ``decode`` adds asks for the precision
    assert torch.equal(traced(payload), codec.decode(payload))


@pytest.mark.parametrize("preset", [presets.quanto(4, 8), presets.quanto(3, 8), presets.higgs(2), presets.higgs(3)])
def test_rows_of_the_wrong_size_or_type_are_refused(preset):
    codec = preset.key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    for broken in (payload.fields["codes"][..., :-1], payload.fields["codes"].to(torch.int16)):
        with pytest.raises(FormatError, match="bytes, got"):
            codec.decode(Payload(payload.fields | {"codes": broken}))
