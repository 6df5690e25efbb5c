"""Triton's RVQ encoding against brute force in float64: in its interpreter without a GPU, compiled with one."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_guard import DEVICE, guarded, poisoned  # noqa: F401, the fixture

from vqkv.kernels import reference
from vqkv.kernels.gpu import encode

SMALL = {  # the interpreter's time goes with the number of operations and little with their size
    "many": {"block_m": 32, "block_c": 32, "fold": 4, "depth": 1, "unroll": 2},
    "few": {"block_m": 32, "block_c": 32, "fold": 4, "depth": 1, "unroll": 2},
    "beam": {"block_m": 64, "block_c": 32, "fold": 2, "depth": 2, "unroll": 1},
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs, chunks and turns of the loops even where the data are tiny."""
    if DEVICE == "cpu":
        monkeypatch.setattr(
            encode, "ENCODE", encode.ENCODE | {name: encode.ENCODE[name] | SMALL[name] for name in SMALL}
        )


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def whole_numbers(*shape, seed=0, size=2):
    """Scores of such vectors are exact in every arithmetic, and often equal."""
    return torch.randint(-size, size + 1, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def width(codebooks):
    return max(1, (codebooks.shape[1] - 1).bit_length())


def assert_same_codes(ref, tri):
    assert tri.dtype == ref.dtype and tri.shape == ref.shape
    assert torch.equal(ref, tri)


def assert_as_good(x, codebooks, tri, ref, most=1.001):
    """The squared error of the codes ``tri`` is at most that of ``ref``, but for rounding."""
    errors = [(x.double() - reference.rvq_decode(codes, codebooks)).square().mean() for codes in (tri, ref)]
    assert errors[0] <= most * errors[1]


@pytest.mark.parametrize(
    ("rows", "dim", "size", "num_quantizers"),
    [
        (1, 1, 3, 1), (63, 4, 60, 3), (65, 5, 100, 1), (100, 20, 257, 2), (2, 32, 1, 3), (5, 64, 3, 8), (9, 100, 70, 2),
        (3, 256, 5, 2),
    ],
)  # fmt: skip
def test_codes_are_the_references_where_scores_are_exact(rows, dim, size, num_quantizers, small_tiles):
    """Equally near codes included: of those, the lowest."""
    x, codebooks = whole_numbers(rows, dim), whole_numbers(num_quantizers, size, dim, seed=1)
    assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))


@pytest.mark.parametrize("size", [3, 100, 600])
def test_of_equal_codes_the_lowest_wins_wherever_they_lie(size):
    x, codebooks = whole_numbers(9, 4), whole_numbers(1, size, 4, size=1).repeat(2, 1, 1)
    codebooks[:, 0], codebooks[:, -1] = 7, codebooks[:, 1]
    assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))
    constant = torch.ones(2, size, 4, device=DEVICE)
    assert not encode.rvq_encode(x, constant).any()


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "groups", "dim", "size", "num_quantizers", "bits"),
    [(5, 3, 4, 3, 3, 2), (3, 4, 5, 60, 3, 11), (2, 1, 20, 100, 2, 7), (7, 1, 1, 2, 2, 1)],
)
def test_beams_and_strings_are_the_references_where_scores_are_exact(
    beam, rows, groups, dim, size, num_quantizers, bits, small_tiles
):
    x, codebooks = whole_numbers(rows, groups, dim), whole_numbers(num_quantizers, size, dim, seed=1)
    expected = reference.rvq_encode(x, codebooks, beam)
    assert_same_codes(expected, encode.rvq_encode(x, codebooks, beam))
    packed = encode.rvq_encode_packed(x, codebooks, bits, beam)
    assert_same_codes(reference.pack_codes(expected.flatten(-2), bits), packed)


def test_of_equal_extensions_the_better_candidates_win_wherever_their_codes_lie(small_tiles):
    """Several chunks of codes: the better candidate's may come after the list is full of the worse one's."""
    x, codebooks = whole_numbers(12, 2, size=1), whole_numbers(3, 200, 2, seed=1, size=4)
    codebooks[:, :64] += 3 * codebooks[:, :64].sign()
    for beam in (2, 3):
        assert_same_codes(reference.rvq_encode(x, codebooks, beam), encode.rvq_encode(x, codebooks, beam))


@pytest.mark.parametrize("beam", [2, 3])
def test_of_equal_extensions_the_better_candidates_come_in_though_the_list_is_full(beam, small_tiles):
    """The worse candidate's are found first, in codes before those that extend the better one equally well."""
    codebooks = torch.full((2, 600, 2), 50.0, device=DEVICE)
    codebooks[0, :2] = torch.tensor([[1.0, 0], [0, 2]], device=DEVICE)  # residuals of 0: (-1, 0) and (0, -2)
    codebooks[1, [0, 20, 40]] = torch.tensor([[1.0, -2], [-1, -2], [0, -3]], device=DEVICE)
    codebooks[1, [560, 575, 590]] = torch.tensor([[-1.0, 1], [-2, 0], [-1, -1]], device=DEVICE)
    x = torch.zeros(3, 2, device=DEVICE)
    found = encode.rvq_encode(x, codebooks, beam)
    assert_same_codes(reference.rvq_candidates(x, codebooks, beam)[:, 0], found)
    assert found.tolist() == [[0, 560]] * 3


def test_a_beam_of_16_with_the_tiles_of_the_gpu():
    x, codebooks = whole_numbers(2, 5), whole_numbers(2, 300, 5, seed=1)
    assert_same_codes(reference.rvq_encode(x, codebooks, 16), encode.rvq_encode(x, codebooks, 16))
    assert encode.serves(codebooks, 64) and not encode.serves(codebooks, 65)
    assert not encode.serves(codebooks.repeat(1, 1, 60))
    with pytest.raises(ValueError, match="beam"):
        encode.rvq_encode(x, codebooks, 65)


@pytest.mark.parametrize("magnitude", [1, 1e-6, 1e4])
def test_gaussian_codes_are_nearly_always_the_references_and_as_good(magnitude):
    """Operands are fp16: the first stage's codes differ where two are as near to within 1/1,000 or so."""
    x, codebooks = gaussian(500, 32) * magnitude, gaussian(2, 64, 32, seed=1) * magnitude
    codebooks[1] *= 0.4
    ref, tri = reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks)
    assert (ref[:, 0] == tri[:, 0]).float().mean() >= 0.99
    assert_as_good(x, codebooks, tri, ref)


@pytest.mark.parametrize("beam", [2, 3, 5])
def test_gaussian_beams_are_as_good_as_the_references(beam, small_tiles):
    x, codebooks = gaussian(25, 8), gaussian(3, 20, 8, seed=1)
    ref, tri = reference.rvq_encode(x, codebooks, beam), encode.rvq_encode(x, codebooks, beam)
    assert (ref == tri).all(dim=-1).float().mean() >= 0.9
    assert_as_good(x, codebooks, tri, ref, most=1.005)


def test_magnitudes_may_differ_from_stage_to_stage():
    scales = torch.tensor([1e4, 1.0, 1e-4], device=DEVICE)[:, None, None]
    codebooks = whole_numbers(3, 60, 8, seed=1, size=8) * scales
    codes = torch.randint(60, (65, 3), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x = reference.rvq_decode(codes, codebooks).float()
    assert_as_good(x, codebooks, encode.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks), 1.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("codebook_dtype", [torch.float16, torch.float32])
def test_dtypes_of_vectors_and_codebooks(dtype, codebook_dtype, small_tiles):
    """A residual needs more digits than the vector has: one of 100 after a code of 1,000 cannot be kept in bfloat16."""
    x = (whole_numbers(30, 5) + 100).to(dtype)
    codebooks = whole_numbers(2, 20, 5, seed=1) + torch.tensor([1000, -900], device=DEVICE)[:, None, None]
    codebooks = codebooks.to(codebook_dtype)
    assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_lies_around_the_inputs_is_not_read(beam, garbage, small_tiles):
    """Codes and vectors have gaps between them, too."""
    x, codebooks = whole_numbers(5, 3, 5), whole_numbers(2, 33, 5, seed=1)
    around_x = poisoned(x, (3 * 8 + 1, 8, 1), garbage)
    around_codebooks = poisoned(codebooks, None if beam == 1 else (33 * 7 + 2, 7, 1), garbage)
    expected = reference.rvq_encode_packed(x, codebooks, 6, beam)
    assert_same_codes(expected, encode.rvq_encode_packed(around_x, around_codebooks, 6, beam))


@pytest.mark.parametrize("beam", [1, 2])
def test_nothing_is_written_around_the_output(beam, small_tiles, guarded):  # noqa: F811
    x, codebooks = whole_numbers(11, 3, 5), whole_numbers(2, 33, 5, seed=1)
    expected = reference.rvq_encode(x, codebooks, beam)
    assert_same_codes(expected, encode.rvq_encode(x, codebooks, beam))
    packed = encode.rvq_encode_packed(x, codebooks, 6, beam)
    assert_same_codes(reference.pack_codes(expected.flatten(-2), 6), packed)


@pytest.mark.parametrize("view", ["strided groups", "heads behind tokens", "expanded", "no two dimensions merge"])
def test_views_are_encoded_like_their_copies(view, small_tiles):
    x = whole_numbers(2, 3, 2, 16)
    views = {
        "strided groups": x.unflatten(-1, (4, 4)).mT,
        "heads behind tokens": x.transpose(1, 2).unflatten(-1, (4, 4)),
        "expanded": x[:1].expand(2, -1, -1, -1).unflatten(-1, (4, 4)),
        "no two dimensions merge": whole_numbers(2, 2, 2, 3, 4, 4).permute(3, 2, 1, 0, 4, 5),
    }
    x, codebooks = views[view], whole_numbers(2, 7, 4, seed=1)
    for beam in (1, 2):
        expected = reference.rvq_encode_packed(x, codebooks, 3, beam)
        assert_same_codes(expected, encode.rvq_encode_packed(x, codebooks, 3, beam))
    assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))


@pytest.mark.parametrize(("groups", "num_quantizers", "bits"), [(8, 9, 15), (70, 1, 3), (1, 64, 16)])
def test_strings_of_any_length(groups, num_quantizers, bits, small_tiles):
    """Those that fit in registers, up to 1,024 bits, and those that are packed by a second kernel."""
    x, codebooks = whole_numbers(2, groups, 2), whole_numbers(num_quantizers, 5, 2, seed=1)
    for beam in (1, 2) if num_quantizers < 64 else (1,):
        expected = reference.rvq_encode_packed(x, codebooks, bits, beam)
        assert_same_codes(expected, encode.rvq_encode_packed(x, codebooks, bits, beam))


@pytest.mark.parametrize("beam", [1, 2])
def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone(beam, small_tiles):
    x, codebooks = whole_numbers(9, 2, 4), whole_numbers(3, 33, 4, seed=1)
    expected = reference.rvq_encode(x, codebooks, beam)
    x[1, 0], x[4, 1, 2], x[7, 0, 3] = float("nan"), float("inf"), -float("inf")
    codes = encode.rvq_encode(x, codebooks, beam)
    fine = x.isfinite().all(dim=-1)
    assert fine.sum() == 15 and torch.equal(expected[fine], codes[fine])
    assert codes.min() >= 0 and codes.max() < 33


def test_nothing_to_encode():
    codebooks = gaussian(3, 60, 5)
    assert encode.rvq_encode(gaussian(0, 5), codebooks).shape == (0, 3)
    assert encode.rvq_encode_packed(gaussian(2, 0, 4, 5), codebooks, 6).shape == (2, 0, 9)


def test_codebooks_written_to_are_prepared_again():
    x, codebooks = whole_numbers(5, 4), whole_numbers(1, 8, 4, seed=1)
    encode.rvq_encode(x, codebooks)
    codebooks.copy_(codebooks.flip(1))
    assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))
    with torch.inference_mode():
        codebooks = whole_numbers(1, 8, 4, seed=3)
        assert_same_codes(reference.rvq_encode(x, codebooks), encode.rvq_encode(x, codebooks))


def test_equal_inputs_give_equal_codes(small_tiles):
    x, codebooks = gaussian(33, 20), gaussian(2, 60, 20, seed=1)
    for beam in (1, 2):
        assert torch.equal(encode.rvq_encode(x, codebooks, beam), encode.rvq_encode(x, codebooks, beam))
